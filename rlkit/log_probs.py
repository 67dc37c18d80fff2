"""Log-probabilities of given tokens under a model, and the entropy of its next-token distributions."""

from __future__ import annotations

from functools import partial
from weakref import WeakKeyDictionary

import torch
from torch.utils.checkpoint import checkpoint
from transformers import DynamicCache

from rlkit.support.checks import number, shown

CHUNK_ELEMENTS = (
    2**24
)  # float32 logits made at once: 2^24 x 4 bytes = 64 MiB, 167 positions of 100,352 tokens


def get_response_log_probs(
    model, input_ids, labels, return_token_entropy=False, *, response_mask=None, temperature=1.0
):
    """Log-probability of every label given the tokens before it.

    Args:
        model: a causal language model: a Hugging Face one, or any module whose output has ``.logits``.
        input_ids, labels: (B, T) int64, as from ``tokenize_prompt_and_output`` (labels[t] follows
            input_ids[t]). Rows are padded on the right, so no attention mask is needed.
        return_token_entropy: also give the entropy of the distribution each label was drawn from, in nats.
        response_mask: (B, T) bool; only these positions are scored, the others get 0. None scores all.
        temperature: > 0, divides the logits. Use the sampler's, or the on-policy ratio is not 1.

    Returns:
        {"log_probs": (B, T)} and, if asked for, "token_entropy": (B, T); float32 whatever the model's dtype.
        The entropy is a statistic, without gradient. Logits of -inf (a filtered vocabulary) add nothing to
        it.

    The (B, T, vocabulary) logits are never held in float32: where a model's logits are its output head
    applied to its last hidden state, the head is applied to a chunk of positions at a time and once more in
    the backward pass; any other model (capped or scaled logits, a toy) gives its own logits, turned into
    float32 chunk by chunk.

    Raises:
        ValueError: shapes that differ, a temperature that is not positive.

    Source: the handout's section 4.2.1.
    """
    _check_scoring(input_ids, labels, response_mask, temperature)
    if not labels.numel():  # longest row: one token, with nothing before it
        empty = torch.zeros(labels.shape, device=labels.device)
        return {"log_probs": empty, "token_entropy": empty} if return_token_entropy else {"log_probs": empty}
    head = output_head(model)
    if head is None:
        output = model(input_ids)
        features = getattr(output, "logits", output)  # (B, T, vocabulary)
    else:
        features = model.base_model(input_ids=input_ids, use_cache=False).last_hidden_state  # (B, T, hidden)
    scored = _scored_positions(labels, response_mask)
    features = features.flatten(0, 1).index_select(0, scored)
    log_probs, entropy = score_tokens(
        features, labels.flatten()[scored], head, temperature, return_token_entropy
    )
    result = {"log_probs": _put_back(log_probs, scored, labels)}
    if return_token_entropy:
        result["token_entropy"] = _put_back(entropy, scored, labels)
    return result


def get_shared_prefix_log_probs(
    model, input_ids, labels, return_token_entropy=False, *, response_mask, temperature=1.0
):
    """``get_response_log_probs`` for rows that share prompts: the same numbers and gradients for less work.

    Three forward passes build one key/value cache, WITH gradients: what all rows begin with (one row), the
    rest of each distinct prompt (one row per prompt), and each response from its prompt's last token on (one
    row per response). A group of G responses thus pays for its prompt once, forward and backward.

    Where the model, or the batch, does not allow it, this is ``get_response_log_probs``.
    """
    _check_scoring(input_ids, labels, response_mask, temperature)
    plain = partial(
        get_response_log_probs,
        model,
        input_ids,
        labels,
        return_token_entropy,
        response_mask=response_mask,
        temperature=temperature,
    )
    if not labels.numel() or not bool(response_mask.any(dim=1).all()):
        return plain()
    first = response_mask.int().argmax(dim=1)  # (B,) where a row's first response token is predicted
    if int(first.min()) == 0 or not can_share_prefix(model, labels):
        return plain()
    hidden = _tail_hidden_states(model, input_ids, response_mask, first)  # (B, tail, hidden)
    rows, columns = response_mask.nonzero(as_tuple=True)
    scored = _scored_positions(labels, response_mask)
    features = hidden.flatten(0, 1).index_select(0, rows * hidden.shape[1] + columns - first[rows])
    log_probs, entropy = score_tokens(
        features, labels.flatten()[scored], output_head(model), temperature, return_token_entropy
    )
    result = {"log_probs": _put_back(log_probs, scored, labels)}
    if return_token_entropy:
        result["token_entropy"] = _put_back(entropy, scored, labels)
    return result


def _tail_hidden_states(model, input_ids, response_mask, first):
    """Last hidden states (B, tail, hidden) of each row from position ``first`` (its prompt's last token) on."""
    positions = torch.arange(input_ids.shape[1], device=input_ids.device)  # (T,)
    n_rows, longest_prompt = len(input_ids), int(first.max())
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


