"""What a model can do, found out by trying it on a few tokens rather than from a list of architectures."""

from collections.abc import Callable
from contextlib import contextmanager
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

import torch

PROBED = 512  # the longest window that rows are made to exceed; a longer one costs too much to try
SHORTEST = 14  # the rows of a probe for no window at all are shorter, and compared in full
KEPT = 16  # positions of a row that are compared
FINE_MARGIN, COARSE_MARGIN = 512, 4  # float errors that two right ways may differ by, in float32 and below it

_OUTPUT_HEADS: WeakKeyDictionary = WeakKeyDictionary()
_VERDICTS: WeakKeyDictionary = WeakKeyDictionary()


def output_head(model):
    """The linear layer whose output on the last hidden state IS the model's logits, or None if there is none.

    A forward pass on two tokens decides, once per model: the head's output must equal the logits bit for bit,
    so a model that caps or scales them is not mistaken for a plain one.
    """
    if model not in _OUTPUT_HEADS:
        _OUTPUT_HEADS[model] = is_plain_head(model)
    return model.get_output_embeddings() if _OUTPUT_HEADS[model] else None


@torch.no_grad()
def is_plain_head(model) -> bool:
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    base = getattr(model, "base_model", None)
    if not isinstance(head, torch.nn.Linear) or base is None or base is model:
        return False
    seen = {}
    hook = base.register_forward_hook(lambda module, args, output: seen.update(output=output))
    try:
        ids = torch.tensor([[0, 1]], device=head.weight.device)
        logits = model(input_ids=ids, use_cache=False).logits
    finally:
        hook.remove()
    hidden = getattr(seen.get("output"), "last_hidden_state", None)
    if hidden is None or hidden.shape[-1] != head.in_features:
        return False
    return torch.equal(head(hidden), logits)


def windows(config) -> list[int]:
    """Every length in a config beyond which attention or a recurrence may change, nested configs included:
    whole numbers whose name speaks of a window, a chunk or local attention (and not of layers)."""

    def walk(values):
        for name, value in values.items():
            if isinstance(value, dict) and not str(name).startswith(("vision", "audio")):
                yield from walk(value)
            elif isinstance(value, int) and value > 1 and "layers" not in str(name):  # True is 1
                used = values.get("use_sliding_window", True) or name != "sliding_window"
                if used and any(word in str(name) for word in ("window", "chunk", "local_attention")):
                    yield value

    return sorted(set(walk(config.to_dict())))


def positions(config) -> int | None:
    """The longest text in which a token's distribution depends only on what stands before it; None: no limit.

    With "dynamic" and "longrope" position embeddings a text longer than the original length changes the
    frequencies of ALL its positions, so sampling token by token and scoring at once are different models.
    """
    config = config.get_text_config()
    longest = getattr(config, "max_position_embeddings", None)
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = [rope, *(kind for kind in rope.values() if isinstance(kind, dict))]  # one, or one per layer type
    limits = [
        kind.get("original_max_position_embeddings")
        or getattr(config, "original_max_position_embeddings", None)
        for kind in kinds
        if kind.get("rope_type") in ("dynamic", "longrope")
    ]
    return min([n for n in [longest, *limits] if n], default=None)


