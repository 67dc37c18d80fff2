"""The per-token policy-gradient loss, and its mean over a microbatch."""

from __future__ import annotations

import torch

from rlkit.support.checks import number, shown

METHODS = ("none", "noclip", "grpo", "gspo", "cispo")
MAX_LOG_RATIO = 80.0  # exp(80) = 5.5e34 still fits float32; beyond it a ratio is held there, without gradient


def compute_policy_gradient_loss(
    raw_rewards_or_advantages,
    policy_log_probs,
    importance_reweighting_method="none",
    old_log_probs=None,
    cliprange=None,
    response_mask=None,
):
    """The loss at every token; its gradient is minus the policy-gradient estimator's term.

    With A the row's advantage, log pi the token's log-probability, w = exp(log pi - log pi_0) and e =
        cliprange: "none"    -A log pi "noclip"  -A w "grpo"    -min(A w, A clip(w, 1 - e, 1 + e)) "gspo"
        as "grpo", with s = exp(mean of log pi - log pi_0 over the row's response tokens) in place of w
        "cispo"   -stop_gradient(min(w, 1 + e)) A log pi
    or a function ``f(advantages (B, 1), log_probs (B, T), old_log_probs | None, response_mask | None,
    cliprange | None)`` that gives the (B, T) loss, or (loss, dict of numbers to log).

    Args:
        raw_rewards_or_advantages: (B,) or (B, 1).
        policy_log_probs: (B, T), with gradient. Half precision is turned into float32, in which ratios fit.
        old_log_probs: (B, T), those of the policy that sampled; needed by every method but "none". No
            gradient.
        cliprange: e >= 0, needed by "grpo", "gspo" and "cispo".
        response_mask: (B, T) bool, True at response tokens; None counts every position as one. Whatever
            stands at the other positions (NaN, infinities, stale values) is replaced before any arithmetic.

    Returns:
        (per_token_loss (B, T), metadata). metadata holds detached scalars: n_ratios, how many tokens
        (sequences for "gspo") are counted; n_clipped_low and n_clipped_high, at how many of them clipping
        binds; clip_fraction, clip_fraction_low and clip_fraction_high, those over n_ratios; and, with
        old_log_probs, ratio_min and ratio_max. Clipping binds where the min takes the clipped branch, so that
        no gradient
        flows: low is A < 0 and w < 1 - e, high is A > 0 and w > 1 + e. (A ratio outside the range on the
        other side is not clipped and not counted.) For "cispo" high counts A != 0 and w > 1 + e, where the
        weight is held; its gradient still flows.

    Raises:
        ValueError: a missing old_log_probs or cliprange, shapes that do not fit, an unknown method.

    Source: PPO (1707.06347), GRPO (2402.03300), GSPO (2507.18071), CISPO (MiniMax-M1, 2506.13585).
    """
    method = importance_reweighting_method
    _check_tensors(
        policy_log_probs=policy_log_probs, old_log_probs=old_log_probs, response_mask=response_mask
    )
    policy_log_probs = policy_log_probs.to(torch.promote_types(policy_log_probs.dtype, torch.float32))
    try:
        raw_rewards_or_advantages = torch.as_tensor(raw_rewards_or_advantages, device=policy_log_probs.device)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"raw_rewards_or_advantages: got {shown(raw_rewards_or_advantages)}, expected a tensor or a "
            "list of numbers"
        ) from error
    if raw_rewards_or_advantages.dtype != torch.float64:  # bool, integer or half-precision ones
        raw_rewards_or_advantages = raw_rewards_or_advantages.to(policy_log_probs.dtype)
    _check_loss_arguments(
        raw_rewards_or_advantages, policy_log_probs, method, old_log_probs, cliprange, response_mask
    )
    advantages = raw_rewards_or_advantages.reshape(-1, 1)  # (B, 1)
    mask = (
        torch.ones_like(policy_log_probs, dtype=torch.bool) if response_mask is None else response_mask.bool()
    )
    log_probs = policy_log_probs.masked_fill(~mask, 0.0)
    if old_log_probs is not None:
        old_log_probs = old_log_probs.detach().to(log_probs.dtype).masked_fill(~mask, 0.0)
    if callable(method):
        result = method(advantages, log_probs, old_log_probs, response_mask, cliprange)
        loss, statistics = result if isinstance(result, tuple) else (result, {})
        if not isinstance(loss, torch.Tensor) or loss.shape != log_probs.shape:
            got = f"shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else shown(loss)
            raise ValueError(
                f"importance_reweighting_method: the function gave {got}, expected a loss at every token, "
                f"{tuple(log_probs.shape)}, or that and a dict"
            )
        return loss, statistics

    ratio = (
        None if old_log_probs is None else importance_ratio(log_probs, old_log_probs, mask, method == "gspo")
    )
    if method == "none":
        loss = -advantages * log_probs
    elif method == "noclip":
        loss = -advantages * ratio
    elif method == "cispo":
        loss = -ratio.clamp(max=1 + cliprange).detach() * advantages * log_probs
    else:  # "grpo" and "gspo" differ in the ratio only
        clipped = ratio.clamp(1 - cliprange, 1 + cliprange)
        loss = -torch.minimum(advantages * ratio, advantages * clipped)
    loss = loss.expand_as(policy_log_probs)
    return loss, clip_statistics(method, advantages, ratio, cliprange, mask)


def importance_ratio(log_probs, old_log_probs, mask, per_sequence=False):
    """w = exp(log pi - log pi_0), (B, T); per sequence the geometric mean over the masked tokens, (B, 1).

    An empty row has the ratio 1. Differences beyond +-80 are held there, so that nothing overflows.
    """
    log_ratio = log_probs - old_log_probs
    if per_sequence:
        n_tokens = mask.sum(dim=1, keepdim=True)
        log_ratio = log_ratio.masked_fill(~mask, 0.0).sum(dim=1, keepdim=True) / n_tokens.clamp(min=1)
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


