"""How much memory a run needs on the trainer's device, from sizes alone; which settings fit which card."""

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from rlkit.jobs.config import Config
from rlkit.log_probs import CHUNK_ELEMENTS
from rlkit.samplers.vllm.find import ONE_GPU_SHARE, place
from rlkit.support.adapters import adapter_of, add_lora
from rlkit.support.models import revision_of
from rlkit.support.probes import positions
from rlkit.support.ranks import Ranks

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
VLLM_CPU_BYTES = 4e9  # vLLM's processes (measured: 2.9 GB) and its cache (1 GiB) on a CPU


def model_shape(location: str) -> dict:
    """Parameters and sizes of a model from its config alone; no weights are read or allocated."""
    return shape_of(_without_weights(AutoConfig.from_pretrained(**revision_of(location))))


def shape_with_lora(model, config) -> dict:
    """The same with the config's LoRA in it; model: a folder, a hub id, or a model, which stays as it is."""
    given = not isinstance(model, str)
    if given and adapter_of(model) is not None:
        raise ValueError(f"got {config.lora_rank}, but the model has an adapter already; expected 0")
    known = model.config if given else AutoConfig.from_pretrained(**revision_of(model))
    return shape_of(_without_weights(known, config))


def _without_weights(model_config, config=None):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(model_config)
    if config is not None and config.lora_rank:
        add_lora(model, config.lora_rank, config.lora_alpha, config.lora_target_modules)
    return model


