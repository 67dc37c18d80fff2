"""What train, evaluate and compare.ipynb share: strict parameters, finding runs, responses to read.

Papermill only warns about a parameter it does not know, and passes ``true``, ``1e-5`` from YAML or ``[1, 2]``
as text. So the first cell after a notebook's ``parameters`` cell calls ``parameters(globals())`` and gives
the result to a record that checks every name and type; a ValueError there ends the job with a non-zero exit
code.
"""

import dataclasses
import glob
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, Self

import pandas as pd
from pydantic import AfterValidator, BeforeValidator
from pydantic.dataclasses import dataclass

from rlkit.jobs.config import Config, Size
from rlkit.jobs.records import Record, by_name, read_records
from rlkit.jobs.runs import Run, load_run
from rlkit.laptop import MODELS
from rlkit.samplers.base import SamplingParams
from rlkit.support.checks import hint, shown, unusable_path
from rlkit.support.console import plain_console
from rlkit.support.fields import STRICT, Checked, Real, Text, Whole, collected, given, say, unknown
from rlkit.support.models import model_location
from rlkit.support.text import visible
from rlkit.tasks.prompts import load_prompt

_REMEMBERED = "_rlkit_parameter_names"
# what evaluate.ipynb takes from Config; a parameter of training would change nothing there, so it is refused
_FROM_CONFIG = "preset model dataset sampler max_tokens dtype device attn_implementation seed threads".split()
_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def parameters(namespace: dict[str, Any]) -> dict[str, Any]:
    """The names that the ``parameters`` cell, and papermill's cell after it, have set in ``globals()``.

    It must run in the first cell after them, before anything else is assigned (imports and functions don't
    count). The names are remembered, so that the cell can be run again later, with other values.
    """
    if _REMEMBERED not in namespace:
        shell = namespace["get_ipython"]() if "get_ipython" in namespace else None
        hidden = getattr(shell, "user_ns_hidden", {})
        plain = {k: v for k, v in namespace.items() if not (isinstance(v, ModuleType) or callable(v))}
        visible = (name for name in plain if not name.startswith(("_", "PAPERMILL_")))
        namespace[_REMEMBERED] = [name for name in visible if name not in hidden]
    return {name: namespace[name] for name in namespace[_REMEMBERED] if name in namespace}


def _names(value) -> tuple[str, ...]:
    """Names from a list, from text with commas between them, or from a list written as text."""
    if isinstance(value, str):
        text = value.strip()
        value = (text[1:-1] if text[:1] + text[-1:] == "[]" else text).split(",")
    if isinstance(value, (list, tuple, set)) and all(isinstance(item, (str, Path)) for item in value):
        items = tuple(text for item in value if (text := str(item).strip().strip("'\"")))
        if items and not any(map(unusable_path, items)):
            return items
    raise ValueError(f"got {shown(value)}, expected names with commas between them, or a list of names")


def _prompts(names: tuple[str, ...]):
    errors: list[str] = []
    for name in names:
        with collected(errors):
            load_prompt(name)
    if errors:
        raise ValueError("; ".join(error.removeprefix("prompt: ") for error in errors))
    return names


def _value(value) -> str:
    """A field's value as text: papermill passes ``baseline=0.001`` as a number."""
    if not isinstance(value, (str, int, float)):
        raise ValueError(f"got {shown(value)}, expected text")
    return str(value)


def _field_of_config(name: str):
    if name not in Config.__dataclass_fields__:
        raise ValueError(f"got {name!r}, expected a field of Config{hint(name, Config.__dataclass_fields__)}")
    return name


