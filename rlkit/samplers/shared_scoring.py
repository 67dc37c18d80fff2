"""Scoring rows that share prompts: each prompt is passed through the model once per group, with gradients."""

import math
from functools import partial

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import DynamicCache

from rlkit.log_probs import Mask, Scores, Tokens, check_scoring, get_response_log_probs, score_positions
from rlkit.support.probes import binding_window, judged, output_head, positions, say_once
from rlkit.support.recompute import recomputes
from rlkit.tokenization import join_and_shift


def get_shared_prefix_log_probs(
    model,
    input_ids: Tokens,
    labels: Tokens,
    return_token_entropy=False,
    *,
    response_mask: Mask,
    temperature=1.0,
) -> Scores:
    """``get_response_log_probs`` for rows that share prompts: the same numbers and gradients for less work.

    Three forward passes build one key/value cache, WITH gradients: what all rows begin with (one row), the
    rest of each distinct prompt (one row per prompt), and each response from its prompt's last token on (one
    row per response). A group of G responses thus pays for its prompt once, forward and backward.

    Where the model, or the batch, does not allow it, this is ``get_response_log_probs``.
    """
    check_scoring(input_ids, labels, response_mask, temperature)
    # where each row's first response token is predicted
    first = response_mask.int().argmax(dim=1) if labels.numel() else labels.new_zeros(1)
    whole = bool(response_mask.any(dim=1).all()) and int(first.min()) > 0
    if not whole or not can_share_prefix(model, labels):
        rest = (model, input_ids, labels, return_token_entropy)
        return get_response_log_probs(*rest, response_mask=response_mask, temperature=temperature)
    hidden = tail_hidden_states(model, input_ids, response_mask, first)  # (B, tail, hidden)
    rows, columns = response_mask.nonzero(as_tuple=True)
    features = hidden.flatten(0, 1)[rows * hidden.shape[1] + columns - first[rows]]
    return score_positions(
        features, labels, response_mask, output_head(model), temperature, return_token_entropy
    )


def tail_hidden_states(
    model, input_ids: Tokens, response_mask: Mask, first: Int[Tensor, " batch"]
) -> Float[Tensor, "batch tail hidden"]:
    """Last hidden states of each row from position ``first`` (its prompt's last token) on."""
    positions = torch.arange(input_ids.shape[1], device=input_ids.device)  # (T,)
    longest_prompt = int(first.max())
    n_common = int((input_ids == input_ids[:1]).all(dim=0)[: int(first.min())].cumprod(dim=0).sum())
    keys = input_ids[:, :longest_prompt].masked_fill(positions[:longest_prompt] >= first[:, None], -1)
    prompts, prompt_of_row = keys.unique(dim=0, return_inverse=True)  # (P, prompt), (B,)
    prompts = prompts[:, n_common:]  # (P, middle)
    in_prompt = prompts >= 0
    n_tail = (response_mask * positions).amax(dim=1) - first + 1  # (B,)
    steps = positions[: int(n_tail.max())]
    tail_at = first[:, None] + steps  # (B, tail)
    in_tail = steps < n_tail[:, None]
    tail = input_ids.gather(1, tail_at.clamp(max=input_ids.shape[1] - 1))

    cache = DynamicCache()
    forward = partial(model.base_model, past_key_values=cache, use_cache=True)
    if n_common:
        forward(input_ids=input_ids[:1, :n_common])
    seen = in_prompt.new_ones(len(prompts), n_common)
    if prompts.shape[1]:
        if n_common:
            cache.batch_repeat_interleave(len(prompts))
        seen = torch.cat([seen, in_prompt], dim=1)
        forward(
            input_ids=prompts.clamp(min=0),
            attention_mask=seen.long(),
            position_ids=positions[n_common:longest_prompt].expand(len(prompts), -1),
        )
    cache.batch_select_indices(prompt_of_row)
    seen = torch.cat([seen[prompt_of_row], in_tail], dim=1)
    return forward(input_ids=tail, attention_mask=seen.long(), position_ids=tail_at).last_hidden_state


def can_share_prefix(model, labels=None) -> bool:
    """Whether ``get_shared_prefix_log_probs`` is exact for this model (and rows as long as ``labels``').

    Asked of the model itself, once, by `rlkit.support.probes`; a "no" is said in one line. Rows longer than
    an attention window or than `positions` take the plain way, and so does a model in training mode with
    active dropout or gradient checkpointing.
    """
    if recomputes(model):  # a cache holds what recomputing would drop
        return False
    if getattr(model, "config", None) is None or output_head(model) is None:
        return False
    longest = 0 if labels is None else labels.shape[1] + 1
    if (model.training and drops_or_recomputes(model)) or longest > (positions(model.config) or math.inf):
        return False
    window = binding_window(model, longest)
    if window or not judged(model, "scoring", 0, partial(scores_right, model)):
        say_once(
            f"scoring: {type(model).__name__} passes a prompt once per response (sharing it is not right)"
        )
        return False
    return True


def drops_or_recomputes(model) -> bool:
    dropout = any(isinstance(m, torch.nn.Dropout) and m.p > 0 for m in model.modules())
    return (
        dropout
        or getattr(model, "is_gradient_checkpointing", False)
        or bool(getattr(model.config, "attention_dropout", 0.0))
    )


def scores_right(model, probe) -> bool:
    """Whether three rows, two of them with one prompt and all of them padded, score as the probe says."""
    first = [len(row) - 4 for row in probe.rows]  # each prompt's last token
    ids = join_and_shift([row[: n + 1] for row, n in zip(probe.rows, first)], [r[-3:] for r in probe.rows], 0)
    batch = {name: tensor.to(model.device) for name, tensor in ids.items()}
    starts = torch.tensor(first, device=model.device)
    try:
        hidden = tail_hidden_states(model, batch["input_ids"], batch["response_mask"], starts)
        log_p = output_head(model)(hidden).float().log_softmax(dim=-1)[:, :3]
    except Exception:  # whatever a model without such a cache raises: it cannot
        return False
    return probe.agrees(torch.cat([probe.distances(row, n, log_p[row]) for row, n in enumerate(first)]))