class Probe:
    """Three rows of tokens and a plain full forward pass of each one by itself: what is right.

    rows: one, and two that share a prompt; all longer than ``window``.
    tolerance: how far apart two right ways may be: a margin times the model's own float error, which is how
        far its log-probs move (median over positions) when every second number of the embeddings' output is
        nudged by one unit in the last place, at least half a unit of the log-probs themselves. Right ways
        were measured at 0 to 2 times that error (a chunked recurrence at 400), wrong ones at 50,000 and more
        in float32, 10 and more in bfloat16.
    """

    def __init__(self, model, window: int):
        length = max(8, window + 4)  # + 5 is the longest row
        ids = usable_ids(model.config)
        token = [ids[(i * i + 3 * i) % len(ids)] for i in range(2 * length)]
        shared = token[: length // 2] + token[length : length + (length + 1) // 2]
        self.rows = [token[: length + 5], shared + token[1:3], shared + token[3:5]]
        self.log_probs = [full_log_probs(model, row) for row in self.rows]
        with nudged_embeddings(model):
            nudged = [full_log_probs(model, row) for row in self.rows]
        right, eps = torch.cat(self.log_probs), torch.finfo(model.dtype).eps
        noise = distances(torch.cat(nudged), right).median()
        rounding = eps / 2 * distances(right, torch.zeros(())).median()
        self.tolerance = (FINE_MARGIN if eps < 1e-4 else COARSE_MARGIN) * torch.maximum(
            noise, rounding
        ).item()
        self.finite = not right.isnan().any()

    def distances(self, row: int, position: int, log_probs: torch.Tensor) -> torch.Tensor:
        """How far the (n, vocabulary) ``log_probs`` of ``row`` from ``position`` on are from right, (n,)."""
        at = position - (len(self.rows[row]) - len(self.log_probs[row]))
        return distances(log_probs, self.log_probs[row][at : at + len(log_probs)])

    def agrees(self, found: torch.Tensor) -> bool:
        """Whether all distances are within the tolerance. NaN weights pass: they are named elsewhere."""
        return bool((found <= self.tolerance).all()) or not self.finite


def binding_window(model, longest: float) -> int:
    """The longest window that rows of ``longest`` tokens exceed; 0 if there is none."""
    known = _VERDICTS.setdefault(model, {})
    if "windows" not in known:
        known["windows"] = windows(model.config)
    return max((w for w in known["windows"] if w < max(longest, SHORTEST)), default=0)


def judged(model, what: str, window: int, judge: Callable[[Probe], Any]) -> Any:
    """What ``judge(probe)`` says of the model as it is, asked once per model, attention and window."""
    known = _VERDICTS.setdefault(model, {})
    key = what, window, model.config._attn_implementation
    if key not in known:
        with torch.no_grad(), evaluating(model), torch.autocast(model.device.type, enabled=False):
            known[key] = judge(Probe(model, window))
    return known[key]


def check_causal(model) -> None:
    """ValueError where a token's distribution depends on what comes after it, as an encoder's does."""

    def causal(probe: Probe) -> bool:
        found = probe.distances(0, 0, full_log_probs(model, probe.rows[0][:-4]))
        return probe.agrees(found.median())  # where experts nearly tie, rounding may move one position far

    if not judged(model, "causal", 0, causal):
        raise ValueError(
            f"model: got {type(model).__name__}, in which later tokens change the distribution of earlier "
            "ones (an encoder?); expected a causal language model"
        )


def full_log_probs(model, row: list[int]) -> torch.Tensor:
    """log p (KEPT, vocabulary), float32, at a row's last positions, by one plain forward pass of this row."""
    ids = torch.tensor([row], device=model.device)
    return model(input_ids=ids, use_cache=False).logits[0, -KEPT:].float().log_softmax(dim=-1)


@cache
def say_once(text: str) -> None:
    """Print a line that nobody needs twice."""
    print(text, flush=True)


@contextmanager
def nudged_embeddings(model):
    def nudge(module, args, output):
        every_second = torch.arange(output.numel(), device=output.device).view_as(output) % 2
        return output * (1 + torch.finfo(output.dtype).eps * every_second).to(output.dtype)

    hook = model.get_input_embeddings().register_forward_hook(nudge)
    try:
        yield
    finally:
        hook.remove()


@contextmanager
def evaluating(model):
    """The model in eval mode; every module's own mode is restored."""
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True


def distances(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Root mean squares over the vocabulary of two log-probs (positions, vocabulary), one per position."""
    return (a.clamp(min=-1e4) - b.clamp(min=-1e4)).square().mean(dim=-1).sqrt()


def usable_ids(config) -> list[int]:
    """Up to a hundred ordinary token ids: none that the config gives a meaning of its own, if it can be."""
    named = (getattr(config.get_text_config(), f"{name}_token_id", None) for name in ("pad", "bos", "eos"))
    special = {i for ids in named for i in (ids if isinstance(ids, list) else [ids])}
    ids = range(min(100, config.get_text_config().vocab_size))
    return [i for i in ids if i not in special] or list(ids)