Names = Annotated[tuple[str, ...], BeforeValidator(_names)]
Prompts = Annotated[Names, AfterValidator(_prompts)]
Value = Annotated[str, BeforeValidator(_value)]
FieldName = Annotated[Text, AfterValidator(_field_of_config)]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class EvaluateJob(metaclass=Checked):
    """What evaluate.ipynb does. ``sampling`` holds what ``evaluate`` is told about it."""

    config: Config  # model, dataset, machine; where ``model`` is a run's folder, the rest comes from that run
    prompts: Prompts = say(("question_only", "r1_zero", "r1_zero_three_shot"), "names or files")
    against: Text | None = say(
        None, "a second model for the same questions: base (what the run began with), a name or a folder"
    )
    n_problems: Size = say(128, "validation problems")
    n_samples: Size = say(4, "responses to each; one at temperature 0, where all would be the same")
    fast: bool = say(True, "True: the strict grader of training; False: the lenient one, for audits")
    temperature: Real = say(1.0, "0 is greedy, which a config for training does not have", ge=0, le=100)
    top_p: Real = say(1.0, "nucleus sampling; 1 is off")
    top_k: Whole = say(0, "sample among the k likeliest tokens; 0 is off")
    min_p: Real = say(0.0, "drop tokens below this share of the likeliest's probability; 0 is off")
    repetition_penalty: Real = say(1.0, "1 is off")

    def __post_init__(self):
        SamplingParams(**self.sampling)

    @property
    def sampling(self) -> dict[str, Any]:
        """max_tokens, seed, temperature, top_p, top_k, min_p, repetition_penalty."""
        own = {name: getattr(self, name) for name in _SAMPLING}
        return {"max_tokens": self.config.max_tokens, "seed": self.config.seed, **own}

    @classmethod
    def from_parameters(cls, values: Mapping[str, Any]) -> Self:
        """The job from what the notebook was given; None is the default. One ValueError for all mistakes."""
        known = [name for name in cls.__dataclass_fields__ if name != "config"] + _FROM_CONFIG
        errors, values = [unknown(cls, n, known) for n in values if n not in known], given(values, known)
        folder, base = resolve(str(values.get("model", ""))), None
        if folder is not None:
            values["model"] = str(folder)
            if (folder / "metrics.jsonl").is_file():
                recorded = load_run(folder).config
                recorded["prompts"] = recorded["prompt"]
                base = recorded["model"]
                if recorded.get("autocast"):  # evaluation needs no float32 masters
                    recorded["dtype"] = "bfloat16"
                values = {n: recorded[n] for n in known if n in recorded} | values
        of_config = {name: value for name, value in values.items() if name in _FROM_CONFIG}
        own = {n: v for n, v in values.items() if n in known and n not in _FROM_CONFIG}
        config = Config()
        with collected(errors):
            config = Config.from_parameters(of_config)
            if config.autocast:
                config = dataclasses.replace(config, dtype="bfloat16", autocast=False)
            model_location(config.model)
        with collected(errors):
            if values.get("against") is not None:
                own["against"] = _second_model(values["against"], base)
        with collected(errors):
            job = cls(config=config, **own)
        if errors:
            raise ValueError("\n".join(errors))
        if job.temperature == 0:
            return dataclasses.replace(job, n_samples=1)
        return dataclasses.replace(job, config=dataclasses.replace(config, temperature=job.temperature))


def _second_model(name: str, base: str | None) -> str:
    """Where the model to compare with lies; "base" is what the run of ``model`` began with."""
    if name == "base" and base is None:
        raise ValueError("against: got 'base', but model is no run's folder, so its base model is not known")
    name = base if name == "base" and base else str(name)
    folder = resolve(name)
    if folder is not None and (folder / "metrics.jsonl").is_file():
        folder = load_run(folder).model_path
    try:
        model_location(name := str(folder or name))
    except ValueError as error:
        raise ValueError(f"against: {error}") from None
    return name


@dataclass(frozen=True, kw_only=True, config=STRICT)
class CompareJob(metaclass=Checked):
    """What compare.ipynb does."""

    runs: Names = say((), "run folders, patterns such as runs/*, or files of records")
    metrics: Names | None = say(None, "what is drawn, the first also tabulated; None: those of COMPARED")
    baseline: Value | None = say(None, "the group that others are compared with; None is grpo or the first")
    by: FieldName = say("algo", "the config field that makes the groups")

    def __post_init__(self):
        if not self.runs:
            raise ValueError(
                "runs: got nothing, expected run folders, a pattern such as runs/* or a file of records"
            )

    @classmethod
    def from_parameters(cls, values: Mapping[str, Any]) -> Self:
        """The job from what the notebook was given; None is the default. One ValueError for all mistakes."""
        return cls(**given(values, cls.__dataclass_fields__))


def _lists(value) -> dict[str, list]:
    """{parameter: its values} from a dict or its JSON; one value stands for a list of one."""
    try:
        found = json.loads(value) if isinstance(value, str) else value
    except ValueError:
        found = None
    if not isinstance(found, Mapping):
        raise ValueError(f'got {shown(value)}, expected JSON such as {{"lr": [1e-4, 3e-4]}}')
    return {str(name): values if isinstance(values, list) else [values] for name, values in found.items()}


Lists = Annotated[dict[str, list], BeforeValidator(_lists)]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class SweepJob(metaclass=Checked):
    """What sweep.ipynb does."""

    algo: Names = say(("grpo",), "algorithms, with commas between")
    seed: Names = say(("0",), "seeds, with commas between")
    grid: Lists = say({}, 'further parameters and their values, as JSON: {"lr": [1e-4, 3e-4]}')
    folder: Text | None = say(None, "where the runs lie; None is a temporary folder, for a trial")
    workers: Size | None = say(None, "runs at a time; None is cores / threads of a run")

    @property
    def runs(self) -> dict[str, list]:
        """{parameter: values} for ``rlkit.sweep``."""
        return {"algo": list(self.algo), **self.grid, "seed": list(self.seed)}

    @classmethod
    def from_parameters(cls, values: Mapping[str, Any]) -> Self:
        """The job from what the notebook was given; None is the default. One ValueError for all mistakes."""
        return cls(**given(values, cls.__dataclass_fields__))


