"""What every sampler takes and gives: one small protocol behind which rollouts come from anywhere."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol, get_args, runtime_checkable

if TYPE_CHECKING:
    import torch

Way = Literal[
    "auto", "shm", "nccl", "gloo"
]  # how a vLLM server gets new weights, see samplers.vllm.weight_sync
WAYS = get_args(Way)


@dataclass(frozen=True)
class SamplingParams:
    """How to sample; every value is sent explicitly, none is taken from a model's generation_config.

    max_tokens: most new tokens per response, the end-of-text token included.
    temperature: > 0 divides the logits; 0 means greedy.
    top_p, top_k, min_p: truncations, off at 1.0, 0 and 0.0. repetition_penalty: off at 1.0. They change the
        distribution that is sampled from but not the one that is trained: for evaluation, not for training.
    stop: strings that end a response as soon as its text contains one; the string is kept in the text.
    seed: one integer; the same seed, prompts and weights give the same responses.

    Raises ValueError for a value out of range.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    stop: tuple[str, ...] = ()
    seed: int = 0

    def __post_init__(self):
        def require(name, ok, expected):
            if not ok:
                raise ValueError(f"{name}: got {getattr(self, name)!r}, expected {expected}")

        require("max_tokens", self.max_tokens >= 1, "at least 1")
        require("temperature", 0 <= self.temperature < math.inf, "a finite number >= 0")
        require("top_p", 0 < self.top_p <= 1, "a share in (0, 1]")
        require("top_k", self.top_k >= 0, "at least 0 (0 is off)")
        require("min_p", 0 <= self.min_p <= 1, "a share in [0, 1]")
        require("repetition_penalty", 0 < self.repetition_penalty < math.inf, "a number > 0")
        strings = not isinstance(self.stop, str) and all(isinstance(s, str) and s for s in self.stop)
        require("stop", strings, "a tuple of non-empty strings")


@dataclass
class Completion:
    """One response.

    text: what was decoded, cut right after the stop string if one was met. Special tokens are text like any
        other, but for those that begin, pad or end a text.
    token_ids: exactly the ids that were sampled, the end-of-text id included; never re-tokenised.
    finish_reason: "stop" (end of text or a stop string) or "length" (cut at max_tokens).
    log_probs: natural log-probability of each id under the distribution it was drawn from (after temperature
        and truncations), same length as ``token_ids``.
    prompt_token_ids: the ids the model was conditioned on.
    entropies: entropy in nats of the distribution each id was drawn from; [] from a sampler that cannot say.
    """

    text: str
    token_ids: list[int]
    finish_reason: str
    log_probs: list[float] = field(default_factory=list)
    prompt_token_ids: list[int] = field(default_factory=list)
    entropies: list[float] = field(default_factory=list)


@runtime_checkable
class Sampler(Protocol):
    """Turns prompts into responses. ``generate`` gives one list of ``n`` completions per prompt."""

    def generate(self, prompts: list[str], params: SamplingParams, n: int = 1) -> list[list[Completion]]: ...

    def sync_weights(self, model: torch.nn.Module, step: int | None = None) -> None:
        """Make the next ``generate`` use this model's weights (nothing to do when it is the same object)."""
        ...

    def close(self) -> None: ...


def prompt_ids(tokenizer, prompts: list[str], max_tokens: int, room: float | None) -> list[list[int]]:
    """The prompts' token ids, as ``encode_prompts``. ``room``: positions of the model; None is no limit.

    Raises ValueError for an empty prompt, or one that leaves no room for max_tokens.
    """
    from rlkit.tokenization import encode_prompts  # not at the top: a Config reads this module without torch

    if isinstance(prompts, str) or not all(isinstance(prompt, str) for prompt in prompts):
        raise ValueError(f"prompts: got {prompts!r:.80}, expected a list of strings")
    encoded = encode_prompts(prompts, tokenizer)
    for i, ids in enumerate(encoded):
        if not ids:
            raise ValueError(f"prompts[{i}]: got {prompts[i]!r}, which has no tokens; expected at least one")
        if len(ids) + max_tokens > (room or math.inf):
            raise ValueError(
                f"prompts[{i}]: got {len(ids)} tokens, and max_tokens={max_tokens} more do not fit; "
                f"expected at most {room} together (the model's max_position_embeddings)"
            )
    return encoded


def end_of_text_ids(model, tokenizer) -> list[int]:
    """Every id that ends a text according to the tokenizer, the model's config or its generation config."""
    sources = (tokenizer, model.config, getattr(model, "generation_config", None))
    found = set()
    for ids in (getattr(source, "eos_token_id", None) for source in sources):
        found.update(ids if isinstance(ids, (list, tuple)) else [] if ids is None else [ids])
    return sorted(found)
