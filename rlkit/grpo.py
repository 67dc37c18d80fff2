"""One GRPO step: rollouts in, one optimizer step, numbers to log out."""
from __future__ import annotations

import warnings
from contextlib import nullcontext
from math import isfinite

import torch

from rlkit.advantages import compute_group_normalized_rewards, compute_rollout_rewards
from rlkit.log_probs import get_response_log_probs
from rlkit.losses import (aggregate_loss_across_microbatch, check_loss_normalization, check_reweighting,
                          compute_policy_gradient_loss)
from rlkit.tokenization import tokenize_prompt_and_output


def grpo_train_step(model, tokenizer, optimizer, gradient_accumulation_steps, max_grad_norm, reward_fn,
                    repeated_prompts, rollout_responses, repeated_ground_truths, group_size, baseline="mean",
                    advantage_eps=1e-6, advantage_normalizer="std", importance_reweighting_method="none",
                    old_log_probs=None, cliprange=None, loss_normalization="sequence", normalization_constant=None, *,
                    response_token_ids=None, prompt_token_ids=None, temperature=1.0, advantages=None,
                    rewards_metadata=None, autocast_dtype=None, tis_weights=None, shared_prefix=True,
                    entropy_rows="all"):
    """Reward, normalise, score, accumulate gradients, take ONE optimizer step.

    Args (B is the train batch, the number of responses; T the longest row minus 1):
        model, tokenizer, optimizer: a causal language model and what belongs to it.
        gradient_accumulation_steps: microbatches a full batch is cut into (each of ceil(B / steps) rows; pruned rows
            save microbatches). It changes memory and speed, never the result.
        max_grad_norm: the gradient is scaled down to this norm if it is longer; None leaves it.
        reward_fn, repeated_prompts, rollout_responses, repeated_ground_truths: B strings each, G in a row per prompt.
        group_size, baseline, advantage_eps, advantage_normalizer: see ``compute_group_normalized_rewards``.
        importance_reweighting_method, cliprange: see ``compute_policy_gradient_loss``.
        old_log_probs: the sampling policy's, (B, T) beside the labels, or a list of B 1-D tensors with one value per
            response token (as from ``response_log_probs``).
        loss_normalization, normalization_constant: see ``aggregate_loss_across_microbatch``.
        response_token_ids, prompt_token_ids: the sampler's own ids; nothing is re-tokenised then.
        temperature: the sampler's.
        advantages: (B,), when they come from somewhere else, as off-policy, where a row's group is not whole in the
            train batch. No reward is computed then; ``rewards_metadata`` is merged into the metadata.
        autocast_dtype: such as torch.bfloat16, for mixed precision around the forward pass; None for none.
        tis_weights: B lists or 1-D tensors, one detached factor per response token, multiplied into the loss
            (truncated importance sampling between the sampling engine and the trainer).
        shared_prefix: score the prompt once per group where the model can (see ``get_shared_prefix_log_probs``).
        entropy_rows: "all" also scores the pruned rows, without gradient, so that the entropy covers the whole batch;
            "kept" leaves them out altogether, which is cheaper and lets the entropy depend on the pruning.

    Rows of advantage zero have no gradient and are never passed through the model with one, but they keep counting
    in every divisor: loss and gradient are those of the unpruned batch. (A method that is a function is given every
    row, since its loss need not be proportional to the advantage.) If no row is left the loss is 0 and the optimizer
    still steps, with zero gradients, as it would unpruned. A gradient that is not finite is never applied: the step
    is skipped with a warning.

    Returns:
        (loss, metadata). loss is a detached scalar. metadata holds plain numbers: loss, grad_norm (before clipping),
        token_entropy (mean over response tokens, nats), reward, format_reward, answer_reward (means),
        clip_fraction, clip_fraction_low, clip_fraction_high (of all the batch's response tokens, or sequences for
        "gspo"), ratio_min and ratio_max (with old_log_probs), response_length (mean tokens), rows_used (rows with
        gradient), lr, and the group statistics of ``compute_group_normalized_rewards``. Afterwards every gradient
        is None.

    Raises:
        ValueError: whatever the components refuse, before the model is touched.

    Source: the handout's sections 4.2.4, 5.4 and 6.4.
    """
    check_reweighting(importance_reweighting_method, old_log_probs, cliprange)
    check_loss_normalization(loss_normalization, normalization_constant)
    metadata = dict(rewards_metadata or {})
    if advantages is None:
        raw_rewards, means = compute_rollout_rewards(reward_fn, rollout_responses, repeated_ground_truths)
        advantages, groups = compute_group_normalized_rewards(raw_rewards, group_size, baseline, advantage_eps,
                                                              advantage_normalizer)
        metadata |= means | groups
    batch = make_train_batch(model, tokenizer, repeated_prompts, rollout_responses, advantages,
                             response_token_ids, prompt_token_ids, old_log_probs, tis_weights)
    n_rows = len(batch["advantages"])
    has_gradient = batch["advantages"] != 0
    if callable(importance_reweighting_method):
        has_gradient = torch.ones_like(has_gradient)
    rows_per_microbatch = -(-n_rows // gradient_accumulation_steps)
    passes = [(rows, True) for rows in split_rows(batch, has_gradient, rows_per_microbatch)]
    if entropy_rows == "all":
        passes += [(rows, False) for rows in split_rows(batch, ~has_gradient, rows_per_microbatch)]

    optimizer.zero_grad(set_to_none=True)
    model.zero_grad(set_to_none=True)
    batch_loss, statistics = 0.0, []
    for rows, with_gradient in passes:
        part = select_rows(batch, rows)
        with torch.set_grad_enabled(with_gradient):
            scored = score(model, part, temperature, autocast_dtype, shared_prefix)
            per_token_loss, stats = compute_policy_gradient_loss(
                part["advantages"], scored["log_probs"], importance_reweighting_method, part["old_log_probs"],
                cliprange, part["response_mask"])
            if part["tis_weights"] is not None:
                per_token_loss = per_token_loss * part["tis_weights"]
            loss = aggregate_loss_across_microbatch(per_token_loss, part["response_mask"], loss_normalization,
                                                    normalization_constant)
        if loss_normalization == "sequence":  # the mean over these rows -> their share of the whole batch's mean
            loss = loss * (len(rows) / n_rows)
        if with_gradient:
            loss.backward()
            batch_loss += loss.item()
        statistics.append(stats | {"n_tokens": part["response_mask"].sum(),
                                   "entropy_sum": scored["token_entropy"].detach().sum()})

    grad_norm = optimizer_step(model, optimizer, max_grad_norm)
    metadata |= _batch_statistics(statistics, batch, importance_reweighting_method == "gspo")
    metadata |= {"loss": batch_loss, "rows_used": int(has_gradient.sum()), "lr": optimizer.param_groups[0]["lr"]}
    if grad_norm is not None:
        metadata["grad_norm"] = grad_norm
    return torch.tensor(batch_loss), metadata


def optimizer_step(model, optimizer, max_grad_norm=None):
    """Clip, step, drop the gradients. Returns the gradient's norm before clipping, or None if it was not finite.

    A parameter without a gradient gets zeros, so that a batch with nothing to learn steps as it would unpruned (the
    optimizer's momentum still moves the weights).
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    for p in parameters:
        if p.grad is None:
            p.grad = torch.zeros_like(p)
    norm = torch.nn.utils.clip_grad_norm_(parameters, torch.inf if max_grad_norm is None else max_grad_norm).item()
    if isfinite(norm):
        optimizer.step()
    else:
        warnings.warn(f"the gradient's norm is {norm}: this optimizer step is skipped", stacklevel=3)
    optimizer.zero_grad(set_to_none=True)
    model.zero_grad(set_to_none=True)
    return norm if isfinite(norm) else None


def response_log_probs(model, tokenizer, repeated_prompts, rollout_responses, *, response_token_ids=None,
                       prompt_token_ids=None, temperature=1.0, microbatch_size=32, autocast_dtype=None,
                       shared_prefix=True):
    """The model's log-probabilities of each response's tokens, without gradient: the off-policy ``old_log_probs``.

    Scored in microbatches of rows of like length; given back in the rows' own order.

    Returns:
        a list of B float32 1-D CPU tensors, one value per response token (one less where the prompt is empty).
    """
    batch = make_train_batch(model, tokenizer, repeated_prompts, rollout_responses, None,
                             response_token_ids, prompt_token_ids)
    every_row = torch.ones(len(batch["labels"]), dtype=torch.bool)
    result = [None] * len(every_row)
    for rows in split_rows(batch, every_row, microbatch_size):
        part = select_rows(batch, rows)
        with torch.no_grad():
            log_probs = score(model, part, temperature, autocast_dtype, shared_prefix, False)["log_probs"].cpu()
        for row, values, mask in zip(rows.tolist(), log_probs, part["response_mask"].cpu()):
            result[row] = values[mask]
    return result


def score(model, part, temperature=1.0, autocast_dtype=None, shared_prefix=True, return_token_entropy=True):
    """Log-probabilities (and entropies) of a microbatch's response tokens, by the quickest exact way."""
    device_type = part["input_ids"].device.type
    with nullcontext() if autocast_dtype is None else torch.autocast(device_type, dtype=autocast_dtype):
        return get_response_log_probs(model, part["input_ids"], part["labels"], return_token_entropy,
                                      response_mask=part["response_mask"], temperature=temperature)


def make_train_batch(model, tokenizer, prompts, responses, advantages=None, response_token_ids=None,
                     prompt_token_ids=None, old_log_probs=None, tis_weights=None) -> dict:
    """All of a train batch's rows as tensors on the model's device, checked against each other.

    input_ids, labels, response_mask (B, T); advantages (B,); old_log_probs and tis_weights (B, T) or None.
    """
    batch = tokenize_prompt_and_output(prompts, responses, tokenizer, output_token_ids=response_token_ids,
                                       prompt_token_ids=prompt_token_ids)
    mask = batch["response_mask"]
    if advantages is not None:
        advantages = torch.as_tensor(advantages).flatten()
        if len(advantages) != len(mask) or not bool(torch.isfinite(advantages).all()):
            raise ValueError(f"advantages: got {len(advantages)} values ({advantages.tolist()[:8]}...), expected "
                             f"{len(mask)} finite ones, one per response")
        batch["advantages"] = advantages
    batch["old_log_probs"] = _beside_labels(old_log_probs, mask, "old_log_probs")
    batch["tis_weights"] = _beside_labels(tis_weights, mask, "tis_weights")
    device = next(model.parameters()).device
    return {name: None if tensor is None else tensor.to(device) for name, tensor in batch.items()}


def _beside_labels(values, mask, name):
    """(B, T) float tensor beside the labels, from one such (wider right padding is cut) or from B 1-D rows."""
    if values is None:
        return None
    n_rows, width = mask.shape
    if len(values) != n_rows:
        raise ValueError(f"{name}: got {len(values)} rows, expected {n_rows}, one per response")
    if isinstance(values, torch.Tensor) and values.ndim == 2:
        if values.shape[1] < width:
            raise ValueError(f"{name}: got shape {tuple(values.shape)}, expected ({n_rows}, {width}) beside the labels")
        return values[:, :width].detach().float().cpu()
    rows = [torch.as_tensor(row, dtype=torch.float32).detach().cpu() for row in values]
    lengths = mask.sum(dim=1).tolist()
    for i, (row, length) in enumerate(zip(rows, lengths)):
        if row.shape != (length,):
            raise ValueError(f"{name}: got shape {tuple(row.shape)} in row {i}, expected ({length},), one value per "
                             "response token")
    return torch.zeros(n_rows, width).masked_scatter(mask, torch.cat(rows)) if rows else None


def split_rows(batch, chosen, size):
    """The chosen rows' indices, in lists of at most ``size`` rows of like length (less padding, less work)."""
    ends = row_ends(batch)
    rows = chosen.nonzero().squeeze(1)
    rows = rows[ends[rows].argsort(stable=True)]
    return rows.split(size) if len(rows) else []


def row_ends(batch):
    """(B,) one past the last position of each row that holds a response token (0 for an empty response)."""
    mask = batch["response_mask"]
    return (mask * torch.arange(1, mask.shape[1] + 1, device=mask.device)).amax(dim=1) if mask.shape[1] else mask.sum(1)


def select_rows(batch, rows) -> dict:
    """These rows of every tensor, in this order, right padding cut: one permutation for ids, masks and weights."""
    width = max(1, int(row_ends(batch)[rows].max()))
    return {name: None if t is None else t[rows][:, :width] if t.ndim == 2 else t[rows] for name, t in batch.items()}


def _batch_statistics(statistics, batch, per_sequence) -> dict:
    """Microbatch statistics -> the batch's: counts are added, never averaged."""
    sums = {}
    for stats in statistics:
        for name, value in stats.items():
            sums.setdefault(name, []).append(float(value))
    mask = batch["response_mask"]
    n_tokens, n_ratios = sum(sums.get("n_tokens", [])), int((mask.any(dim=1) if per_sequence else mask).sum())
    result = {"response_length": mask.sum().item() / len(mask)}
    if n_tokens:
        result["token_entropy"] = sum(sums["entropy_sum"]) / n_tokens
    low, high = (sum(sums.get(f"n_clipped_{side}", [])) / max(n_ratios, 1) for side in ("low", "high"))
    result |= {"clip_fraction": low + high, "clip_fraction_low": low, "clip_fraction_high": high}
    if "ratio_min" in sums:
        result |= {"ratio_min": min(sums["ratio_min"]), "ratio_max": max(sums["ratio_max"])}
    return result
