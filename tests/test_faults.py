"""Faults put in on purpose: disks, files, locks, links, changed inputs, rewards and gradients gone wrong.

Each time the run says in one line what happened, nothing that was there is lost, and what can go on ends with
the numbers of a run that nothing happened to.
"""

import errno
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny_model import RUN as VALUES
from tiny_model import save_tiny_model, share_of_lower_case

from rlkit import Config, train
from rlkit.jobs.metrics import TIMES
from rlkit.jobs.resumable import resumable
from rlkit.jobs.run_writer import claim_run_dir
from rlkit.jobs.runs import Run, checkpoints
from rlkit.support.files import read_jsonl


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return str(save_tiny_model(tmp_path_factory.mktemp("base")))


@pytest.fixture(scope="module")
def whole(tmp_path_factory, base):
    config = Config(model=base, run_dir=str(tmp_path_factory.mktemp("runs") / "whole"), **VALUES)
    return numbers(train(config, reward_fn=share_of_lower_case))


def numbers(run):
    """All that a run found out, but for times."""
    rows = read_jsonl(run.path / "metrics.jsonl")
    plain = [{k: v for k, v in row.items() if k not in TIMES} for row in rows]
    weights = (run.model_path / "model.safetensors").read_bytes()
    return plain, read_jsonl(run.path / "rollouts.jsonl"), weights


def tree(folder):
    """Every file below a folder, with its content."""
    files = (p for p in sorted(Path(folder).rglob("*")) if p.is_file() and p.name != ".lock")
    return {str(p.relative_to(folder)): p.read_bytes() for p in files}


class Stop(Exception):
    pass


def stopping_in(step, action=None):
    """A reward that does something, or raises Stop, when it is first asked in this step."""
    calls = []

    def reward(response, ground_truth):
        calls.append(1)
        if len(calls) == 16 * (step - 1) + 1:
            if action is None:
                raise Stop
            action()
        return share_of_lower_case(response, ground_truth)

    return reward


@pytest.fixture
def stopped(tmp_path, base):
    """The config of a run that stopped in step 5 with checkpoints at 2 and 4; to resume with ``go``."""
    config = Config(model=base, run_dir=str(tmp_path / "run"), **VALUES)
    with pytest.raises(Stop):
        train(config, reward_fn=stopping_in(5))
    assert [p.name for p in checkpoints(config.run_dir)] == ["step-000002", "step-000004"]
    record = Path(config.run_dir) / "config.json"  # the reward that goes on is another function
    own = share_of_lower_case
    text = re.sub(r'"reward_fn": "[^"]*"', f'"reward_fn": "{name_of(own)}"', record.read_text(), count=1)
    record.write_text(text)
    return replace(config, resume=True)


def name_of(function):
    from rlkit.jobs.record import function_name

    return function_name(function)


def go(config, **more):
    return train(config, reward_fn=share_of_lower_case, **more)


# ---- what stands in the way of reading


@pytest.mark.parametrize("error", [MemoryError(), OSError(errno.EIO, "I/O error"), PermissionError(13, "no")])
def test_an_error_of_reading_is_raised_and_the_folder_stays(stopped, whole, monkeypatch, error):
    before = tree(stopped.run_dir)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "load", lambda *a, **k: (_ for _ in ()).throw(error))
        with pytest.raises(type(error)):
            go(stopped)
    assert tree(stopped.run_dir) == before
    assert numbers(go(stopped)) == whole


def test_an_extended_run_that_cannot_be_read_keeps_its_log(tmp_path, base, monkeypatch):
    config = Config(model=base, run_dir=str(tmp_path / "run"), **VALUES)
    go(config)
    before = tree(config.run_dir)
    monkeypatch.setattr(torch, "load", lambda *a, **k: (_ for _ in ()).throw(torch.OutOfMemoryError()))
    with pytest.raises(torch.OutOfMemoryError):
        go(replace(config, resume=True, n_steps=8))
    assert tree(config.run_dir) == before


