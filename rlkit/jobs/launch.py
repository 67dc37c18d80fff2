"""Starting the ranks of a run: ``n_gpus`` processes of ``python -m rlkit.train`` under torchrun's agent."""

import os
import signal
import subprocess
import sys
from dataclasses import asdict, replace

from rlkit.jobs.run_writer import new_run_dir
from rlkit.jobs.runs import Run


def launch(config, own: dict[str, bool]) -> Run:
    """Train in ``config.n_gpus`` processes of their own, their lines printed here; the finished run.

    own: what the caller passed as an object, which another process cannot have. RuntimeError with the first
    failure's reason if a rank fails.
    """
    given = [name for name, there in own.items() if there]
    if given:
        raise ValueError(
            f"n_gpus: got {config.n_gpus} with {', '.join(given)} of your own, which other processes cannot "
            "have; expected n_gpus 1, or your script started by torchrun"
        )
    if config.run_dir is None:
        config = replace(config, run_dir=str(new_run_dir(config.preset, config.algo, config.seed)))
    values = [f"{name}={value}" for name, value in asdict(config).items() if value is not None]
    command = [sys.executable, "-u", "-m", "rlkit.train", *values]
    environment = os.environ | {"OMP_NUM_THREADS": str(config.threads), "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    ) as process:
        assert process.stdout is not None
        try:
            last = ""
            for line in process.stdout:
                last = line.rstrip() or last
                print(line, end="", flush=True)
        except BaseException:
            process.send_signal(signal.SIGINT)
            raise
    if process.returncode:
        raise RuntimeError(f"train: {last}")
    return Run(config.run_dir)


def start_ranks(n: int, arguments: list[str]) -> str | None:
    """Run ``python -m rlkit.train`` in ``n`` ranks on this machine. None, or what the first failure was."""
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
    try:
        elastic_launch(settings, sys.executable)("-u", "-m", "rlkit.train", *arguments)
    except ChildFailedError as error:
        # a rank that is killed takes the others' conversation down with it: its own end is the reason
        rank, failure = min(
            error.failures.items(), key=lambda item: (item[1].exitcode >= 0, item[1].timestamp)
        )
        if failure.exitcode >= 0:
            return str(failure.message if isinstance(failure.message, str) else failure.message["message"])
        killer = signal.Signals(-failure.exitcode).name
        return f"rank {rank} of {n} was ended by {killer}; the run stops, resume goes on from its checkpoint"
    return None
