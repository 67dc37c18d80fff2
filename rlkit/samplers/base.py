"""What every sampler takes and gives: one small protocol behind which rollouts come from anywhere."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class SamplingParams:
    """How to sample; every value is sent explicitly, none is taken from a model's generation_config.

    temperature: > 0 divides the logits; 0 means greedy.
    top_p, top_k, min_p: truncations, all off by default (1.0, 0, 0.0), as policy gradients need.
    repetition_penalty: 1.0 is off.
    max_tokens: most new tokens per response, the end-of-text token included.
    stop: strings that end a response as soon as its text contains one; the string is kept in the text.
    seed: one integer; the same seed, prompts and weights give the same responses.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    stop: tuple[str, ...] = ()
    seed: int = 0


@dataclass
class Completion:
    """One response.

    text: decoded without special tokens, cut right after the stop string if one was met.
    token_ids: exactly the ids that were sampled, the end-of-text id included; never re-tokenised.
    log_probs: natural log-probability of each id under the distribution it was drawn from (after temperature
        and truncations), same length as ``token_ids``.
    finish_reason: "stop" (end of text or a stop string) or "length" (cut at max_tokens).
    prompt_token_ids: the ids the model was conditioned on.
    """

    text: str
    token_ids: list[int]
    finish_reason: str
    log_probs: list[float] = field(default_factory=list)
    prompt_token_ids: list[int] = field(default_factory=list)


@runtime_checkable
class Sampler(Protocol):
    """Turns prompts into responses. ``generate`` returns one list of ``n`` completions per prompt, in order."""

    def generate(self, prompts: list[str], params: SamplingParams, n: int = 1) -> list[list[Completion]]: ...

    def sync_weights(self, model: torch.nn.Module, step: int | None = None) -> None:
        """Make the next ``generate`` use this model's weights (nothing to do when it is the same object)."""
        ...

    def close(self) -> None: ...
