"""Run configuration: a frozen record of checked fields, with three presets.

Every field of ``Config`` is a parameter of ``notebooks/train.ipynb``. The constructor checks types, bounds
and what must fit together; it opens no file: that files, model and memory are there, ``planning`` checks.
"""

import dataclasses
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from annotated_types import Interval
from pydantic import AfterValidator
from pydantic.dataclasses import dataclass

from rlkit.algorithms import get_algorithm
from rlkit.samplers.base import Way
from rlkit.support.checks import shown
from rlkit.support.fields import PLAIN, STRICT, Checked, Real, Text, Whole, given, say, schema_of

# The presets. The laptop's values are the fields' defaults; olmo's are the handout's section 4.3.
PRESETS: dict[str, dict[str, Any]] = {
    "laptop": {},
    "laptop_long": dict(model="laptop_long", dataset="laptop_long", n_steps=60, max_tokens=256, lr=1e-4)
    | dict(eval_every=20, rollouts_every=20),
    "olmo": dict(model="allenai/OLMo-2-0425-1B", dataset="openai/gsm8k", n_train=6400, n_val=1024)
    | dict(n_val_final=None, sampler="vllm", n_steps=200, rollout_batch_size=256, group_size=8, lr=1e-5)
    | dict(max_tokens=512, attn_implementation="flash_attention_2", eval_every=10, rollouts_every=40)
    # the handout's plain bfloat16 rounds most updates of lr 1e-5 away; these move, and fit into 80 GB
    | dict(dtype="float32", autocast=True, threads=4),
}
MICROBATCH_ROWS = {"laptop": 32, "laptop_long": 32, "olmo": 8}  # 128 rows / 4 microbatches, 256 rows / 32
OFF_POLICY_TRAIN_ROWS = 8
MANY = 1_000_000  # more steps, rows, tokens or problems than this are a mistake


def _device(value: str):
    if not re.fullmatch(r"cpu|mps|cuda(:\d+)?", value):
        raise ValueError(f"got {shown(value)}, expected 'cpu', 'cuda', 'cuda:0' or 'mps' or None")
    return value


Count = Annotated[int, Interval(ge=0, le=MANY), PLAIN]
Size = Annotated[int, Interval(ge=1, le=MANY), PLAIN]
Divisor = Annotated[float, Interval(ge=1e-3, le=1e12), PLAIN]
Rank = Annotated[int, Interval(ge=0, le=4096), PLAIN]
Alpha = Annotated[float, Interval(ge=1e-3, le=1e6), PLAIN]
ClipRange = Annotated[float, Interval(ge=0, le=1000), PLAIN]
KLCoef = Annotated[float, Interval(ge=0, le=1000), PLAIN]
Few = Annotated[int, Interval(ge=0, le=100), PLAIN]
Device = Annotated[Text, AfterValidator(_device)]
Preset = Literal["laptop", "laptop_long", "olmo"]
Who = Literal["transformers", "vllm"]
Dtype = Literal["float32", "bfloat16"]
Half = Literal["bfloat16", "float16"]
Attention = Literal["flash_attention_2", "sdpa", "eager"]
Schedule = Literal["constant", "linear", "cosine"]
SinkName = Literal["none", "wandb", "tensorboard", "trackio"]


