"""The README's numbers are those of the recorded runs."""

import importlib.util
import json
import statistics

import pytest


@pytest.fixture(scope="module")
def draw(repo):
    spec = importlib.util.spec_from_file_location("draw", repo / "figures" / "draw.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_results_table_is_the_recorded_runs(draw, repo):
    readme = (repo / "README.md").read_text()
    for algo, row in draw.table(draw.recorded()).iterrows():
        cells = [
            algo and f"`{algo}`",
            row["start (mean)"],
            *(row[f"seed {i}"] for i in range(4)),
            row["mean"],
            row["95 % interval"],
            row["CPU s a run"],
        ]
        assert "| " + " | ".join(cells) + " |" in readme


def test_every_recorded_run_says_where_it_comes_from(draw):
    for runs in [*draw.recorded().values(), *draw.recorded("vllm_runs").values()]:
        assert len(runs) >= 4
        for run in runs:
            provenance = run.config["provenance"]
            assert provenance["git"]["commit"] and not provenance["git"]["dirty"]
            assert provenance["machine"]["cores"] and provenance["versions"]["torch"]


def test_the_figures_of_vllm_on_a_cpu_are_recorded_ones(draw, repo):
    """Accuracies from the runs, speed, sync and gaps from the benchmark's file."""
    readme = " ".join((repo / "README.md").read_text().split())
    [runs] = draw.recorded("vllm_runs").values()
    ends = [run.summary["val_end"] for run in runs]
    mean, low, high = draw.mean_interval(ends)
    assert [run.config["seed"] for run in runs] == [0, 1, 2, 3]
    assert (
        f"{', '.join(f'{end:.3f}' for end in ends)} (seeds 0 to 3; mean {mean:.3f}, 95 % interval {low:.3f} "
        f"to "
        f"{high:.3f})"
    ) in readme
    mean, low, high = draw.difference(runs, draw.recorded()["grpo"])
    assert (
        low < 0 < high
        and f"is {mean:.3f} from the runs in process seed by seed ({low:.3f} to {high:.3f})" in readme
    )
    assert all(not run.config["provenance"]["git"]["dirty"] for run in runs)
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
