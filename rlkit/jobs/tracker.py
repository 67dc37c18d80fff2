"""The program that talks to a tracker (W&B, TensorBoard, trackio) for a run, in a process of its own.

``sinks`` starts it and stops it. What such a library does to its process (hooks at exit, a wrapped stdout,
threads, sys.exit, a call that never returns) so cannot reach the run. It reads lines of JSON: first how to
open the tracker, then a row each; it answers each with one line, "" or what went wrong, and ends with its
input, also where the run was killed. A call that takes longer than ``seconds`` ends this process.
"""

import faulthandler
import json
import os
import signal
import sys
from contextlib import suppress
from html import escape
from importlib import import_module


def open_tensorboard(opening: dict):
    """(log, finish). TensorBoard hides what an earlier part of the run wrote from first_step on."""
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(os.path.join(opening["dir"], "tensorboard"), purge_step=opening["first_step"])

    def log(row: dict, step: int, table: list[dict]) -> None:
        for name, value in row.items():
            writer.add_scalar(name, value, step)
        if table:
            cells = [
                [f"<pre>{escape(str(v))}</pre>".replace("\n", "<br>") for v in r.values()] for r in table
            ]
            lines = [list(table[0]), ["---"] * len(table[0]), *cells]
            writer.add_text("rollouts", "\n".join("|".join(line).replace("\r", "") for line in lines), step)
        writer.flush()

    return log, writer.close


def open_module(opening: dict):
    """(log, finish) of wandb, or of trackio, which has its functions. Steps that are there are left out."""
    name, known = opening["name"], {key: opening[key] for key in ("group", "config")}
    module = import_module(name)
    if name == "wandb":
        settings = module.Settings(console="off")  # the run's output is in its notebook
        known |= {key: opening[key] for key in ("id", "dir", "tags")} | {"settings": settings}
        run = module.init(project="rlkit", name=opening["title"], resume="allow", **known)
    else:
        run = module.init(project="rlkit", name=opening["id"], resume="allow", embed=False, **known)
    first = max(opening["first_step"], steps_there(run, name))

    def log(row: dict, step: int, table: list[dict]) -> None:
        if step < first:
            return
        if table:
            columns, data = list(table[0]), [list(r.values()) for r in table]
            row = row | {"rollouts": table_of(module, name, columns, data)}
        module.log(row, step=step)

    return log, module.finish


def table_of(module, name: str, columns: list[str], data: list[list]):
    if name == "wandb":
        return module.Table(columns=columns, data=data)
    from pandas import DataFrame

    return module.Table(dataframe=DataFrame(data, columns=columns))


def steps_there(run, name: str) -> int:
    """The first step that a run which goes on does not have yet; 0 for a new one."""
    return int((getattr(run, "step", 0) if name == "wandb" else getattr(run, "_next_step", 0)) or 0)


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what the tracker prints goes to stderr
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the run, which then closes this
    lines = open(0, encoding="utf-8")
    nowhere = open(os.devnull, "w")

    def attempt(function, *arguments):
        result, error = None, ""
        faulthandler.dump_traceback_later(opening["seconds"], exit=True, file=nowhere)
        try:
            result = function(*arguments)
        except BaseException as reason:  # sys.exit, too
            error = f"{type(reason).__name__}: {reason}"
        faulthandler.cancel_dump_traceback_later()
        with suppress(OSError):  # the run was killed; its rows are still taken
            print(json.dumps(error), file=answers, flush=True)
        return result

    opening = json.loads(lines.readline())
    opened = attempt(open_tensorboard if opening["name"] == "tensorboard" else open_module, opening)
    if opened:
        for line in lines:
            row, step, table = json.loads(line)
            attempt(opened[0], {name: row[name] for name in row if name != "step"}, step, table)
        attempt(opened[1])
    faulthandler.dump_traceback_later(opening["seconds"], exit=True, file=nowhere)  # for its hooks at exit


if __name__ == "__main__":
    sys.dont_write_bytecode = True
    main()