class _Presets(Checked):
    def preset(cls, name: str, /, **overrides) -> "Config":
        """``Config.preset("olmo", lr=3e-6)``: the preset's values with some of them replaced."""
        values = dict(PRESETS.get(name, {})) if isinstance(name, str) else {}
        if "dtype" in overrides:  # the preset's autocast belongs to its own type of weights
            values.pop("autocast", None)
        return cls(**{"preset": name, **values, **overrides})


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Config(metaclass=_Presets):
    """Everything that decides a run: ``Config()`` the laptop's, ``Config.preset("olmo", seed=1)`` a GPU's.

    Bad values raise one ValueError that names each field, what came and what was expected. Text is read where
    it plainly is a value ("1e-5", "true"). ``Config.field_table()`` lists the fields, both presets and a line
    about each.
    """

    preset: Preset = say(
        "laptop", "the testbed whose values hold for all that is not given: laptop, laptop_long or olmo"
    )
    algo: Text = say("grpo", "the estimator, a name in rlkit.ALGORITHMS")
    model: Text = say("laptop", "the base model: laptop, laptop_long, a hub id or a folder")
    prompt: Text = say(
        "r1_zero", "r1_zero, question_only, r1_zero_three_shot, chat or a text file with {question} in it"
    )
    dataset: Text = say(
        "laptop", "the problems: laptop, laptop_long, a hub id or a folder with train.jsonl and test.jsonl"
    )
    question_column: Text = say("question", "the questions' name in the dataset's rows")
    answer_column: Text = say(
        "answer", "the answers': numbers, text, or worked answers that end in #### gold"
    )
    n_train: Size = say(6400, "training problems")
    n_val: Count = say(256, "validation problems of an evaluation on the way; 0 turns them all off")
    n_val_final: Count | None = say(512, "validation problems of the last evaluation; None is n_val")
    sampler: Who = say("transformers", "who generates: transformers (in process) or vllm (a server)")
    weight_sync: Way = say(
        "auto",
        "how vLLM gets new weights: shm (a file in memory), nccl (two GPUs), gloo (nccl's dialogue on a "
        "CPU); auto is nccl where it can be, else shm",
    )
    n_steps: Count = say(30, "rollout batches to sample and learn from")
    rollout_batch_size: Size = say(128, "responses sampled a step, group_size for each prompt")
    group_size: Size = say(8, "responses per prompt")
    train_batch_size: Size | None = say(
        None,
        "responses per optimizer step; None is the whole rollout batch, or 8 for an off-policy algorithm",
    )
    gradient_accumulation_steps: Size | None = say(
        None,
        "microbatches a train batch is cut into (memory only); None is 4 (laptop) or 32 (olmo) for the whole "
        "rollout batch and in proportion below",
    )
    lr: Real = say(3e-4, "learning rate, after the warm-up", ge=0, le=10)
    lr_warmup_steps: Count = say(0, "steps over which the learning rate rises to lr in equal parts")
    lr_schedule: Schedule = say(
        "constant", "the learning rate after the warm-up: constant, or linear or cosine down to 0"
    )
    adam_beta1: Real = say(0.9, "AdamW's first beta", ge=0, lt=1)
    adam_beta2: Real = say(0.95, "AdamW's second beta", ge=0, lt=1)
    weight_decay: Real = say(0.0, "AdamW's weight decay", ge=0, le=100)
    max_grad_norm: Real = say(1.0, "a longer gradient is scaled down to this norm", ge=1e-6, le=1e9)
    advantage_eps: Real = say(1e-6, "added to the advantage's divisor", ge=0, le=1)
    cliprange: ClipRange | None = say(
        None, "how far an importance ratio may leave 1; None is the algorithm's"
    )
    cliprange_high: ClipRange | None = say(
        None, "the same above 1, where it is another one; None is cliprange or the algorithm's"
    )
    kl_coef: KLCoef | None = say(
        None, "factor of the KL penalty towards the base model; None is the algorithm's, 0 is off"
    )
    mask_truncated: bool | None = say(
        None, "leave responses that were cut at max_tokens out of the loss; None is the algorithm's"
    )
    resamples: Few | None = say(
        None,
        "rounds in which groups with all rewards equal give way to other prompts; None is the algorithm's",
    )
    normalization_constant: Divisor | None = say(
        None, "divisor of a loss with a constant normaliser; None is train_batch_size x max_tokens"
    )
    tis_cap: Divisor | None = say(
        None, "truncated importance sampling: cap of the trainer/sampler ratio; None is off"
    )
    temperature: Real = say(1.0, "sampling temperature, also used when scoring", ge=0.01, le=100)
    max_tokens: Size = say(64, "most new tokens per response")
    dtype: Dtype = say("float32", "the weights' (and optimizer's) type: float32 or bfloat16")
    autocast: bool = say(False, "arithmetic in autocast_dtype around float32 weights")
    autocast_dtype: Half = say(
        "bfloat16", "autocast's type: bfloat16, or float16 with a scaled loss for cards without bfloat16"
    )
    gradient_checkpointing: bool = say(
        False, "keep each layer's input only and compute the rest again in the backward pass"
    )
    lora_rank: Rank = say(0, "train LoRA matrices of this rank and leave the model's weights; 0 trains these")
    lora_alpha: Alpha | None = say(None, "LoRA's numerator: B A counts alpha / rank times; None is 2 x rank")
    lora_target_modules: Text = say(
        "all-linear", "layers with a LoRA: all-linear (not the output head) or names with commas between"
    )
    attn_implementation: Attention | None = say(
        None, "flash_attention_2, sdpa or eager; None leaves it to transformers"
    )
    device: Device | None = say(None, "cpu, cuda, cuda:1, mps; None is the first GPU there is, else cpu")
    eval_every: Count = say(10, "steps between evaluations; 0 is only at the end")
    eval_at_start: bool = say(True, "evaluate the base model as step 0")
    rollouts_every: Count = say(10, "steps between rollouts written to rollouts.jsonl; 0 is never")
    checkpoint_every: Count = say(10, "steps between checkpoints; 0 is only at the end")
    seed: Whole = say(0, "decides prompts' order, sampling and shuffling", ge=0, lt=2**63)
    n_gpus: Whole = say(
        1, "processes that share the model's weights and the rows, one on each GPU (or on a CPU)", ge=1, le=64
    )
    threads: Whole = say(1, "CPU threads of the run", ge=1, le=1024)
    run_dir: Text | None = say(None, "the run's folder; None is a new one under runs/")
    resume: bool = say(False, "go on with the run in run_dir from its last checkpoint")
    allow_changes: bool = say(
        False, "resume although other values, data, code or weights are there now than the run began with"
    )
    sink: SinkName = say("none", "also log to wandb, tensorboard or trackio")
    check_memory: bool = say(True, "stop before loading if the estimated peak memory is more than is free")
    dry_run: bool = say(False, "check everything, print the plan and stop")

    elsewhere = dict.fromkeys(
        ("top_p", "top_k", "min_p", "repetition_penalty"),
        "not a parameter of training, since it would bias the gradient; evaluate.ipynb takes it",
    )

    def __post_init__(self):
        _check_together(self, get_algorithm(self.algo))

    @classmethod
    def from_parameters(cls, parameters: Mapping[str, Any]) -> "Config":
        """A config from what a job was given; None, or text for it, is the preset's value.

        Raises one ValueError that lists every misspelt name ("did you mean") and every unreadable value.
        """
        values = given(parameters, cls.__dataclass_fields__)
        return _Presets.preset(cls, values.pop("preset", "laptop"), **values)

    def resolved(self, algorithm=None) -> Self:
        """The same config with every None that has a value filled in; algorithm None is the one of ``algo``.

        Left None: tis_cap (off), device and attn_implementation (decided where the model loads) and what the
        algorithm does not use.
        """
        algorithm = get_algorithm(self.algo if algorithm is None else algorithm)
        _check_together(self, algorithm)
        rows, accumulation = _batches(self, algorithm)
        final, constant = self.n_val_final, self.normalization_constant
        own = algorithm.cliprange
        low, high = own if isinstance(own, (tuple, list)) else (own, None)
        if algorithm.loss_normalization == "constant" and constant is None:
            constant = float(rows * self.max_tokens)
        return dataclasses.replace(
            self,
            train_batch_size=rows,
            gradient_accumulation_steps=accumulation,
            n_val_final=self.n_val if final is None or not self.n_val else final,
            cliprange=low if self.cliprange is None else self.cliprange,
            cliprange_high=high if self.cliprange is self.cliprange_high is None else self.cliprange_high,
            kl_coef=algorithm.kl_coef if self.kl_coef is None else self.kl_coef,
            mask_truncated=algorithm.mask_truncated if self.mask_truncated is None else self.mask_truncated,
            resamples=algorithm.resamples if self.resamples is None else self.resamples,
            normalization_constant=constant,
        )

    def settle(self, algorithm):
        """The algorithm with this (resolved) config's values in it."""
        pair = self.cliprange if self.cliprange_high is None else (self.cliprange, self.cliprange_high)
        return dataclasses.replace(algorithm, cliprange=pair, kl_coef=self.kl_coef)

    @property
    def n_prompts(self) -> int:
        """Prompts per rollout batch."""
        return self.rollout_batch_size // self.group_size

    @staticmethod
    def field_table() -> list[dict]:
        """One dict per field: name, type, laptop, olmo (the presets' values) and doc."""
        kinds = {"integer": "int", "number": "float", "boolean": "bool", "string": "str"}
        laptop, olmo, rows = Config(), _Presets.preset(Config, "olmo"), []
        for name in Config.__dataclass_fields__:
            schema = schema_of(Config, name)
            row = {"name": name, "type": kinds[schema["type"]] + schema["none"].replace("or", "|")}
            row |= {
                "laptop": getattr(laptop, name),
                "olmo": getattr(olmo, name),
                "doc": schema["description"],
            }
            rows.append(row)
        return rows


