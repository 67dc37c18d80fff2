"""What a run will need, before it starts: devices, access, prompt lengths, memory, disk, tokens and time.

``plan(config)`` loads a tokenizer and the problems, but no weights, and trains nothing. The estimates say how
they are made; memory is an upper bound, up to twice what is used where prompts are long, time right within a
factor of a few.
"""

from __future__ import annotations

import shutil
from importlib.metadata import version
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from rlkit.algorithms import get_algorithm
from rlkit.jobs.sinks import check_sink
from rlkit.log_probs import CHUNK_ELEMENTS
from rlkit.samplers.vllm.find import (
    ONE_GPU_SHARE,
    OWN_GPU_SHARE,
    find_vllm,
    place,
    vllm_importable,
    vllm_missing,
    vllm_unpinned,
)
from rlkit.samplers.vllm.weight_sync import choose_way
from rlkit.support.models import check_device, choose_attention, model_location
from rlkit.tasks.problems import load_problems
from rlkit.tasks.prompts import load_prompt

# effective floating-point operations per second that the time estimate assumes, small matrices and overheads
# included
FLOPS = {"cpu": 3e10, "mps": 2e12, "cuda": 5e13}
GB = 1e9
BYTES = {"float32": 4, "bfloat16": 2}
VLLM_SHM_BYTES = 200e6
VLLM_CPU_BYTES = 4e9  # vLLM's processes (measured: 2.9 GB) and its cache (1 GiB) on a CPU


def plan(config, *, algorithm=None) -> dict:
    """Check what can be checked without training, and estimate the rest.

    Returns a dict: ok (nothing stands in the way), errors and warnings (lists of lines), memory (bytes by
    part), memory_total, memory_free, device, prompt_tokens (longest, mean), tokens (upper bounds for the
    run), seconds (rough), disk (bytes), and text, all of it as a printable page.
    """
    algorithm = get_algorithm(config.algo if algorithm is None else algorithm)
    config = config.resolved(algorithm)
    errors, warnings, lines = [], [], []

    def attempt(function, *arguments):
        try:
            return function(*arguments)
        except Exception as error:  # whatever a file, the hub or a parser raises: report it and look further
            line = " ".join(str(error).split()) or repr(error)
            if line not in errors:  # the same dataset is read twice
                errors.append(line)

    prompt = load_prompt(config.prompt)
    device = attempt(check_device, config.device) or torch.device("cpu")
    dtype = getattr(torch, config.dtype)
    attention, reason = choose_attention(config.attn_implementation, dtype, device)
    lines.append(
        f"{algorithm.name}, {config.n_steps} steps of {config.n_prompts} prompts x {config.group_size} "
        f"responses, train batches of {config.train_batch_size} rows in "
        f"{config.gradient_accumulation_steps} microbatch(es), lr {config.lr:g}"
    )
    lines.append(
        f"device {device}{_device_name(device)}, {config.dtype}"
        f"{' with bfloat16 autocast' if config.autocast else ''}, attention {attention}"
        f"{f' ({reason})' if reason else ''}, {config.threads} CPU thread(s)"
    )
    versions, install = [f"{name} {version(name)}" for name in ("torch", "transformers")], None
    if config.sampler == "vllm":
        known = len(errors)
        install = attempt(find_vllm)
        if install is None and len(errors) == known:
            errors.append(f"sampler: {vllm_missing()}")
        elif install is not None:
            where, reason = server_outlook(config, install, device)
            lines.append(where)
            warnings += [f"sampler: expected {vllm_unpinned(install)}"] if vllm_unpinned(install) else []
            warnings += [f"weight_sync: shm in place of {config.weight_sync} ({reason})"] if reason else []
            versions.append(
                f"{install.package} {install.version}{'' if install.here else f' in {install.python}'}"
            )
    lines.append("versions: " + ", ".join(versions))
    attempt(check_sink, config.sink)

    result = {
        "device": str(device),
        "memory": {},
        "memory_total": 0,
        "memory_free": free_memory(device),
        "prompt_tokens": {},
        "tokens": {},
        "seconds": None,
        "disk": 0,
    }
    train_problems = attempt(load_problems, config.dataset, "train", config.n_train)
    n_val = max(config.n_val, config.n_val_final)
    val_problems = attempt(load_problems, config.dataset, "validation", n_val)
    for problems, wanted, split in (
        (train_problems, config.n_train, "n_train"),
        (val_problems, n_val, "n_val"),
    ):
        if problems is not None and len(problems) < wanted:
            warnings.append(f"{split}: {len(problems)} problems are there, {wanted} were asked for")
    location = attempt(model_location, config.model)
    tokenizer, architecture = location and attempt(_open_model, config.model, location) or (None, None)

    lengths = {"longest": 256, "mean": 200.0}  # where the tokenizer or the problems are not there
    if tokenizer and train_problems:
        lengths = prompt_lengths(tokenizer, train_problems + (val_problems or []), prompt)
        result["prompt_tokens"] = lengths
        lines.append(
            f"prompt {prompt.name}: {lengths['mean']:.0f} tokens on average, {lengths['longest']} at most; "
            f"{config.max_tokens} new ones"
        )
    if architecture:
        longest = lengths["longest"] + config.max_tokens
        if longest > architecture["positions"]:
            errors.append(
                f"max_tokens: the longest prompt and response together are {longest} tokens, the model "
                f"holds {architecture['positions']}"
            )
        memory = memory_estimate(config, architecture, lengths, device, install)
        total, free = memory_peak(memory), result["memory_free"]
        result |= {"memory": memory, "memory_total": total, "parameters": architecture["parameters"]}
        lines.append(
            f"model {config.model}: {architecture['parameters'] / 1e6:,.1f} M parameters; memory about "
            f"{_size(total)} on {device}, {_size(free)} free: "
            + ", ".join(f"{name} {_size(value)}" for name, value in memory.items())
        )
        if total > free:
            (errors if config.check_memory else warnings).append(too_little(config, device, total, free))
        errors += server_shortages(config, install, device, architecture) if install else []
        result["disk"] = disk_estimate(config, architecture)
        result["tokens"] = token_estimate(config, lengths)
        result["seconds"] = time_estimate(config, architecture, lengths, device)
        lines.append(
            f"tokens: at most {result['tokens']['rollouts']:,.0f} generated for training and "
            f"{result['tokens']['evaluations']:,.0f} for evaluation"
        )
        lines.append(
            f"time: roughly {_duration(result['seconds'])} if every response had {config.max_tokens} tokens, "
            f"assuming {FLOPS[device.type]:.0e} operations a second"
        )
    folder = _nearest(config.run_dir or "runs")
    disk_free = shutil.disk_usage(folder).free
    lines.append(
        f"disk: about {_size(result['disk'])} for checkpoints and weights, {_size(disk_free)} free where "
        f"{config.run_dir or 'runs'} goes"
    )
    if result["disk"] > disk_free:
        errors.append(
            f"run_dir: needs about {_size(result['disk'])} in {folder}, {_size(disk_free)} free: try another "
            "run_dir, or checkpoint_every=0"
        )
    lines += [f"warning: {line}" for line in warnings] + [f"error: {line}" for line in errors]
    lines.append(
        "plan: " + ("nothing stands in the way" if not errors else f"{len(errors)} problem(s), see above")
    )
    return result | {"ok": not errors, "errors": errors, "warnings": warnings, "text": "\n".join(lines)}


