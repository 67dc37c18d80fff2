"""Records of runs: what is read back is what the run said, and figures of them stand where the numbers do."""

import json

import numpy as np
import pandas as pd
import pytest

from rlkit import load_run
from rlkit.jobs import plots
from rlkit.jobs.parameters import find_runs, load_runs
from rlkit.jobs.records import by_name, final_record, passes, read_records, record_of, write_records
from rlkit.jobs.tables import comparison
from rlkit.tasks.evaluation import summarize


def folder(path, algo, seed, ends, batch=64, updates=4):
    path.mkdir(parents=True)
    config = {"algorithm": {"name": algo}, "algo": algo, "model": "laptop", "seed": seed, "n_steps": 2}
    config |= {"rollout_batch_size": batch, "finished_step": 2, "run_dir": str(path)}
    provenance = {"command": f"python x.py run_dir={path}", "git": {"commit": "abc", "dirty": False}}
    (path / "config.json").write_text(json.dumps(config | {"provenance": provenance}))
    rows = [{"step": 0, "val_reward": 0.031234567, "val_reward_se": 0.01}]
    rows += [{"step": 1, "reward": 0.25, "optimizer_steps": updates}]
    rows += [
        {"step": 2, "reward": 0.5, "optimizer_steps": updates, "val_reward": ends, "val_format_reward": 1.0}
    ]
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return load_run(path)


@pytest.fixture
def records(tmp_path):
    runs = [folder(tmp_path / f"runs/{a}-seed{s}", a, s, e + s / 100) for a, s, e in CASES]
    write_records(tmp_path / "kept.jsonl", map(record_of, runs))
    return runs, tmp_path / "kept.jsonl"


CASES = [("grpo", 0, 0.5), ("grpo", 1, 0.6), ("rft", 1, 0.7), ("rft", 0, 0.4)]


def test_a_record_is_the_run_without_the_machines_folders(records, tmp_path):
    runs, path = records
    kept = {run.name: run for run in read_records(path)}
    assert list(kept) == ["grpo-seed0", "grpo-seed1", "rft-seed0", "rft-seed1"]
    for run in runs:
        twin = kept[run.name]
        assert twin.finished and twin.summary.keys() == run.summary.keys()
        assert (
            twin.summary["val_end"] == run.summary["val_end"] and twin.summary["algo"] == run.config["algo"]
        )
        pd.testing.assert_frame_equal(twin.metrics, run.metrics, check_dtype=False, rtol=1e-5)
        assert twin.final == {} and "run_dir" not in twin.config
    assert str(tmp_path) not in path.read_text()
    assert [run.config["seed"] for run in by_name(kept.values())["rft"]] == [0, 1]


def test_records_stand_beside_folders(records, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert [run.name for run in load_runs("kept.jsonl, runs/rft-*")] == [
        *("grpo-seed0", "grpo-seed1", "rft-seed0", "rft-seed1"),
        *("rft-seed0", "rft-seed1"),
    ]
    groups, notes = comparison(load_runs("kept.jsonl"))
    assert list(groups) == ["grpo", "rft"] and notes == []
    (tmp_path / "other.jsonl").write_text('{"question": "1 + 1"}\n')
    assert [p.name for p in find_runs("*.jsonl")] == ["kept.jsonl", "other.jsonl"]
    with pytest.raises(ValueError, match="other.jsonl: expected a file of recorded runs"):
        load_runs("other.jsonl")


def test_the_curves_against_rollouts_and_updates(records):
    groups = by_name(read_records(records[1]))
    for x, last in (("step", 2), ("rollouts", 128), ("updates", 8)):
        [axis] = plots.seeds(groups, x=x).axes
        assert axis.get_xlabel() == x
        assert {line.get_xdata()[-1] for line in axis.lines} == {last}
        assert sorted(line.get_ydata()[-1] for line in axis.lines) == pytest.approx(
            [0.4, 0.5, 0.555, 0.555, 0.61, 0.71]
        )
    with pytest.raises(ValueError, match="x: got 'hours'"):
        plots.seeds(groups, x="hours")


def test_the_ends_and_their_differences_by_seed(records):
    figure = plots.ends(by_name(read_records(records[1])))
    left, right = figure.axes
    dots = [line.get_xdata() for line in left.lines if len(line.get_xdata()) == 2 and line.get_alpha()]
    np.testing.assert_allclose(dots, [[0.5, 0.61], [0.4, 0.71]])
    # rft - grpo: -0.1 and +0.1; mean 0, half width 12.706 * 0.1414 / sqrt(2) = 1.2706
    [bar] = right.collections
    np.testing.assert_allclose(np.array(bar.get_segments()[0])[:, 0], [-1.271, 1.271], atol=1e-3)


def test_what_is_kept_of_an_evaluation():
    rows = pd.DataFrame(
        [(p, s, "q", "1", 2 + p, "", "", r, r, r, n, "stop") for p, s, r, n in ANSWERS],
        columns="problem sample question gold n_steps prompt response reward format_reward answer_reward "
        "length finish_reason".split(),
    )
    kept = final_record(summarize(rows))
    assert kept["right"] == [1, 0] and kept["n_steps"] == [2, 3] and kept["n_samples"] == 2
    assert kept["length_right"] == 10 and kept["length_wrong"] == 30
    assert passes(kept, 1) == (0.25, 0.25) and passes(kept, 2)[0] == 0.5
    assert passes(kept, 2, np.array([True, False])) == (1.0, 0.0)


ANSWERS = [(0, 0, 1.0, 10), (0, 1, 0.0, 20), (1, 0, 0.0, 30), (1, 1, 0.0, 40)]
