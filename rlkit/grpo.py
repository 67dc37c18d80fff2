"""One GRPO step: a rollout batch in, one optimizer step, metrics out."""

import warnings
from contextlib import nullcontext
from functools import partial
from math import inf, isfinite
from typing import Any

import torch

from rlkit.advantages import compute_group_normalized_rewards, compute_rollout_rewards
from rlkit.algorithms import Algorithm
from rlkit.batch import RolloutBatch, beside_labels
from rlkit.losses import (
    REWEIGHTINGS,
    aggregate_loss_across_microbatch,
    check_loss_normalization,
    check_reweighting,
    compute_policy_gradient_loss,
    k3,
    loss_gspo,
    loss_none,
    sequence_mean,
    token_mean,
)
from rlkit.samplers.shared_scoring import get_shared_prefix_log_probs
from rlkit.support.arguments import check_count, check_finite, check_number, check_shape, named_function
from rlkit.support.metrics import batch_statistics, microbatch_statistics
from rlkit.support.ranks import ranks_of
from rlkit.support.shapes import PerToken, Rows, Scalar
from rlkit.tokenization import tokenize_prompt_and_output


def train_step(
    model,
    optimizer,
    batch: RolloutBatch,
    algorithm: Algorithm,
    *,
    gradient_accumulation_steps=1,
    max_grad_norm=None,
    temperature=1.0,
    normalization_constant=None,
    autocast_dtype=None,
    scaler=None,
) -> tuple[Scalar, dict]:
    """Score, weigh by the advantages, accumulate gradients, take ONE optimizer step.

    Args:
        batch: with advantages, with old_log_probs if the algorithm reweights by them, and with ref_log_probs
            if it has a kl_coef.
        gradient_accumulation_steps: microbatches a full batch is cut into (each of ceil(B / steps) rows). It
            changes memory and speed, never the result.
        max_grad_norm: a longer gradient is scaled down to this norm; None leaves it.
        temperature: the sampler's.
        normalization_constant: see ``constant_sum``.
        autocast_dtype: such as torch.bfloat16, for mixed precision around the forward pass; None for none.
        scaler: a ``torch.amp.GradScaler``, for torch.float16: the loss is multiplied by its scale, so that
            small gradients are not rounded to zero, and the gradient divided by it before it is clipped. A
            gradient that is not finite halves the scale.

    Rows of advantage zero have no gradient and are never passed through the model, nor are empty responses;
    they keep counting in every divisor, so loss and gradient are those of the unpruned batch. (A reweighting
    of one's own is given every row, since its loss need not be proportional to the advantage.) If no row is
    left the loss is 0 and the optimizer still steps, with zero gradients, as it would unpruned. A gradient
    that is not finite is never applied: that step is skipped with a warning.

    Returns:
        (loss, metadata). loss is a detached scalar. metadata holds plain numbers, what is not finite left
        out: loss, grad_norm (before clipping), token_entropy (mean over response tokens, nats: of all rows if
        ``batch.entropies`` is there, else of the rows used), clip_fraction and its two sides (of all the
        batch's response tokens, or sequences for "gspo"), ratio_min and ratio_max (to the old policy,
        on-policy to the sampler), logprob_gap_mean and logprob_gap_max (|model - sampler|), response_length
        (mean tokens), rows_used (rows passed through the model), kl (mean of k3), lr, and the counts behind
        them (n_*). Every
        gradient is None.

    Raises ValueError for arguments that do not fit, before the model is touched.

    Source: the handout's sections 4.2.4, 5.4 and 6.4.
    """
    method = algorithm.importance_reweighting_method
    cliprange = algorithm.cliprange
    reweighting = check_step(batch, algorithm, gradient_accumulation_steps, max_grad_norm, temperature)
    normalize = check_loss_normalization(algorithm.loss_normalization, normalization_constant)
    if normalize is token_mean:  # of the whole batch, whatever its microbatches
        normalization_constant = max(1, int(batch.response_mask.sum()))
    batch = batch.to(next(model.parameters()).device)
    learn = rows_that_teach(batch, algorithm)

    model.zero_grad(set_to_none=True)
    batch_loss, statistics = 0.0, []
    ranks = ranks_of(model)
    pieces = batch.split(learn, -(-len(batch) // ranks.pieces(gradient_accumulation_steps)))
    for rows, mine in ranks.share(pieces):
        part = batch.select(rows)
        old = part.old_log_probs
        if old is None and reweighting is loss_none:  # not in the loss, only to see the ratio
            old = part.sampler_log_probs
        scored = score(model, part, temperature, autocast_dtype, part.entropies is None)
        per_token_loss, stats = compute_policy_gradient_loss(
            part.advantages, scored["log_probs"], method, old, cliprange, part.response_mask
        )
        if part.tis_weights is not None:
            per_token_loss = per_token_loss * part.tis_weights
        if algorithm.kl_coef and part.ref_log_probs is not None:
            penalty = k3(scored["log_probs"], part.ref_log_probs)
            per_token_loss = per_token_loss + algorithm.kl_coef * penalty
            stats = stats | {"kl": penalty.detach()[part.response_mask].mean()}
        loss = aggregate_loss_across_microbatch(
            per_token_loss, part.response_mask, algorithm.loss_normalization, normalization_constant
        )
        if normalize is sequence_mean:  # the mean over these rows -> their share of the whole batch's mean
            loss = loss * (len(rows) / len(batch))
        loss = loss * mine  # 0 for a rank that only takes part
        (loss if scaler is None else scaler.scale(loss)).backward()
        if mine:
            batch_loss += loss.item()
            statistics.append(microbatch_statistics(stats, scored, part))
    batch_loss = sum(ranks.gather(batch_loss))
    statistics = [some for found in ranks.gather(statistics) for some in found]

    grad_norm = optimizer_step(model, optimizer, max_grad_norm, scaler)
    metadata = batch_statistics(statistics, batch, reweighting is loss_gspo)
    metadata |= {"loss": batch_loss, "grad_norm": grad_norm, "rows_used": int(learn.sum())}
    metadata["lr"] = optimizer.param_groups[0]["lr"]
    return torch.tensor(batch_loss), {name: value for name, value in metadata.items() if isfinite(value)}


def rows_that_teach(batch: RolloutBatch, algorithm: Algorithm) -> Rows:
    """Rows with a response and an advantage other than 0 (any for a reweighting of one's own or a KL)."""
    method = algorithm.importance_reweighting_method
    own = named_function("importance_reweighting_method", method, REWEIGHTINGS) not in REWEIGHTINGS.values()
    return batch.response_mask.any(dim=1) & ((batch.advantages != 0) | own | (algorithm.kl_coef > 0))


def score(
    model, part: RolloutBatch, temperature=1.0, autocast_dtype=None, return_token_entropy=False
) -> dict:
    """Log-probabilities (and entropies) of a microbatch's response tokens, as ``get_response_log_probs``."""
    device_type = part.input_ids.device.type
    with nullcontext() if autocast_dtype is None else torch.autocast(device_type, dtype=autocast_dtype):
        rows, mask = (part.input_ids, part.labels, return_token_entropy), part.response_mask
        scoring = getattr(model, "score_rows", None) or partial(get_shared_prefix_log_probs, model)
        return scoring(*rows, response_mask=mask, temperature=temperature)


@torch.no_grad()
def response_log_probs(
    model, batch: RolloutBatch, *, temperature=1.0, microbatch_size=32, autocast_dtype=None, rows=None
) -> PerToken:
    """The model's log-probabilities of the response tokens, without gradient: ``old_log_probs``.

    rows: (B,) bool, which rows to score; None is all. Float32 on the model's device, 0 elsewhere.
    """
    batch = batch.to(next(model.parameters()).device)
    wanted = batch.response_mask.any(dim=1)
    wanted = wanted if rows is None else wanted & rows.to(wanted.device)
    result = torch.zeros(batch.labels.shape, device=wanted.device)
    ranks = ranks_of(model)
    for some, mine in ranks.share(batch.split(wanted, microbatch_size)):
        log_probs = score(model, batch.select(some), temperature, autocast_dtype)["log_probs"]
        if mine:
            result[some, : log_probs.shape[1]] = log_probs
    return ranks.total(result)


def optimizer_step(model, optimizer, max_grad_norm=None, scaler=None) -> float:
    """Clip, step, drop the gradients; returns the gradient's norm before clipping.

    A parameter without a gradient gets zeros, so that a batch with nothing to learn from steps as it would
    unpruned (an optimizer's momentum still moves the weights). If the norm is not finite, nothing is stepped.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    for p in parameters:
        p.grad = torch.zeros_like(p) if p.grad is None else p.grad
    limit = inf if max_grad_norm is None else max_grad_norm
    scaled = scaler is not None and scaler.is_enabled()
    if scaled:
        scaler.scale(parameters[0].grad.new_zeros(()))  # makes its scale, if no loss has been scaled yet
        scaler.unscale_(optimizer)
    norm: Any = torch.nn.utils.clip_grad_norm_(parameters, limit)
    norm = getattr(norm, "full_tensor", lambda: norm)().item()  # of a sharded model: over all ranks
    if scaled:  # as below, but that the scale is halved where the norm is not finite, and nothing is said
        scaler.step(optimizer)
        scaler.update()
    elif isfinite(norm):
        optimizer.step()
    else:
        warnings.warn(f"the gradient's norm is {norm}: this optimizer step is skipped", stacklevel=3)
    optimizer.zero_grad(set_to_none=True)
    model.zero_grad(set_to_none=True)
    return norm


def check_step(batch, algorithm, gradient_accumulation_steps, max_grad_norm, temperature):
    """The reweighting's function; ValueError for what a step cannot work with."""
    check_count("gradient_accumulation_steps", gradient_accumulation_steps)
    if max_grad_norm not in (None, inf):  # inf: measured, not scaled
        check_number("max_grad_norm", max_grad_norm, lambda v: v > 0, "a positive number or None")
    check_number("temperature", temperature, lambda t: t > 0, "the sampler's, a positive number")
    check_shape("advantages", batch.advantages, (len(batch),), "one finite number per response")
    check_finite("advantages: the advantage", batch.advantages)
    method = algorithm.importance_reweighting_method
    reweighting = named_function("importance_reweighting_method", method, REWEIGHTINGS)
    check_reweighting(reweighting, batch.old_log_probs, algorithm.cliprange)
    if algorithm.kl_coef and batch.ref_log_probs is None:
        raise ValueError("ref_log_probs: got None with a kl_coef, expected the reference's log-probabilities")
    return reweighting


# ---- the handout's function


def grpo_train_step(
    model,
    tokenizer,
    optimizer,
    gradient_accumulation_steps,
    max_grad_norm,
    reward_fn,
    repeated_prompts,
    rollout_responses,
    repeated_ground_truths,
    group_size,
    baseline="mean",
    advantage_eps=1e-6,
    advantage_normalizer="std",
    importance_reweighting_method="none",
    old_log_probs=None,
    cliprange=None,
    loss_normalization="sequence",
    normalization_constant=None,
) -> tuple[Scalar, dict]:
    """Reward, normalise, tokenise, and ``train_step``.

    Args (B responses; T the longest row minus 1):
        repeated_prompts, rollout_responses, repeated_ground_truths: B strings each, group_size in a row per
        prompt.
        old_log_probs: the sampling policy's, (B, T) beside the labels, or B rows of one value per token.
        The other arguments are the components'.

    Returns (loss, metadata) of ``train_step``; metadata also holds the mean rewards and the group statistics.
    Raises ValueError for what the components refuse, before the model is touched.

    Source: the handout's sections 4.2.4, 5.4 and 6.4.
    """
    rewards, means = compute_rollout_rewards(reward_fn, rollout_responses, repeated_ground_truths)
    advantages, statistics = compute_group_normalized_rewards(
        rewards, group_size, baseline, advantage_eps, advantage_normalizer
    )
    batch = RolloutBatch(**tokenize_prompt_and_output(repeated_prompts, rollout_responses, tokenizer))
    for start in range(0, len(repeated_prompts), group_size):
        if len(set(repeated_prompts[start : start + group_size])) > 1:
            raise ValueError(
                f"repeated_prompts: rows {start} to {start + group_size - 1} are one group and have other "
                f"prompts, expected the {group_size} responses to a prompt in a row"
            )
    batch.advantages = advantages.float()
    if old_log_probs is not None:
        batch.old_log_probs = beside_labels("old_log_probs", old_log_probs, batch.response_mask)
    algorithm = Algorithm(
        "", baseline, advantage_normalizer, loss_normalization, importance_reweighting_method, cliprange
    )
    loss, metadata = train_step(
        model,
        optimizer,
        batch,
        algorithm,
        gradient_accumulation_steps=gradient_accumulation_steps,
        max_grad_norm=max_grad_norm,
        normalization_constant=normalization_constant,
    )
    return loss, means | statistics | metadata
