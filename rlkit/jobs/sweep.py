"""Many runs: a grid of parameters, each run a papermill execution of notebooks/train.ipynb in its own folder.

``sweep(grid(algo=["grpo", "drgrpo"], seed=range(8)), "runs/first")``. Finished runs are skipped, broken ones
go on from their checkpoint, one that fails stops no other, and the same call goes on after Ctrl-C.
"""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import pandas as pd

from rlkit.jobs.config import Config
from rlkit.jobs.record import differences
from rlkit.jobs.resumable import Stopped, sigterm_raises
from rlkit.jobs.run_writer import in_use
from rlkit.jobs.runs import Run, read_log
from rlkit.support.checks import shown
from rlkit.support.progress import progress

NOTEBOOK = Path(__file__).resolve().parents[2] / "notebooks" / "train.ipynb"
STARTS = 3  # a kernel can lose its ports to another process before it has them: it is started again
_BY_SWEEP = ("run_dir", "resume", "dry_run")


def grid(**lists) -> list[dict[str, Any]]:
    """All combinations, the last name varying fastest: ``grid(lr=[1e-4, 3e-4], seed=range(2))`` is four.

    A value that is no list, range, tuple or set stands in every run.
    """
    columns = [v if isinstance(v, (list, range, tuple, set)) else [v] for v in lists.values()]
    return [dict(zip(lists, values)) for values in product(*columns)]


@dataclass
class _Job:
    name: str
    parameters: dict[str, Any]
    config: Config
    folder: Path
    status: str = "waiting"
    error: str = ""
    starts: int = 0
    process: subprocess.Popen | None = field(default=None, repr=False)

    @property
    def notebook(self) -> Path:
        return self.folder.with_name(f"{self.name}.ipynb")

    @property
    def errors(self) -> Path:
        return self.folder.with_name(f"{self.name}.error.txt")

    def steps(self) -> int:
        """Steps in the run's log so far."""
        return int(max((row["step"] for row in read_log(self.folder / "metrics.jsonl")), default=0))