def check_memory(config, problems, prompt) -> None:
    """ValueError if a (resolved) config's estimated peak is beyond what its device has free; no weights are read."""
    location, device = model_location(config.model), check_device(config.device)
    tokenizer, shape = _open_model(config.model, location)
    lengths = prompt_lengths(tokenizer, sorted(problems, key=lambda p: len(p.question))[-64:], prompt)
    install = find_vllm() if config.sampler == "vllm" else None
    total, free = memory_peak(memory_estimate(config, shape, lengths, device, install)), free_memory(device)
    if total > free:
        raise ValueError(too_little(config, device, total, free))


def server_outlook(config, install, device) -> tuple[str, str]:
    """(where vLLM will run and how it gets the weights, why that is not the way that was wanted or "")."""
    gpu, shared = place(device)
    way, reason = choose_way(
        config.weight_sync,
        server_on_cpu=install.on_cpu,
        server_gpu=gpu,
        policy_gpu=(device.index or 0) if device.type == "cuda" else None,
        vllm_importable=vllm_importable(),
    )
    where = "the CPU" if install.on_cpu else f"GPU {gpu}"
    if shared and not install.on_cpu:
        where += f", the policy's own: {ONE_GPU_SHARE:.0%} of its memory, freed while the policy trains"
    return f"vLLM on {where}; weights by {way}", reason


def prompt_lengths(tokenizer, problems, prompt) -> dict:
    """longest and mean tokens of the problems' prompts."""
    counts = [
        len(ids)
        for ids in tokenizer(
            [prompt.fill(p.question) for p in problems], add_special_tokens=False, verbose=False
        )["input_ids"]
    ]
    return {"longest": max(counts), "mean": sum(counts) / len(counts)}


