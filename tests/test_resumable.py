"""What a notebook says about its run: where it lies, how to go on, and an end without screens of frames."""

import re
import shlex
import shutil
import signal
import subprocess
import sys
import textwrap
import time

import pytest
from IPython.core.interactiveshell import InteractiveShell
from tiny_model import save_tiny_model

from rlkit.algorithms import get_algorithm
from rlkit.jobs import resumable as module
from rlkit.jobs.config import Config
from rlkit.jobs.resumable import Stopped, resumable
from rlkit.jobs.run_writer import open_run
from rlkit.jobs.runs import Run
from rlkit.trainer import train

SMALL = dict(n_steps=2, rollout_batch_size=8, group_size=4, n_train=16, n_val=0, max_tokens=4)


@pytest.fixture
def config(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(module, "_STARTED", set())
    model = str(save_tiny_model(tmp_path / "base"))
    return Config(model=model, prompt="question_only", **SMALL)


def test_the_cell_again_makes_a_new_run_or_shows_the_finished_one(config, tmp_path):
    for n in (1, 2):
        with resumable(config, {}) as started:
            run = train(started)
        assert run.finished and len(list((tmp_path / "runs").iterdir())) == n
    assert config.run_dir is None
    named = Config(**{f: getattr(config, f) for f in SMALL | {"model": 0, "prompt": 0}}, run_dir="mine")
    stamps = set()
    for _ in range(2):
        with resumable(named, {}) as started:
            stamps.add((train(started).path / "metrics.jsonl").stat().st_mtime_ns)
    assert len(stamps) == 1


def test_a_cell_that_was_interrupted_goes_on_when_it_runs_again(config, tmp_path):
    named = Config(**{f: getattr(config, f) for f in SMALL | {"model": 0, "prompt": 0}}, run_dir="mine")

    def interrupted(response, ground_truth):
        raise KeyboardInterrupt

    with pytest.raises(Stopped) as stopped:
        with resumable(named, {"seed": 0, "algo": "grpo", "lr": None}) as started:
            train(started, reward_fn=interrupted)
    text = str(stopped.value)
    folder = tmp_path / "mine"
    assert text.startswith("Stopped (interrupted).") and f"set run_dir = '{folder}' and resume = True" in text
    assert re.search(
        rf"papermill /\S+/notebooks/train.ipynb {folder}-resumed.ipynb -p seed 0 -p algo grpo "
        rf"-p run_dir {folder} -p resume True\n",
        text,
    )
    with pytest.raises(ValueError, match="resume: .*reward_fn"):  # another reward: said, not mixed in
        with resumable(named, {}) as started:
            train(started)
    with resumable(Config(**named.__dict__ | {"allow_changes": True}), {}) as started:
        assert train(started).finished


def test_the_folder_goes_while_it_trains(config, tmp_path):
    def gone(response, ground_truth):
        shutil.rmtree(tmp_path / "runs", ignore_errors=True)
        return {"reward": 0.0}

    with pytest.raises(OSError, match="^run_dir: .*; the run stops, its folder is gone$"):
        with resumable(config, {}) as started:
            train(started, reward_fn=gone)


def test_the_second_of_two_jobs_is_not_told_to_go_on_with_the_firsts_run(config, tmp_path, capsys):
    """The first begins between the second's look at the folder and its start."""
    values = {f: getattr(config, f) for f in SMALL | {"model": 0, "prompt": 0}}
    named = Config(**values, run_dir="mine")
    with pytest.raises(ValueError, match="another process is writing"):
        with resumable(named, {}) as started:
            first = open_run(named.resolved(), get_algorithm("grpo"))
            open_run(started.resolved(), get_algorithm("grpo"))
    assert "To go on" not in capsys.readouterr().err
    first.close()


def test_relative_paths_are_right_from_another_folder(config, tmp_path, monkeypatch):
    values = {f: getattr(config, f) for f in SMALL} | {"model": "base", "prompt": "question_only"}
    (tmp_path / "question_only").mkdir()  # not what is meant
    with pytest.raises(Stopped) as stopped:
        with resumable(Config(**values), values) as started:
            train(started, reward_fn=lambda response, truth: (_ for _ in ()).throw(KeyboardInterrupt))
    words = shlex.split(str(stopped.value).splitlines()[1])
    given = dict(zip(words[words.index("-p") + 1 :: 3], words[words.index("-p") + 2 :: 3]))
    assert (given["model"], given["prompt"]) == (str(tmp_path / "base"), "question_only")
    monkeypatch.chdir("/")
    [folder] = (tmp_path / "runs").iterdir()
    assert Run(folder).config["model"] == given["model"]
    there = dict(run_dir=str(folder), resume=True, model=given["model"])
    with pytest.raises(ValueError, match="other values: reward_fn "):  # and no other model
        train(Config(**values | there))


def test_ipython_shows_a_stop_by_its_words_alone(capsys):
    InteractiveShell.instance().run_cell(
        "from rlkit.jobs.resumable import Stopped\ndef deep(): raise Stopped('only this')\ndeep()"
    )
    assert capsys.readouterr().out.strip() == "only this"


def test_there_is_no_hint_where_there_is_nothing_to_go_on_with(config, tmp_path, capsys):
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "metrics.jsonl").write_text('{"step": 0}\n')
    values = {f: getattr(config, f) for f in SMALL | {"model": 0, "prompt": 0}}
    with pytest.raises(ValueError, match="already holds a run"):
        with resumable(Config(**values, run_dir="used"), {}) as started:
            train(started)
    with pytest.raises(ZeroDivisionError):
        with resumable(config, {}):
            raise ZeroDivisionError
    assert "To go on" not in capsys.readouterr().err
    assert list((tmp_path / "runs").iterdir()) == []  # nothing was written, so nothing stays


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals")
def test_sigterm_closes_the_run_and_says_how_to_go_on(config, tmp_path):
    script = f"""
        import os, signal
        from rlkit import Config, train
        from rlkit.jobs.resumable import resumable
        def reward(response, ground_truth):
            os.kill(os.getpid(), signal.SIGTERM)
            return {{"reward": 0.0}}
        values = {SMALL | dict(model=config.model, prompt="question_only")!r}
        with resumable(Config(**values), {{}}) as started:
            train(started, reward_fn=reward)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode != 0 and "Stopped (SIGTERM). To go on from the last checkpoint" in done.stderr
    [folder] = (tmp_path / "runs").iterdir()
    assert str(folder) in done.stderr and not Run(folder).finished


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals")
def test_ctrl_c_in_a_terminal_gives_two_lines_and_the_second_goes_on(config, tmp_path):
    """A run that would go on for hours is interrupted, and again after the command that it gave."""
    small = SMALL | dict(n_steps=900_000, model=config.model, prompt="question_only", checkpoint_every=1)
    command = [sys.executable, "-m", "rlkit.train", *(f"{name}={value}" for name, value in small.items())]
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    steps = 0
    for cwd in (tmp_path, "/"):
        with subprocess.Popen(command, cwd=cwd, **pipes) as job:
            deadline = time.monotonic() + 120
            while time.monotonic() < deadline and job.poll() is None:
                found = max((p.name for p in tmp_path.glob("runs/*/checkpoints/step-*")), default="")
                if found > f"step-{steps:06d}":
                    break
                time.sleep(0.02)
            job.send_signal(signal.SIGINT)
            said = [line for line in job.communicate(timeout=60)[1].splitlines() if "train:" not in line]
        assert job.returncode == 1 and len(said) == 2, said
        assert said[0] == "Stopped (interrupted). To go on from the last checkpoint:"
        [folder] = (tmp_path / "runs").iterdir()
        python, *rest = shlex.split(said[1])
        assert python == "python" and f"run_dir={folder}" in rest and rest[-1] == "resume=True"
        command, before = [sys.executable, *rest], steps
        steps = int(Run(folder).metrics.step.max())
        assert steps > before and Run(folder).metrics.step.tolist() == list(range(1, steps + 1))
