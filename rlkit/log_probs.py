"""Log-probabilities of given tokens under a model, and the entropy of its next-token distributions."""
from __future__ import annotations

from weakref import WeakKeyDictionary

import torch
from torch.utils.checkpoint import checkpoint

CHUNK_ELEMENTS = 2 ** 24  # float32 logits held at once: 2^24 x 4 bytes = 64 MiB


def get_response_log_probs(model, input_ids, labels, return_token_entropy=False, *, response_mask=None,
                           temperature=1.0):
    """Log-probability of every label given the tokens before it.

    Args:
        model: a causal language model: a Hugging Face one, or any module whose output has ``.logits``.
        input_ids, labels: (B, T) int64, as from ``tokenize_prompt_and_output`` (labels[t] follows input_ids[t]).
            Rows are padded on the right, so no attention mask is needed.
        return_token_entropy: also give the entropy of the distribution each label was drawn from, in nats.
        response_mask: (B, T) bool; only these positions are scored, the others get 0. None scores all.
        temperature: > 0, divides the logits. Use the sampler's, or the on-policy ratio is not 1.

    Returns:
        {"log_probs": (B, T)} and, if asked for, "token_entropy": (B, T); float32 whatever the model's dtype, both
        with gradient. Logits of -inf (a filtered vocabulary) add nothing to the entropy.

    The (B, T, vocabulary) logits are never held in float32: where a model's logits are its output head applied to
    its last hidden state, the head is applied to a chunk of positions at a time and once more in the backward pass;
    any other model (capped or scaled logits, a toy) gives its own logits, turned into float32 chunk by chunk.

    Raises:
        ValueError: shapes that differ, a temperature that is not positive.

    Source: the handout's section 4.2.1.
    """
    _check_scoring(input_ids, labels, response_mask, temperature)
    head = output_head(model)
    if head is None:
        output = model(input_ids)
        features = getattr(output, "logits", output)                                         # (B, T, vocabulary)
    else:
        features = model.base_model(input_ids=input_ids, use_cache=False).last_hidden_state  # (B, T, hidden)
    scored = _scored_positions(labels, response_mask)
    features = features.flatten(0, 1).index_select(0, scored)
    log_probs, entropy = score_tokens(features, labels.flatten()[scored], head, temperature, return_token_entropy)
    result = {"log_probs": _put_back(log_probs, scored, labels)}
    if return_token_entropy:
        result["token_entropy"] = _put_back(entropy, scored, labels)
    return result


def score_tokens(features, labels, head=None, temperature=1.0, return_entropy=False):
    """(log_probs (N,), entropy (N,) or None) of N labels, a chunk of positions at a time.

    features: (N, hidden) if there is a ``head`` to make logits of them, else the (N, vocabulary) logits.
    """
    vocabulary = features.shape[-1] if head is None else head.weight.shape[0]
    size = max(1, CHUNK_ELEMENTS // vocabulary)
    if len(features) <= size:
        return _score_chunk(features, labels, head, temperature, return_entropy)
    chunks = [checkpoint(_score_chunk, f, y, head, temperature, return_entropy, use_reentrant=False)
              for f, y in zip(features.split(size), labels.split(size))]
    log_probs, entropies = zip(*chunks)
    return torch.cat(log_probs), torch.cat(entropies) if return_entropy else None


def _score_chunk(features, labels, head, temperature, return_entropy):
    logits = (features if head is None else head(features)).float() / temperature
    log_p = logits.log_softmax(dim=-1)
    entropy = None
    if return_entropy:  # p log p tends to 0 with p: select, since 0 x -inf is NaN
        entropy = -(log_p.exp() * log_p.masked_fill(log_p == -torch.inf, 0.0)).sum(dim=-1)
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
    for name, tensor in (("labels", labels), ("response_mask", response_mask)):
        if tensor is not None and tensor.shape != input_ids.shape:
            raise ValueError(f"{name}: got shape {tuple(tensor.shape)}, expected input_ids' {tuple(input_ids.shape)}")
    if not temperature > 0:
        raise ValueError(f"temperature: got {temperature!r}, expected a positive number (0, greedy, has no "
                         "log-probabilities)")


# What a model can do is found out once, by trying it on a few tokens, rather than from a list of architectures.

_OUTPUT_HEADS: WeakKeyDictionary = WeakKeyDictionary()


def output_head(model):
    """The linear layer whose output on the last hidden state IS the model's logits, or None if there is no such.

    A forward pass on two tokens decides, once per model: the head's output must equal the logits bit for bit, so a
    model that caps or scales them is not mistaken for a plain one.
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
