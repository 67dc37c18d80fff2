"""Jobs killed at random moments through papermill, as a cluster or a lid would; `make test-slow` runs it.

Each kill falls after the job has logged at least one more step, within the second after that: in a step, in a
log line, in a checkpoint or in the last weights. Killed are the kernel, papermill, or both. At the end the
run must be, bit for bit, the one that nothing happened to.
"""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from rlkit.jobs.metrics import TIMES
from rlkit.jobs.runs import load_run
from rlkit.support.files import read_jsonl

KILLS = 13  # of each of four runs of this test
VALUES = dict(
    n_steps=40,
    rollout_batch_size=16,
    group_size=4,
    n_train=64,
    n_val=8,
    n_val_final=8,
    max_tokens=16,
    eval_every=7,
    rollouts_every=3,
    checkpoint_every=1,
)


def start(folder, resume):
    """papermill in a process group of its own."""
    values = VALUES | {"run_dir": folder / "run", "resume": resume}
    arguments = [word for name, value in values.items() for word in ("-p", name, str(value))]
    notebook = Path(__file__).parents[2] / "notebooks" / "train.ipynb"
    command = [str(Path(sys.executable).with_name("papermill")), str(notebook), "out.ipynb", *arguments]
    environment = os.environ | {"JUPYTER_PREFER_ENV_PATH": "1", "OMP_NUM_THREADS": "1"}
    log = open(folder / "log", "a")
    options = dict(cwd=folder, env=environment, stdout=log, stderr=log, start_new_session=True)
    return subprocess.Popen(command, **options)


def kill(process, whom):
    """SIGKILL to the kernel, to papermill or to both; all are gone on return."""
    children = psutil.Process(process.pid).children(recursive=True)
    for victim in {"kernel": children, "papermill": [process], "both": [*children, process]}[whom]:
        victim.send_signal(signal.SIGKILL)
    gone, alive = psutil.wait_procs(children, timeout=30)
    process.wait(timeout=60)
    assert not alive, f"left after papermill was killed: {alive}"


def numbers(folder):
    rows = read_jsonl(folder / "run" / "metrics.jsonl")
    plain = [{k: v for k, v in row.items() if k not in TIMES} for row in rows]
    weights = (folder / "run" / "model" / "model.safetensors").read_bytes()
    return plain, read_jsonl(folder / "run" / "rollouts.jsonl"), weights


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("seed", range(4))
def test_runs_killed_at_random_moments_end_as_if_nothing_had_happened(tmp_path, seed):
    chance, kills, runs = random.Random(seed), 0, 0
    whole = tmp_path / "whole"
    whole.mkdir()
    assert start(whole, resume=False).wait() == 0, (whole / "log").read_text()
    wanted = numbers(whole)
    while kills < KILLS:
        folder = tmp_path / f"killed{runs}"
        folder.mkdir()
        log, runs = folder / "run" / "metrics.jsonl", runs + 1
        while not (folder / "run/config.json").is_file() or not load_run(folder / "run").finished:
            process = start(folder, resume=(folder / "run" / "config.json").is_file())
            seen = len(read_jsonl(log, growing=True))
            while process.poll() is None and len(read_jsonl(log, growing=True)) <= seen:
                time.sleep(0.01)
            time.sleep(chance.uniform(0, 1.0))
            if process.poll() is None:
                kill(process, chance.choice(["kernel", "papermill", "both"]))
                kills += 1
            else:
                assert process.returncode == 0, (folder / "log").read_text()[-3000:]
        assert numbers(folder) == wanted, f"run {runs} of seed {seed} differs after {kills} kills"
    print(f"{kills} kills over {runs} runs of seed {seed}")