def _open_model(name: str, location: str):
    """(tokenizer, shape); one short ValueError if they are not there."""
    try:
        return AutoTokenizer.from_pretrained(location), model_shape(location)
    except (OSError, ValueError, KeyError) as error:
        first_line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ValueError(
            f"model: could not load {name!r} ({first_line}); expected 'laptop', a folder, or a hub id and "
            "a network that reaches the hub"
        ) from error


def model_shape(location: str) -> dict:
    """Parameters and sizes of a model from its config alone; no weights are read or allocated."""
    config = AutoConfig.from_pretrained(location)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return shape_of(model)


def shape_of(model) -> dict:
    """parameters, vocabulary, layers, hidden, feed_forward, kv_width (key and value sizes together), positions."""
    config = model.config.get_text_config()
    heads = config.num_attention_heads
    head_size = getattr(config, "head_dim", None) or config.hidden_size // heads
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "vocabulary": config.vocab_size,
        "layers": config.num_hidden_layers,
        "hidden": config.hidden_size,
        "feed_forward": getattr(config, "intermediate_size", None)
        or getattr(config, "n_inner", None)
        or 4 * config.hidden_size,
        "kv_width": 2 * (getattr(config, "num_key_value_heads", None) or heads) * head_size,
        "positions": getattr(config, "max_position_embeddings", None) or 10**9,
    }


def server_shortages(config, install, device, shape: dict) -> list[str]:
    """What the server would lack: room for the weights in its share of a GPU, that share itself, shared memory."""
    lines = []
    shm = shutil.disk_usage("/dev/shm").total if Path("/dev/shm").is_dir() else VLLM_SHM_BYTES
    if shm < VLLM_SHM_BYTES:
        lines.append(
            f"/dev/shm: {_size(shm)} in all, vLLM's processes talk through {_size(VLLM_SHM_BYTES)} of it: "
            "start the container with --shm-size=1g"
        )
    if not install.on_cpu and torch.cuda.is_available():
        gpu, shared = place(device)
        free, total = torch.cuda.mem_get_info(gpu)
        share = (ONE_GPU_SHARE if shared else OWN_GPU_SHARE) * total
        weights = shape["parameters"] * (2 if config.autocast else BYTES[config.dtype])
        if share < 1.2 * weights:
            lines.append(
                f"memory: vLLM's share of GPU {gpu} is {_size(share)}, the model's weights alone are "
                f"{_size(weights)}: try a second GPU, or a smaller model"
            )
        elif share > free:
            lines.append(
                f"memory: vLLM takes {_size(share)} of GPU {gpu}, {_size(free)} free: end what else uses it"
            )
    return lines


def memory_estimate(config, shape: dict, lengths: dict, device, vllm=None) -> dict:
    """Bytes on the trainer's device, by part.

    weights, gradients, optimizer: 1, 1 and 2 numbers per parameter in the weights' type (AdamW keeps two
    moments).
    activations: what a backward pass of one microbatch keeps, about 14 hidden + 4 feed-forward numbers per
    token and layer (attention without its score matrix; with autocast in bfloat16, plus a copy of the weights
    in it).
    logits: one chunk of positions in float32, with its gradient and softmax.
    cache: keys and values of the rollout batch, while sampling in process (up to 512 rows at once).
    vllm: the server's share while it samples, where it lives on the policy's GPU (it sleeps while the policy
        trains).
    server: its processes, cache and weights and the file they come by, where both live on the CPU.
    The last two ask which vLLM there is: ``vllm``, a `VLLMInstall` or None.

    An upper bound: prompts that a microbatch's rows share are counted once per row, and scored once per
    prompt.
    """
    size = BYTES[config.dtype]
    compute = 2 if config.autocast else size
    rows = config.train_batch_size // config.gradient_accumulation_steps
    tokens = rows * (lengths["longest"] + config.max_tokens)
    parameters = shape["parameters"]
    memory = {
        "weights": parameters * (size + (2 if config.autocast else 0)),
        "gradients": parameters * size,
        "optimizer": 2 * parameters * size,
        "activations": tokens
        * shape["layers"]
        * (14 * shape["hidden"] + 4 * shape["feed_forward"])
        * compute,
        "logits": 3 * 4 * min(tokens * shape["vocabulary"], max(CHUNK_ELEMENTS, shape["vocabulary"])),
        "cache": 0,
    }
    if config.sampler == "transformers":
        own = min(512, config.rollout_batch_size) * config.max_tokens
        prompts = min(512, config.n_prompts) * lengths["longest"]
        memory["cache"] = int(1.5 * (own + prompts) * shape["layers"] * shape["kv_width"] * size)
    elif vllm is not None and vllm.on_cpu and device.type == "cpu":
        memory["server"] = int(
            VLLM_CPU_BYTES + parameters * (compute + 2 * size)
        )  # two files while one is replaced
    elif vllm is not None and not vllm.on_cpu and place(device)[1]:
        memory["vllm"] = int(ONE_GPU_SHARE * torch.cuda.get_device_properties(device).total_memory)
    return memory


