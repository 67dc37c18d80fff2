"""Writing a run's folder so that a kill loses nothing.

A step's line is written before its checkpoint, and a checkpoint appears under its name only when it is whole,
with checksums. So after a kill at any moment the last checkpoint is good, and what was logged after it is put
aside before the run goes on. Nothing is ever deleted to go on: only a checkpoint that its checksums prove
damaged is stepped over.
"""

import errno
import math
import os
import shutil
import time
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from rlkit.jobs import sharding
from rlkit.jobs.metrics import METRICS
from rlkit.jobs.record import continued, earlier_run, run_record
from rlkit.jobs.runs import Run, checkpoints, read_log, steps_missing
from rlkit.support.checks import shown
from rlkit.support.files import (
    CHECKSUMS,
    GrowingFile,
    as_jsonl,
    damage,
    fresh_folder,
    publish,
    read_jsonl,
    write_checksums,
    write_json,
    write_text,
)
from rlkit.support.ranks import ALONE, Ranks

NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EINVAL)
LOGS = ("metrics.jsonl", "rollouts.jsonl")


class RunWriter:
    """The open folder of a run that is being trained. ``open_run`` makes one.

    Of several ranks only the first writes lines and the final model; all write and read checkpoints. What the
    disk refuses (it is full, the folder is gone) is one OSError that says what is kept.
    """

    def __init__(self, path: Path, ranks: Ranks = ALONE):
        self.path, self.ranks, self._files = path, ranks, {}
        self.record, self._goes_on = {}, False  # a run that goes on keeps its record until it is loaded
        self._open = ExitStack()

    @property
    def finished(self) -> bool:
        """True if the run has all the steps that are wanted now."""
        return self.ranks.from_first(lambda: self.record.get("finished_step", -1) >= self.record["n_steps"])

    @contextmanager
    def _writing(self):
        try:
            yield
        except OSError as error:
            left = list(checkpoints(self.path))
            kept = f"its checkpoint {left[-1].name} is kept" if left else "it has no checkpoint yet"
            what = error.strerror or str(error)
            if error.errno in (errno.ENOSPC, getattr(errno, "EDQUOT", None)):
                what = f"{what}: {shutil.disk_usage(self.path).free / 1e6:.0f} MB free"
            line = f"run_dir: {str(self.path)!r} cannot be written to ({what}); the run stops, "
            if not (self.path / "config.json").is_file():
                raise OSError(f"{line}its folder is gone") from error
            raise OSError(f"{line}{kept}, and resume=True goes on with it once that is mended") from error

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
        with self._writing():
            if name not in self._files:
                self._files[name] = GrowingFile(self.path / name)
                self._open.callback(self._files[name].close)
            self._files[name].add(as_jsonl(rows))

    def save_checkpoint(self, step: int, model, optimizer, scaler=None) -> None:
        """checkpoints/step-*/state.pt and its checksum, whole or not at all; the two latest are kept."""
        target = self.path / "checkpoints" / f"step-{step:06d}"
        if self.ranks.from_first(target.is_dir):
            return
        partial = target.with_name(f".partial-{target.name}")
        with self._writing():
            for file in self._files.values():
                file.sync()
            try:
                if self.ranks.size > 1:
                    self.ranks.from_first(lambda: fresh_folder(partial) and None)
                    sharding.save(partial, step, model, optimizer)
                else:
                    save_state(fresh_folder(partial) / "state.pt", step, model, optimizer, scaler)
                if self.ranks.first:
                    write_checksums(partial)
                    publish(partial, target)
                    self._prune_checkpoints(keep=2)
            except BaseException:  # room for what matters more
                shutil.rmtree(partial, ignore_errors=True)
                raise

    def _prune_checkpoints(self, keep: int) -> None:
        for folder in checkpoints(self.path)[:-keep]:
            shutil.rmtree(folder)

    def restore(self, model, optimizer, scaler=None, allow_gaps=False) -> int:
        """Load the last checkpoint and cut the logs back to it. Returns its step, or -1 if there is none.

        A checkpoint that is not as it was written is renamed and the one before it taken. ValueError if none
        is whole, if it is of another model, or if the log lacks steps; with ``allow_gaps`` it may lack some,
        and a checkpoint its checksums (format 1). Any other error is raised as it is. The folder, config.json
        included, stays as it was until all is loaded.
        """
        import torch

        from rlkit.support.adapters import load_trained_state

        folder, step = self.ranks.from_first(lambda: self._last_whole(allow_gaps)), -1
        if folder is not None and (self.ranks.size > 1 or not (folder / "state.pt").exists()):
            step = sharding.load(folder, model, optimizer)
        elif folder is not None:
            device = next(model.parameters()).device
            state = torch.load(folder / "state.pt", map_location=device, weights_only=True)
            try:
                load_trained_state(model, state["model"])
                optimizer.load_state_dict(state["optimizer"])
            except torch.OutOfMemoryError:
                raise
            except (RuntimeError, ValueError) as error:
                of = f"the weights in {str(folder)!r} are not of this model's names and shapes"
                expected = "expected the model and lora_rank that they were trained with"
                raise ValueError(f"resume: {of}; {expected}") from error
            if scaler and state.get("scaler"):
                scaler.load_state_dict(state["scaler"])
            step = state["step"]
        if self.ranks.first:
            logs = {name: read_log(self.path / name) for name in LOGS}
            missing = steps_missing(logs["metrics.jsonl"], step)
            if missing and not allow_gaps:
                what = f"{str(self.path / 'metrics.jsonl')!r} lacks the lines of {missing}"
                raise ValueError(f"resume: {what}; expected a whole log, or allow_changes=True")
            with self._writing():
                for name, rows in logs.items():
                    put_aside_after(self.path / name, rows, step)
            self._goes_on = False
            self.note()
        return step

    def _last_whole(self, unproven=False) -> Path | None:
        """The newest checkpoint that its checksums find whole; damaged ones after it are renamed. unproven:
        one without checksums will do."""
        damaged = {}
        for folder in reversed(found := checkpoints(self.path)):
            damaged_how = damage(folder)
            if not damaged_how or (unproven and not (folder / CHECKSUMS).exists() and any(folder.iterdir())):
                for bad, how in damaged.items():
                    aside = bad.with_name(f"damaged-{bad.name}-{time.time_ns()}")
                    print(f"{bad}: damaged ({how}), kept as {aside.name}; {folder.name} is taken", flush=True)
                    bad.rename(aside)
                return folder
            damaged[folder] = damaged_how
        if found:
            how = ", ".join(f"{bad.name}: {how}" for bad, how in damaged.items())
            what = f"no checkpoint in {str(self.path)!r} is as it was written ({how})"
            raise ValueError(f"resume: {what}; expected a whole one, or a new run_dir")
        return None

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

        with self._writing():
            if adapter_of(model) is not None:
                put("adapter")
            with merged(model):
                put("model")
            for file in self._files.values():
                file.add("")  # as it was written?
        self.note(finished_step=step)
        self._prune_checkpoints(keep=1)

    def note(self, **values) -> None:
        """Further entries of config.json."""
        if self.ranks.first:
            self.record = (self.record or Run(self.path).config) | values
            if not self._goes_on:
                with self._writing():
                    write_json(self.path / "config.json", self.record)

    def note_weights(self, weights: str, allow_changes: bool) -> None:
        """The hash of the base model's weights. ValueError if the run began with others."""
        if self.ranks.first:
            inputs = self.record["inputs"]
            if inputs.get("weights", weights) != weights and not allow_changes:
                raise ValueError(
                    f"model: its weights are not those that the run in {str(self.path)!r} began with; "
                    "expected these (loaded anew, if it was trained in place), or allow_changes=True"
                )
            self.note(inputs=inputs | {"weights": weights})

    def close(self) -> None:
        self._files = {}
        self._open.close()


