"""Log-probabilities of given tokens under a model, and the entropy of its next-token distributions."""

import torch
from torch.utils.checkpoint import checkpoint

from rlkit.support.arguments import check_matrix, check_number, check_shape
from rlkit.support.probes import output_head
from rlkit.support.shapes import Labels, Logits, Mask, PerPosition, Scores, Tokens

CHUNK_ELEMENTS = 2**24  # float32 logits made at once: 64 MiB, 167 positions of 100,352 tokens


def log_distribution(logits: Logits, temperature=1.0) -> Logits:
    """log softmax(z / T), in float32."""
    logits = logits.float()
    return (logits if temperature == 1 else logits / temperature).log_softmax(dim=-1)


def label_log_probs(log_p: Logits, labels: Labels) -> PerPosition:
    """log p of each row's label."""
    return log_p.gather(1, labels[:, None]).squeeze(1)


@torch.no_grad()
def token_entropy(log_p: Logits) -> PerPosition:
    """-sum p log p of each row, in nats. Log-probabilities of -inf (a filtered vocabulary) add nothing."""
    lowest = torch.finfo(log_p.dtype).min  # 0 x -inf would be NaN
    return -log_p.exp().mul_(log_p.clamp(min=lowest)).sum(dim=-1)


def get_response_log_probs(
    model,
    input_ids: Tokens,
    labels: Tokens,
    return_token_entropy=False,
    *,
    response_mask: Mask | None = None,
    temperature=1.0,
) -> Scores:
    """Log-probability of every label given the tokens before it.

    Args:
        model: a causal language model: a Hugging Face one, or any module whose output has ``.logits``.
        input_ids, labels: as from ``tokenize_prompt_and_output`` (labels[t] follows input_ids[t]). Rows are
            padded on the right, so no attention mask is needed.
        return_token_entropy: also give the entropy of the distribution each label was drawn from, in nats.
        response_mask: only these positions are scored, the others get 0. None scores all.
        temperature: > 0, divides the logits. Use the sampler's, or the on-policy ratio is not 1.

    Returns:
        {"log_probs": (B, T)} and, if asked for, "token_entropy": (B, T), without gradient; float32 whatever
        the model's dtype.

    The (B, T, vocabulary) logits are never held in float32: where a model's logits are its output head
    applied to its last hidden state, the head is applied to a chunk of positions at a time and once more in
    the backward pass; any other model (capped or scaled logits, a toy) gives its own logits, turned into
    float32 chunk by chunk.

    Raises ValueError for shapes that differ, a temperature that is not positive.
    Source: the handout's section 4.2.1.
    """
    check_scoring(input_ids, labels, response_mask, temperature)
    head = output_head(model) if labels.numel() else None
    if not labels.numel():  # the longest row is one token, with nothing before it
        features = torch.zeros(*labels.shape, 1, device=labels.device)
    elif head is None:
        output = model(input_ids)
        features = getattr(output, "logits", output)  # (B, T, vocabulary)
    else:
        features = model.base_model(input_ids=input_ids, use_cache=False).last_hidden_state  # (B, T, hidden)
    mask = torch.ones_like(labels, dtype=torch.bool) if response_mask is None else response_mask
    return score_positions(
        features.flatten(0, 1)[mask.flatten()], labels, mask, head, temperature, return_token_entropy
    )


def score_positions(features, labels: Tokens, mask: Mask, head, temperature, return_entropy) -> Scores:
    """The scores of the N masked positions, put back into (B, T) tensors of zeros.

    features: (N, hidden) if there is a ``head`` to make logits of them, else the (N, vocabulary) logits.
    """
    values = score_tokens(features, labels[mask], head, temperature, return_entropy)
    names = ("log_probs", "token_entropy")
    return {
        name: torch.zeros(labels.shape, device=labels.device).masked_scatter(mask, value)
        for name, value in zip(names, values)
        if value is not None
    }


def score_tokens(features, labels: Labels, head=None, temperature=1.0, return_entropy=False):
    """(log_probs (N,), entropy (N,) or None) of N labels, a chunk of positions at a time."""
    vocabulary = features.shape[-1] if head is None else head.weight.shape[0]
    size = max(1, CHUNK_ELEMENTS // vocabulary)
    rest = (head, temperature, return_entropy)
    if len(features) <= size:
        return score_chunk(features, labels, *rest)
    chunks = zip(features.split(size), labels.split(size))
    chunks = [checkpoint(score_chunk, f, y, *rest, use_reentrant=False) for f, y in chunks]
    log_probs, entropies = zip(*chunks)
    return torch.cat(log_probs), torch.cat(entropies) if return_entropy else None


def score_chunk(features, labels: Labels, head, temperature, return_entropy):
    """``score_tokens`` for the positions of one chunk."""
    log_p = log_distribution(features if head is None else head(features), temperature)
    return label_log_probs(log_p, labels), token_entropy(log_p) if return_entropy else None


def check_scoring(input_ids, labels, response_mask, temperature) -> None:
    """Refuse shapes that differ and a temperature without log-probabilities."""
    check_matrix("input_ids", input_ids)
    check_shape("labels", labels, input_ids.shape, "as input_ids")
    if response_mask is not None:
        check_shape("response_mask", response_mask, input_ids.shape, "as input_ids")
    expected = "a positive number (0, greedy, has no log-probabilities)"
    check_number("temperature", temperature, lambda t: t > 0, expected)
