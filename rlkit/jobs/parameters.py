"""What the job notebooks (train, evaluate, compare) share: strict parameters, finding runs, responses to
read.

Papermill only warns about a parameter it does not know, and hands over ``true``, ``1e-5`` from YAML or ``[1,
2]`` as text. So the first cell after a notebook's ``parameters`` cell calls ``parameters(globals())`` and
gives the result to a record that checks every name and type; a ValueError there ends the job with a non-zero
exit code.
"""

from __future__ import annotations

import dataclasses
import glob
import json
import os
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pandas as pd

from rlkit.jobs.config import Config
from rlkit.jobs.runs import Run, load_run
from rlkit.jobs.tables import hint
from rlkit.support.checks import shown, unusable_path
from rlkit.tasks.prompts import load_prompt

_REMEMBERED = "_rlkit_parameter_names"
# what evaluate.ipynb takes from Config; a parameter of training would change nothing there, so it is refused
_SAMPLING_FIELDS = (
    "preset",
    "model",
    "dataset",
    "sampler",
    "max_tokens",
    "temperature",
    "top_p",
    "dtype",
    "device",
    "attn_implementation",
    "seed",
    "threads",
)


def parameters(namespace: dict[str, Any]) -> dict[str, Any]:
    """The names that the ``parameters`` cell, and papermill's cell after it, have set: call it with
    ``globals()``.

    It must run in the first cell after them, before anything else is assigned; imports and functions don't
    count. The names are remembered, so that the cell can be run again later in the session, with other
    values.
    """
    if _REMEMBERED not in namespace:
        shell = namespace["get_ipython"]() if "get_ipython" in namespace else None
        hidden = getattr(shell, "user_ns_hidden", {})
        namespace[_REMEMBERED] = [
            name
            for name, value in namespace.items()
            if not name.startswith(("_", "PAPERMILL_"))
            and name not in hidden
            and not isinstance(value, (ModuleType, type))
            and not callable(value)
        ]
    return {name: namespace[name] for name in namespace[_REMEMBERED] if name in namespace}


@contextmanager
def resumable(config: Config, values: Mapping[str, Any]) -> Iterator[Config]:
    """Says where the run lies before it starts and, should it stop, how to go on with it.

    ``with resumable(config, values) as config: run = train(config)``, where ``values`` are the job's
    parameters. The config comes back with its ``run_dir``, a new folder under runs/ unless one was given. An
    error (or an interrupt) passes through, so that the job fails; what was written stays.
    """
    if config.run_dir is None and not config.dry_run:
        config = dataclasses.replace(config, run_dir=str(new_run_dir(config)))
    if not config.dry_run:
        print(f"run folder: {config.run_dir}", flush=True)
    try:
        yield config
    except BaseException:
        if config.run_dir and (Path(config.run_dir) / "config.json").is_file():
            given = {
                name: value
                for name, value in values.items()
                if value is not None and name not in ("run_dir", "resume", "dry_run")
            }
            given |= {"run_dir": config.run_dir, "resume": True}
            arguments = " ".join(f"-p {name} {shlex.quote(str(value))}" for name, value in given.items())
            print(
                f"The run stopped. What it wrote is in {config.run_dir}; go on from its last checkpoint "
                f"with\n"
                f"  papermill notebooks/train.ipynb runs/resumed.ipynb {arguments}",
                file=sys.stderr,
                flush=True,
            )
        raise


def new_run_dir(config: Config) -> Path:
    """A name under runs/ that is not taken: preset, algorithm, seed and the time."""
    stem = Path("runs") / f"{config.preset}-{config.algo}-seed{config.seed}-{time.strftime('%Y%m%d-%H%M%S')}"
    names = (stem.with_name(stem.name + suffix) for suffix in ("", *(f"-{i}" for i in range(2, 1000))))
    return next(name for name in names if not name.exists())


