"""What a model can do, found out by trying it on a few tokens rather than from a list of architectures."""

from weakref import WeakKeyDictionary

import torch

_OUTPUT_HEADS: WeakKeyDictionary = WeakKeyDictionary()


def output_head(model):
    """The linear layer whose output on the last hidden state IS the model's logits, or None if there is none.

    A forward pass on two tokens decides, once per model: the head's output must equal the logits bit for bit,
    so a model that caps or scales them is not mistaken for a plain one.
    """
    if model not in _OUTPUT_HEADS:
        _OUTPUT_HEADS[model] = is_plain_head(model)
    return model.get_output_embeddings() if _OUTPUT_HEADS[model] else None


@torch.no_grad()
def is_plain_head(model) -> bool:
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