def shape_of(model) -> dict:
    """parameters (without a LoRA's), trained and adapted ones, vocabulary, layers, hidden, feed_forward,
    kv_width (keys and values; 0 without attention heads), qk_norm (queries and keys normalised by
    themselves), positions."""
    config = model.config.get_text_config()

    def first(*names, default) -> int:
        return next((v for name in names if (v := getattr(config, name, None))), default)

    heads, hidden = first("num_attention_heads", default=0), config.hidden_size
    width = first("head_dim", default=hidden // heads) if heads else 0
    sizes = {name: p.numel() for name, p in model.named_parameters()}
    lora = adapter_of(model) is not None
    shape = {"parameters": sum(n for name, n in sizes.items() if ".lora_" not in name)}
    shape["trained"] = sum(n for name, n in sizes.items() if not lora or ".lora_" in name)
    shape["adapted"] = sum(n for name, n in sizes.items() if name.endswith(".base_layer.weight"))
    shape |= {"vocabulary": config.vocab_size}
    shape |= {"layers": config.num_hidden_layers, "hidden": hidden}
    shape["feed_forward"] = first("intermediate_size", "n_inner", default=4 * hidden)
    shape["kv_width"] = 2 * first("num_key_value_heads", default=heads) * width
    shape["qk_norm"] = any("q_norm" in name for name in sizes)
    return shape | {"positions": positions(model.config) or 10**9}


def memory_estimate(
    config,
    shape: dict,
    lengths: dict,
    device,
    vllm=None,
    own_sampler: bool = True,
    attention: str | None = "sdpa",
) -> dict:
    """Bytes on the trainer's device, by part.

    weights: one number per parameter; autocast adds a copy in its type, a LoRA its own, in float32.
    gradients, optimizer: 1 and 2 numbers per trained parameter in its type (AdamW's moments).
        Each of n_gpus ranks holds its share of these; the first also a whole copy, to sample in process.
    activations: what a backward pass of one microbatch keeps. Per token and layer 9 hidden + keys and values
        + 4 feed-forward numbers, and 2 hidden + keys and values more where queries and keys are normalised;
        in float32 4 bytes each, in bfloat16 2 (norms are computed in float32: 2.5), under autocast, or with a
        float32 LoRA in a bfloat16 model, 3. Prompts that rows share count once, but each row then holds keys
        and values of its own. With gradient_checkpointing: each layer's input, and all of one layer.
    logits: one chunk of positions in float32, with its gradient and softmax.
    update: what AdamW computes between its moments and the weights, on a GPU for all parameters at once.
    cache: keys and values of the rollout batch, while sampling in process (up to 512 rows at once).
    merged: the adapted layers once more, W + B A, while a LoRA's model samples or is handed to vLLM.
    vllm: the server's share of the policy's GPU while it samples (it sleeps while the policy trains).
    server: its processes, cache and weights and the file they come by, where both live on the CPU.
    The last two ask which vLLM there is: ``vllm``, a `VLLMInstall` or None.
    """
    c, size, lora = config, BYTES[config.dtype], shape["trained"] < shape["parameters"]
    compute = BYTES[c.autocast_dtype] if c.autocast else size
    rows = -(-c.train_batch_size // Ranks(size=c.n_gpus).pieces(c.gradient_accumulation_steps))
    total = lengths["longest"] + c.max_tokens
    on_policy = c.train_batch_size == c.rollout_batch_size
    prompts = min(rows, -(-rows // c.group_size) if on_policy else c.n_prompts)
    shared = c.n_gpus == 1 and not c.gradient_checkpointing and attention in (None, "sdpa", "eager")
    tokens = rows * c.max_tokens + prompts * lengths["longest"] if shared else rows * total
    n, layers, hidden, kv = (shape[name] for name in ("parameters", "layers", "hidden", "kv_width"))
    numbers = 9 * hidden + kv + 4 * shape["feed_forward"] + shape["qk_norm"] * (2 * hidden + kv)
    each = 4 if compute == 4 else 3 if c.autocast or lora else 2.5
    kept = layers * (tokens * numbers * each + shared * rows * total * 1.5 * kv * compute)
    if c.gradient_checkpointing:
        kept = tokens * (layers * hidden * (4 if c.autocast else size) + numbers * each)
    per_trained = 4 if lora else size
    trained, vocabulary = shape["trained"] * per_trained, shape["vocabulary"]
    memory = {"weights": n * (size + (compute if c.autocast else 0)) + (trained if lora else 0)}
    memory |= {"gradients": trained, "optimizer": 2 * trained, "activations": int(kept)}
    some = min(rows * c.max_tokens * vocabulary, max(CHUNK_ELEMENTS, vocabulary))
    memory |= {"logits": 3 * 4 * some, "update": trained if device.type == "cuda" else 0, "cache": 0}
    for part in ("weights", "gradients", "optimizer", "update"):
        memory[part] = -(-memory[part] // c.n_gpus)
    if c.n_gpus > 1 and c.sampler == "transformers" and own_sampler:
        memory["weights"] += n * size
    if lora and (c.dtype == "float32" or c.sampler == "vllm"):
        memory["merged"] = shape["adapted"] * size
    if c.sampler == "transformers" and own_sampler:
        own = min(512, c.rollout_batch_size) * c.max_tokens
        read = min(512, c.n_prompts) * lengths["longest"]
        memory["cache"] = int(1.5 * (own + read) * layers * kv * size)
    elif vllm is not None and vllm.on_cpu and device.type == "cpu":
        files = 2 * size  # two while one is replaced
        memory["server"] = int(VLLM_CPU_BYTES + n * (compute + files))
    elif vllm is not None and not vllm.on_cpu and place(device)[1]:
        memory["vllm"] = int(ONE_GPU_SHARE * torch.cuda.get_device_properties(device).total_memory)
    return memory


def memory_peak(memory: dict) -> int:
    """Training and sampling take turns: the larger of the two, on top of what stays."""
    training = memory["gradients"] + max(memory["activations"] + memory["logits"], memory["update"])
    stays = memory["weights"] + memory["optimizer"] + memory.get("server", 0)
    return stays + max(training, memory["cache"] + memory.get("vllm", 0) + memory.get("merged", 0))


# ---- which settings fit which card: README's table

CARDS = (8, 16, 24, 40, 80)  # GB
CUDA_BYTES = 1e9  # what CUDA and its libraries take before any tensor
_SIZES = {
    "OLMo-2-1B": ("olmo2", dict(hidden_size=2048, num_hidden_layers=16, num_attention_heads=16))
    + (dict(num_key_value_heads=16, intermediate_size=8192, vocab_size=100352, tie_word_embeddings=False),),
    "Qwen2.5-0.5B": ("qwen2", dict(hidden_size=896, num_hidden_layers=24, num_attention_heads=14))
    + (dict(num_key_value_heads=2, intermediate_size=4864, vocab_size=151936, tie_word_embeddings=True),),
}
_PLAIN, _SAVING = {"dtype": "bfloat16"}, {"gradient_checkpointing": True}
_SETTINGS = [{}, _SAVING, _PLAIN, _PLAIN | _SAVING]
_SETTINGS += [{"lora_rank": 16} | more for more in ({}, _SAVING, _PLAIN, _PLAIN | _SAVING)]


def memory_table() -> list[str]:
    """README's lines: for settings of the preset olmo, what training needs and the smallest card that has it.

    The card also holds vLLM, which takes turns with the training and needs its share to hold the weights.
    """
    lines = ["| `preset olmo` with | " + " | ".join(f"{name} | card" for name in _SIZES) + " |"]
    lines += ["|---|" + "---|" * 2 * len(_SIZES)]
    for changes in _SETTINGS:
        config, cells = Config.from_parameters({"preset": "olmo", **changes}).resolved(), []
        for kind, *sizes in _SIZES.values():
            plain = AutoConfig.for_model(kind, **sizes[0], **sizes[1], pad_token_id=0, bos_token_id=0)
            shape = shape_of(_without_weights(plain, config))
            rest = ({"longest": 300}, torch.device("cuda"))  # about r1_zero's longest prompt on GSM8K
            memory = memory_estimate(config, shape, *rest, attention="flash_attention_2")
            card = next((f"{card} GB" for card in CARDS if fits(memory, config, shape, card * 1e9)), "none")
            cells += [f"{memory_peak(memory) / 1e9:.1f} GB", card]
        text = " ".join(f"{name}={value}" for name, value in changes.items())
        lines.append(f"| {f'`{text}`' if text else '(nothing)'} | " + " | ".join(cells) + " |")
    return lines


def fits(memory: dict, config, shape: dict, card: float) -> bool:
    """Whether training and a vLLM server find room on one card of so many bytes, in turns."""
    share = ONE_GPU_SHARE * card
    served = 1.2 * shape["parameters"] * (BYTES[config.autocast_dtype if config.autocast else config.dtype])
    return share >= served and memory_peak(memory | {"vllm": share}) + CUDA_BYTES <= card