@dataclass(frozen=True)
class EvaluateJob:
    """What evaluate.ipynb does.

    config: model, dataset, sampling; where ``model`` is a run's folder, what is not given comes from that
        run.
    prompts: names or files; n_problems, n_samples: validation problems, responses to each (one where
    temperature is 0, since all would be the same); fast: the strict grader of training (True) or the lenient
    one of audits (False);
    temperature: config's, or 0, greedy, which a config for training does not have.
    """

    config: Config
    prompts: tuple[str, ...] = ("question_only", "r1_zero", "r1_zero_three_shot")
    n_problems: int = 128
    n_samples: int = 4
    fast: bool = True
    temperature: float = 1.0

    @classmethod
    def from_parameters(cls, values: Mapping[str, Any]) -> EvaluateJob:
        """The job from what the notebook was given; None is the default. Raises one ValueError for all mistakes."""
        own = {
            "prompts": _as_prompts,
            "n_problems": _like("threads"),
            "n_samples": _like("threads"),
            "fast": _like("dry_run"),
            "temperature": _like("lr"),
        }  # whole numbers >= 1; true or false; >= 0
        given, rest = _read(values, own, _SAMPLING_FIELDS)
        folder = resolve(str(rest.get("model", "")))
        if folder is not None:
            rest["model"] = str(folder)
            if (folder / "metrics.jsonl").is_file():
                recorded = load_run(folder).config
                rest = {name: recorded[name] for name in _SAMPLING_FIELDS if name in recorded} | rest
                if "prompts" not in given:
                    load_prompt(recorded["prompt"])  # it may have been a file that is gone
                    given["prompts"] = (recorded["prompt"],)
        if given.get("temperature"):
            rest["temperature"] = given["temperature"]
        config = Config.from_parameters(rest)
        given.setdefault("temperature", config.temperature)
        if given["temperature"] == 0:
            given["n_samples"] = 1
        return cls(config=config, **given)


@dataclass(frozen=True)
class CompareJob:
    """What compare.ipynb does.

    runs: run folders or patterns such as ``runs/*`` (a list, or one text with commas). metrics: what is
    drawn, the first of them also tabulated; None is what all runs have of ``tables.COMPARED``. baseline: the
    group others are compared with; None is the first. by: the config field that makes the groups.
    """

    runs: tuple[str, ...]
    metrics: tuple[str, ...] | None = None
    baseline: str | None = None
    by: str = "algo"

    @classmethod
    def from_parameters(cls, values: Mapping[str, Any]) -> CompareJob:
        """The job from what the notebook was given; None is the default. Raises one ValueError for all mistakes."""
        own = {"runs": _as_list, "metrics": _as_list, "baseline": _as_value, "by": _as_text}
        given, _ = _read(values, own, ())
        fields = [field.name for field in dataclasses.fields(Config)]
        if given.get("by", "algo") not in fields:
            raise ValueError(
                f"by: got {given['by']!r}, expected a field of Config{hint(given['by'], fields)}"
            )
        if not given.get("runs"):
            raise ValueError("runs: got nothing, expected run folders or a pattern such as runs/*")
        return cls(**given)


def find_runs(patterns) -> list[Path]:
    """The run folders (those with a metrics.jsonl) that the names or patterns mean, in order, each once.

    A relative pattern is looked for from the working directory and then from the folders above it, so that
    the same value works from the repository's root and from ``notebooks/``. ValueError for a pattern that
    means no run.
    """
    found: dict[Path, None] = {}
    for pattern in _as_list(patterns):
        for base in (Path(), *Path.cwd().parents):
            here = [Path(p) for p in sorted(glob.glob(os.path.expanduser(base / pattern)))]
            here = [p for p in here if (p / "metrics.jsonl").is_file()]
            if here:
                found |= dict.fromkeys(here)
                break
        else:
            raise ValueError(f"runs: {pattern!r} means no run folder here (a run folder has a metrics.jsonl)")
    return list(found)


