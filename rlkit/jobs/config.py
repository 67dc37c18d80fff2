"""What a run is made of: one frozen record, two presets, and a strict reading of what a job passes in.

Every field of ``Config`` is a parameter of ``notebooks/train.ipynb``. Papermill hands over what it could not
read (``1e-5`` from YAML, ``true``, ``null``) as text and only warns about a name it does not know, so
``Config.from_parameters`` turns text into the field's type and refuses by name what it cannot read.
"""

from __future__ import annotations

import dataclasses
import math
import os
import re
from dataclasses import dataclass
from difflib import get_close_matches

from rlkit.algorithms import get_algorithm
from rlkit.samplers.base import WAYS
from rlkit.support.checks import missing_folder, number, shown, unusable_folder, unusable_path
from rlkit.tasks.prompts import load_prompt

# ranges: what the error says, and the test
_POSITIVE = ("a number > 0", lambda v: v > 0)
_NOT_NEGATIVE = ("a number >= 0", lambda v: v >= 0)
_AT_LEAST_1 = ("a whole number >= 1", lambda v: v >= 1)
_COUNT = ("a whole number >= 0", lambda v: v >= 0)
_BELOW_1 = ("a number from 0 up to but not including 1", lambda v: 0 <= v < 1)
_SHARE = ("a number above 0, at most 1", lambda v: 0 < v <= 1)
_DEVICE = ("'cpu', 'cuda', 'cuda:0' or 'mps'", lambda v: re.fullmatch(r"cpu|mps|cuda(:\d+)?", v))


def _field(default, doc, check=None, choices=None):
    """A dataclass field with one line about it; ``check`` is (what is expected, test)."""
    return dataclasses.field(default=default, metadata={"doc": doc, "check": check, "choices": choices})