def memory_peak(memory: dict) -> int:
    """Training and sampling take turns: the larger of the two, on top of what stays."""
    training = memory["gradients"] + memory["activations"] + memory["logits"]
    return (
        memory["weights"]
        + memory["optimizer"]
        + memory.get("server", 0)
        + max(training, memory["cache"] + memory.get("vllm", 0))
    )


def free_memory(device) -> int:
    """Bytes that this process can still get on the device."""
    if device.type == "cuda" and torch.cuda.is_available():
        return torch.cuda.mem_get_info(device)[0]
    import psutil

    return min(psutil.virtual_memory().available, _cgroup_free())


def _cgroup_free() -> int:
    """A container's own limit, which the machine's free memory does not show."""
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
    except (OSError, ValueError):
        return 2**62
    return 2**62 if limit == "max" else max(0, int(limit) - used)


def too_little(config, device, total: int, free: int) -> str:
    """The message of a memory estimate that is above what is free."""
    return (
        f"memory: needs about {_size(total)} on {device}, {_size(free)} free: try {advice(config, device)}"
        + (", or check_memory=False: the estimate is an upper bound" if config.check_memory else "")
    )


def advice(config, device) -> str:
    """What to change, the most useful first."""
    tips = []
    if config.train_batch_size > config.gradient_accumulation_steps:
        tips.append(f"gradient_accumulation_steps={config.train_batch_size}")
    if config.dtype == "float32":
        tips.append("dtype=bfloat16")
    if config.max_tokens > 256:
        tips.append(f"max_tokens={config.max_tokens // 2}")
    if config.sampler == "vllm" and device.type == "cuda" and torch.cuda.device_count() == 1:
        tips.append("a second GPU for vLLM")
    return ", ".join([*tips, "a smaller model"])


def disk_estimate(config, shape: dict) -> int:
    """Bytes: weights and two moments per checkpoint, three at once while one is written, and the final weights."""
    size = BYTES[config.dtype]
    at_once = 3 if config.checkpoint_every and config.n_steps > config.checkpoint_every else 1
    return (3 * at_once + 1) * shape["parameters"] * size


def token_estimate(config, lengths: dict) -> dict:
    """Upper bounds over the run: generated tokens for training and evaluation, and prompt tokens read."""
    n_evaluations = (config.n_steps // config.eval_every if config.eval_every else 0) + config.eval_at_start
    evaluated = config.n_val_final + max(n_evaluations - 1, 0) * config.n_val if config.n_val else 0
    rows = config.n_steps * config.rollout_batch_size
    return {
        "rollouts": rows * config.max_tokens,
        "evaluations": evaluated * config.max_tokens,
        "prompts": int((rows + evaluated) * lengths["mean"]),
    }


def time_estimate(config, shape: dict, lengths: dict, device) -> float:
    """Seconds: 2 operations per parameter and token generated or read, 6 per token trained on."""
    tokens = token_estimate(config, lengths)
    read_once = tokens["prompts"] / config.group_size  # a group shares its prompt
    work = 2 * (tokens["rollouts"] + tokens["evaluations"] + read_once) + 6 * (tokens["rollouts"] + read_once)
    per_second = FLOPS[device.type] * (config.threads if device.type == "cpu" else 1)
    return work * shape["parameters"] / per_second


def _device_name(device) -> str:
    return f" ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else ""


def _nearest(path) -> Path:
    """The folder, or the nearest one above it that is there."""
    path = Path(path).expanduser().absolute()
    return next(folder for folder in (path, *path.parents) if folder.is_dir())


def _size(n: float) -> str:
    return (
        f"{n / GB:.0f} GB" if n >= 10 * GB else f"{n / GB:.1f} GB" if n >= 0.1 * GB else f"{n / 1e6:.0f} MB"
    )


def _duration(seconds: float) -> str:
    return (
        f"{seconds:.0f} s"
        if seconds < 120
        else f"{seconds / 60:.0f} min"
        if seconds < 7200
        else f"{seconds / 3600:.1f} h"
    )