def keep_record(run: Run, folder: str | Path) -> Path:
    """Copies what is small and worth keeping of a run, its config and metrics, to ``folder``/<name>, to be
    committed.

    What names the machine's folders (the command, the run's own path) is left out; ``load_run`` reads the
    copy.
    """
    target = Path(folder) / run.name
    target.mkdir(parents=True, exist_ok=True)
    config = run.config | {"run_dir": None}
    config["provenance"] = {
        name: value for name, value in config.get("provenance", {}).items() if name != "command"
    }
    (target / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
    shutil.copyfile(run.path / "metrics.jsonl", target / "metrics.jsonl")
    return target


def resolve(name: str) -> Path | None:
    """The folder of this name, from the working directory or the folders above it; None if there is none."""
    if name == "laptop" or not name:
        return None
    folders = (Path(os.path.expanduser(base / name)) for base in (Path(), *Path.cwd().parents))
    return next((folder for folder in folders if os.path.isdir(folder)), None)


# ---- responses to read


def before_and_after(run: Run) -> tuple[pd.DataFrame, pd.DataFrame]:
    """The validation responses kept at a run's first and last evaluation; prints a line that says at which
    steps.

    A run without validation has training rollouts instead, of the first and the last step kept; one that kept
    nothing gives two empty frames, and a single step is the first frame alone.
    """
    rows = run.rollouts
    if rows.empty:
        print(
            "no responses were kept: no validation was made, and no training rollouts (n_steps or "
            "rollouts_every 0)"
        )
        return rows, rows
    validation = rows[rows.split == "validation"]
    kept, what = (validation, "validation") if len(validation) else (rows, "no validation was made; training")
    first, last = int(kept.step.min()), int(kept.step.max())
    print(
        f"{what} responses of "
        + (f"step {first}, then of step {last}" if first < last else f"step {first} alone")
    )
    return kept[kept.step == first], kept[kept.step == last].head(None if first < last else 0)


def training_group(run: Run) -> pd.DataFrame:
    """One group of the last training rollouts kept, the first with right and wrong responses if there is one.

    Empty where a run kept none; then a line is printed that says why.
    """
    rows = run.rollouts
    rows = rows[rows.split == "train"] if len(rows) else rows
    if rows.empty:
        print("no training responses were kept (n_steps or rollouts_every 0)")
        return rows
    last = rows[rows.step == rows.step.max()]
    mixed = last.groupby("group").reward.transform("nunique") > 1
    return last[last.group == (last[mixed] if mixed.any() else last).group.min()]


def print_responses(rows: pd.DataFrame, n: int = 3) -> None:
    """Prints up to ``n`` responses (a frame with question or prompt, response, gold, and rewards if there are any)."""
    question = None
    for _, row in rows.head(n).iterrows():
        asked = (
            row["question"]
            if "question" in row
            else row["prompt"].split("User:")[-1].split("\nAssistant:")[0]
        )
        if asked != question:
            question = asked
            print(f"{'=' * 100}\nQ: {question.strip()}   [right: {row['gold']}]\n")
        verdict = [
            f"{name} {row[key]:{form}}"
            for name, key, form in (
                ("format", "format_reward", ".0f"),
                ("answer", "answer_reward", ".0f"),
                ("advantage", "advantage", "+.2f"),
            )
            if pd.notna(row.get(key))
        ]
        print(f"A: {row['response'].strip()}", f"  [{', '.join(verdict)}]\n" if verdict else "\n")
    if not len(rows):
        print("(none)")


# ---- reading values that papermill may have passed as text


def _read(values: Mapping[str, Any], own: Mapping[str, Callable], passed_on: tuple[str, ...]):
    """(own parameters read by their functions, the rest by name); one ValueError for all mistakes."""
    known, errors, given, rest = list(dict.fromkeys([*own, *passed_on])), [], {}, {}
    for name, value in values.items():
        if name not in known:
            errors.append(f"{name}: unknown parameter{hint(name, known)}")
        elif value is None or value in ("None", "null"):
            continue
        elif name in own:
            try:
                given[name] = own[name](value)
            except ValueError as error:
                errors.append(f"{name}: {error}")
        else:
            rest[name] = value
    if errors:
        raise ValueError("; ".join(errors))
    return given, rest


def _as_list(value) -> tuple[str, ...]:
    if isinstance(value, str):
        text = value.strip()
        try:
            value = json.loads(text) if text.startswith("[") else text.strip("[]").split(",")
        except ValueError:
            value = text.strip("[]").split(",")
    if isinstance(value, (list, tuple, set)) and all(isinstance(item, (str, Path)) for item in value):
        items = tuple(text for item in value if (text := str(item).strip().strip("'\"")))
        if items and not any(map(unusable_path, items)):
            return items
    raise ValueError(f"got {shown(value)}, expected names with commas between them, or a list of names")


def _as_text(value) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"got {shown(value)}, expected text")
    return value


def _as_value(value) -> str:
    """A field's value as text: papermill hands over ``baseline=0.001`` as a number."""
    return str(value) if isinstance(value, (int, float)) else _as_text(value)


def _as_prompts(value) -> tuple[str, ...]:
    names, errors = _as_list(value), []
    for name in names:
        try:
            load_prompt(name)
        except ValueError as error:
            errors.append(str(error).removeprefix("prompt: "))
    if errors:
        raise ValueError("; ".join(errors))
    return names


def _like(field: str) -> Callable:
    """Reads a value as Config reads this field of it."""

    def read(value):
        try:
            return getattr(Config.from_parameters({field: value}), field)
        except ValueError as error:
            raise ValueError(str(error).removeprefix(f"{field}: ")) from None

    return read
