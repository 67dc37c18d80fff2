"""Around a run in a notebook: where it lies, how to go on should it stop, and an end without noise."""

import dataclasses
import os
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from rlkit.jobs.config import Config
from rlkit.jobs.record import with_places
from rlkit.jobs.run_writer import claim_run_dir, in_use, runs_folder

_STARTED: set[Path] = set()  # run folders of this kernel


class Stopped(KeyboardInterrupt):  # noqa: N818 (as KeyboardInterrupt is no Error)
    """An interrupt or SIGTERM, shown by its own words alone, not by screens of frames."""

    def _render_traceback_(self):  # what IPython asks for
        return [str(self)]


@contextmanager
def resumable(config: Config, values: Mapping[str, Any], how=None) -> Iterator[Config]:
    """Prints where the run lies before it starts and, should it stop, how to go on with it.

    ``with resumable(config, values) as started: run = train(started)``, where ``values`` are the job's
    parameters. ``started`` has its ``run_dir``, a new folder under runs/ unless one was given; run again in
    the same kernel, the cell goes on with a run_dir that was given, or shows it if it is finished. An error
    passes through, so that the job fails; what was written stays. An interrupt and SIGTERM end it cleanly.
    how: ``f(folder, values)``, what to do to go on; None is ``how_to_resume``, for the notebook.
    """
    if config.dry_run:
        yield config
        return
    claimed = config.run_dir is None
    folder = Path(
        os.path.expanduser(config.run_dir or claim_run_dir(config.preset, config.algo, config.seed))
    )
    folder = folder.absolute()
    record = folder / "config.json"
    again = folder in _STARTED and os.path.isfile(record)
    config = dataclasses.replace(config, run_dir=str(folder), resume=config.resume or again)
    _STARTED.add(folder)
    before, hint_lines = read_bytes(record), (how or how_to_resume)(folder, values)
    print(f"run folder: {near(folder)}", flush=True)
    to_terminal(f"run folder: {folder}\n{hint_lines}")
    try:
        with sigterm_raises(Stopped("SIGTERM")):
            yield config
    except BaseException as error:
        if claimed:
            with suppress(OSError):  # it holds something, or is gone
                folder.rmdir()
        changed = read_bytes(record) != before or (config.resume and not isinstance(error, ValueError))
        began = changed and os.path.isfile(record) and not in_use(folder)  # is there something to go on with?
        if isinstance(error, KeyboardInterrupt):
            why = f"Stopped ({str(error) or 'interrupted'})."
            raise Stopped(f"{why} {hint_lines}" if began else why) from None
        if began:
            print(hint_lines, file=sys.stderr, flush=True)
        raise


def how_to_resume(folder: Path, values: Mapping[str, Any]) -> str:
    """What to type and what to set to go on with a run that stopped; both right wherever one stands."""
    left_out = ("run_dir", "resume", "dry_run")
    stated = {k: v for k, v in values.items() if v is not None and k not in left_out}
    stated = with_places(stated) | {"run_dir": folder, "resume": True}
    notebook = Path(__file__).resolve().parents[2] / "notebooks" / "train.ipynb"
    output = folder.with_name(f"{folder.name}-resumed.ipynb")
    words = ["papermill", notebook, output, *(w for item in stated.items() for w in ("-p", *item))]
    join = shlex.join if os.name == "posix" else subprocess.list2cmdline
    return (
        f"To go on from the last checkpoint, in a terminal:\n  {join(map(str, words))}\n"
        f"or in the notebook: set run_dir = {str(folder)!r} and resume = True in its first cell, and run all."
    )


def near(folder: Path) -> str:
    """The folder as seen from where runs/ is, if it lies there."""
    top = runs_folder().parent
    return str(folder.relative_to(top)) if folder.is_relative_to(top) else str(folder)


def read_bytes(path: Path) -> bytes | None:
    return path.read_bytes() if os.path.isfile(path) else None


def to_terminal(text: str) -> None:
    """A line to where the kernel's own process writes: papermill's terminal, or JupyterLab's."""
    if sys.stderr is not sys.__stderr__:  # the kernel's stream goes to the notebook; its descriptor does not
        with suppress(OSError):
            os.write(sys.stderr.fileno(), f"{text}\n".encode())


@contextmanager
def sigterm_raises(error: BaseException):
    """SIGTERM raises ``error`` here, so that all is closed, and ends the process after that."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(*_):
        raise error

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    except BaseException as raised:
        if raised is error:
            threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGTERM)).start()  # once this is told
        raise
    finally:
        signal.signal(signal.SIGTERM, before)
