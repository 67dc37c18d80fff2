"""Starting the ranks of a run: ``n_gpus`` processes of ``python -m rlkit.train`` under torchrun's agent."""

import logging
import os
import signal
import subprocess
import sys
from collections import deque
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from threading import Thread

from rlkit.jobs.run_writer import claim_run_dir
from rlkit.jobs.runs import Run
from rlkit.support.files import read_jsonl
from rlkit.support.progress import progress


def launch(config, own: list[str]) -> Run:
    """Train in ``config.n_gpus`` processes of their own, their lines printed here; the finished run.

    own: names of what the caller passed as an object, which another process cannot have. RuntimeError with
    the first failure's reason if a rank fails.
    """
    if own:
        raise ValueError(
            f"n_gpus: got {config.n_gpus} with {', '.join(own)} of your own, which other processes cannot "
            "have; expected n_gpus 1, or your script started by torchrun"
        )
    if config.run_dir is None:
        config = replace(config, run_dir=str(claim_run_dir(config.preset, config.algo, config.seed)))
    values = [f"{name}={value}" for name, value in asdict(config).items() if value is not None]
    command = [sys.executable, "-u", "-m", "rlkit.train", *values]
    environment = os.environ | {"OMP_NUM_THREADS": str(config.threads)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "env": environment}
    last = deque([""], maxlen=1)
    metrics = Path(config.run_dir).expanduser() / "metrics.jsonl"
    with subprocess.Popen(command, **pipes) as process, progress(total=config.n_steps, desc="train") as bar:
        reader = Thread(target=_relay, args=(process.stdout, last), daemon=True)
        reader.start()
        try:
            while process.poll() is None:
                reader.join(timeout=0.5)
                steps = [row["step"] for row in read_jsonl(metrics, growing=True)]
                bar.update(max([bar.n, *steps]) - bar.n)
        except BaseException:
            with suppress(ValueError):  # Windows, whose console tells the child itself
                process.send_signal(signal.SIGINT)
            raise
        reader.join()
    if process.returncode:
        raise RuntimeError(f"train: {last.pop() or f'ended with exit status {process.returncode}'}")
    return Run(metrics.parent)


def _relay(stream, last) -> None:
    for line in stream:
        print(line, end="", flush=True)
        last.append(line.strip())


def start_ranks(n: int, arguments: list[str]) -> str | None:
    """Run ``python -m rlkit.train`` in ``n`` ranks on this machine. None, or what the first failure was."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    settings = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=n,
        run_id=f"rlkit-{os.getpid()}",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
    )
    for name in [*logging.root.manager.loggerDict, "torch"]:  # what they would say is in the line below
        if name.startswith("torch"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
    try:
        elastic_launch(settings, sys.executable)("-u", "-m", "rlkit.train", *arguments)
    except SignalException as error:  # Ctrl-C or SIGTERM, which the agent has passed on
        raise KeyboardInterrupt(error.sigval.name) from None
    except ChildFailedError as error:
        rank, failure = min(error.failures.items(), key=_comes_before)
        if failure.exitcode < 0:
            killer = signal.Signals(-failure.exitcode).name
            return (
                f"rank {rank} of {n} was ended by {killer}; the run stops, resume goes on from its checkpoint"
            )
        record = (failure.error_file_data or {}).get("message", {})
        record = record if isinstance(record, dict) else {}
        said = str(record.get("message", failure.message))  # torch gives the text, or the whole of the record
        if not said.startswith("ValueError: "):
            print(record.get("extraInfo", {}).get("py_callstack", ""), file=sys.stderr)
        return said.removeprefix("ValueError: ")
    return None


def _comes_before(item) -> tuple:
    """Which failure is the reason: a killed rank ends the others' talk, and the agent ends them (SIGTERM)."""
    code = item[1].exitcode
    return code == -signal.SIGTERM, code >= 0, item[1].timestamp
