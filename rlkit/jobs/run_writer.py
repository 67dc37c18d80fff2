"""Writing a run's folder so that a kill loses nothing.

A step's line is written before its checkpoint, and a checkpoint appears under its name only when it is whole.
So after a kill at any moment the last checkpoint is good, and what was logged after it is cut off before the
run goes on.
"""

import json
import math
import os
import shutil
import time
from dataclasses import asdict, fields
from hashlib import sha256
from pathlib import Path
from typing import IO, Any

from rlkit.jobs import sharding
from rlkit.jobs.metrics import METRICS
from rlkit.jobs.provenance import provenance
from rlkit.jobs.runs import Run, checkpoints
from rlkit.support.checks import shown
from rlkit.support.files import as_jsonl, fresh_folder, publish, read_jsonl, write_json, write_text
from rlkit.support.ranks import ALONE, Ranks

# what may differ when a run goes on; n_steps may grow
_MAY_CHANGE = set(
    "resume run_dir sink dry_run checkpoint_every n_steps n_gpus device weight_sync check_memory".split()
)


class RunWriter:
    """The open folder of a run that is being trained. ``open_run`` makes one.

    Of several ranks only the first writes lines and the final model; all write and read checkpoints.
    """

    def __init__(self, path: Path, ranks: Ranks = ALONE):
        self.path, self.ranks, self._files = path, ranks, {}
        self._lock: IO | None = None

    def log(self, row: dict) -> None:
        """One line of metrics.jsonl, on disk when this returns. What is not finite or None is left out."""
        names = [*(name for name in METRICS if name in row), *sorted(row.keys() - METRICS.keys())]
        kept = {name: row[name] for name in names if row[name] is not None and math.isfinite(row[name])}
        self._append("metrics.jsonl", [kept])

    def add_rollouts(self, rows: list[dict]) -> None:
        """Lines of rollouts.jsonl."""
        self._append("rollouts.jsonl", rows)

    def _append(self, name, rows):
        if not self.ranks.first:
            return
        if name not in self._files:
            self._files[name] = open(self.path / name, "a", encoding="utf-8")
        self._files[name].write(as_jsonl(rows))
        self._files[name].flush()

    def save_checkpoint(self, step: int, model, optimizer, scaler=None) -> None:
        """checkpoints/step-*/state.pt, whole or not at all; the two latest are kept."""
        import torch

        from rlkit.support.adapters import trained_state

        for file in self._files.values():
            os.fsync(file.fileno())
        target = self.path / "checkpoints" / f"step-{step:06d}"
        if self.ranks.from_first(target.is_dir):
            return
        partial = target.with_name(f".partial-{target.name}")
        if self.ranks.size > 1:
            self.ranks.from_first(lambda: fresh_folder(partial) and None)
            sharding.save(partial, step, model, optimizer)
        else:
            fresh_folder(partial)
            state = {"step": step, "model": trained_state(model), "optimizer": optimizer.state_dict()}
            with open(partial / "state.pt", "wb") as file:
                torch.save(state | ({"scaler": scaler.state_dict()} if scaler else {}), file)
                file.flush()
                os.fsync(file.fileno())
        if self.ranks.first:
            publish(partial, target)
            self._prune_checkpoints(keep=2)

    def _prune_checkpoints(self, keep: int) -> None:
        for folder in checkpoints(self.path)[:-keep]:
            shutil.rmtree(folder)

    def restore(self, model, optimizer, scaler=None) -> int:
        """Load the last checkpoint and cut the logs back to it. Returns its step, or -1 if there is none."""
        import torch

        from rlkit.support.adapters import load_trained_state

        if self.ranks.first:
            for leftover in (self.path / "checkpoints").glob(".partial-*"):
                shutil.rmtree(leftover)
        step, device = -1, next(model.parameters()).device
        for folder in reversed(self.ranks.from_first(lambda: checkpoints(self.path))):
            if self.ranks.size > 1 or not (folder / "state.pt").exists():
                step = sharding.load(folder, model, optimizer)
                break
            try:
                state = torch.load(folder / "state.pt", map_location=device, weights_only=True)
            except Exception as error:  # damaged on disk, in whatever way: the one before it may be whole
                line = f"cannot be read ({type(error).__name__}), trying the checkpoint before it"
                print(f"{folder}: {line}", flush=True)
                shutil.rmtree(folder)
                continue
            load_trained_state(model, state["model"])
            optimizer.load_state_dict(state["optimizer"])
            if scaler:
                scaler.load_state_dict(state.get("scaler", {}))
            step = state["step"]
            break
        for name in ("metrics.jsonl", "rollouts.jsonl") if self.ranks.first else ():
            rows = read_jsonl(self.path / name, growing=True)
            write_text(self.path / name, as_jsonl(row for row in rows if row["step"] <= step))
        return step

    def finish(self, step: int, model, tokenizer) -> None:
        """The final weights into model/, a LoRA into adapter/, then the note that the run is finished."""
        from rlkit.support.adapters import adapter_of, merged
        from rlkit.support.models import save_model

        if not self.ranks.first:
            return

        def put(name: str) -> None:
            partial = fresh_folder(self.path / f".partial-{name}")
            save_model(model, tokenizer, partial)
            shutil.rmtree(self.path / name, ignore_errors=True)
            publish(partial, self.path / name)

        if adapter_of(model) is not None:
            put("adapter")
        with merged(model):
            put("model")
        self.note(finished_step=step)
        self._prune_checkpoints(keep=1)

    def note(self, **values) -> None:
        """Further entries of config.json."""
        if self.ranks.first:
            write_json(self.path / "config.json", Run(self.path).config | values)

    def close(self) -> None:
        for file in (*self._files.values(), self._lock):
            if file is not None:
                file.close()
        self._files, self._lock = {}, None