def sweep(runs: Mapping[str, Any] | Iterable[Mapping[str, Any]], folder, workers=None) -> pd.DataFrame:
    """Train all of these runs, ``workers`` at a time, under ``folder``; a row for each is returned.

    runs: {parameter: its values}, of which all combinations are taken (``grid``), or a list of dicts, one a
        run. The parameters are those of train.ipynb; ``name`` may be given, else it says what varies.
    workers: runs at a time; None is the cores that this process may use divided by a run's ``threads``.

    ``folder/<name>/`` is the run's folder, ``<name>.ipynb`` the executed notebook and, of a run that failed,
    ``<name>.error.txt`` what it said. status is finished, failed, or elsewhere (another process trains it
    now). ValueError naming the run for a parameter that is wrong, before any run starts.
    """
    jobs = _jobs(runs, Path(os.path.expanduser(folder)).absolute())
    threads = max(job.config.threads for job in jobs)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    workers = max(1, cores // threads) if workers is None else workers
    if not isinstance(workers, int) or workers < 1:
        raise ValueError(f"workers: got {shown(workers)}, expected at least 1")
    total = sum(job.config.n_steps for job in jobs)
    with progress(total=total, desc="sweep", unit="step") as bar, sigterm_raises(Stopped("SIGTERM")):
        try:
            while unfinished := [job for job in jobs if job.status in ("waiting", "running")]:
                running = [job for job in unfinished if job.status == "running"]
                for job in unfinished:
                    if job.status == "waiting" and len(running) < workers:
                        _look(job)  # another sweep may have it by now
                        if job.status == "waiting":
                            _start(job)
                            running.append(job)
                for job in running:
                    _poll(job)
                bar.update(sum(min(j.steps(), j.config.n_steps) for j in jobs) - bar.n)
                counts = {s: sum(j.status == s for j in jobs) for s in ("finished", "running", "failed")}
                bar.set_postfix_str(", ".join(f"{n} {status}" for status, n in counts.items() if n))
                if any(job.status == "running" for job in jobs):
                    time.sleep(0.3)
        except BaseException:
            _stop([job for job in jobs if job.process is not None])
            raise
    return _table(jobs)


def _jobs(runs, folder: Path) -> list[_Job]:
    """The runs, checked; one ValueError for all that is wrong with them."""
    if not NOTEBOOK.is_file():
        raise ValueError(f"notebook: {NOTEBOOK} is not there; a sweep needs a checkout of the project")
    listed = grid(**runs) if isinstance(runs, Mapping) else [dict(run) for run in runs]
    if not listed:
        raise ValueError("runs: got none, expected {parameter: values} or a list of runs")
    names = list(dict.fromkeys(name for run in listed for name in run if name != "name"))
    varying = [n for n in names if len({str(run.get(n)) for run in listed}) > 1]
    jobs, errors = [], []
    for run in listed:
        name = str(run.pop("name", None) or _name(run, varying))
        if unsafe := re.sub(r"[\w.+=,-]", "", name):
            errors.append(f"{name}: its name has {unsafe!r}, expected letters, digits and . + = , - _")
        if taken := [n for n in _BY_SWEEP if n in run]:
            errors.append(f"{name}: {taken[0]} is set by the sweep itself")
        try:
            config = Config.from_parameters(run)
            jobs.append(_Job(name, run, config, folder / name))
        except ValueError as error:
            errors.append(f"{name}: {error}")
    found = [job.name.casefold() for job in jobs]
    errors += [
        f"{name}: two runs have this name" for name in sorted({n for n in found if found.count(n) > 1})
    ]
    if errors:
        raise ValueError("runs: " + "\n".join(errors))
    return jobs


def _name(run: Mapping[str, Any], varying: list[str]) -> str:
    """What varies, the algorithm first and the seed last: drgrpo-lr=0.0003-seed1."""
    parts = [str(run[n]) if n == "algo" else f"{n}={run[n]}" for n in varying if n in run and n != "seed"]
    parts += [f"seed{run['seed']}"] if "seed" in run else []
    return re.sub(r"[^\w.+=,-]+", "_", "-".join(parts)) or "run"


def _look(job: _Job) -> None:
    """What is in the run's folder: is it finished, is it another run, does another process write it?"""
    if not (job.folder / "config.json").is_file():
        return
    try:
        record, _ = Run(job.folder).config, job.steps()
    except ValueError as error:  # another program's, or damaged
        _fail(job, str(error))
        return
    asked = asdict(job.config.resolved()) | {"algorithm": {}, "inputs": {}}
    if others := differences(record, asked):
        _fail(job, f"the run in {job.folder} was made with other values: {', '.join(others)}")
    elif record.get("finished_step", -1) >= job.config.n_steps:
        job.status = "finished"
    elif in_use(job.folder):
        job.status = "elsewhere"


def _start(job: _Job) -> None:
    begun = (job.folder / "config.json").is_file() and bool(read_log(job.folder / "metrics.jsonl"))
    given = job.parameters | {"run_dir": job.folder, "resume": begun}
    words = [word for name, value in given.items() if value is not None for word in ("-p", name, str(value))]
    job.folder.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "papermill", NOTEBOOK, job.notebook, *words]
    threads = {"OMP_NUM_THREADS": str(job.config.threads), "JUPYTER_PREFER_ENV_PATH": "1"}
    with job.errors.open("w", encoding="utf-8") as said:
        # a session of its own: Ctrl-C in the terminal comes to the sweep, which ends its runs in good order
        job.process = subprocess.Popen(
            [str(word) for word in command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=said,
            env=os.environ | threads,
            start_new_session=True,
        )
    job.status, job.starts = "running", job.starts + 1


def _poll(job: _Job) -> None:
    """Has it ended, and how?"""
    assert job.process is not None
    if job.process.poll() is None:
        return
    said = job.errors.read_text(encoding="utf-8", errors="replace")
    if job.process.returncode == 0:
        job.status = "finished"
        job.errors.unlink()
    elif "Kernel died before replying" in said and job.starts < STARTS:
        job.status = "waiting"
    elif "another process is writing to" in said:
        job.status = "elsewhere"
        job.errors.unlink()
    else:
        lines = [line for line in said.splitlines() if line.strip()]
        why = [line for line in lines if re.match(r"\w*(Error|Exception|Stopped)\b", line)]
        code = f"ended with exit status {job.process.returncode}"
        _fail(job, (why or lines or [code])[-1])
    job.process = None


def _fail(job: _Job, why: str) -> None:
    job.status, job.error = "failed", why


def _stop(jobs: list[_Job]) -> None:
    """Interrupt these runs and wait until they have closed their files; a checkpoint is what they leave."""
    for job in jobs:
        if job.process is not None:
            job.process.send_signal(signal.SIGINT if os.name == "posix" else signal.SIGTERM)
    for job in jobs:
        if job.process is not None:
            try:
                job.process.wait(timeout=30)
            except subprocess.TimeoutExpired:
                job.process.kill()


def _table(jobs: list[_Job]) -> pd.DataFrame:
    """A row per run: what was asked, how it ended, and the last validation accuracy."""
    rows = []
    for job in jobs:
        row = {"run": job.name, **job.parameters, "status": job.status}
        if job.status == "finished":
            row |= {k: v for k, v in Run(job.folder).summary.items() if k in ("val_end", "cpu_seconds")}
        rows.append(row | {"error": job.error})
    return pd.DataFrame(rows).set_index("run")