def save_state(path: Path, step: int, model, optimizer, scaler=None) -> None:
    """What a run goes on from, in one file. OSError if the disk refuses it, which torch tells otherwise."""
    import torch

    from rlkit.support.adapters import trained_state

    state = {"step": step, "model": trained_state(model), "optimizer": optimizer.state_dict()}
    with open(path, "wb") as file:
        refused = []

        class Told:
            def write(self, data):
                try:
                    return file.write(data)
                except OSError as error:
                    refused.append(error)
                    raise

            def flush(self):
                file.flush()

        try:
            torch.save(state | ({"scaler": scaler.state_dict()} if scaler else {}), Told())  # pyright: ignore
        except RuntimeError as error:
            raise (refused or [error])[0] from None
        file.flush()
        os.fsync(file.fileno())


def put_aside_after(path: Path, rows: list[dict], step: int) -> None:
    """Cut a log of these rows back to a step; later ones, which come again, go to superseded-<name>."""
    later = [row for row in rows if row["step"] > step]
    if later:
        aside = path.with_name(f"superseded-{path.name}")
        write_text(aside, as_jsonl([*read_jsonl(aside, growing=True), *later]))
    write_text(path, as_jsonl(row for row in rows if row["step"] <= step))


def open_run(config, algorithm, ranks: Ranks = ALONE, inputs: dict | None = None) -> RunWriter:
    """The folder for this (resolved) config: a new one, or with ``resume`` one to go on with.

    inputs: hashes of what the run learns from, by ``inputs_of``.

    Raises ValueError if the folder is in use, cannot be written to or holds links (a received one's might
    lead anywhere), if it holds a run and ``resume`` is off, or if ``resume`` is on and there is no run or one
    made with other values (named one by one; n_steps may grow).
    """
    if not ranks.first:
        return RunWriter(ranks.from_first(None), ranks)
    if config.run_dir is None:
        path = claim_run_dir(config.preset, algorithm.name, config.seed)
    else:
        path = Path(os.path.expanduser(config.run_dir)).absolute()
    writer = RunWriter(path, ranks)
    try:
        path.mkdir(parents=True, exist_ok=True)
        refuse_links(path)
        writer._open.callback(_locked(path).release)
        recorded, record = earlier_run(path, config.resume), run_record(config, algorithm, inputs)
        record = record if recorded is None else continued(recorded, record, path)
        (path / "checkpoints").mkdir(exist_ok=True)
        for leftover in (
            *path.glob(".partial-*"),
            *path.glob("checkpoints/.partial-*"),
            *path.glob(".try-*"),
        ):
            shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()
        writer.record, writer._goes_on = record, recorded is not None
        if recorded is None:
            write_json(path / "config.json", record)
    except OSError as error:
        writer.close()
        what = f"got {shown(str(path))}, expected a folder that can be written to"
        raise ValueError(f"run_dir: {what} ({error.strerror or error})") from error
    except BaseException:
        writer.close()
        raise
    ranks.from_first(lambda: path)
    return writer