def find_runs(patterns) -> list[Path]:
    """The run folders (those with a metrics.jsonl) and files of records that the names or patterns mean.

    In order, each once. A relative pattern is looked for from the working directory and then from the folders
    above it, so that the same value works from the repository's root and from ``notebooks/``. ValueError for
    a pattern that means no run.
    """
    found: dict[Path, None] = {}
    for pattern in _names(patterns):
        for base in (Path(), *Path.cwd().parents):
            place = str(base / os.path.expanduser(pattern))
            here = [Path(place)] if os.path.isdir(place) else map(Path, sorted(glob.glob(place)))
            if here := [p for p in here if (p if p.suffix == ".jsonl" else p / "metrics.jsonl").is_file()]:
                found |= dict.fromkeys(here)
                break
        else:
            raise ValueError(
                f"runs: {pattern!r} means no run here: no folder with a metrics.jsonl, no file of records"
            )
    return list(found)


def load_runs(patterns) -> list[Run]:
    """The runs in these folders and files of records (see ``find_runs``)."""
    paths = find_runs(patterns)
    return [run for path in paths for run in ([load_run(path)] if path.is_dir() else read_records(path))]


def recorded(experiment: str) -> dict[str, list[Record]]:
    """The runs of ``figures/records/<experiment>.jsonl`` in groups, {name without its seed: runs by seed}."""
    return by_name(read_records(find_runs(f"figures/records/{experiment}.jsonl")[0]))


def resolve(name: str) -> Path | None:
    """The folder of this name, from the working directory or the folders above it; None if there is none."""
    if name in MODELS or not name:
        return None
    folders = (Path(os.path.expanduser(base / name)) for base in (Path(), *Path.cwd().parents))
    return next((folder for folder in folders if os.path.isdir(folder)), None)


# ---- responses to read


def before_and_after(run: Run) -> tuple[pd.DataFrame, pd.DataFrame]:
    """The validation responses kept at a run's first and last evaluation; prints a line about their steps.

    A run without validation has training rollouts instead, of the first and the last step kept; one that kept
    nothing gives two empty frames, and a single step is the first frame alone.
    """
    rows: Any = run.rollouts
    if rows.empty:
        why = "no validation was made, and no training rollouts (n_steps or rollouts_every 0)"
        print(f"no responses were kept: {why}")
        return rows, rows
    validation = rows[rows.split == "validation"]
    kept, what = (validation, "validation") if len(validation) else (rows, "no validation was made; training")
    first, last = int(kept.step.min()), int(kept.step.max())
    steps = f"{first} alone" if first == last else f"{first}, then of step {last}"
    print(f"{what} responses of step {steps}")
    return kept[kept.step == first], kept[kept.step == last].head(None if first < last else 0)


def training_group(run: Run) -> pd.DataFrame:
    """One group of the last training rollouts kept, the first with right and wrong responses if there is one.

    Empty where a run kept none; then a line is printed that says why.
    """
    rows: Any = run.rollouts
    rows = rows[rows.split == "train"] if len(rows) else rows
    if rows.empty:
        print("no training responses were kept (n_steps or rollouts_every 0)")
        return rows
    last = rows[rows.step == rows.step.max()]
    mixed = last.groupby("group").reward.transform("nunique") > 1
    return last[last.group == (last[mixed] if mixed.any() else last).group.min()]


def print_responses(rows: pd.DataFrame, n: int = 3) -> None:
    """Prints up to ``n`` rows of a frame: question or prompt, response, gold, rewards if there are any."""
    plain_console()
    question = None
    for row in rows.head(n).to_dict("records"):
        asked = row.get("question") or row["prompt"].split("User:")[-1].split("\nAssistant:")[0]
        if asked != question:
            question = asked
            print(visible(f"{'=' * 100}\nQ: {question.strip()}   [right: {row['gold']}]\n"))
        columns = {"format": "format_reward", "answer": "answer_reward", "advantage": "advantage"}
        found = {name: row.get(column, math.nan) for name, column in columns.items()}
        marks = {name: value for name, value in found.items() if math.isfinite(value)}
        verdict = ", ".join(f"{k} {v:+.2f}" if k == "advantage" else f"{k} {v:.0f}" for k, v in marks.items())
        print(visible(f"A: {row['response'].strip()}"), f"  [{verdict}]\n" if verdict else "\n")
    if not len(rows):
        print("(none)")
