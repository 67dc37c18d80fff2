"""The per-token policy-gradient loss, and its mean over a microbatch."""

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from rlkit.support.arguments import (
    as_tensor,
    check_matrix,
    check_number,
    check_shape,
    is_one_number,
    named_function,
)
from rlkit.support.checks import shown
from rlkit.support.shapes import Mask, PerRow, PerToken, Scalar

MAX_LOG_RATIO = 80.0  # exp(80) = 5.5e34 still fits float32; beyond it a ratio is held there, without gradient


# ---- importance ratios: the policy's probability over the sampling policy's


def token_ratio(log_probs: PerToken, old_log_probs: PerToken, mask: Mask | None = None) -> PerToken:
    """w = exp(log pi - log pi_0) at every token. PPO (1707.06347), GRPO (2402.03300)."""
    return (log_probs - old_log_probs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def sequence_ratio(log_probs: PerToken, old_log_probs: PerToken, mask: Mask) -> PerRow:
    """s = exp(mean over response tokens of log pi - log pi_0), 1 for an empty row. GSPO (2507.18071)."""
    log_ratio = (log_probs - old_log_probs).masked_fill(~mask, 0.0).sum(dim=1, keepdim=True)
    mean = log_ratio / mask.sum(dim=1, keepdim=True).clamp(min=1)
    return mean.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def bounds(cliprange) -> tuple[float, float]:
    """(1 - e, 1 + e); of a pair (e_low, e_high) (1 - e_low, 1 + e_high): DAPO's clip-higher (2503.14476)."""
    low, high = cliprange if isinstance(cliprange, (tuple, list)) else (cliprange, cliprange)
    return 1 - low, 1 + high


# ---- importance reweightings: the loss at every token
# f(advantages (B, 1), log_probs (B, T), old_log_probs (B, T) | None, mask (B, T), cliprange | None)
# -> (B, T), or ((B, T), dict of numbers to log)


def loss_none(advantages: PerRow, log_probs: PerToken, old, mask, cliprange) -> PerToken:
    """-A log pi: REINFORCE, on-policy."""
    return -advantages * log_probs


def loss_noclip(advantages: PerRow, log_probs: PerToken, old: PerToken, mask, cliprange) -> PerToken:
    """-A w."""
    return -advantages * token_ratio(log_probs, old)


def loss_grpo(advantages: PerRow, log_probs: PerToken, old: PerToken, mask, cliprange) -> PerToken:
    """-min(A w, A clip(w, 1 - e, 1 + e)): PPO's clip (1707.06347), as in GRPO (2402.03300)."""
    w = token_ratio(log_probs, old)
    return -torch.minimum(advantages * w, advantages * w.clamp(*bounds(cliprange)))


def loss_gspo(advantages: PerRow, log_probs: PerToken, old: PerToken, mask, cliprange) -> PerToken:
    """-min(A s, A clip(s, 1 - e, 1 + e)), the same number at every token of a row: GSPO (2507.18071)."""
    s = sequence_ratio(log_probs, old, mask)
    loss = -torch.minimum(advantages * s, advantages * s.clamp(*bounds(cliprange)))
    return loss.expand_as(log_probs)


def loss_cispo(advantages: PerRow, log_probs: PerToken, old: PerToken, mask, cliprange) -> PerToken:
    """-stop_gradient(min(w, 1 + e)) A log pi: CISPO (MiniMax-M1, 2506.13585)."""
    w = token_ratio(log_probs, old)
    return -w.clamp(max=bounds(cliprange)[1]).detach() * advantages * log_probs


REWEIGHTINGS = dict(none=loss_none, noclip=loss_noclip, grpo=loss_grpo, gspo=loss_gspo, cispo=loss_cispo)
CLIPPED = (loss_grpo, loss_gspo, loss_cispo)


# ---- loss normalisers: f(loss (B, T), mask (B, T), constant | None) -> scalar
# A train step adds the losses of microbatches, and rows that teach nothing are not among them. So one's own
# is a sum over rows, divided by the constant (the step turns sequence_mean's mean into its share of the sum).


def sequence_mean(loss: PerToken, mask: Mask, constant=None) -> Scalar:
    """1/B sum_i 1/|y_i| sum_t loss_it; a row with an empty mask adds 0 and counts in B. GRPO (2402.03300)."""
    return (masked_sums(loss, mask) / mask.sum(dim=1).clamp(min=1)).sum() / max(len(loss), 1)


def constant_sum(loss: PerToken, mask: Mask, constant: float) -> Scalar:
    """1/Z sum_i sum_t loss_it with one Z for all of training: Dr. GRPO (2503.20783)."""
    return masked_sums(loss, mask).sum() / constant


def token_mean(loss: PerToken, mask: Mask, n_tokens=None) -> Scalar:
    """1/N sum_i sum_t loss_it, N the train batch's response tokens (None: those here). DAPO (2503.14476)."""
    return masked_sums(loss, mask).sum() / (mask.sum().clamp(min=1) if n_tokens is None else n_tokens)


def masked_sums(loss: PerToken, mask: Mask) -> Float[Tensor, " batch"]:
    """Each row's sum over its mask; what stands elsewhere, even NaN, reaches neither value nor gradient."""
    return loss.masked_fill(~mask, 0.0).sum(dim=1, dtype=torch.promote_types(loss.dtype, torch.float32))


LOSS_NORMALIZATIONS = {"sequence": sequence_mean, "constant": constant_sum, "token": token_mean}


def k3(log_probs: PerToken, ref_log_probs: PerToken) -> PerToken:
    """exp(d) - 1 - d with d = log ref - log pi: at samples of pi its mean is KL(pi, ref), its gradient's mean
    that of KL(ref, pi). Schulman 2020, "Approximating KL divergence"; as GRPO (2402.03300) uses it."""
    d = ref_log_probs - log_probs
    return d.clamp(max=MAX_LOG_RATIO).exp() - 1 - d


# ---- the handout's two functions


def compute_policy_gradient_loss(
    raw_rewards_or_advantages,
    policy_log_probs: PerToken,
    importance_reweighting_method: str | Callable = "none",
    old_log_probs: PerToken | None = None,
    cliprange=None,
    response_mask: Mask | None = None,
):
    """The loss at every token; its gradient is minus the policy-gradient estimator's term.

    Args:
        raw_rewards_or_advantages: (B,) or (B, 1).
        policy_log_probs: with gradient. Half precision is turned into float32, in which ratios fit.
        importance_reweighting_method: a name in ``REWEIGHTINGS``, or a function like those there.
        old_log_probs: those of the policy that sampled; needed by every method but "none". No gradient.
        cliprange: e >= 0, or a pair of them (below, above), needed by "grpo", "gspo" and "cispo".
        response_mask: True at response tokens; None counts every position as one. Whatever stands at the
            other positions (NaN, infinities, stale values) is replaced before any arithmetic.

    Returns (per_token_loss (B, T), metadata): the scalars of ``clip_statistics``, or what the function gave.
    Raises ValueError for a missing old_log_probs or cliprange, shapes that do not fit, an unknown method.

    Source: the handout's sections 4.2.4 and 6.
    """
    name = "importance_reweighting_method"
    check_matrix("policy_log_probs", policy_log_probs)
    shape = policy_log_probs.shape
    for other, tensor in (("old_log_probs", old_log_probs), ("response_mask", response_mask)):
        if tensor is not None:
            check_shape(other, tensor, shape, "as policy_log_probs")
    advantages = as_tensor(
        "raw_rewards_or_advantages", raw_rewards_or_advantages, device=policy_log_probs.device
    )
    if tuple(advantages.shape) not in ((len(policy_log_probs),), (len(policy_log_probs), 1)):
        check_shape("raw_rewards_or_advantages", advantages, shape[:1], "one per row of policy_log_probs")
    method = named_function(name, importance_reweighting_method, REWEIGHTINGS)
    check_reweighting(method, old_log_probs, cliprange)

    log_probs = policy_log_probs.to(torch.promote_types(policy_log_probs.dtype, torch.float32))
    if advantages.dtype != torch.float64:  # bool, integer or half-precision ones
        advantages = advantages.to(log_probs.dtype)
    advantages = advantages.reshape(-1, 1)
    mask = (torch.ones_like(log_probs) if response_mask is None else response_mask).bool()
    log_probs = log_probs.masked_fill(~mask, 0.0)
    if old_log_probs is not None:
        old_log_probs = old_log_probs.detach().to(log_probs.dtype).masked_fill(~mask, 0.0)
    result = method(advantages, log_probs, old_log_probs, mask, cliprange)
    loss: Any = result
    metadata: Any = {}
    if isinstance(result, tuple) and len(result) == 2:
        loss, metadata = result
    expected = "a loss at every token, or that and a dict of numbers"
    check_shape(f"{name}: the function", loss, shape, expected)
    if not (isinstance(metadata, dict) and all(map(is_one_number, metadata.values()))):
        raise ValueError(f"{name}: the function: got {shown(metadata)}, expected {expected}")
    if method in REWEIGHTINGS.values():
        ratio = sequence_ratio if method is loss_gspo else token_ratio
        ratio = None if old_log_probs is None else ratio(log_probs, old_log_probs, mask)
        metadata = clip_statistics(method, advantages, ratio, cliprange, mask)
    return loss, metadata


@torch.no_grad()
def clip_statistics(method, advantages: PerRow, ratio, cliprange, mask: Mask) -> dict:
    """Scalars over the response tokens (over the sequences for GSPO).

    n_ratios: how many are counted; n_clipped_low, n_clipped_high: at how many of them clipping binds;
    clip_fraction, clip_fraction_low, clip_fraction_high: those over n_ratios; ratio_min and ratio_max, unless
    ``ratio`` ((B, T), for GSPO (B, 1)) is None. Clipping binds where the min takes the clipped branch, so
    that no gradient flows: low is A < 0 and w < 1 - e, high is A > 0 and w > 1 + e. (A ratio outside on the
    other side is not clipped.) For CISPO high counts A != 0 and w > 1 + e, where the weight is held; its
    gradient still flows.
    """
    counted = mask.any(dim=1, keepdim=True) if method is loss_gspo else mask
    low = high = torch.zeros_like(counted)
    if method in CLIPPED:
        lowest, highest = bounds(cliprange)
        above, below = ratio > highest, ratio < lowest
        low = counted & (advantages < 0) & below & (method is not loss_cispo)
        high = counted & above & ((advantages != 0) if method is loss_cispo else (advantages > 0))
    stats = {"n_ratios": counted.sum(), "n_clipped_low": low.sum(), "n_clipped_high": high.sum()}
    n = stats["n_ratios"].clamp(min=1)
    stats["clip_fraction"] = (low.sum() + high.sum()) / n
    stats |= {"clip_fraction_low": low.sum() / n, "clip_fraction_high": high.sum() / n}
    if ratio is not None and bool(counted.any()):
        stats |= {"ratio_min": ratio[counted].min(), "ratio_max": ratio[counted].max()}
    return stats


def aggregate_loss_across_microbatch(
    per_token_policy_gradient_loss: PerToken,
    mask,
    loss_normalization: str | Callable = "sequence",
    normalization_constant=None,
) -> Scalar:
    """One number from the (B, T) losses, by a name in ``LOSS_NORMALIZATIONS`` or a function like those there.

    Args:
        mask: (B, T), True (or 1) at response tokens. Positions outside it are left out by selection, so NaN
            or infinities there reach neither the value nor the gradient.
        normalization_constant: a positive number, needed by "constant": one constant for all of training,
            such as rows in the batch x longest response (Dr. GRPO's B G L_max). It covers the whole batch, so
            losses of microbatches are simply added.

    Returns: a scalar tensor, summed (and left) in float32 where the losses are in half precision.
    Raises: ValueError for shapes that differ, an unknown name, a missing constant.

    Source: the handout's sections 4.2.4 and 5.
    """
    loss = per_token_policy_gradient_loss
    check_matrix("per_token_policy_gradient_loss", loss)
    check_shape("mask", mask, loss.shape, "as the loss")
    normalize = check_loss_normalization(loss_normalization, normalization_constant)
    result = normalize(loss, mask.bool(), normalization_constant)
    check_shape("loss_normalization: the function", result, (), "one number as a tensor")
    return result


def check_loss_normalization(loss_normalization, normalization_constant):
    """The function of this name; ValueError for an unknown one, or a constant that is missing."""
    normalize = named_function("loss_normalization", loss_normalization, LOSS_NORMALIZATIONS)
    if normalize is constant_sum:
        expected = "a positive number with loss_normalization='constant'"
        check_number("normalization_constant", normalization_constant, lambda z: z > 0, expected)
    return normalize


def check_reweighting(method, old_log_probs, cliprange) -> None:
    """Refuse a method (a function) whose old_log_probs or cliprange is missing."""
    known = {function: name for name, function in REWEIGHTINGS.items()}
    needing = f"with importance_reweighting_method={known.get(method)!r}, expected"
    if method in known and method is not loss_none and old_log_probs is None:
        raise ValueError(f"old_log_probs: got None {needing} the sampling policy's log-probabilities")
    if method in CLIPPED:
        pair = isinstance(cliprange, (tuple, list)) and len(cliprange) == 2
        for e in cliprange if pair else [cliprange]:
            check_number("cliprange", e, lambda e: e >= 0, f"a number >= 0 {needing[:-10]}")
