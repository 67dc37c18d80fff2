"""LoRA by peft: small trainable matrices inside a model of transformers, which keeps its class and its names.

An adapted layer computes W x + (alpha / rank) B A x with W frozen. A and B are float32 whatever W's type is;
B starts at zero, so that the first step begins at the base model. Source: Hu et al. 2021, LoRA, section 4.
"""

from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from rlkit.support.checks import first_line, shown


def add_lora(model, rank: int, alpha: float | None = None, target_modules: str = "all-linear") -> None:
    """Freeze the model and put an adapter into each target layer, in place.

    alpha: None is 2 x rank. target_modules: "all-linear" (every linear layer but the output head), or names
    of layers with commas between them. ValueError for a model with an adapter, or without such layers.
    """
    from peft import LoraConfig

    if adapter_of(model) is not None:
        raise ValueError(f"lora_rank: got {rank}, but the model has an adapter already; expected 0")
    names = [name.strip() for name in target_modules.split(",")]
    targets = target_modules if target_modules == "all-linear" else names
    scale: Any = 2 * rank if alpha is None else alpha  # peft writes int and takes float
    try:
        model.add_adapter(LoraConfig(r=rank, lora_alpha=scale, target_modules=targets, task_type="CAUSAL_LM"))
    except ValueError as error:
        expected = "expected all-linear, or names of the model's linear layers such as q_proj,v_proj"
        got = f"lora_target_modules: got {shown(target_modules)}, {expected}"
        raise ValueError(f"{got} ({first_line(error)})") from error
    for p in model.parameters():
        if p.requires_grad:
            p.data = p.data.float()
    check_adapter(model)


def unwrapped(model):
    """The transformers model inside a ``PeftModel`` (its adapter lies in the layers), or the model itself.

    ValueError for an adapter that is not one plain LoRA in training.
    """
    check_adapter(model)
    model = inner(model)
    if adapter_of(model) is not None:
        model._hf_peft_config_loaded = True  # as add_adapter sets it: save_pretrained then writes the adapter
    return model


def inner(model):
    """The same for any adapter that lies in the layers, frozen or not; ValueError for prompt tuning."""
    if adapter_of(model) is None or not hasattr(model, "get_base_model"):
        return model
    if model.active_peft_config.is_prompt_learning:
        kind = model.active_peft_config.peft_type.value
        raise ValueError(
            f"model: has an adapter of kind {kind}, expected one inside the layers, such as LORA"
        )
    return model.get_base_model()


def adapter_of(model) -> str | None:
    """The name of the model's adapter, or None. (peft leaves its config on the model it changes.)"""
    return next(iter(getattr(model, "peft_config", None) or {}), None)


def check_adapter(model) -> None:
    """ValueError for an adapter that could not be merged and saved: LoRA alone, one, training, is fine."""
    name = adapter_of(model)
    if name is None:
        return
    configs = model.peft_config
    lora, trained = configs[name], [n for n, p in model.named_parameters() if p.requires_grad]
    kind = getattr(lora.peft_type, "value", lora.peft_type)
    head, tied = model.get_output_embeddings(), getattr(model.config, "tie_word_embeddings", False)
    wrong = {
        f"{len(configs)} adapters ({', '.join(configs)}), expected one": len(configs) > 1,
        f"an adapter of kind {kind}, expected LORA": kind != "LORA",
        "a LoRA with modules_to_save, a bias or tokens to train, expected its matrices alone": bool(
            getattr(lora, "modules_to_save", None)
            or getattr(lora, "trainable_token_indices", None)
            or getattr(lora, "bias", "none") != "none"
        ),
        "an adapter that is frozen, expected one in training (is_trainable=True)": not trained,
        f"{next((n for n in trained if '.lora_' not in n), '')} to train beside its adapter, expected the "
        "adapter alone": any(".lora_" not in n for n in trained),
        "an adapter on an output head that is tied to the embedding, expected none there": tied
        and hasattr(head, "base_layer"),
    }
    if what := next((line for line, applies in wrong.items() if applies), ""):
        raise ValueError(f"model: has {what}")


@contextmanager
def merged(model):
    """Inside, the model is the plain one: each adapted layer is a linear layer of weight W + (alpha / r) B A.

    Names are the base model's. After it W is the very tensor it was, so that no rounding adds up. A model
    without an adapter is left alone, and so is one that is merged already.
    """
    adapted = {}
    if adapter_of(model) is not None:
        from peft.tuners.lora import LoraLayer

        adapted = {name: m for name, m in model.named_modules() if isinstance(m, LoraLayer)}
    if not adapted:
        yield
        return
    layers: list[tuple[str, Any]] = list(adapted.items())
    saves_adapter = model._hf_peft_config_loaded
    kept = {name: layer.get_base_layer().weight.data for name, layer in layers}
    try:
        with torch.inference_mode(False), torch.no_grad():
            for name, layer in layers:
                layer.get_base_layer().weight.data = kept[name].clone()
                layer.merge()
                model.set_submodule(name, layer.get_base_layer())
        model._hf_peft_config_loaded = False  # save_pretrained writes the whole model
        yield
    finally:
        model._hf_peft_config_loaded = saves_adapter
        for name, layer in layers:
            layer.get_base_layer().weight.data = kept[name]
            layer.merged_adapters.clear()
            model.set_submodule(name, layer)


def for_sampling(model):
    """``merged`` where W is float32, as fast as the base model. In bfloat16 the adapter stays active: most of
    a small B A would be rounded away in the sum, and the policy sampled would not be the one trained."""
    whole = adapter_of(model) is not None and model.dtype == torch.float32
    return merged(model) if whole else nullcontext()


def trained_state(model) -> dict:
    """What a checkpoint keeps: the adapter's tensors, or without an adapter the whole state."""
    state = model.state_dict()
    if adapter_of(model) is None:
        return state
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    return {name: tensor for name, tensor in state.items() if name in trained}


def load_trained_state(model, state: dict) -> None:
    """The inverse of ``trained_state``; RuntimeError where names or shapes are others."""
    ours = trained_state(model)
    rest = {name: tensor for name, tensor in model.state_dict().items() if name not in ours}
    model.load_state_dict(rest | state)
