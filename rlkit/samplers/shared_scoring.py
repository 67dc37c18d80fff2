"""Scoring rows that share prompts: each prompt is passed through the model once per group, with gradients."""

from functools import partial
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import DynamicCache

from rlkit.log_probs import Mask, Scores, Tokens, check_scoring, get_response_log_probs, score_positions
from rlkit.support.probes import output_head
from rlkit.support.recompute import recomputes


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


_SHARES_PREFIX: WeakKeyDictionary = WeakKeyDictionary()


def can_share_prefix(model, labels=None) -> bool:
    """Whether ``get_shared_prefix_log_probs`` is exact for this model (and for rows as long as ``labels``').

    Asked of the model itself: a small forward pass both ways, once per model. A model in training mode with
    active dropout, gradient checkpointing, or attention over a window shorter than the rows takes the plain
    way.
    """
    config = getattr(model, "config", None)
    if recomputes(model):  # a cache holds what recomputing would drop
        return False
    if config is None or output_head(model) is None or (model.training and drops_or_recomputes(model)):
        return False
    if getattr(config, "_attn_implementation", None) not in ("sdpa", "eager"):
        return False
    windows = [getattr(config, name, None) for name in ("sliding_window", "attention_chunk_size")]
    if labels is not None and any(window is not None and window <= labels.shape[1] for window in windows):
        return False
    if model not in _SHARES_PREFIX:
        _SHARES_PREFIX[model] = sharing_agrees(model)
    return _SHARES_PREFIX[model]


def drops_or_recomputes(model) -> bool:
    dropout = any(isinstance(m, torch.nn.Dropout) and m.p > 0 for m in model.modules())
    return (
        dropout
        or getattr(model, "is_gradient_checkpointing", False)
        or bool(getattr(model.config, "attention_dropout", 0.0))
    )


@torch.no_grad()
def sharing_agrees(model) -> bool:
    ids = torch.tensor([[1, 2, 3, 4, 1, 0], [1, 2, 3, 4, 2, 1], [1, 2, 0, 1, 0, 0]])
    first, end = torch.tensor([3, 3, 2]), torch.tensor([5, 6, 4])
    at = torch.arange(6)
    mask = (at >= first[:, None]) & (at < end[:, None])
    head = output_head(model)
    ids, first, mask = (t.to(head.weight.device) for t in (ids % head.weight.shape[0], first, mask))
    plain = model.base_model(input_ids=ids, use_cache=False).last_hidden_state.float()
    try:
        shared = tail_hidden_states(model, ids, mask, first).float()
    except Exception:  # whatever a model without such a cache raises: it cannot
        return False
    rows, columns = mask.nonzero(as_tuple=True)
    tolerance = 1e-4 if head.weight.dtype == torch.float32 else 1e-1
    return torch.allclose(
        shared[rows, columns - first[rows]], plain[rows, columns], rtol=tolerance, atol=tolerance
    )
