"""How prompts become responses: one protocol, and two samplers behind it."""

from importlib import import_module

from rlkit.samplers.base import Completion, Sampler, SamplingParams

_HOME = {
    "TransformersSampler": "transformers_sampler",
    "VLLMServer": "vllm.server",
    "VLLMSampler": "vllm.sampler",
}
VLLMCompletion = Completion  # the handout's name
__all__ = ["Completion", "Sampler", "SamplingParams", "VLLMCompletion", "make_sampler", *_HOME]


def make_sampler(name: str, model, tokenizer, **options) -> Sampler:
    """The sampler called ``name``: "transformers" (in process) or "vllm" (a server behind HTTP)."""
    if name == "transformers":
        from rlkit.samplers.transformers_sampler import TransformersSampler

        return TransformersSampler(model, tokenizer, **options)
    if name == "vllm":
        from rlkit.samplers.vllm.sampler import VLLMSampler
        from rlkit.support.adapters import merged

        with merged(model):
            return VLLMSampler(model, tokenizer, **options)
    raise ValueError(f"sampler: got {name!r}, expected 'transformers' or 'vllm'")


def __getattr__(name):
    if name in _HOME:
        return getattr(import_module(f"rlkit.samplers.{_HOME[name]}"), name)
    raise AttributeError(f"module 'rlkit.samplers' has no attribute {name!r}")