def score_tokens(features, labels, head=None, temperature=1.0, return_entropy=False):
    """(log_probs (N,), entropy (N,) or None) of N labels, a chunk of positions at a time.

    features: (N, hidden) if there is a ``head`` to make logits of them, else the (N, vocabulary) logits.
    """
    vocabulary = features.shape[-1] if head is None else head.weight.shape[0]
    size = max(1, CHUNK_ELEMENTS // vocabulary)
    if len(features) <= size:
        return _score_chunk(features, labels, head, temperature, return_entropy)
    chunks = [
        checkpoint(_score_chunk, f, y, head, temperature, return_entropy, use_reentrant=False)
        for f, y in zip(features.split(size), labels.split(size))
    ]
    log_probs, entropies = zip(*chunks)
    return torch.cat(log_probs), torch.cat(entropies) if return_entropy else None


def _score_chunk(features, labels, head, temperature, return_entropy):
    logits = (features if head is None else head(features)).float()
    log_p = (logits if temperature == 1 else logits / temperature).log_softmax(dim=-1)
    entropy = None
    if return_entropy:
        with (
            torch.no_grad()
        ):  # p log p tends to 0 with p, but 0 x -inf is NaN: hold log p at the lowest finite number
            entropy = -log_p.exp().mul_(log_p.clamp(min=torch.finfo(log_p.dtype).min)).sum(dim=-1)
    return log_p.gather(1, labels[:, None]).squeeze(1), entropy


def _scored_positions(labels, response_mask):
    """Indices into the flattened (B * T) positions."""
    if response_mask is None:
        return torch.arange(labels.numel(), device=labels.device)
    return response_mask.flatten().nonzero().squeeze(1)


def _put_back(values, scored, like):
    """(N,) values at their places in a (B, T) tensor of zeros."""
    return values.new_zeros(like.numel()).index_copy(0, scored, values).view(like.shape)


def _check_scoring(input_ids, labels, response_mask, temperature):
    if not isinstance(input_ids, torch.Tensor) or input_ids.ndim != 2:
        got = f"shape {tuple(input_ids.shape)}" if isinstance(input_ids, torch.Tensor) else shown(input_ids)
        raise ValueError(f"input_ids: got {got}, expected a tensor (batch, sequence)")
    for name, tensor in (("labels", labels), ("response_mask", response_mask)):
        if tensor is not None and getattr(tensor, "shape", None) != input_ids.shape:
            got = f"shape {tuple(tensor.shape)}" if isinstance(tensor, torch.Tensor) else shown(tensor)
            raise ValueError(f"{name}: got {got}, expected input_ids' {tuple(input_ids.shape)}")
    if not 0 < number(temperature) < float("inf"):
        raise ValueError(
            f"temperature: got {shown(temperature)}, expected a positive number (0, greedy, has no "
            "log-probabilities)"
        )


# What a model can do is found out once, by trying it on a few tokens, rather than from a list of
# architectures.

_OUTPUT_HEADS: WeakKeyDictionary = WeakKeyDictionary()


def output_head(model):
    """The linear layer whose output on the last hidden state IS the model's logits, or None if there is no
    such.

    A forward pass on two tokens decides, once per model: the head's output must equal the logits bit for bit,
    so a model that caps or scales them is not mistaken for a plain one.
    """
    if model not in _OUTPUT_HEADS:
        _OUTPUT_HEADS[model] = _is_plain_head(model)
    return model.get_output_embeddings() if _OUTPUT_HEADS[model] else None


@torch.no_grad()
def _is_plain_head(model) -> bool:
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    base = getattr(model, "base_model", None)
    if not isinstance(head, torch.nn.Linear) or base is None or base is model:
        return False
    seen = {}
    hook = base.register_forward_hook(lambda module, args, output: seen.update(output=output))
    try:
        logits = model(torch.tensor([[0, 1]], device=head.weight.device)).logits
    finally:
        hook.remove()
    hidden = getattr(seen.get("output"), "last_hidden_state", None)
    return hidden is not None and torch.equal(head(hidden), logits)


_SHARES_PREFIX: WeakKeyDictionary = WeakKeyDictionary()


def can_share_prefix(model, labels=None) -> bool:
    """Whether ``get_shared_prefix_log_probs`` is exact for this model (and for rows as long as ``labels``').

    Asked of the model itself: a small forward pass both ways, once per model. A model in training mode with
    active dropout, gradient checkpointing, or attention over a window shorter than the rows takes the plain
    way.
    """
    config = getattr(model, "config", None)
    if config is None or output_head(model) is None or (model.training and _drops_or_recomputes(model)):
        return False
    if getattr(config, "_attn_implementation", None) not in ("sdpa", "eager"):
        return False
    windows = [getattr(config, name, None) for name in ("sliding_window", "attention_chunk_size")]
    if labels is not None and any(window is not None and window <= labels.shape[1] for window in windows):
        return False
    if model not in _SHARES_PREFIX:
        _SHARES_PREFIX[model] = _sharing_agrees(model)
    return _SHARES_PREFIX[model]


def _drops_or_recomputes(model) -> bool:
    dropout = any(isinstance(m, torch.nn.Dropout) and m.p > 0 for m in model.modules())
    return (
        dropout
        or getattr(model, "is_gradient_checkpointing", False)
        or bool(getattr(model.config, "attention_dropout", 0.0))
    )


@torch.no_grad()
def _sharing_agrees(model) -> bool:
    ids = torch.tensor([[1, 2, 3, 4, 1, 0], [1, 2, 3, 4, 2, 1], [1, 2, 0, 1, 0, 0]])
    first, end = torch.tensor([3, 3, 2]), torch.tensor([5, 6, 4])
    at = torch.arange(6)
    mask = (at >= first[:, None]) & (at < end[:, None])
    head = output_head(model)
    ids, first, mask = (t.to(head.weight.device) for t in (ids % head.weight.shape[0], first, mask))
    plain = model.base_model(input_ids=ids, use_cache=False).last_hidden_state.float()
    try:
        shared = _tail_hidden_states(model, ids, mask, first).float()
    except Exception:  # whatever a model without such a cache raises: it cannot
        return False
    rows, columns = mask.nonzero(as_tuple=True)
    tolerance = 1e-4 if head.weight.dtype == torch.float32 else 1e-1
    return torch.allclose(
        shared[rows, columns - first[rows]], plain[rows, columns], rtol=tolerance, atol=tolerance
    )