@dataclass(frozen=True)
class Config:
    """Everything that decides a run. ``Config()`` is the laptop's; ``Config.preset("olmo", seed=1)`` the big
    one's.

    Bad values raise one ValueError that names each field, what came and what was expected, before anything
    loads. ``Config.field_table()`` lists the fields with both presets and one line each.
    """

    preset: str = _field("laptop", "the testbed whose values hold for all that is not given: laptop or olmo")
    algo: str = _field("grpo", "the estimator, a name in rlkit.ALGORITHMS")
    model: str = _field("laptop", "the base model: laptop, a hub id or a folder")
    prompt: str = _field(
        "r1_zero", "r1_zero, question_only, r1_zero_three_shot or a text file with {question} in it"
    )
    dataset: str = _field(
        "laptop", "the problems: laptop, a hub id or a folder with train.jsonl and test.jsonl"
    )
    n_train: int = _field(6400, "training problems", _AT_LEAST_1)
    n_val: int = _field(256, "validation problems of an evaluation on the way; 0 turns them all off", _COUNT)
    n_val_final: int | None = _field(512, "validation problems of the last evaluation; None is n_val", _COUNT)
    sampler: str = _field(
        "transformers",
        "who generates: transformers (in process) or vllm (a server)",
        choices=("transformers", "vllm"),
    )
    weight_sync: str = _field(
        "auto",
        "how vLLM gets new weights: shm (a file in memory), nccl (two GPUs), ipc (one "
        "GPU), gloo (nccl's dialogue on a CPU); auto is nccl where it can be, else shm",
        choices=WAYS,
    )
    n_steps: int = _field(60, "rollout batches to sample and learn from", _COUNT)
    rollout_batch_size: int = _field(128, "responses sampled a step, group_size for each prompt", _AT_LEAST_1)
    group_size: int = _field(8, "responses per prompt", _AT_LEAST_1)
    train_batch_size: int | None = _field(
        None,
        "responses per optimizer step; None is the whole rollout batch, or 8 for an off-policy algorithm",
        _AT_LEAST_1,
    )
    gradient_accumulation_steps: int | None = _field(
        None,
        "microbatches a train batch is cut into (memory only); None is 4 (laptop) or 32 (olmo) for the whole "
        "rollout batch and in proportion below",
        _AT_LEAST_1,
    )
    lr: float = _field(1e-4, "learning rate, constant", _NOT_NEGATIVE)
    adam_beta1: float = _field(0.9, "AdamW's first beta", _BELOW_1)
    adam_beta2: float = _field(0.95, "AdamW's second beta", _BELOW_1)
    weight_decay: float = _field(0.0, "AdamW's weight decay", _NOT_NEGATIVE)
    max_grad_norm: float = _field(1.0, "a longer gradient is scaled down to this norm", _POSITIVE)
    advantage_eps: float = _field(1e-6, "added to the advantage's divisor", _NOT_NEGATIVE)
    cliprange: float | None = _field(
        None, "how far an importance ratio may leave 1; None is the algorithm's", _NOT_NEGATIVE
    )
    normalization_constant: float | None = _field(
        None, "divisor of a loss with a constant normaliser; None is train_batch_size x max_tokens", _POSITIVE
    )
    tis_cap: float | None = _field(
        None, "truncated importance sampling: cap of the trainer/sampler ratio; None is off", _POSITIVE
    )
    temperature: float = _field(1.0, "sampling temperature, also used when scoring", _POSITIVE)
    top_p: float = _field(1.0, "nucleus sampling; 1 is off, as policy gradients need", _SHARE)
    top_k: int = _field(0, "sample among the k likeliest tokens; 0 is off", _COUNT)
    min_p: float = _field(
        0.0, "drop tokens below this share of the likeliest's probability; 0 is off", _BELOW_1
    )
    repetition_penalty: float = _field(1.0, "1 is off", _POSITIVE)
    max_tokens: int = _field(64, "most new tokens per response", _AT_LEAST_1)
    dtype: str = _field(
        "float32", "the weights' (and optimizer's) type: float32 or bfloat16", choices=("float32", "bfloat16")
    )
    autocast: bool = _field(False, "bfloat16 arithmetic around float32 weights")
    attn_implementation: str | None = _field(
        None, "flash_attention_2, sdpa or eager; None is sdpa", choices=("flash_attention_2", "sdpa", "eager")
    )
    device: str | None = _field(
        None, "cpu, cuda, cuda:1, mps; None is the first GPU there is, else cpu", _DEVICE
    )
    eval_every: int = _field(20, "steps between evaluations; 0 is only at the end", _COUNT)
    eval_at_start: bool = _field(True, "evaluate the base model as step 0")
    rollouts_every: int = _field(20, "steps between rollouts written to rollouts.jsonl; 0 is never", _COUNT)
    checkpoint_every: int = _field(10, "steps between checkpoints; 0 is only at the end", _COUNT)
    seed: int = _field(0, "decides prompts' order, sampling and shuffling", _COUNT)
    threads: int = _field(1, "CPU threads of the run", _AT_LEAST_1)
    run_dir: str | None = _field(None, "the run's folder; None is a new one under runs/")
    resume: bool = _field(False, "go on with the run in run_dir from its last checkpoint")
    sink: str = _field(
        "none",
        "also log to wandb, tensorboard or trackio",
        choices=("none", "wandb", "tensorboard", "trackio"),
    )
    check_memory: bool = _field(True, "stop before loading if the estimated peak memory is more than is free")
    dry_run: bool = _field(False, "check everything, print the plan and stop")

    def __post_init__(self):
        errors = [error for field in dataclasses.fields(self) for error in _check_field(self, field)]
        _raise(errors)
        _raise(_check_together(self, get_algorithm(self.algo)))
        for field in dataclasses.fields(self):  # 1 -> 1.0, so that equal configs look equal
            if _kind(field) == "float" and getattr(self, field.name) is not None:
                object.__setattr__(self, field.name, float(getattr(self, field.name)))

    @classmethod
    def from_parameters(cls, parameters: dict) -> Config:
        """A config from what a job was given: names checked, text read as the field's type, None as the
        preset's value.

        Raises one ValueError that lists every misspelt name ("did you mean") and every unreadable value.
        """
        fields, errors, values = {f.name: f for f in dataclasses.fields(cls)}, [], {}
        for name, value in parameters.items():
            if name not in fields:
                close = get_close_matches(str(name), fields, n=1)
                errors.append(
                    f"{name}: unknown parameter" + (f"; did you mean {close[0]!r}?" if close else "")
                )
                continue
            try:
                values[name] = _coerce(fields[name], value)
            except ValueError as error:
                errors.append(str(error))
        _raise(errors)
        values = {name: value for name, value in values.items() if value is not None}
        return cls.preset(values.pop("preset", "laptop"), **values)

    def resolved(self, algorithm=None) -> Config:
        """The same config with every None that has a value filled in, for this algorithm (default:
        ``algo``'s).

        Left None: tis_cap (off), device and attn_implementation (decided where the model loads) and what the
        algorithm does not use.
        """
        algorithm = get_algorithm(self.algo if algorithm is None else algorithm)
        _raise(_check_together(self, algorithm))
        train_rows, accumulation = _batches(self, algorithm)
        values = {
            "train_batch_size": train_rows,
            "gradient_accumulation_steps": accumulation,
            "n_val_final": self.n_val if self.n_val_final is None or not self.n_val else self.n_val_final,
            "cliprange": algorithm.cliprange if self.cliprange is None else self.cliprange,
        }
        if algorithm.loss_normalization == "constant" and self.normalization_constant is None:
            values["normalization_constant"] = float(train_rows * self.max_tokens)
        return dataclasses.replace(self, **values)

    @property
    def n_prompts(self) -> int:
        """Prompts per rollout batch."""
        return self.rollout_batch_size // self.group_size

    @staticmethod
    def field_table() -> list[dict]:
        """One dict per field: name, type, laptop, olmo (the presets' values) and doc."""
        return [
            {
                "name": f.name,
                "type": f.type,
                "laptop": getattr(Config(), f.name),
                "olmo": PRESETS["olmo"].get(f.name, f.default),
                "doc": f.metadata["doc"],
            }
            for f in dataclasses.fields(Config)
        ]


