"""Where metrics go besides the run's folder: W&B, TensorBoard or trackio, each imported only when asked for.

Nothing a tracker does ends, hangs or slows a run: it lives in a process of its own (`tracker.py`), fed by one
thread from a queue. What it does not take is dropped and counted; metrics.jsonl has every row in any case.
"""

import json
import os
import re
import subprocess
import sys
import time
from contextlib import suppress
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from queue import Full, Queue
from threading import Thread
from typing import Any
from uuid import uuid4

from rlkit.jobs.runs import Run

NAMES = ("wandb", "tensorboard", "trackio")  # the packages' names, too
ROWS = 1000  # that may wait for the tracker
CALL_SECONDS = 60  # for one call of the tracker; one that takes longer ends it
CLOSE_SECONDS = 60  # that the end of a run waits for it
LOGIN_SECONDS = 20  # that a plan waits for W&B's word
TABLE_ROWS = 4  # responses shown with an evaluation
_SHOWN = ("prompt", "response", "gold", "reward")


class Sink:
    """``log(row, step, rollouts)`` a dict of numbers and some responses, ``close()`` at the end.

    This one keeps nothing.
    """

    def log(self, row: dict, step: int, rollouts=()) -> None:
        pass

    def close(self) -> None:
        pass


class Tracker(Sink):
    """A sink whose calls return at once (``close`` within CLOSE_SECONDS) whatever the tracker does."""

    def __init__(self, opening: dict):
        self.name, self.rows, self.warned = opening["name"], Queue(ROWS), False
        self.child: Any = None
        self.given, self.taken = 0, 0
        line = json.dumps(opening | {"seconds": CALL_SECONDS}, default=str)
        self.thread = Thread(target=self._feed, args=(line,), daemon=True)
        self.thread.start()

    def log(self, row: dict, step: int, rollouts=()) -> None:
        table = [{name: r[name] for name in _SHOWN} for r in rollouts[:TABLE_ROWS]]
        self.given += 1
        try:
            self.rows.put_nowait(json.dumps([row, step, table], default=str))
        except Full:
            self._warn(f"{ROWS} rows wait for it")

    def close(self) -> None:
        end = time.monotonic() + CLOSE_SECONDS
        with suppress(Full):
            self.rows.put(None, timeout=CLOSE_SECONDS if self.thread.is_alive() else 0)
        self.thread.join(max(0, end - time.monotonic()))
        if self.thread.is_alive():
            self._warn(f"not done {CLOSE_SECONDS} s after the run")
            if self.child:
                self.child.kill()
        if dropped := self.given - self.taken:
            print(f"{self.name}: {dropped} of {self.given} rows dropped; metrics.jsonl has all", flush=True)

    def _feed(self, opening: str) -> None:
        try:
            command = [sys.executable, "-P", str(Path(__file__).with_name("tracker.py"))]
            pipes: dict[str, Any] = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, encoding="utf-8")
            with subprocess.Popen(command, **pipes) as self.child:
                for i, line in enumerate(chain([opening], iter(self.rows.get, None))):
                    self.taken += self._ask(line + "\n") and i > 0
                self.child.stdin.close()
                self._ask("")
        except Exception as error:  # it is gone, or could not be started
            self._warn(str(error) or type(error).__name__)

    def _ask(self, text: str) -> bool:
        """Whether the tracker took it. EOFError if it is gone."""
        with suppress(BrokenPipeError):
            if text:
                self.child.stdin.write(text)
                self.child.stdin.flush()
        if not (answer := self.child.stdout.readline()):
            raise EOFError(f"it ended, or a call took longer than {CALL_SECONDS} s")
        if error := json.loads(answer):
            self._warn(" ".join(error.split())[:300])
        return not error

    def _warn(self, why: str) -> None:
        if not self.warned:
            self.warned = True
            print(f"warning: {self.name}: {why}; the run goes on without it", flush=True)


def check_sink(name: str) -> None:
    """ValueError if the sink's package is not installed, or W&B would ask for a login."""
    if name in NAMES and find_spec(name) is None:
        expected = f"expected 'none' or `pip install {name}` first"
        raise ValueError(f"sink: got {name!r}, but {name} is not installed; {expected}")
    if name == "wandb" and not wandb_login():
        expected = (
            "expected `wandb login` once before, or WANDB_API_KEY or WANDB_MODE=offline in the environment"
        )
        raise ValueError(f"sink: got 'wandb', but nobody is logged in to it here; {expected}")


def wandb_login() -> bool:
    """Whether W&B can start without asking anything: it is asked, in a process that has no keyboard.

    True also where it gives no answer in LOGIN_SECONDS: with a login it may look for its server first.
    """
    if os.environ.get("WANDB_MODE") in ("offline", "disabled", "dryrun") or os.environ.get("WANDB_API_KEY"):
        return True
    code = "import wandb; online = wandb.setup().settings.mode == 'online'; "
    code += "raise SystemExit(online and not wandb.login(verify=False))"
    quiet: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
    try:
        command = [sys.executable, "-P", "-c", code]
        return subprocess.run(command, timeout=LOGIN_SECONDS, **quiet).returncode == 0
    except subprocess.TimeoutExpired:
        return True


def open_sink(name: str, folder, first_step: int = 0) -> Sink:
    """The sink called ``name`` ("none", "wandb", "tensorboard" or "trackio") of the run that ``folder``, a
    RunWriter, writes; ``first_step`` is the first that it will log.

    A run that goes on is the same run there, by the tracker_id in its config.json. Of rows that are there
    already beyond its last checkpoint W&B and trackio keep the old ones, TensorBoard shows the new ones.
    """
    check_sink(name)
    if name == "none":
        return Sink()
    if name not in NAMES:
        raise ValueError(f"sink: got {name!r}, expected one of none, {', '.join(NAMES)}")
    path, config = folder.path, Run(folder.path).config
    if "tracker_id" not in config:
        name_there = re.sub(r"[^\w-]+", "-", path.name, flags=re.ASCII)[:80]
        folder.note(tracker_id=f"{name_there}-{uuid4().hex[:8]}")
        config = Run(path).config
    algo, seed = config["algorithm"]["name"], f"seed{config['seed']}"
    tags = [text[:64] for text in (config["preset"], algo, seed)]
    who = {
        "id": config["tracker_id"],
        "title": path.name,
        "group": f"{config['preset']}-{algo}",
        "tags": tags,
    }
    where = {"name": name, "dir": str(path.absolute()), "first_step": first_step, "config": config}
    return Tracker(who | where)