def refuse_links(path: Path) -> None:
    for entry in (*path.iterdir(), *path.glob("checkpoints/*")):
        if entry.is_symlink() or not (entry.is_file() or entry.is_dir()):
            what = "a link" if entry.is_symlink() else "no plain file"
            raise ValueError(f"run_dir: {str(entry)!r} is {what}; expected a run's own files and folders")


def runs_folder() -> Path:
    """Where new runs go: runs/ of the checkout that the working directory is in, else of that directory."""
    checkout = Path(__file__).resolve().parents[2]
    inside = (checkout / "notebooks").is_dir() and Path.cwd().resolve().is_relative_to(checkout)
    return (checkout if inside else Path.cwd()) / "runs"


def claim_run_dir(preset: str, algo: str, seed: int) -> Path:
    """A new folder under runs/, made here, so that no other start has it: preset, algorithm, seed, time."""
    stem = f"{preset}-{algo}-seed{seed}-{time.strftime('%Y%m%d-%H%M%S')}"
    try:
        runs_folder().mkdir(parents=True, exist_ok=True)
        for suffix in ("", *(f"-{i}" for i in range(2, 10000))):
            with suppress(FileExistsError):
                (path := runs_folder() / f"{stem}{suffix}").mkdir()
                return path
    except OSError as error:
        what = f"no new folder can be made in {str(runs_folder())!r} ({error.strerror or error})"
        raise ValueError(f"run_dir: {what}; expected one that can be written to") from error
    raise ValueError(f"run_dir: ten thousand runs began as {stem} this second; expected a name of your own")


def in_use(path: Path) -> bool:
    """True while a process, this one or another, holds the run's folder."""
    with suppress(OSError):  # the folder is gone
        try:
            _locked(path).release()
        except ValueError:
            return True
    return False


def _locked(path: Path) -> FileLock:
    """An exclusive lock that the system drops with the process, however that ends. Where the file system has
    no locks, one line says so and nothing is held."""
    lock = FileLock(path / ".lock", timeout=0, thread_local=False, fallback_to_soft=False)
    try:
        lock.acquire()
    except Timeout:
        raise ValueError(f"run_dir: another process is writing to {str(path)!r}") from None
    except (OSError, NotImplementedError) as error:
        if getattr(error, "errno", errno.ENOSYS) not in NO_LOCKS:
            raise
        why = f"this file system offers no locks ({getattr(error, 'strerror', '') or error})"
        print(f"{path}: {why}: see that no second run writes here", flush=True)
    return lock