@torch.no_grad()
def clip_statistics(method, advantages, ratio, cliprange, mask) -> dict[str, torch.Tensor]:
    """The metadata of ``compute_policy_gradient_loss``, counted over response tokens (or whole sequences)."""
    counted = mask.any(dim=1, keepdim=True) if method == "gspo" else mask
    low = high = torch.zeros_like(counted)
    if method in ("grpo", "gspo"):
        low = counted & (advantages < 0) & (ratio < 1 - cliprange)
        high = counted & (advantages > 0) & (ratio > 1 + cliprange)
    elif method == "cispo":
        high = counted & (advantages != 0) & (ratio > 1 + cliprange)
    stats = {"n_ratios": counted.sum(), "n_clipped_low": low.sum(), "n_clipped_high": high.sum()}
    n = stats["n_ratios"].clamp(min=1)
    stats |= {
        "clip_fraction": (stats["n_clipped_low"] + stats["n_clipped_high"]) / n,
        "clip_fraction_low": stats["n_clipped_low"] / n,
        "clip_fraction_high": stats["n_clipped_high"] / n,
    }
    if ratio is not None and bool(counted.any()):
        seen = ratio[counted]
        stats |= {"ratio_min": seen.min(), "ratio_max": seen.max()}
    return stats


def aggregate_loss_across_microbatch(
    per_token_policy_gradient_loss, mask, loss_normalization="sequence", normalization_constant=None
):
    """One number from the (B, T) losses.

    "sequence": the mean over each row's masked tokens, then the mean over the B rows; a row with an empty
    mask adds 0 and still counts in B. "constant": the masked sum over ``normalization_constant``. Positions
    outside the mask are left out by selection, so NaN or infinities there reach neither the value nor the
    gradient.

    Args:
        per_token_policy_gradient_loss: (B, T).
        mask: (B, T), True (or 1) at response tokens.
        normalization_constant: a positive number, needed by "constant": one constant for all of training,
            such as rows in the batch x longest response (Dr. GRPO's B G L_max). It covers the whole batch, so
            losses of microbatches are simply added.

    Returns: a scalar tensor, summed (and left) in float32 where the losses are in half precision.
    Raises: ValueError for shapes that differ, an unknown name, a missing constant.
    """
    loss = per_token_policy_gradient_loss
    _check_tensors(per_token_policy_gradient_loss=loss, mask=mask)
    if loss.shape != mask.shape or loss.ndim != 2:
        raise ValueError(
            f"mask: got shape {tuple(mask.shape)} for a loss of shape {tuple(loss.shape)}, expected "
            "two equal (batch, sequence) shapes"
        )
    check_loss_normalization(loss_normalization, normalization_constant)
    mask = mask.bool()
    row_sums = loss.masked_fill(~mask, 0.0).sum(
        dim=1, dtype=torch.promote_types(loss.dtype, torch.float32)
    )  # (B,)
    if loss_normalization == "constant":
        return row_sums.sum() / normalization_constant
    return (row_sums / mask.sum(dim=1).clamp(min=1)).sum() / max(len(loss), 1)


def check_loss_normalization(loss_normalization, normalization_constant):
    if loss_normalization not in ("sequence", "constant"):
        raise ValueError(
            f"loss_normalization: got {shown(loss_normalization)}, expected 'sequence' or 'constant'"
        )
    if loss_normalization == "constant" and not 0 < number(normalization_constant) < float("inf"):
        raise ValueError(
            f"normalization_constant: got {shown(normalization_constant)} with loss_normalization="
            "'constant', expected a positive number"
        )


def check_reweighting(method, old_log_probs, cliprange):
    """Refuse an unknown method, or one whose old_log_probs or cliprange is missing."""
    if not callable(method) and method not in METHODS:
        raise ValueError(
            f"importance_reweighting_method: got {shown(method)}, expected one of {', '.join(METHODS)} or "
            "a function"
        )
    if method in ("noclip", "grpo", "gspo", "cispo") and old_log_probs is None:
        raise ValueError(
            f"old_log_probs: got None with importance_reweighting_method={method!r}, expected the "
            "sampling policy's log-probabilities"
        )
    if method in ("grpo", "gspo", "cispo") and not number(cliprange) >= 0:
        raise ValueError(
            f"cliprange: got {shown(cliprange)} with importance_reweighting_method={method!r}, expected a "
            "number >= 0"
        )


def _check_loss_arguments(advantages, log_probs, method, old_log_probs, cliprange, response_mask):
    check_reweighting(method, old_log_probs, cliprange)
    if log_probs.ndim != 2:
        raise ValueError(f"policy_log_probs: got shape {tuple(log_probs.shape)}, expected (batch, sequence)")
    if tuple(advantages.shape) not in ((len(log_probs),), (len(log_probs), 1)):
        raise ValueError(
            f"raw_rewards_or_advantages: got shape {tuple(advantages.shape)}, expected "
            f"({len(log_probs)},) or ({len(log_probs)}, 1), one per row of policy_log_probs"
        )
    for name, tensor in (("old_log_probs", old_log_probs), ("response_mask", response_mask)):
        if tensor is not None and tensor.shape != log_probs.shape:
            raise ValueError(
                f"{name}: got shape {tuple(tensor.shape)}, expected policy_log_probs' "
                f"{tuple(log_probs.shape)}"
            )


def _check_tensors(**tensors):
    for name, tensor in tensors.items():
        if tensor is not None and not isinstance(tensor, torch.Tensor):
            raise ValueError(f"{name}: got {shown(tensor)}, expected a tensor (batch, sequence)")
