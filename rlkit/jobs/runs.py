"""A run's folder, and how it is read back. ``run_writer`` writes it.

config.json       the config's fields, "algorithm" and "provenance"
metrics.jsonl     one line a step (step 0 is the base model's evaluation), names as in ``metrics``
rollouts.jsonl    some responses, one a line: split, step, group, prompt, response, gold, rewards, advantage
checkpoints/      step-000010/state.pt: what is trained, optimizer, step; the last two, at the end one
model/            the final weights and tokenizer, for ``load_model`` and for transformers; a LoRA merged in
adapter/          of a LoRA run: the adapter, for ``peft.PeftModel.from_pretrained`` on the base model
"""

import json
import os
import re
from pathlib import Path

import pandas as pd

from rlkit.jobs.metrics import PHASES
from rlkit.support.checks import shown
from rlkit.support.files import read_jsonl


class Run:
    """A run's folder, read back: ``config``, ``metrics``, ``rollouts``, ``summary``; also while it runs."""

    def __init__(self, path):
        self.path = Path(path)

    @property
    def config(self) -> dict:
        """config.json: the fields, "algorithm" (a dict) and "provenance". ValueError for a broken file."""
        return read_config(self.path / "config.json")

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def metrics(self) -> pd.DataFrame:
        """One row a step, the columns of ``METRICS``; a value that a step does not have is NaN."""
        path = self.path / "metrics.jsonl"
        frame = pd.DataFrame(read_log(path))
        return frame if len(frame) else pd.DataFrame(columns=["step"])

    @property
    def rollouts(self) -> pd.DataFrame:
        """One response a row: step, split ("train", "validation"), group, prompt, response, gold, ..."""
        return pd.DataFrame(read_log(self.path / "rollouts.jsonl"))

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
        """The run in one row: validation accuracy at start and end, train reward, seconds (clock, CPU)."""
        config, metrics = self.config, self.metrics
        row = {"run": self.name, "algo": config["algorithm"]["name"], "model": config["model"]}
        row |= {"seed": config["seed"], "steps": int(metrics.step.max()) if len(metrics) else 0}
        row["finished"] = self.finished
        if "val_reward" in metrics:
            val = metrics.dropna(subset="val_reward")
            first, last = val.iloc[0], val.iloc[-1]
            row |= {
                "val_start": first.val_reward,
                "val_end": last.val_reward,
                "val_end_se": last.val_reward_se,
            }
            row |= {"val_best": val.val_reward.max(), "val_format_end": last.val_format_reward}
        if "reward" in metrics:
            row["train_reward_last_10"] = metrics.reward.dropna().tail(10).mean()
        row["seconds"] = metrics[[name for name in PHASES if name in metrics]].sum().sum()
        if "time_cpu" in metrics:
            row["cpu_seconds"] = metrics.time_cpu.sum()
        plain = (bool, int, str)
        return {name: value if isinstance(value, plain) else float(value) for name, value in row.items()}

    def __repr__(self):
        return f"Run({str(self.path)!r})"


def load_run(path) -> Run:
    """The run in this folder. ValueError if there is none, or if its config.json is not a run's."""
    if not isinstance(path, (str, os.PathLike)):
        raise ValueError(f"run: got {shown(path)}, expected a run's folder")
    path = Path(os.path.expanduser(path))
    missing = [name for name in ("config.json", "metrics.jsonl") if not os.path.isfile(path / name)]
    if missing:
        what = f"has no {' and no '.join(missing)}" if os.path.isdir(path) else "is not a folder"
        raise ValueError(f"run: {shown(str(path))} {what}; expected a run's folder")
    read_config(path / "config.json")  # an error of a broken one belongs here
    return Run(path)


def read_log(path) -> list[dict]:
    """The lines of metrics.jsonl or rollouts.jsonl, [] if there is none; ValueError for a broken one."""
    rows = read_jsonl(path, growing=True)
    if not all(isinstance(row.get("step"), (int, float)) for row in rows):
        raise ValueError(f"{path}: a line has no number as its 'step', so it is not a run's log")
    return rows


def read_config(path) -> dict:
    """What a run's config.json holds; ValueError naming the file if it is broken or another program's."""
    try:
        record = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:  # an empty file, too
        raise ValueError(f"{path}: cannot be read as JSON ({error}); expected a run's config") from error
    needed = ("algorithm", "model", "seed", "n_steps")
    missing = [name for name in needed if name not in record] if isinstance(record, dict) else needed
    if missing or not isinstance(record["algorithm"], dict) or "name" not in record["algorithm"]:
        what = ", ".join(missing) or "name of an algorithm"
        raise ValueError(f"{path}: has no {what}; expected a run's config")
    kinds: dict[str, type] = dict(n_steps=int, finished_step=int, inputs=dict, resumed=list)
    for name, kind in kinds.items():
        if not isinstance(record.get(name, kind()), kind):
            got = f"{name}: got {shown(record[name])}, expected {kind.__name__}"
            raise ValueError(f"{path}: {got}; is this a run's config?")
    return record


def steps_missing(rows: list[dict], last: int) -> str:
    """Which of the steps 1 to ``last`` have no line in a log; "" if all have one."""
    lacking = sorted(set(range(1, last + 1)) - {row["step"] for row in rows})
    if len(lacking) < 2:
        return f"step {lacking[0]}" if lacking else ""
    return f"{len(lacking)} steps from {lacking[0]} to {lacking[-1]}"


def checkpoints(path) -> list[Path]:
    """The run's complete checkpoints, oldest first."""
    found = (p for p in (Path(path) / "checkpoints").glob("step-*") if p.is_dir())
    steps = {int(p.name.removeprefix("step-")): p for p in found if re.fullmatch(r"step-\d+", p.name)}
    return [steps[step] for step in sorted(steps)]