@pytest.mark.parametrize("how", ["a flipped bit", "cut", "gone"])
def test_a_damaged_checkpoint_is_kept_aside_and_the_one_before_it_taken(stopped, whole, capsys, how):
    state = checkpoints(stopped.run_dir)[-1] / "state.pt"
    content = bytearray(state.read_bytes())
    content[len(content) // 2] ^= 1
    written = bytes(content) if how == "a flipped bit" else content[:1000]
    state.unlink() if how == "gone" else state.write_bytes(written)
    assert numbers(go(stopped)) == whole
    assert "step-000004: damaged (state.pt is" in capsys.readouterr().out
    [aside] = (Path(stopped.run_dir) / "checkpoints").glob("damaged-step-000004-*")
    assert how == "gone" or (aside / "state.pt").read_bytes() == written
    rows = read_jsonl(Path(stopped.run_dir) / "superseded-metrics.jsonl")
    assert [row["step"] for row in rows] == [3, 4]


def test_without_a_whole_checkpoint_nothing_is_touched(stopped):
    for folder in checkpoints(stopped.run_dir):
        (folder / "state.pt").write_bytes(b"")
    before = tree(stopped.run_dir)
    for _ in range(2):
        with pytest.raises(ValueError, match="resume: no checkpoint in .* is as it was written"):
            go(stopped)
    assert tree(stopped.run_dir) == before


@pytest.mark.parametrize("written", [None, b"", b'{"state', b"[]", b"{}", b"[1]"])
def test_checksums_that_are_damaged_themselves(stopped, whole, capsys, written):
    sums = checkpoints(stopped.run_dir)[-1] / "checksums.json"
    sums.unlink() if written is None else sums.write_bytes(written)
    assert numbers(go(stopped)) == whole
    assert "step-000004: damaged (checksums.json is" in capsys.readouterr().out


def test_a_run_of_format_1_goes_on_if_that_is_allowed(stopped, whole):
    record = Path(stopped.run_dir) / "config.json"
    kept = {k: v for k, v in json.loads(record.read_text()).items() if k not in ("format", "inputs")}
    record.write_text(json.dumps(kept))
    for folder in checkpoints(stopped.run_dir):
        (folder / "checksums.json").unlink()
    with pytest.raises(ValueError, match="format .there 'nothing', now 2"):
        go(stopped)
    assert numbers(go(replace(stopped, allow_changes=True))) == whole


@pytest.mark.parametrize("first, then", [(2, 4), (2, 0), (0, 2)])
def test_weights_of_another_shape_are_refused_though_changes_are_allowed(tmp_path, base, first, then):
    config = Config(model=base, run_dir=str(tmp_path / "run"), **VALUES | dict(n_steps=2, lora_rank=first))
    go(config)
    before = tree(config.run_dir)
    with pytest.raises(ValueError, match="^resume: the weights in .*step-000002' are not of this model's"):
        go(replace(config, resume=True, allow_changes=True, n_steps=3, lora_rank=then))
    assert tree(config.run_dir) == before
    assert go(replace(config, resume=True, n_steps=3)).finished  # as it began, it goes on


def test_a_record_or_log_of_something_else_is_named(stopped):
    folder, before = Path(stopped.run_dir), tree(stopped.run_dir)
    record = json.loads(before["config.json"])
    wrong = [("n_steps", "6"), ("inputs", []), ("inputs", None), ("resumed", 5), ("finished_step", "x")]
    faults = [("config.json", json.dumps(record | {k: v}).encode(), f"{k}: got {v!r}") for k, v in wrong]
    for name in ("metrics.jsonl", "rollouts.jsonl"):
        for line in (b'{"a": 1}\n', b'{"step": "1"}\n', b'{"step": null}\n'):
            faults.append((name, before[name] + line, "a line has no number as its 'step'"))
    for name, content, said in faults:
        (folder / name).write_bytes(content)
        with pytest.raises(ValueError, match=f"{name}: {re.escape(said)}"):
            go(stopped)
        assert tree(folder) == before | {name: content}
        (folder / name).write_bytes(before[name])


@pytest.mark.parametrize("how", ["gone", "cut", "a line less"])
def test_a_log_that_lacks_steps_is_seen(stopped, whole, how):
    log = Path(stopped.run_dir) / "metrics.jsonl"
    lines = log.read_text().splitlines(keepends=True)
    kept = {"gone": [], "cut": lines[:2], "a line less": lines[:3] + lines[4:]}[how]
    lacking = {"gone": "4 steps from 1 to 4", "cut": "3 steps from 2 to 4", "a line less": "step 3"}[how]
    log.write_text("".join(kept))
    before = tree(stopped.run_dir)
    with pytest.raises(ValueError, match=f"resume: .*metrics.jsonl' lacks the lines of {lacking}; expected"):
        go(stopped)
    assert tree(stopped.run_dir) == before
    run = go(replace(stopped, allow_changes=True))
    assert run.finished and numbers(run)[2] == whole[2]


# ---- what may not change between two starts


def test_a_resume_with_nothing_there_is_refused(tmp_path, base):
    config = Config(model=base, run_dir=str(tmp_path / "typo"), resume=True, **VALUES)
    with pytest.raises(ValueError, match="resume: there is no run in .*typo'; expected its folder"):
        go(config)
    assert not (tmp_path / "typo").exists()


def test_what_a_run_began_with_may_not_change(tmp_path, base):
    data, prompt, model = tmp_path / "data", tmp_path / "p.prompt", tmp_path / "model"
    shutil.copytree(base, model)
    data.mkdir()
    prompt.write_text("Q: {question} A:")
    line = '{{"question": "What is {0} plus 1?", "answer": "{1}"}}\n'
    texts = ["".join(line.format(i, i + j) for i in range(16)) for j in (1, 2)]
    for name in ("train.jsonl", "validation.jsonl"):
        (data / name).write_text(texts[0])
    places = dict(dataset=str(data), prompt=str(prompt), model=str(model))
    config = Config(run_dir=str(tmp_path / "run"), **VALUES | places | dict(n_steps=2, n_val_final=4))
    assert go(config).finished
    longer = replace(config, resume=True, n_steps=3)

    def refused(said, config=longer, **given):
        before = tree(config.run_dir)
        with pytest.raises(ValueError, match=said):
            train(config, **{"reward_fn": share_of_lower_case} | given)
        assert tree(config.run_dir) == before

    for name, called in (("train.jsonl", "training problems"), ("validation.jsonl", "validation problems")):
        (data / name).write_text(texts[1])
        refused(rf"resume: .* other values: {called} \(there '(16|4), sha256")
        (data / name).write_text(texts[0])
    prompt.write_text("Question: {question} A:")
    refused("other values: prompt text")
    prompt.write_text("Q: {question} A:")
    refused("other values: reward_fn .there 'tiny_model.share_of_lower_case", reward_fn=None)
    refused("other values: val_reward_fn", val_reward_fn=share_of_lower_case)
    refused(
        r"other values: lr \(there 0.001, now 0.002\); expected .*allow_changes", replace(longer, lr=2e-3)
    )
    weights = model / "model.safetensors"
    original = weights.read_bytes()
    weights.write_bytes(original[:-4000] + bytes(len(original[-4000:])))
    refused("model: its weights are not those that the run in .* began with")
    weights.write_bytes(original)

    record = tmp_path / "run" / "config.json"
    text = record.read_text()
    record.write_text(re.sub(r' "lr": .*\n', "", text, count=1))  # by a version that did not know it
    refused("other values: lr .there 'nothing', now 0.001")
    record.write_text(text.replace('"format": 2', '"format": 1'))
    refused("other values: format .there 1, now 2")
    record.write_text(text)

    free = dict(gradient_accumulation_steps=4, eval_every=1, n_val=2, n_val_final=3, threads=2)
    free |= dict(rollouts_every=1, checkpoint_every=1, gradient_checkpointing=True)
    run = go(replace(longer, lr=2e-3, allow_changes=True, **free))
    assert run.finished and run.config["lr"] == 2e-3
    assert run.config["resumed"][-1]["changes"] == ["lr (there 0.001, now 0.002)"]
    assert run.config["provenance"]["started"] <= run.config["resumed"][-1]["started"]
    go(replace(longer, lr=2e-3, n_steps=4, **free))  # what it has become is now what may not change
    refused("lr .there 0.002, now 0.001", replace(longer, n_steps=5))


# ---- new folders, locks, links


def test_starts_of_one_second_get_a_folder_each(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found, gate = [], threading.Barrier(12)

    def claim():
        gate.wait()
        found.append(claim_run_dir("laptop", "grpo", 0))

    threads = [threading.Thread(target=claim) for _ in range(12)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert len(set(found)) == 12 == len(list((tmp_path / "runs").iterdir()))


@pytest.mark.skipif(sys.platform == "win32", reason="flock is POSIX's")
@pytest.mark.parametrize("code", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_or_folder_syncs(tmp_path, base, whole, monkeypatch, capsys, code):
    import fcntl

    fsync = os.fsync

    def no_folders(descriptor):
        if os.path.isdir(f"/proc/self/fd/{descriptor}"):
            raise OSError(errno.EINVAL, "Invalid argument")
        fsync(descriptor)

    monkeypatch.setattr(fcntl, "flock", lambda *a: (_ for _ in ()).throw(OSError(code, "no locks")))
    monkeypatch.setattr(os, "fsync", no_folders)
    assert numbers(go(Config(model=base, run_dir=str(tmp_path / "run"), **VALUES))) == whole
    assert "this file system offers no locks" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["metrics.jsonl", "checkpoints", ".lock", "config.json", "model"])
def test_a_received_folder_with_a_link_is_refused_and_its_target_stays(stopped, tmp_path, name):
    target = tmp_path / "elsewhere"
    place = Path(stopped.run_dir) / name
    place.rename(target) if place.exists() else target.write_text("mine")
    place.symlink_to(target)
    before = tree(tmp_path)
    with pytest.raises(ValueError, match=f"run_dir: .*{name}' is a link"):
        go(stopped)
    assert tree(tmp_path) == before


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX")
@pytest.mark.parametrize("name", ["metrics.jsonl", "superseded-rollouts.jsonl", ".lock"])
def test_a_pipe_in_the_folder_is_refused_not_waited_for(tmp_path, base, name):
    (tmp_path / "run").mkdir()
    os.mkfifo(tmp_path / "run" / name)
    with pytest.raises(ValueError, match=f"run_dir: .*{name}' is no plain file"):
        go(Config(model=base, run_dir=str(tmp_path / "run"), **VALUES))


def test_no_place_for_a_new_folder_is_one_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").write_text("a file")
    with pytest.raises(ValueError, match="^run_dir: no new folder can be made in .*runs"):
        claim_run_dir("laptop", "grpo", 0)
    with pytest.raises(ValueError, match="run_dir: got .*a name of 300 bytes"):
        with resumable(Config(run_dir="x" * 300, n_steps=1), {}) as started:
            train(started)


def test_a_path_that_is_no_utf8_is_refused_by_name(tmp_path):
    with pytest.raises(ValueError, match="run_dir: got .*it holds bytes that are no UTF-8"):
        Config(run_dir=os.fsdecode(bytes(tmp_path) + b"/\xff"))


# ---- the disk


def test_a_full_disk_stops_the_run_in_one_line_and_the_same_kernel_goes_on(tmp_path, base, whole):
    resource = pytest.importorskip("resource")
    config = Config(model=base, run_dir=str(tmp_path / "run"), **VALUES)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    full = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(
            OSError,
            match="^run_dir: '.*run' cannot be written to .File too large.*; the run "
            "stops, its checkpoint step-000002 is kept, and resume=True",
        ):
            train(config, reward_fn=stopping_in(3, full))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    names = [p.name for p in (tmp_path / "run").rglob("*")]
    assert [name for name in names if name.startswith(".partial")] == []
    assert [row["step"] for row in read_jsonl(tmp_path / "run/metrics.jsonl")] == [0, 1, 2, 3, 4]
    assert numbers(go(replace(config, resume=True, allow_changes=True))) == whole


def test_a_real_full_file_system(tmp_path, base, whole):
    """A tmpfs, where one may be mounted, that somebody fills in step 3: no checkpoint fits any more."""
    place = tmp_path / "small"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(place)]
    if not shutil.which("mount") or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("no file system can be mounted here")
    try:
        config = Config(model=base, run_dir=str(place / "run"), check_memory=False, **VALUES)
        filler = place / "filler"
        fill = lambda: filler.write_bytes(bytes(shutil.disk_usage(place).free - 40_000))
        with pytest.raises(OSError, match=r"cannot be written to \(No space left on device: 0 MB free\)"):
            train(config, reward_fn=stopping_in(3, fill))
        with pytest.raises((OSError, ValueError), match="run_dir: .*(No space left|free)"):
            go(replace(config, resume=True, allow_changes=True))  # still full; no lock is left behind
        filler.unlink()
        assert numbers(go(replace(config, resume=True, allow_changes=True))) == whole
    finally:
        subprocess.run(["umount", str(place)])


@pytest.mark.parametrize("what", ["run", "run/metrics.jsonl"])
def test_a_folder_or_log_that_disappears_is_seen_at_once(tmp_path, base, what):
    place = tmp_path / what
    gone = lambda: shutil.rmtree(place) if place.is_dir() else place.unlink()
    config = Config(model=base, run_dir=str(tmp_path / "run"), **VALUES)
    with pytest.raises(OSError, match="run_dir: .* cannot be written to .*removed or changed meanwhile"):
        train(config, reward_fn=stopping_in(3, gone))


def test_leftovers_of_a_killed_write_go_first(stopped, whole):
    folder = Path(stopped.run_dir)
    (folder / "checkpoints" / ".partial-step-000006").mkdir()
    (folder / ".partial-model").mkdir()
    (folder / ".partial-config.json").write_text("{")
    assert numbers(go(stopped)) == whole
    assert not [p for p in folder.rglob(".partial*")]


# ---- rewards and gradients


def test_a_reward_that_exits_does_not_end_the_job_as_if_all_were_well(tmp_path, base):
    with pytest.raises(RuntimeError, match=r"reward_fn: it called sys.exit\(0\)"):
        train(
            Config(model=base, run_dir=str(tmp_path / "run"), **VALUES),
            reward_fn=stopping_in(2, lambda: sys.exit(0)),
        )
    assert not Run(tmp_path / "run").finished


def test_steps_that_cannot_be_taken_are_counted_and_end_the_run(tmp_path, base, capsys):
    def huge(response, ground_truth):
        return {"reward": 1e38 * share_of_lower_case(response, ground_truth)["reward"]}

    values = VALUES | dict(
        algo="drgrpo", n_steps=40, train_batch_size=16, normalization_constant=1e-3, n_val=0
    )
    config = Config(model=base, run_dir=str(tmp_path / "run"), **values)
    with pytest.warns(UserWarning, match="skipped"):
        with pytest.raises(
            RuntimeError, match="step 20: the gradient was not finite in the last 20 optimizer"
        ):
            train(config, reward_fn=huge)
    assert "step 1: 1 of 1 optimizer steps left out" in capsys.readouterr().out
    rows = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    assert [row["skipped_steps"] for row in rows] == [1] * len(rows) and len(rows) == 19
