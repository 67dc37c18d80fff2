"""Several ranks train one model: the numbers of one, checkpoints for any number, one message at the end."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rlkit import Config, load_run, train
from rlkit.jobs.sharding import by_name
from rlkit.support.ranks import Ranks

SMALL = dict(
    n_steps=4,
    n_val=16,
    n_val_final=16,
    eval_every=2,
    rollout_batch_size=32,
    train_batch_size=16,
    checkpoint_every=2,
    algo="offpolicy_clip",
    lr=3e-4,
)
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node"]


def started(n_ranks, *arguments, **options):
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.getcwd()}
    command = [*TORCHRUN, str(n_ranks), *arguments]
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    return subprocess.Popen(command, env=environment, **pipes, **options)


def run_ranks(n_ranks, folder, **values):
    parameters = SMALL | values | {"run_dir": folder}
    process = started(n_ranks, "-m", "rlkit.train", *(f"{k}={v}" for k, v in parameters.items()))
    text = process.communicate()[0]
    assert process.returncode == 0, text
    return load_run(folder)


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory):
    return train(Config(run_dir=str(tmp_path_factory.mktemp("one") / "run"), **SMALL))


def assert_same_run(run, expected):
    other = load_file(expected.model_path / "model.safetensors")
    for name, weight in load_file(run.model_path / "model.safetensors").items():
        # Adam divides by the gradient's size: what is rounding in a gradient near 0 is more in its step
        torch.testing.assert_close(weight, other[name], rtol=0, atol=3e-5)
    mine, theirs = run.metrics, expected.metrics
    assert list(mine.columns) == list(theirs.columns) and list(mine.step) == list(theirs.step)
    for name in [n for n in mine.columns if not n.startswith(("time", "tokens_per"))]:
        assert mine[name].to_numpy() == pytest.approx(theirs[name].to_numpy(), abs=5e-5, nan_ok=True), name


@pytest.mark.slow
def test_steps_of_a_sharded_model_equal_one_ranks():
    process = started(3, str(Path(__file__).with_name("ranks_compare.py")))
    text = process.communicate()[0]
    assert process.returncode == 0, text


def test_two_ranks_train_what_one_does_and_others_resume_it(one_rank, tmp_path):
    run = run_ranks(2, tmp_path / "two")
    assert_same_run(run, one_rank)
    assert len(run.rollouts) == len(one_rank.rollouts)


@pytest.mark.slow
def test_without_validation_the_final_model_is_the_trained_one_and_one_rank_resumes_it(tmp_path):
    values = SMALL | {"n_val": 0}
    half = run_ranks(2, tmp_path / "half", n_steps=2, n_val=0)
    assert not (half.path / "checkpoints/step-000002/state.pt").exists()
    short = train(Config(**values | {"n_steps": 2, "run_dir": str(tmp_path / "short")}))
    assert_same_run(half, short)
    longer = [Config(**values | {"run_dir": str(run.path), "resume": True}) for run in (half, short)]
    assert_same_run(*map(train, longer))


@pytest.mark.slow
def test_a_checkpoint_of_one_rank_goes_on_over_three(one_rank, tmp_path):
    train(Config(**SMALL | {"run_dir": str(tmp_path / "run"), "n_steps": 2}))
    assert_same_run(run_ranks(3, tmp_path / "run", resume=True), one_rank)


@pytest.mark.slow
def test_a_killed_rank_ends_all_with_one_message_and_resume_goes_on(one_rank, tmp_path):
    values = SMALL | {"run_dir": tmp_path / "run", "n_gpus": 2}
    command = [sys.executable, "-m", "rlkit.train", *(f"{k}={v}" for k, v in values.items())]
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    with subprocess.Popen(command, **pipes) as process:
        metrics, killed = tmp_path / "run" / "metrics.jsonl", None
        while process.poll() is None and killed is None:
            time.sleep(0.05)
            if metrics.exists() and len(metrics.read_text().splitlines()) >= 4:  # steps 0 to 3
                killed = next(pid for pid in descendants(process.pid) if rank_of(pid) == "1")
                os.kill(killed, signal.SIGKILL)
        text = process.communicate()[0]
    said = "rank 1 of 2 was ended by SIGKILL; the run stops, resume goes on from its checkpoint"
    first, *how, last = text.splitlines()
    assert process.returncode == 1 and first.startswith("run folder: ") and last == said
    assert len(how) == 2 and how[1].endswith(f"run_dir={tmp_path / 'run'} n_gpus=2 resume=True"), how
    assert_same_run(train(Config(**values | {"run_dir": str(tmp_path / "run"), "resume": True})), one_rank)


def descendants(pid: int) -> list[int]:
    children = [int(c) for c in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return children + [d for child in children for d in descendants(child)]


def rank_of(pid: int) -> str | None:
    entries = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
    return dict(entry.split("=", 1) for entry in entries if "=" in entry).get("RANK")


def test_bad_values_are_said_once_before_anything_starts(tmp_path):
    command = [sys.executable, "-m", "rlkit.train", "n_gpus=2", "rollout_batch_size=33"]
    found = subprocess.run(command, capture_output=True, text=True)
    assert found.returncode == 1 and found.stdout == ""
    assert found.stderr == "rollout_batch_size: got 33, expected a multiple of group_size, 8\n"


def test_objects_of_ones_own_cannot_be_sent_to_other_processes(tmp_path):
    config = Config(run_dir=str(tmp_path / "run"), n_gpus=2)
    with pytest.raises(ValueError, match="n_gpus: got 2 with reward_fn of your own.*torchrun"):
        train(config, reward_fn=lambda response, gold: {"reward": 1.0})
    assert not (tmp_path / "run").exists()


def test_pieces_are_dealt_so_that_all_ranks_make_equally_many_passes():
    shares = [Ranks(rank, 3).share(["a", "b", "c", "d"]) for rank in range(3)]
    assert shares[0] == [("a", True), ("d", True)]
    assert shares[1] == [("b", True), ("a", False)]
    assert shares[2] == [("c", True), ("a", False)]
    assert Ranks(1, 3).share([]) == []
    assert [Ranks(0, 3).pieces(n) for n in (1, 3, 4)] == [3, 3, 6]


def test_an_optimizers_counted_parameters_get_their_names():
    weights = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(weights.parameters())
    weights(torch.ones(2)).sum().backward()
    optimizer.step()
    named = by_name(optimizer.state_dict(), ["weight", "bias"])
    assert named["param_groups"][0]["params"] == ["weight", "bias"]
    assert torch.equal(named["state"]["bias"]["exp_avg"], optimizer.state[weights.bias]["exp_avg"])
    json.dumps(named["param_groups"])