def open_run(config, algorithm, ranks: Ranks = ALONE, problems=None) -> RunWriter:
    """The folder for this (resolved) config: a new one, or with ``resume`` one to go on with.

    Raises ValueError if the folder is in use or cannot be written to, if it holds a run and ``resume`` is
    off, or if ``resume`` is on and the run there was made with other values (named one by one; n_steps may
    grow).
    """
    if not ranks.first:
        return RunWriter(ranks.from_first(None), ranks)
    if config.run_dir is None:
        path = new_run_dir(config.preset, algorithm.name, config.seed)
    else:
        path = Path(os.path.expanduser(config.run_dir))
    try:
        record = _record(path, config, algorithm, problems)
        path.mkdir(parents=True, exist_ok=True)
        writer = RunWriter(path, ranks)
        writer._lock = _lock(path)
        (path / "checkpoints").mkdir(exist_ok=True)
        if record.get("finished_step", -1) < config.n_steps:
            write_json(path / "config.json", record)
        ranks.from_first(lambda: path)
        return writer
    except OSError as error:
        what = f"got {shown(str(path))}, expected a folder that can be written to"
        raise ValueError(f"run_dir: {what} ({error.strerror or error})") from error


def _record(path: Path, config, algorithm, problems) -> dict:
    """What this run's config.json will hold; ValueError if the folder's results are another run's."""
    files = ("metrics.jsonl", "model")
    used = [name for name in files if (path / name).exists() and (path / name).stat().st_size]
    used += (
        ["checkpoints"] if checkpoints(path) else []
    )  # a run that failed before any result counts for nothing
    what = f"run_dir: {str(path)!r}"
    if used and not config.resume:
        expected = "expected a new folder, or resume=True to go on with it"
        raise ValueError(f"{what} already holds a run ({', '.join(used)}); {expected}")
    wanted: dict[str, Any] = run_record(config, algorithm) | {"problems": digest_of(problems)}
    if not used:
        if config.resume:
            print(f"{path}: nothing to go on with, the run starts from the base model", flush=True)
        return wanted
    if not (path / "config.json").exists():
        expected = "so what it holds is not known; expected a run's folder or a new one"
        raise ValueError(f"{what} has {', '.join(used)} but no config.json, {expected}")
    recorded = Run(path).config
    _check_same(recorded, wanted, path)
    resumed = [*recorded.get("resumed", []), wanted["provenance"]["started"]]
    return recorded | {name: wanted[name] for name in _MAY_CHANGE - {"run_dir"}} | {"resumed": resumed}


def run_record(config, algorithm) -> dict:
    """What config.json holds: the fields, the algorithm, and where, when and with what the run was made."""
    parts = {f.name: getattr(algorithm, f.name) for f in fields(algorithm)}
    parts |= {"cliprange": list(algorithm.cliprange)} if isinstance(algorithm.cliprange, tuple) else {}
    rule = {name: function_name(part) if callable(part) else part for name, part in parts.items()}
    return asdict(config) | {"algorithm": rule, "provenance": provenance()}


def digest_of(problems) -> str | None:
    """How many problems of one's own (to train on, to validate on), and a hash of them; None for none."""
    if problems is None:
        return None
    texts = json.dumps([[(p.question, p.answer) for p in part] for part in problems])
    return f"{sum(map(len, problems))}, sha256 {sha256(texts.encode()).hexdigest()[:16]}"


def function_name(function) -> str:
    """The module and name of a function; of its class for a callable object."""
    named = function if hasattr(function, "__qualname__") else type(function)
    return f"{named.__module__}.{named.__qualname__}"


def _check_same(recorded: dict, wanted: dict, path: Path) -> None:
    fixed = [name for name in wanted if name in recorded and name not in _MAY_CHANGE | {"provenance"}]
    other = [name for name in fixed if recorded[name] != wanted[name]]
    what = f"the run in {str(path)!r} was made"
    if other:
        values = ", ".join(f"{name} (there {recorded[name]!r}, now {wanted[name]!r})" for name in other)
        expected = "expected the same ones, or a new run_dir"
        raise ValueError(f"resume: {what} with other values: {values}; {expected}")
    there, now = recorded["n_steps"], wanted["n_steps"]
    if now != there and wanted["lr_schedule"] != "constant":
        what += f" for {there}, and the learning rate falls to 0 after them"
        raise ValueError(f"n_steps: got {now}, but {what}; expected {there}")
    if now < there:
        raise ValueError(f"n_steps: got {now}, but {what} for {there}; expected at least that")


def new_run_dir(preset: str, algo: str, seed: int) -> Path:
    """A name under runs/ that is not taken: preset, algorithm, seed and the time."""
    stem = f"{preset}-{algo}-seed{seed}-{time.strftime('%Y%m%d-%H%M%S')}"
    names = (Path("runs") / f"{stem}{suffix}" for suffix in ("", *(f"-{i}" for i in range(2, 1000))))
    return next(name for name in names if not name.exists())


def _lock(path: Path):
    """An exclusive lock that the system drops with the process, however that ends."""
    try:
        import fcntl
    except ImportError:  # Windows
        return None
    file = open(path / ".lock", "w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        raise ValueError(f"run_dir: another process is writing to {str(path)!r}") from None
    return file
