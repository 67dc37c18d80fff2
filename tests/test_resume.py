"""A run killed at any moment goes on from its last checkpoint with the numbers of one that was not."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pandas as pd
import pytest
import torch
from safetensors.torch import load_file
from tiny_model import RUN, save_tiny_model, share_of_lower_case

from rlkit import laptop
from rlkit.jobs import run_writer
from rlkit.jobs.config import Config
from rlkit.jobs.metrics import TIMES
from rlkit.jobs.runs import checkpoints
from rlkit.support.files import read_jsonl
from rlkit.trainer import train


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """The laptop's model, or a random one where it has not been built."""
    if (laptop.model_path() / "config.json").is_file():
        return str(laptop.model_path())
    return str(save_tiny_model(tmp_path_factory.mktemp("base")))


def config_in(folder, base, **values):
    return Config(**RUN | {"model": base, "run_dir": str(folder)} | values)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, base):
    return train(config_in(tmp_path_factory.mktemp("runs") / "whole", base), reward_fn=share_of_lower_case)


def assert_same(run, other):
    """Metrics but for times, rollouts and final weights, bit for bit."""

    def plain(path):
        return [
            {k: v for k, v in row.items() if k not in TIMES}
            for row in read_jsonl(path / "metrics.jsonl", growing=True)
        ]

    assert plain(run.path) == plain(other.path)
    assert read_jsonl(run.path / "rollouts.jsonl") == read_jsonl(other.path / "rollouts.jsonl")
    a, b = (load_file(r.model_path / "model.safetensors") for r in (run, other))
    assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
    assert run.finished and [p.name for p in checkpoints(run.path)] == ["step-000006"]


SCRIPT = """
import sys, time
sys.path.insert(0, {tests!r})
from rlkit import Config, train
from tiny_model import share_of_lower_case
def slowly(response, ground_truth):
    time.sleep(0.01)
    return share_of_lower_case(response, ground_truth)
train(Config(**{values!r}), reward_fn=slowly)
"""


def test_sigkill_then_resume_ends_with_the_same_numbers(tmp_path, base, undisturbed):
    config = config_in(tmp_path / "run", base)
    values = {name: getattr(config, name) for name in config.__dataclass_fields__}
    script = SCRIPT.format(tests=os.path.dirname(__file__), values=values)
    child = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    metrics, deadline = tmp_path / "run" / "metrics.jsonl", time.monotonic() + 120
    while len(read_jsonl(metrics, growing=True)) < 4 and child.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    child.send_signal(signal.SIGKILL)  # in step 4: past checkpoint 2
    assert child.wait() == -signal.SIGKILL, child.stderr.read().decode()
    child.stderr.close()
    assert [p.name for p in checkpoints(config.run_dir)] in (["step-000002"], ["step-000002", "step-000004"])
    with pytest.raises(ValueError, match="already holds a run"):
        train(config, reward_fn=share_of_lower_case)
    config = replace(config, resume=True, allow_changes=True)  # another reward function's name
    assert_same(train(config, reward_fn=share_of_lower_case), undisturbed)


MOMENTS = [
    ("log", 0, True),
    ("log", 3, True),
    ("log", 3, False),
    ("add_rollouts", 2, False),
    ("save_checkpoint", 0, True),
    ("save_checkpoint", 1, False),
    ("finish", 0, True),
    ("finish", 0, False),
]


@pytest.mark.parametrize("method, count, before", MOMENTS)
def test_a_stop_between_any_two_writes(tmp_path, base, undisturbed, monkeypatch, method, count, before):
    """The same, stopped right before or right after a write; whatever was under way is left half done."""
    real, calls = getattr(run_writer.RunWriter, method), []

    def stopping(self, *args):
        calls.append(1)
        if len(calls) == count + 1 and before:
            raise SystemExit("stopped")
        real(self, *args)
        if len(calls) == count + 1:
            raise SystemExit("stopped")

    monkeypatch.setattr(run_writer.RunWriter, method, stopping)
    config = config_in(tmp_path / "run", base)
    with pytest.raises(SystemExit):
        train(config, reward_fn=share_of_lower_case)
    monkeypatch.undo()
    with open(tmp_path / "run" / "metrics.jsonl", "a") as file:
        file.write('{"step": 6, "rewa')
    assert_same(train(replace(config, resume=True), reward_fn=share_of_lower_case), undisturbed)


def test_a_finished_run_comes_back_at_once_and_a_longer_one_goes_on(tmp_path, base, undisturbed, monkeypatch):
    config = config_in(tmp_path / "run", base, n_steps=4, eval_every=0, n_val_final=4)
    first = train(config, reward_fn=share_of_lower_case)
    stamp = (first.path / "metrics.jsonl").stat().st_mtime_ns
    with monkeypatch.context() as m:
        m.setattr("rlkit.trainer.load_model", None)  # nothing is loaded
        again = train(replace(config, resume=True), reward_fn=share_of_lower_case)
    assert again.finished and (again.path / "metrics.jsonl").stat().st_mtime_ns == stamp
    longer = train(replace(config, resume=True, n_steps=6), reward_fn=share_of_lower_case)
    assert longer.metrics.step.tolist() == [0, 1, 2, 3, 4, 5, 6] and longer.finished
    columns = ["reward", "loss", "grad_norm", "token_entropy"]
    pd.testing.assert_frame_equal(longer.metrics[columns], undisturbed.metrics[columns], check_exact=True)