# The presets. The laptop's values are the fields' defaults; olmo's are the handout's section 4.3.
PRESETS: dict[str, dict] = {
    "laptop": {},
    "olmo": dict(
        preset="olmo",
        model="allenai/OLMo-2-0425-1B",
        dataset="openai/gsm8k",
        n_train=6400,
        n_val=1024,
        n_val_final=None,
        sampler="vllm",
        n_steps=200,
        rollout_batch_size=256,
        group_size=8,
        lr=1e-5,
        max_tokens=512,
        dtype="bfloat16",
        attn_implementation="flash_attention_2",
        eval_every=10,
        rollouts_every=40,
        threads=4,
    ),
}
MICROBATCH_ROWS = {"laptop": 32, "olmo": 8}  # 128 rows / 4 microbatches, 256 rows / 32
OFF_POLICY_TRAIN_ROWS = 8


def _from_preset(cls, name: str, **overrides) -> Config:
    """``Config.preset("olmo", lr=3e-6)``: the preset's values with some of them replaced."""
    if not isinstance(name, str) or name not in PRESETS:
        close = get_close_matches(str(name), PRESETS, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise ValueError(f"preset: got {shown(name)}, expected one of {', '.join(PRESETS)}{hint}")
    unknown = [n for n in overrides if n not in cls.__dataclass_fields__]
    if unknown:
        close = get_close_matches(unknown[0], cls.__dataclass_fields__, n=1)
        raise ValueError(
            f"{unknown[0]}: unknown parameter" + (f"; did you mean {close[0]!r}?" if close else "")
        )
    return cls(**{**PRESETS[name], **overrides})


# `preset` is a field and, on the class, the way to make one: an instance's own value hides the class's
# function.
Config.preset = classmethod(_from_preset)


def _batches(config: Config, algorithm) -> tuple[int, int]:
    """(responses per optimizer step, microbatches per optimizer step)."""
    train_rows = config.train_batch_size
    if train_rows is None:
        train_rows = OFF_POLICY_TRAIN_ROWS if algorithm.off_policy else config.rollout_batch_size
        train_rows = min(train_rows, config.rollout_batch_size)
    accumulation = config.gradient_accumulation_steps
    if accumulation is None:
        accumulation = max(1, train_rows // MICROBATCH_ROWS[config.preset])
        while train_rows % accumulation:
            accumulation -= 1
    return train_rows, accumulation


# ---- one field


def _kind(field) -> str:
    return field.type.split(" | ")[0]


_EXPECTED = {"int": "a whole number", "float": "a number", "bool": "true or false", "str": "text"}
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")
_WORDS = {
    "true": True,
    "yes": True,
    "on": True,
    "1": True,
    "false": False,
    "no": False,
    "off": False,
    "0": False,
}
_NONE_WORDS = ("None", "null", "NULL", "Null", "~")


def _coerce(field, value):
    """``value`` as the field's type. Text is read only where nothing is guessed."""
    kind = _kind(field)
    if isinstance(value, str) and value in _NONE_WORDS:
        return None
    if value is None or (kind != "str" and not isinstance(value, str)):
        return (
            int(value)
            if kind == "int" and isinstance(value, float) and value.is_integer()
            else bool(value)
            if kind == "bool" and isinstance(value, int) and value in (0, 1)
            else value
        )
    if kind == "str":
        if isinstance(value, os.PathLike):
            return os.fspath(value)
        if not isinstance(value, str):
            raise ValueError(
                f"{field.name}: {shown(value)} is a {type(value).__name__}, expected text (papermill's -r "
                "passes a value as text)"
            )
        return value
    if kind == "bool" and value.lower() in _WORDS:
        return _WORDS[value.lower()]
    if kind in ("int", "float") and _NUMBER.fullmatch(value):
        read = float(value)
        if kind == "float":
            return read
        if read.is_integer():
            return int(value) if value.lstrip("+-").isdigit() else int(read)
    raise ValueError(f"{field.name}: {shown(value)} is not {_EXPECTED[kind]}")


def _check_field(config: Config, field) -> list[str]:
    name, value, kind = field.name, getattr(config, field.name), _kind(field)
    check, choices = field.metadata["check"], field.metadata["choices"]
    optional = field.type.endswith("| None")
    expected = (check[0] if check else _EXPECTED[kind]) + (" or None" if optional else "")
    if value is None:
        return [] if optional else [f"{name}: got None, expected {expected}"]
    types = {"int": int, "float": (int, float), "bool": bool, "str": str}[kind]
    if not isinstance(value, types) or (isinstance(value, bool) and kind != "bool"):
        return [f"{name}: {shown(value)} is not {_EXPECTED[kind]}"]
    if kind == "float" and not math.isfinite(number(value)):
        return [f"{name}: got {shown(value)}, expected {expected}"]
    if kind == "int" and abs(value) >= 2**63:
        return [f"{name}: got {shown(value)}, expected {expected} and below 2**63"]
    if kind == "str" and (why := unusable_path(value)):
        return [f"{name}: got {shown(value)}, expected {expected} that names something ({why})"]
    if choices and value not in choices:
        close = get_close_matches(value, choices, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        return [f"{name}: got {shown(value)}, expected one of {', '.join(choices)}{hint}"]
    if kind == "str" and not value.strip():
        return [f"{name}: got an empty text, expected {expected}"]
    if check and not check[1](value):
        return [f"{name}: got {shown(value)}, expected {expected}"]
    return []


# ---- the fields together


def _check_together(config: Config, algorithm) -> list[str]:
    errors = []
    if config.preset not in PRESETS:
        errors.append(f"preset: got {config.preset!r}, expected one of {', '.join(PRESETS)}")
        return errors
    rollout, group = config.rollout_batch_size, config.group_size
    if rollout % group:
        errors.append(f"rollout_batch_size: got {rollout}, expected a multiple of group_size, {group}")
    elif rollout // group > config.n_train:
        errors.append(
            f"n_train: got {config.n_train}, expected at least the {rollout // group} prompts of one "
            f"rollout batch (rollout_batch_size {rollout} / group_size {group})"
        )
    train_rows, accumulation = _batches(config, algorithm)
    if rollout % train_rows:
        errors.append(
            f"train_batch_size: got {train_rows}, expected a divisor of rollout_batch_size, {rollout}"
        )
    if train_rows % accumulation:
        errors.append(
            f"gradient_accumulation_steps: got {accumulation}, expected a divisor of the train batch's "
            f"{train_rows} rows"
        )
    if group == 1 and algorithm.advantage_normalizer == "std":
        errors.append(
            f"group_size: got 1 with algo {algorithm.name!r}, which divides by the group's standard "
            "deviation; expected at least 2"
        )
    elif group == 1 and algorithm.baseline == "mean":
        errors.append(
            f"group_size: got 1 with algo {algorithm.name!r}, which subtracts the group's mean and so "
            "leaves nothing to learn; expected at least 2"
        )
    method = algorithm.importance_reweighting_method
    if method in ("grpo", "gspo", "cispo") and config.cliprange is None and algorithm.cliprange is None:
        errors.append(
            f"cliprange: got None, expected a number > 0 for the importance weights of {algorithm.name!r} "
            f"({method})"
        )
    if config.autocast and config.dtype != "float32":
        errors.append(
            f"autocast: got True with dtype {config.dtype}, expected dtype float32 (bfloat16 weights need "
            "no autocast)"
        )
    if config.weight_sync != "auto" and config.sampler != "vllm":
        errors.append(
            f"weight_sync: got {config.weight_sync!r} with sampler {config.sampler!r}, which has the "
            "policy's own weights; expected auto, or sampler vllm"
        )
    if config.resume and config.run_dir is None:
        errors.append("run_dir: got None with resume=True, expected the folder of the run to go on with")
    for name in ("model", "dataset"):
        value = getattr(config, name)
        if value != "laptop" and missing_folder(value):
            errors.append(f"{name}: no folder {shown(value)}; expected 'laptop', a hub id or a folder")
    if config.run_dir is not None and (why := unusable_folder(config.run_dir)):
        errors.append(f"run_dir: got {shown(config.run_dir)}, expected a folder to write to ({why})")
    try:
        load_prompt(config.prompt)
    except ValueError as error:
        errors.append(str(error) if str(error).startswith("prompt") else f"prompt: {error}")
    return errors


def _raise(errors: list[str]) -> None:
    if errors:
        raise ValueError("\n".join(errors))
