"""The command line: ``python -m rlkit.train algo=drgrpo lr=3e-4``, also with n_gpus=2 or under torchrun.

``torchrun --nproc-per-node 2 -m rlkit.train algo=drgrpo`` trains one model over two ranks (jobs.sharding).
"""

import os
import sys

from torch.distributed.elastic.multiprocessing.errors import record

from rlkit.jobs.config import Config
from rlkit.jobs.launch import start_ranks
from rlkit.support.ranks import launched, leave
from rlkit.trainer import train


def main(arguments: list[str]) -> str | None:
    """Train; None, or one message for stderr."""
    unreadable = [text for text in arguments if "=" not in text]
    if unreadable:
        return f"rlkit.train: got {unreadable[0]!r}, expected name=value, such as algo=drgrpo"
    try:
        config = Config.from_parameters(dict(text.split("=", 1) for text in arguments))
        if config.n_gpus > 1 and not launched() and not config.dry_run:
            return start_ranks(config.n_gpus, arguments)
        train(config)
    except ValueError as error:
        if not launched():
            return str(error)
        raise
    return None


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
