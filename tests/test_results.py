"""The numbers in README and in the notebooks' texts are those of the records."""

import importlib.util
import json
import re
import statistics
import subprocess
import sys

import pandas as pd
import pytest

from rlkit.jobs.records import by_name, read_records
from rlkit.jobs.tables import difference_table
from rlkit.support.stats import mean_interval


@pytest.fixture(scope="module")
def draw(repo):
    spec = importlib.util.spec_from_file_location("draw", repo / "figures" / "draw.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_results_in_readme_are_the_recorded_runs(draw, repo):
    groups = by_name(read_records(repo / "figures/records/variants.jsonl"))
    assert draw.readme_with(draw.results(groups)) == (repo / "README.md").read_text()


def test_a_table_of_results_by_hand(draw):
    class One:
        def __init__(self, seed, end):
            self.config = {"seed": seed, "n_steps": 30}
            self.summary = {"val_end": end, "val_start": 0.03, "val_end_se": 0.018, "cpu_seconds": 30 + seed}
            self.final = {"n_samples": 8, "right": [0, 4 + seed]}
            self.metrics = pd.DataFrame({"step": [0, 30], "val_reward": [0.03, end]})

    groups = {"drgrpo": [One(0, 0.79), One(1, 0.83)], "grpo": [One(0, 0.80), One(1, 0.82)]}
    drgrpo, grpo = draw.results(groups).splitlines()[2:4]
    # mean .81, sd .0283, t(.975, 1) = 12.706: half .2541; gaps -.01 and .01: sd .01414, half .1271
    assert drgrpo == (
        "| `drgrpo` | 0.030 | 0.810 (0.556 to 1.064) | +0.000 (-0.127 to +0.127) | 0.500 (0.500 to 0.500) | "
        "0 of 2 | 30 to 31 |"
    )
    assert "| 0.810 (0.683 to 0.937) |  | 0.500" in grpo


def test_an_experiment_that_is_recorded_is_not_made_again(repo):
    record = repo / "figures/records/variants.jsonl"
    before = record.read_bytes()
    done = subprocess.run(
        [sys.executable, repo / "figures/experiments.py", "variants"], capture_output=True, text=True
    )
    assert done.returncode == 0 and done.stdout == "variants: 40 of 40 runs recorded\n", done.stderr
    assert record.read_bytes() == before and not (repo / "runs/experiments/variants").exists()


def test_every_record_says_where_it_comes_from(repo):
    paths = sorted((repo / "figures/records").glob("*.jsonl"))
    assert {"variants.jsonl", "vllm.jsonl"} <= {path.name for path in paths}
    assert sum(path.stat().st_size for path in paths) < 20e6
    for path in paths:
        for run in read_records(path):
            provenance = run.config["provenance"]
            assert run.finished and provenance["git"]["commit"] and not provenance["git"]["dirty"], run.name
            assert provenance["machine"]["cores"] and provenance["versions"]["torch"]


def test_the_numbers_in_the_texts_about_records_stand_in_the_outputs_above(repo):
    """A three-digit number in a text about recorded runs is printed by a cell before it (but in quotes)."""
    seen = 0
    for path in sorted((repo / "notebooks").glob("*.ipynb")):
        printed = ""
        for cell in json.loads(path.read_text())["cells"]:
            source = "".join(cell["source"])
            if cell["cell_type"] == "code":
                for output in cell["outputs"]:
                    printed += "".join(output.get("text", output.get("data", {}).get("text/plain", "")))
            elif cell["id"].startswith("rec-"):
                ours = "\n".join(line for line in source.splitlines() if not line.startswith(">"))
                for number in re.findall(r"(?<![\d.])0?\.(\d{3})\b", ours):
                    known = {f"0.{number}", f"0.{number.rstrip('0')} ", f"0.{number.rstrip('0')}\n"}
                    assert any(form in f"{printed}\n" for form in known), (
                        f"{path.name}, {cell['id']}: .{number}"
                    )
                    seen += 1
    assert seen > 10


def test_the_figures_of_vllm_on_a_cpu_are_recorded_ones(draw, repo):
    """Accuracies from the runs, speed, sync and gaps from the benchmark's file."""
    readme = " ".join((repo / "README.md").read_text().split())
    groups = by_name(read_records(repo / "figures/records/vllm.jsonl"))
    ends = draw.ends(groups["vllm"])
    mean, low, high = mean_interval(ends)
    assert [run.config["seed"] for run in groups["vllm"]] == [0, 1, 2, 3]
    numbers = ", ".join(f"{end:.3f}" for end in ends)
    assert (f"{numbers} (seeds 0 to 3; mean {mean:.3f}, 95 % interval {low:.3f} to {high:.3f})") in readme
    gap = difference_table(groups, "transformers").loc["vllm - transformers"]
    mean, low, high = gap.difference, gap.low, gap.high
    said = f"is {mean:.3f} from the runs in process seed by seed ({low:.3f} to {high:.3f})"
    assert low < 0 < high and said in readme
    bench = json.loads((repo / "figures/benchmarks/vllm_sampler.json").read_text())
    fp32, bf16 = bench["float32"], bench["bfloat16"]
    speed = {name: statistics.median(values) / 1000 for name, values in fp32["tokens_per_second"].items()}
    assert f"{speed['vllm']:.1f}k against {speed['transformers']:.1f}k tokens a second" in readme
    assert f"starts in {fp32['start_seconds']:.0f} s" in readme
    shm, gloo = (fp32["sync_seconds"][way][1] for way in ("shm", "gloo"))
    assert f"in {shm:.2f} s (shm) or {gloo:.2f} s (gloo)" in readme
    gaps = [
        f"{value:.0e}".replace("e-0", "e-") for value in (fp32["gap_mean"], fp32["gap_max"], bf16["gap_mean"])
    ]
    assert "by {} nats on average and {} at most in float32, by {} and".format(*gaps) in readme
    assert f"and {bf16['gap_max']:.2f} in bfloat16" in readme
