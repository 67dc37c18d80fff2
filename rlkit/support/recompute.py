"""Gradient checkpointing: a layer's inner values are computed again in the backward pass, not kept.

Transformers does this in training mode alone. Here the model stays in eval mode, since dropout would make
scoring differ from sampling, so the layers' forward functions are wrapped instead.
"""

from contextlib import contextmanager
from functools import partial

import torch
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer


def layers_of(model) -> list:
    """The layers that transformers calls checkpointable; ValueError if there is none."""
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        what = f"{type(model).__name__} has no layers that transformers can checkpoint"
        raise ValueError(f"gradient_checkpointing: got True, but {what}; expected False")
    return layers


@contextmanager
def recomputed_layers(model):
    """Inside, a forward pass with gradient keeps each layer's input only. Passes without gradient, and those
    that fill a cache (a second pass would fill it twice), are as before."""
    layers = layers_of(model)
    for layer in layers:
        layer.forward = partial(_recomputed, layer.forward)
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward  # the class's own is back


def recomputes(model) -> bool:
    """Whether a forward pass with gradient would compute its layers twice."""
    return torch.is_grad_enabled() and any(
        isinstance(module, GradientCheckpointingLayer) and "forward" in vars(module)
        for module in model.modules()
    )


def _recomputed(forward, *args, **kwargs):
    if torch.is_grad_enabled() and kwargs.get("past_key_values") is None:
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)
    return forward(*args, **kwargs)
