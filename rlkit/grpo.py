"""One GRPO step: rollouts in, one optimizer step, numbers to log out."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from math import isfinite

import torch

from rlkit.advantages import compute_group_normalized_rewards, compute_rollout_rewards
from rlkit.log_probs import get_response_log_probs, get_shared_prefix_log_probs
from rlkit.losses import (
    aggregate_loss_across_microbatch,
    check_loss_normalization,
    check_reweighting,
    compute_policy_gradient_loss,
)
from rlkit.support.checks import number, shown
from rlkit.tokenization import tokenize_prompt_and_output


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
    *,
    response_token_ids=None,
    prompt_token_ids=None,
    temperature=1.0,
    advantages=None,
    rewards_metadata=None,
    autocast_dtype=None,
    tis_weights=None,
    sampler_log_probs=None,
    shared_prefix=True,
    entropy_rows="all",
):
    """Reward, normalise, score, accumulate gradients, take ONE optimizer step.

    Args (B is the train batch, the number of responses; T the longest row minus 1):
        model, tokenizer, optimizer: a causal language model and what belongs to it.
        gradient_accumulation_steps: microbatches a full batch is cut into (each of ceil(B / steps) rows;
            pruned rows save microbatches). It changes memory and speed, never the result.
        max_grad_norm: the gradient is scaled down to this norm if it is longer; None leaves it.
        reward_fn, repeated_prompts, rollout_responses, repeated_ground_truths: B strings each, G in a row per
        prompt.
        group_size, baseline, advantage_eps, advantage_normalizer: see ``compute_group_normalized_rewards``.
        importance_reweighting_method, cliprange: see ``compute_policy_gradient_loss``.
        old_log_probs: the sampling policy's, (B, T) beside the labels, or a list of B 1-D tensors with one
            value per response token (as from ``response_log_probs``).
        loss_normalization, normalization_constant: see ``aggregate_loss_across_microbatch``.
        response_token_ids, prompt_token_ids: the sampler's own ids; nothing is re-tokenised then.
        temperature: the sampler's.
        advantages: (B,), when they come from somewhere else, as off-policy, where a row's group is not whole
            in the train batch. No reward is computed then; ``rewards_metadata`` is merged into the metadata.
        autocast_dtype: such as torch.bfloat16, for mixed precision around the forward pass; None for none.
        tis_weights: B lists or 1-D tensors, one detached factor per response token, multiplied into the loss
            (truncated importance sampling between the sampling engine and the trainer).
        sampler_log_probs: as old_log_probs, the sampling engine's own; only compared with the model's and
            logged.
        shared_prefix: score the prompt once per group where the model can (see
            ``get_shared_prefix_log_probs``).
        entropy_rows: "all" also scores the pruned rows, without gradient, so that the entropy covers the
            whole batch; "kept" leaves them out altogether, which is cheaper and lets the entropy depend on
            the pruning.

    Rows of advantage zero have no gradient and are never passed through the model with one, but they keep
    counting
    in every divisor: loss and gradient are those of the unpruned batch. (A method that is a function is given
    every row, since its loss need not be proportional to the advantage.) If no row is left the loss is 0 and
    the optimizer still steps, with zero gradients, as it would unpruned. Empty responses are not passed
    through the model at all. A gradient that is not finite is never applied: that step is skipped with a
    warning.

    Returns:
        (loss, metadata). loss is a detached scalar. metadata holds plain numbers: loss, grad_norm (before
        clipping), token_entropy (mean over response tokens, nats), reward, format_reward, answer_reward
        (means), clip_fraction, clip_fraction_low, clip_fraction_high (of all the batch's response tokens, or
        sequences for "gspo"), ratio_min and ratio_max (with old_log_probs), logprob_gap_mean and
        logprob_gap_max (the distance |model - sampler|, with sampler_log_probs), response_length (mean
        tokens), rows_used (rows with gradient), lr, and the group statistics of
        ``compute_group_normalized_rewards`` (pass_at_k is a list). What is not finite is left out. Afterwards
        every gradient is None.

    Raises:
        ValueError: whatever the components refuse, before the model is touched.

    Source: the handout's sections 4.2.4, 5.4 and 6.4.
    """
    _check_step(gradient_accumulation_steps, max_grad_norm, temperature, entropy_rows)
    check_reweighting(importance_reweighting_method, old_log_probs, cliprange)
    check_loss_normalization(loss_normalization, normalization_constant)
    metadata = dict(rewards_metadata or {})
    if advantages is None:
        raw_rewards, means = compute_rollout_rewards(reward_fn, rollout_responses, repeated_ground_truths)
        advantages, groups = compute_group_normalized_rewards(
            raw_rewards, group_size, baseline, advantage_eps, advantage_normalizer
        )
        metadata |= means | groups
    batch = make_train_batch(
        model,
        tokenizer,
        repeated_prompts,
        rollout_responses,
        response_token_ids,
        prompt_token_ids,
        advantages=advantages,
        old_log_probs=old_log_probs,
        tis_weights=tis_weights,
        sampler_log_probs=sampler_log_probs,
    )

    n_rows = len(batch["advantages"])
    not_empty = batch["response_mask"].any(dim=1)
    learn = not_empty & (callable(importance_reweighting_method) | (batch["advantages"] != 0))
    rows_per_microbatch = -(-n_rows // gradient_accumulation_steps)
    passes = [(rows, True) for rows in split_rows(batch, learn, rows_per_microbatch, shared_prefix)]
    if entropy_rows == "all":
        passes += [
            (rows, False)
            for rows in split_rows(batch, not_empty & ~learn, rows_per_microbatch, shared_prefix)
        ]

    model.zero_grad(set_to_none=True)
    batch_loss, statistics = 0.0, []
    for rows, with_gradient in passes:
        part = select_rows(batch, rows)
        with torch.set_grad_enabled(with_gradient):
            scored = score(model, part, temperature, autocast_dtype, shared_prefix)
            per_token_loss, stats = compute_policy_gradient_loss(
                part["advantages"],
                scored["log_probs"],
                importance_reweighting_method,
                part.get("old_log_probs"),
                cliprange,
                part["response_mask"],
            )
            if "tis_weights" in part:
                per_token_loss = per_token_loss * part["tis_weights"]
            loss = aggregate_loss_across_microbatch(
                per_token_loss, part["response_mask"], loss_normalization, normalization_constant
            )
            if (
                loss_normalization == "sequence"
            ):  # the mean over these rows -> their share of the whole batch's mean
                loss = loss * (len(rows) / n_rows)
        if with_gradient:
            loss.backward()
            batch_loss += loss.item()
        statistics.append(_microbatch_statistics(stats, scored, part))

    grad_norm = optimizer_step(model, optimizer, max_grad_norm)
    metadata |= _batch_statistics(statistics, batch, importance_reweighting_method == "gspo")
    metadata |= {
        "loss": batch_loss,
        "grad_norm": grad_norm,
        "rows_used": int(learn.sum()),
        "lr": optimizer.param_groups[0]["lr"],
    }
    return torch.tensor(batch_loss), {
        k: v for k, v in metadata.items() if not isinstance(v, float) or isfinite(v)
    }


def optimizer_step(model, optimizer, max_grad_norm=None) -> float:
    """Clip, step, drop the gradients; returns the gradient's norm before clipping.

    A parameter without a gradient gets zeros, so that a batch with nothing to learn from steps as it would
    unpruned (an optimizer's momentum still moves the weights). If the norm is not finite, nothing is stepped.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    for p in parameters:
        if p.grad is None:
            p.grad = torch.zeros_like(p)
    norm = torch.nn.utils.clip_grad_norm_(
        parameters, torch.inf if max_grad_norm is None else max_grad_norm
    ).item()
    if isfinite(norm):
        optimizer.step()
    else:
        warnings.warn(f"the gradient's norm is {norm}: this optimizer step is skipped", stacklevel=3)
    optimizer.zero_grad(set_to_none=True)
    model.zero_grad(set_to_none=True)
    return norm


def response_log_probs(
    model,
    tokenizer,
    repeated_prompts,
    rollout_responses,
    *,
    response_token_ids=None,
    prompt_token_ids=None,
    temperature=1.0,
    microbatch_size=32,
    autocast_dtype=None,
    shared_prefix=True,
):
    """The model's log-probabilities of each response's tokens, without gradient: the off-policy
    ``old_log_probs``.

    Scored in microbatches of rows of like length; given back in the rows' own order.

    Returns:
        a list of B float32 1-D CPU tensors, one value per response token (one less where the prompt is
        empty).
    """
    batch = make_train_batch(
        model, tokenizer, repeated_prompts, rollout_responses, response_token_ids, prompt_token_ids
    )
    result = [torch.zeros(0)] * len(batch["labels"])
    not_empty = batch["response_mask"].any(dim=1)
    for rows in split_rows(batch, not_empty, microbatch_size, shared_prefix):
        part = select_rows(batch, rows)
        with torch.no_grad():
            scored = score(
                model, part, temperature, autocast_dtype, shared_prefix, return_token_entropy=False
            )
        for row, values, mask in zip(rows.tolist(), scored["log_probs"].cpu(), part["response_mask"].cpu()):
            result[row] = values[mask]
    return result


def score(
    model, part, temperature=1.0, autocast_dtype=None, shared_prefix=True, return_token_entropy=True
) -> dict:
    """Log-probabilities (and entropies) of a microbatch's response tokens, as ``get_response_log_probs`` gives them."""
    score_rows = get_shared_prefix_log_probs if shared_prefix else get_response_log_probs
    device_type = part["input_ids"].device.type
    with nullcontext() if autocast_dtype is None else torch.autocast(device_type, dtype=autocast_dtype):
        return score_rows(
            model,
            part["input_ids"],
            part["labels"],
            return_token_entropy,
            response_mask=part["response_mask"],
            temperature=temperature,
        )


def make_train_batch(
    model,
    tokenizer,
    prompts,
    responses,
    response_token_ids=None,
    prompt_token_ids=None,
    *,
    advantages=None,
    **per_token,
) -> dict:
    """All rows of a train batch as tensors on the model's device, checked against each other.

    input_ids, labels, response_mask (B, T); advantages (B,) float32; each of ``per_token`` (such as
    old_log_probs) (B, T) float32, from such a tensor or from B rows of one value per response token. What is
    None is left out.
    """
    batch = tokenize_prompt_and_output(
        prompts, responses, tokenizer, output_token_ids=response_token_ids, prompt_token_ids=prompt_token_ids
    )
    mask = batch["response_mask"]
    if advantages is not None:
        advantages = _as_floats(advantages, "advantages")
        if advantages.shape != (len(mask),) or not bool(torch.isfinite(advantages).all()):
            raise ValueError(
                f"advantages: got shape {tuple(advantages.shape)} with values {advantages.tolist()[:8]}, "
                f"expected ({len(mask)},), one finite number per response"
            )
        batch["advantages"] = advantages
    batch |= {
        name: _beside_labels(values, mask, name) for name, values in per_token.items() if values is not None
    }
    device = next(model.parameters()).device
    return {name: tensor.to(device) for name, tensor in batch.items()}


def _beside_labels(values, mask, name):
    """(B, T) float32 beside the labels, from such a tensor (wider right padding is cut) or from B 1-D rows."""
    n_rows, width = mask.shape
    if not hasattr(values, "__len__") or isinstance(values, str):
        raise ValueError(f"{name}: got {shown(values)}, expected {n_rows} rows, one per response")
    if len(values) != n_rows:
        raise ValueError(f"{name}: got {len(values)} rows, expected {n_rows}, one per response")
    if isinstance(values, torch.Tensor) and values.ndim == 2:
        if values.shape[1] < width:
            raise ValueError(
                f"{name}: got shape {tuple(values.shape)}, expected ({n_rows}, {width}) beside the labels"
            )
        return values[:, :width].detach().float().cpu()
    rows = [_as_floats(row, name).detach().cpu() for row in values]
    for i, (row, n_tokens) in enumerate(zip(rows, mask.sum(dim=1).tolist())):
        if row.shape != (n_tokens,):
            raise ValueError(
                f"{name}: got shape {tuple(row.shape)} in row {i}, expected ({n_tokens},), one value "
                "per response token"
            )
    return torch.zeros(n_rows, width).masked_scatter(mask, torch.cat(rows))


def _as_floats(values, name):
    try:
        return torch.as_tensor(values, dtype=torch.float32)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{name}: got {shown(values)}, expected numbers") from error


def split_rows(batch, chosen, size, by_response=False):
    """The chosen rows' indices in pieces of at most ``size``, rows of like length together (less padding).

    chosen: (B,) bool. The length is the whole row's, or the response's alone, if prompts are shared.
    """
    rows = chosen.nonzero().squeeze(1)
    if not len(rows):
        return ()
    lengths = batch["response_mask"].sum(dim=1) if by_response else row_ends(batch)
    return rows[lengths[rows].argsort(stable=True)].split(size)


def select_rows(batch, rows) -> dict:
    """These rows of every tensor, in this order, right padding cut: one permutation for ids, masks and weights."""
    width = int(row_ends(batch)[rows].max())
    return {name: t[rows][:, :width] if t.ndim == 2 else t[rows] for name, t in batch.items()}


def row_ends(batch):
    """(B,) one past the last position at which a row has a response token; 0 without any."""
    mask = batch["response_mask"]
    return (mask * torch.arange(1, mask.shape[1] + 1, device=mask.device)).amax(dim=1)


def _microbatch_statistics(stats, scored, part) -> dict[str, float]:
    """The loss's statistics and the scoring's, as plain numbers."""
    mask = part["response_mask"]
    stats = dict(stats, n_tokens=mask.sum(), entropy_sum=scored["token_entropy"].detach().sum())
    if "sampler_log_probs" in part:
        gap = (scored["log_probs"].detach() - part["sampler_log_probs"]).abs()[mask]
        stats |= {"gap_sum": gap.sum(), "gap_max": gap.max()}
    return {name: float(value) for name, value in stats.items()}


def _batch_statistics(statistics, batch, per_sequence) -> dict[str, float]:
    """Microbatches' statistics -> the batch's: counts and sums are added, never averaged."""
    names = set.intersection(*map(set, statistics)) if statistics else ()
    seen = {name: [stats[name] for stats in statistics] for name in names}
    mask = batch["response_mask"]
    n_ratios = max(
        1, int((mask.any(dim=1) if per_sequence else mask).sum())
    )  # pruned rows count, as not clipped
    n_low, n_high = (sum(seen.pop(f"n_clipped_{side}", [])) for side in ("low", "high"))
    result = {
        "response_length": mask.sum().item() / len(mask),
        "clip_fraction": (n_low + n_high) / n_ratios,
        "clip_fraction_low": n_low / n_ratios,
        "clip_fraction_high": n_high / n_ratios,
    }
    n_tokens = seen.pop("n_tokens", [])
    if n_tokens:
        result["token_entropy"] = sum(seen.pop("entropy_sum")) / sum(n_tokens)
    if "ratio_min" in seen:
        result |= {"ratio_min": min(seen.pop("ratio_min")), "ratio_max": max(seen.pop("ratio_max"))}
    if "gap_sum" in seen:
        result |= {
            "logprob_gap_mean": sum(seen.pop("gap_sum")) / sum(n_tokens),
            "logprob_gap_max": max(seen.pop("gap_max")),
        }
    for name, values in seen.items():  # what a reader's own loss reports: its mean over tokens
        if name not in result and name != "n_ratios":
            result[name] = sum(v * n for v, n in zip(values, n_tokens)) / sum(n_tokens)
    return result


def _check_step(gradient_accumulation_steps, max_grad_norm, temperature, entropy_rows):
    steps = gradient_accumulation_steps
    if not isinstance(steps, int) or isinstance(steps, bool) or steps < 1:
        raise ValueError(f"gradient_accumulation_steps: got {shown(steps)}, expected an integer >= 1")
    if max_grad_norm is not None and not number(max_grad_norm) > 0:
        raise ValueError(f"max_grad_norm: got {shown(max_grad_norm)}, expected a positive number or None")
    if not 0 < number(temperature) < float("inf"):
        raise ValueError(f"temperature: got {shown(temperature)}, expected the sampler's, a positive number")
    if entropy_rows not in ("all", "kept"):
        raise ValueError(f"entropy_rows: got {entropy_rows!r}, expected 'all' or 'kept'")
