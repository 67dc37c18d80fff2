"""Sweeps: what is run, skipped, gone on with; real papermill jobs of the laptop model, some steps each."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict

import pytest
import torch

from rlkit import Config, grid, load_run, sweep
from rlkit.jobs.metrics import TIMES
from rlkit.jobs.run_writer import _locked

SMALL = dict(n_train=32, n_val=4, n_val_final=4, eval_every=0, rollout_batch_size=16, group_size=8)
SMALL |= dict(checkpoint_every=1, rollouts_every=0, max_tokens=16)


def numbers(run):
    table = run.metrics.drop(columns=[name for name in TIMES if name in run.metrics])
    weights = torch.load(max((run.path / "checkpoints").glob("step-*/state.pt")), weights_only=True)["model"]
    return table, weights


def same(a, b):
    (table, weights), (other, others) = numbers(a), numbers(b)
    assert table.equals(other)
    assert weights.keys() == others.keys() and all(torch.equal(weights[k], others[k]) for k in weights)


def finished(folder, seed, **changes):
    """A folder as a finished run leaves it."""
    config = Config.from_parameters(SMALL | {"n_steps": 2, "seed": seed} | changes).resolved()
    folder.mkdir(parents=True)
    record = asdict(config) | {"algorithm": {"name": config.algo}, "finished_step": 2}
    (folder / "config.json").write_text(json.dumps(record))
    row = {"step": 2, "val_reward": 0.5, "val_reward_se": 0.1, "val_format_reward": 1.0, "time_cpu": 3.0}
    (folder / "metrics.jsonl").write_text(json.dumps(row) + "\n")


def test_a_grid_is_every_combination():
    assert grid(lr=[1, 2], seed=range(2), algo="rft") == [
        {"lr": lr, "seed": seed, "algo": "rft"} for lr in (1, 2) for seed in (0, 1)
    ]


def test_what_is_finished_is_taken_and_another_run_is_not(tmp_path):
    for seed in (0, 1):
        finished(tmp_path / f"rft-lr=0.1-seed{seed}", seed, algo="rft", lr=0.1)
        finished(tmp_path / f"grpo-lr=0.1-seed{seed}", seed, lr=0.1 + seed)
    runs = grid(**SMALL, n_steps=2, algo=["rft", "grpo"], lr=[0.1], seed=[0, 1], prompt=["r1_zero"])
    runs[0] |= {"lr": "1e-1"}  # the same value, written as papermill may write it
    for run in runs:
        run["name"] = f"{run['algo']}-lr=0.1-seed{run['seed']}"
    table = sweep(runs, tmp_path)
    assert table.status.tolist() == ["finished", "finished", "finished", "failed"]
    assert "was made with other values: lr (there 1.1, now 0.1)" in table.error.iloc[3]
    assert table.val_end.iloc[:3].tolist() == [0.5] * 3 and table.cpu_seconds.iloc[0] == 3
    assert load_run(tmp_path / "grpo-lr=0.1-seed1").config["lr"] == 1.1
    assert not list(tmp_path.glob("*.ipynb"))


def test_a_run_that_another_process_writes_is_left_to_it(tmp_path):
    finished(tmp_path / "seed0", 0)
    config = json.loads((tmp_path / "seed0/config.json").read_text())
    (tmp_path / "seed0/config.json").write_text(json.dumps(config | {"finished_step": -1}))
    lock = _locked(tmp_path / "seed0")
    try:
        assert sweep(grid(**SMALL, n_steps=2, seed=[0]), tmp_path).status.tolist() == ["elsewhere"]
    finally:
        lock.release()


def test_names_say_what_varies(tmp_path, monkeypatch):
    from rlkit.jobs import sweep as module

    jobs = module._jobs({"algo": ["grpo", "rft"], "seed": [0, 1], "lr": [1e-4, 3e-4], "n_steps": 5}, tmp_path)
    assert [job.name for job in jobs[:3]] == ["grpo-lr=0.0001-seed0", "grpo-lr=0.0003-seed0"] + [
        "grpo-lr=0.0001-seed1"
    ]
    assert len({job.name for job in jobs}) == 8
    assert len({job.notebook for job in jobs}) == len({job.errors for job in jobs}) == 8  # names have dots
    assert jobs[1].notebook.name == "grpo-lr=0.0003-seed0.ipynb"
    [job] = module._jobs([{"prompt": "r1_zero"}], tmp_path)
    assert job.name == "run" and job.config == Config()


@pytest.mark.parametrize(
    "runs, said",
    [
        ([], "runs: got none"),
        ({"algo": ["grpo", "grop"]}, "runs: grop: algo: got 'grop'.*did you mean 'grpo'"),
        ([{"seed": 1}, {"seed": 1}], "runs: seed1: two runs have this name"),
        ([{"name": "A"}, {"name": "a"}], "runs: a: two runs have this name"),
        ([{"name": "a/b"}], "a/b: its name has '/'"),
        ([{"name": "a", "run_dir": "x"}], "a: run_dir is set by the sweep itself"),
        ([{"seed": 0, "lrr": 1}, {"seed": 1, "lr": -1}], "(?s)seed0: lrr: .*seed1: lr: "),
    ],
)
def test_a_mistake_stops_it_before_any_run(tmp_path, runs, said):
    with pytest.raises(ValueError, match=said):
        sweep(runs, tmp_path / "new")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("workers", [0, 1.5, "2"])
def test_workers_are_counted(tmp_path, workers):
    with pytest.raises(ValueError, match="workers: got .*expected at least 1"):
        sweep([{"seed": 0}], tmp_path, workers=workers)


def test_one_failure_stops_no_other_and_the_same_call_mends_it(tmp_path):
    data = tmp_path / "data"
    runs = grid(**SMALL, n_steps=2, seed=[0]) + [SMALL | dict(n_steps=2, seed=1, dataset=str(data))]
    table = sweep(runs, tmp_path / "runs")
    first, executed = (tmp_path / "runs" / f"{table.index[0]}{end}" for end in ("", ".ipynb"))
    assert table.status.tolist() == ["finished", "failed"]
    assert table.error.iloc[1].startswith("ValueError: dataset: ")
    assert "Traceback" in (tmp_path / "runs" / f"{table.index[1]}.error.txt").read_text()
    assert not list((tmp_path / "runs").glob(f"{first.name}*.txt")) and executed.is_file()
    data.mkdir()
    for name in ("train", "test"):
        rows = [{"question": f"{i} + 1?", "answer": str(i + 1)} for i in range(40)]
        (data / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    written = executed.stat().st_mtime_ns
    table = sweep(runs, tmp_path / "runs")
    assert table.status.tolist() == ["finished"] * 2 and table.error.tolist() == ["", ""]
    assert executed.stat().st_mtime_ns == written
    assert not list((tmp_path / "runs").glob("*.error.txt"))


@pytest.mark.slow
@pytest.mark.parametrize("by", [signal.SIGINT, signal.SIGKILL])
def test_a_sweep_that_is_ended_goes_on(tmp_path, by):
    """SIGKILL is sent to the first run's kernel, whose checkpoint the same call then goes on from."""
    runs = grid(**SMALL | {"checkpoint_every": 5}, n_steps=80, seed=[0, 1])
    code = f"import rlkit; rlkit.sweep({runs!r}, {str(tmp_path / 'a')!r}, workers=1)"
    with subprocess.Popen([sys.executable, "-c", code], start_new_session=True) as process:
        log = tmp_path / "a/seed0/metrics.jsonl"
        while process.poll() is None and not (log.is_file() and log.read_bytes().count(b"\n") >= 8):
            time.sleep(0.02)
        if by == signal.SIGKILL:
            subprocess.run(["pkill", "-KILL", "-P", str(papermill_of(process.pid))])
        else:
            process.send_signal(by)
        process.wait(timeout=120)
    assert not processes_on(tmp_path)
    assert not load_run(tmp_path / "a/seed0").finished
    table = sweep(runs, tmp_path / "a")
    assert table.status.tolist() == ["finished", "finished"]
    assert load_run(tmp_path / "a/seed0").config["resumed"]
    assert sweep(runs, tmp_path / "b", workers=2).status.tolist() == ["finished", "finished"]
    for seed in (0, 1):
        same(load_run(tmp_path / f"a/seed{seed}"), load_run(tmp_path / f"b/seed{seed}"))


def papermill_of(parent):
    return int(subprocess.run(["pgrep", "-P", str(parent)], capture_output=True, text=True).stdout.split()[0])


def processes_on(folder):
    """Processes whose command line names the folder."""
    found = subprocess.run(["pgrep", "-f", str(folder)], capture_output=True, text=True).stdout.split()
    return [pid for pid in found if int(pid) != os.getpid()]
