"""The command line: ``python -m rlkit.train algo=drgrpo lr=3e-4``, also with n_gpus=2 or under torchrun.

``torchrun --nproc-per-node 2 -m rlkit.train algo=drgrpo`` trains one model over two ranks (jobs.sharding).
"""

import os
import shlex
import sys
from pathlib import Path

from torch.distributed.elastic.multiprocessing.errors import record

from rlkit.jobs.config import Config
from rlkit.jobs.launch import start_ranks
from rlkit.jobs.record import with_places
from rlkit.jobs.resumable import Stopped, resumable
from rlkit.support.ranks import launched, leave
from rlkit.trainer import train


def main(arguments: list[str]) -> str | None:
    """Train; None, or one message for stderr."""
    unreadable = [text for text in arguments if "=" not in text]
    if unreadable:
        return f"rlkit.train: got {unreadable[0]!r}, expected name=value, such as algo=drgrpo"
    values = dict(text.split("=", 1) for text in arguments)
    try:
        config = Config.from_parameters(values)
        if launched() or config.dry_run:
            train(config)
            return None
        with resumable(config, values, how_to_go_on) as started:
            if started.n_gpus > 1:
                words = values | {"run_dir": started.run_dir}
                failed = start_ranks(started.n_gpus, [f"{name}={value}" for name, value in words.items()])
                if failed:
                    raise ValueError(failed)
            else:
                train(started)
    except Stopped as stop:
        return str(stop)
    except ValueError as error:
        if not launched():
            return str(error)
        raise
    return None


def how_to_go_on(folder: Path, values) -> str:
    """The command that goes on with the run in this folder."""
    words = with_places(values) | {"run_dir": folder, "resume": True}
    command = shlex.join(["python", "-m", "rlkit.train", *(f"{name}={v}" for name, v in words.items())])
    return f"To go on from the last checkpoint:\n  {command}"


if __name__ == "__main__":
    sys.excepthook = (
        sys.excepthook if not launched() else lambda *error: None
    )  # torchrun's agent says it once
    message = record(main)(sys.argv[1:])
    leave()
    if launched() and message is None:  # all is closed; threads of torch.distributed can abort a normal exit
        sys.stdout.flush()
        os._exit(0)
    sys.exit(message)
