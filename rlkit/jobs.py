"""What the job notebooks (train, evaluate, compare) share: reading their parameters strictly, finding runs.

Papermill only warns about a parameter it does not know, and hands over ``true``, ``1e-5`` from YAML or ``[1, 2]`` as
text. So the first cell after a notebook's ``parameters`` cell calls ``parameters(globals())`` and gives the result to
a record that checks every name and type; a ValueError there ends the job with a non-zero exit code.
"""
from __future__ import annotations

import dataclasses
import glob
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType
from typing import Any

from rlkit.config import Config
from rlkit.runs import load_run

_REMEMBERED = "_rlkit_parameter_names"
# what evaluate.ipynb takes from Config; a parameter of training would change nothing there, so it is refused
_SAMPLING_FIELDS = ("preset", "model", "dataset", "sampler", "max_tokens", "temperature", "top_p", "dtype", "device",
                    "attn_implementation", "seed", "threads")


def parameters(namespace: dict[str, Any]) -> dict[str, Any]:
    """The names that the ``parameters`` cell, and papermill's cell after it, have set: call it with ``globals()``.

    It must run in the first cell after them, before anything else is assigned; imports and functions don't count. The
    names are remembered, so that the cell can be run again later in the session, with other values.
    """
    if _REMEMBERED not in namespace:
        shell = namespace["get_ipython"]() if "get_ipython" in namespace else None
        hidden = getattr(shell, "user_ns_hidden", {})
        namespace[_REMEMBERED] = [
            name for name, value in namespace.items()
            if not name.startswith(("_", "PAPERMILL_")) and name not in hidden
            and not isinstance(value, (ModuleType, type)) and not callable(value)]
    return {name: namespace[name] for name in namespace[_REMEMBERED] if name in namespace}


@dataclass(frozen=True)
class EvaluateJob:
    """What evaluate.ipynb does.

    config: model, dataset, sampling; where ``model`` is a run's folder, what is not given comes from that run.
    prompts: names or files; n_problems, n_samples: validation problems, responses to each; fast: the strict grader of
    training (True) or the lenient one of audits (False).
    """
    config: Config
    prompts: tuple[str, ...] = ("question_only", "r1_zero", "r1_zero_three_shot")
    n_problems: int = 128
    n_samples: int = 4
    fast: bool = True

    @classmethod
    def from_parameters(cls, values: Mapping[str, Any]) -> "EvaluateJob":
        """The job from what the notebook was given; None is the default. Raises one ValueError for all mistakes."""
        own = {"prompts": _as_list, "n_problems": _like("threads"), "n_samples": _like("threads"),
               "fast": _like("resume")}        # whole numbers >= 1; true or false
        given, rest = _read(values, own, _SAMPLING_FIELDS)
        folder = resolve(str(rest.get("model", "")))
        if folder is not None:
            rest["model"] = str(folder)
            if (folder / "metrics.jsonl").is_file():
                recorded = load_run(folder).config
                rest = {name: recorded[name] for name in _SAMPLING_FIELDS if name in recorded} | rest
                given.setdefault("prompts", (recorded["prompt"],))
        return cls(config=Config.from_parameters(rest), **given)


@dataclass(frozen=True)
class CompareJob:
    """What compare.ipynb does.

    runs: run folders or patterns such as ``runs/*`` (a list, or one text with commas). metrics: what is drawn.
    baseline: the group others are compared with; None is the first. by: the config field that makes the groups.
    """
    runs: tuple[str, ...]
    metrics: tuple[str, ...] = ("val_reward", "reward", "response_length", "token_entropy")
    baseline: str | None = None
    by: str = "algo"

    @classmethod
    def from_parameters(cls, values: Mapping[str, Any]) -> "CompareJob":
        """The job from what the notebook was given; None is the default. Raises one ValueError for all mistakes."""
        own = {"runs": _as_list, "metrics": _as_list, "baseline": _as_text, "by": _as_text}
        given, _ = _read(values, own, ())
        fields = [field.name for field in dataclasses.fields(Config)]
        if given.get("by", "algo") not in fields:
            raise ValueError(f"by: got {given['by']!r}, expected a field of Config{_hint(given['by'], fields)}")
        if not given.get("runs"):
            raise ValueError("runs: got nothing, expected run folders or a pattern such as runs/*")
        return cls(**given)


def find_runs(patterns) -> list[Path]:
    """The run folders (those with a metrics.jsonl) that the names or patterns mean, in order, each once.

    A relative pattern is looked for from the working directory and then from the folders above it, so that the same
    value works from the repository's root and from ``notebooks/``. ValueError for a pattern that means no run.
    """
    found: dict[Path, None] = {}
    for pattern in _as_list(patterns):
        for base in (Path(), *Path.cwd().parents):
            here = [Path(p) for p in sorted(glob.glob(str(base / Path(pattern).expanduser())))]
            here = [p for p in here if (p / "metrics.jsonl").is_file()]
            if here:
                found |= dict.fromkeys(here)
                break
        else:
            raise ValueError(f"runs: {pattern!r} means no run folder here (a run folder has a metrics.jsonl)")
    return list(found)


def resolve(name: str) -> Path | None:
    """The folder of this name, from the working directory or the folders above it; None if there is none."""
    if name == "laptop" or not name:
        return None
    bases = (Path(), *Path.cwd().parents)
    return next((base / name for base in bases if (base / name).expanduser().is_dir()), None)


# ---- reading values that papermill may have passed as text

def _read(values: Mapping[str, Any], own: Mapping[str, Callable], passed_on: tuple[str, ...]):
    """(own parameters read by their functions, the rest by name); one ValueError for all mistakes."""
    known, errors, given, rest = [*own, *passed_on], [], {}, {}
    for name, value in values.items():
        if name not in known:
            errors.append(f"{name}: unknown parameter{_hint(name, known)}")
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


def _hint(name: str, known) -> str:
    close = get_close_matches(name, known, n=1)
    return f"; did you mean {close[0]!r}?" if close else f"; expected one of {', '.join(known)}"


def _as_list(value) -> tuple[str, ...]:
    if isinstance(value, str):
        text = value.strip()
        try:
            value = json.loads(text) if text.startswith("[") else text.strip("[]").split(",")
        except ValueError:
            value = text.strip("[]").split(",")
    if isinstance(value, (list, tuple, set)) and all(isinstance(item, (str, Path)) for item in value):
        items = tuple(text for item in value if (text := str(item).strip().strip("'\"")))
        if items:
            return items
    raise ValueError(f"got {value!r}, expected names with commas between them, or a list of names")


def _as_text(value) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"got {value!r}, expected text")
    return value


def _like(field: str) -> Callable:
    """Reads a value as Config reads this field of it."""
    def read(value):
        try:
            return getattr(Config.from_parameters({field: value}), field)
        except ValueError as error:
            raise ValueError(str(error).removeprefix(f"{field}: ")) from None
    return read