del Config.preset  # the field's default: on the class, this name is the method of the metaclass


def _batches(config: Config, algorithm) -> tuple[int, int]:
    """(responses per optimizer step, microbatches per optimizer step)."""
    rows, accumulation = config.train_batch_size, config.gradient_accumulation_steps
    if rows is None:
        rows = OFF_POLICY_TRAIN_ROWS if algorithm.off_policy else config.rollout_batch_size
        rows = min(rows, config.rollout_batch_size)
    if accumulation is None:
        accumulation = max(1, rows // MICROBATCH_ROWS[config.preset])
        while rows % accumulation:
            accumulation -= 1
    return rows, accumulation


def _check_together(config: Config, algorithm) -> None:
    """One ValueError for all fields that do not fit each other, or the algorithm."""
    c, a, rollout, group = config, algorithm, config.rollout_batch_size, config.group_size
    rows, accumulation = _batches(config, algorithm)
    prompts, uneven = divmod(rollout, group)
    clips = a.importance_reweighting_method in ("grpo", "gspo", "cispo")
    alone, by_std = group == 1, a.advantage_normalizer == "std"
    refused = {  # message: whether it applies
        f"rollout_batch_size: got {rollout}, expected a multiple of group_size, {group}": uneven,
        f"n_train: got {c.n_train}, expected at least the {prompts} prompts of one rollout batch "
        f"(rollout_batch_size {rollout} / group_size {group})": not uneven and prompts > c.n_train,
        f"train_batch_size: got {rows}, expected a divisor of rollout_batch_size, {rollout}": rollout % rows,
        f"gradient_accumulation_steps: got {accumulation}, expected a divisor of the train batch's "
        f"{rows} rows": rows % accumulation,
        f"group_size: got 1 with algo {a.name!r}, which divides by the group's standard deviation; "
        "expected at least 2": alone and by_std,
        f"group_size: got 1 with algo {a.name!r}, which subtracts the group's mean and so leaves nothing "
        "to learn; expected at least 2": alone and not by_std and a.baseline == "mean",
        f"cliprange: got None, expected a number > 0 for the importance weights of {a.name!r} "
        f"({a.importance_reweighting_method})": clips and c.cliprange is None and a.cliprange is None,
        f"autocast: got True with dtype {c.dtype}, expected dtype float32 (bfloat16 weights need no "
        "autocast)": c.autocast and c.dtype != "float32",
        f"autocast_dtype: got {c.autocast_dtype} with autocast False, expected autocast True": not c.autocast
        and c.autocast_dtype != "bfloat16",
        f"lora_alpha: got {c.lora_alpha} with lora_rank 0, expected a lora_rank": c.lora_alpha is not None
        and not c.lora_rank,
        f"weight_sync: got {c.weight_sync!r} with sampler {c.sampler!r}, which has the policy's own "
        "weights; expected auto, or sampler vllm": c.weight_sync != "auto" and c.sampler != "vllm",
        f"n_gpus: got {c.n_gpus} with autocast_dtype float16, whose loss scale one process keeps; expected "
        "1, or bfloat16": c.n_gpus > 1 and c.autocast_dtype == "float16",
        f"lr_warmup_steps: got {c.lr_warmup_steps}, expected fewer than n_steps, {c.n_steps}": bool(
            c.lr_warmup_steps and c.lr_warmup_steps >= c.n_steps
        ),
        "run_dir: got None with resume=True, expected the folder of the run to go on with": c.resume
        and c.run_dir is None,
    }
    if errors := [line for line, applies in refused.items() if applies]:
        raise ValueError("\n".join(errors))
