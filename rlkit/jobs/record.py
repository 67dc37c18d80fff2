"""What a run is made of, as config.json keeps it, and whether another start may go on with it.

Beside the config's values stand hashes of what they name: the problems, the prompt's text, the code of one's
own functions, the base model's weights. So a run goes on only over what it began with.
"""

import inspect
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, fields
from hashlib import sha256
from pathlib import Path
from typing import Any

from rlkit.jobs.provenance import provenance
from rlkit.jobs.runs import Run, checkpoints
from rlkit.laptop import MODELS
from rlkit.tasks.prompts import prompt_names

FORMAT = 2  # of config.json, metrics.jsonl and the checkpoints; 1 had no hashes and no checksums
# what may differ when a run goes on: where and how long it runs, memory, what is watched; n_steps may grow
MAY_CHANGE = set(
    "resume allow_changes run_dir sink dry_run n_steps n_gpus device threads weight_sync check_memory "
    "gradient_accumulation_steps gradient_checkpointing checkpoint_every rollouts_every eval_every "
    "eval_at_start n_val n_val_final".split()
)
PLACES = {"model", "dataset", "prompt"}  # may be paths


def run_record(config, algorithm, inputs: dict | None = None) -> dict:
    """What config.json holds: the fields, the algorithm, hashes; where, when and with what it was made."""
    parts = {f.name: getattr(algorithm, f.name) for f in fields(algorithm)}
    parts |= {"cliprange": list(algorithm.cliprange)} if isinstance(algorithm.cliprange, tuple) else {}
    rule = {name: function_name(part) if callable(part) else part for name, part in parts.items()}
    made = {"algorithm": rule, "format": FORMAT, "inputs": inputs or {}, "provenance": provenance()}
    return with_places(asdict(config)) | made


def with_places(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values with absolute paths where model, dataset or prompt is a file or folder here, so that they
    mean the same from another working directory."""
    placed = {}
    for name in PLACES & values.keys():
        path = Path(os.path.expanduser(str(values[name])))
        if values[name] not in (*MODELS, *prompt_names()) and path.exists():
            placed[name] = str(path.absolute())
    return {**values, **placed}


def inputs_of(prompt, reward_fn, val_reward_fn, train_problems, val_problems) -> dict[str, str]:
    """What a run learns from, by name: hashes of data and prompt, names (and hashes) of the rewards."""
    return {
        "training problems": problems_hash(train_problems),
        "validation problems": problems_hash(val_problems),
        "prompt text": _hash([prompt.template, prompt.reward, prompt.stop]),
        "reward_fn": function_name(reward_fn),
        "val_reward_fn": function_name(val_reward_fn),
    }


def problems_hash(problems) -> str:
    """How many problems, and a hash of their questions and answers in this order."""
    return f"{len(problems)}, {_hash([(p.question, p.answer) for p in problems])}"


def weights_hash(sample) -> str:
    """A hash of weights, from some numbers of each tensor: fine-tuning moves nearly all of them."""
    return "sha256 " + sha256(sample.numpy().tobytes()).hexdigest()[:16]


def _hash(value) -> str:
    return "sha256 " + sha256(json.dumps(value).encode()).hexdigest()[:16]


def function_name(function) -> str:
    """The module and name of a function (of its class for a callable object); for one that is not rlkit's,
    with a hash of its source where there is one."""
    named = function if hasattr(function, "__qualname__") else type(function)
    name = f"{named.__module__}.{named.__qualname__}"
    if name.startswith("rlkit."):
        return name
    try:
        return f"{name}, {_hash(inspect.getsource(named))}"
    except (OSError, TypeError):  # written at a prompt, or built in
        return name


def earlier_run(path: Path, resume: bool) -> dict | None:
    """config.json of the run in this folder, to go on with; None for a folder without results.

    ValueError if there are results and no ``resume``, or ``resume`` and nothing to go on with.
    """
    results = [name for name in ("metrics.jsonl", "model") if _holds_something(path / name)]
    results += ["checkpoints"] if checkpoints(path) else []
    there = (path / "config.json").is_file()
    if results and not resume:
        held = f"{str(path)!r} already holds a run ({', '.join(results)})"
        raise ValueError(f"run_dir: {held}; expected a new folder, or resume=True to go on with it")
    if not resume:  # a start that failed before any result counts for nothing
        return None
    if results and not there:
        what = f"{str(path)!r} has {', '.join(results)} but no config.json, so what it holds is not known"
        raise ValueError(f"run_dir: {what}; expected a run's folder")
    if not there:
        raise ValueError(f"resume: there is no run in {str(path)!r}; expected its folder, or resume=False")
    return Run(path).config


def _holds_something(path: Path) -> bool:
    return path.exists() and path.stat().st_size > 0


def continued(recorded: dict, wanted: dict, path: Path) -> dict:
    """The record of a run that goes on. ValueError naming each value that is another one than it began with,
    unless ``allow_changes``; then they are listed with the restart, under "resumed"."""
    what = f"the run in {str(path)!r} was made"
    there, now = recorded["n_steps"], wanted["n_steps"]
    if now < there:
        raise ValueError(f"n_steps: got {now}, but {what} for {there}; expected at least that")
    changes = differences(recorded, wanted)
    if now != there and wanted["lr_schedule"] != "constant":
        changes.append(f"n_steps (there {there}, at whose end the learning rate is 0, now {now})")
    if changes and not wanted["allow_changes"]:
        expected = "expected the same ones, a new run_dir, or allow_changes=True"
        raise ValueError(f"resume: {what} with other values: {', '.join(changes)}; {expected}")
    made = wanted["provenance"]
    restart = {name: made[name] for name in ("started", "versions", "git")} | {"changes": changes}
    kept = recorded if not changes else recorded | {k: v for k, v in wanted.items() if k != "provenance"}
    kept = kept | {name: wanted[name] for name in MAY_CHANGE - {"run_dir"}}
    kept["inputs"] = recorded.get("inputs", {}) | wanted["inputs"]
    return kept | {"resumed": [*recorded.get("resumed", []), restart]}


def differences(recorded: dict, wanted: dict) -> list[str]:
    """What is not as it was, as "name (there ..., now ...)"; a value that was not kept is another one."""
    pairs: dict[str, tuple[Any, Any]] = {}
    for name in wanted.keys() - MAY_CHANGE - {"provenance", "algorithm", "inputs"}:
        pairs[name] = with_places(recorded).get(name, "nothing"), wanted[name]
    for part in ("algorithm", "inputs"):
        for name, value in wanted[part].items():
            if name == "summary":  # words about the algorithm
                continue
            pairs.setdefault(name, (recorded.get(part, {}).get(name, "nothing"), value))
    if recorded.get("n_val") != wanted["n_val"] or recorded.get("n_val_final") != wanted["n_val_final"]:
        pairs.pop("validation problems", None)  # another number of them was asked for
    return [f"{name} (there {a!r}, now {b!r})" for name, (a, b) in sorted(pairs.items()) if a != b]
