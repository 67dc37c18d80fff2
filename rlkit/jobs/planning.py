"""What a run needs, checked before it starts: files, devices, prompt lengths, memory, disk, tokens, time.

``plan(config)`` loads a tokenizer and the problems, but no weights, and trains nothing; ``train`` refuses
what it refuses. The estimates say how they are made: memory is an upper bound, up to twice what is used where
prompts are long, time right within a factor of a few.
"""

import os
import shutil
from contextlib import suppress
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from rlkit.advantages import BASELINES, NORMALIZERS
from rlkit.algorithms import get_algorithm
from rlkit.jobs.memory import BYTES, memory_estimate, memory_peak, model_shape, shape_of, shape_with_lora
from rlkit.jobs.record import continued, earlier_run, run_record
from rlkit.jobs.run_writer import runs_folder
from rlkit.jobs.sinks import check_sink
from rlkit.losses import LOSS_NORMALIZATIONS, REWEIGHTINGS
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
from rlkit.support import machine
from rlkit.support.arguments import named_function
from rlkit.support.checks import first_line, shown, unusable_folder
from rlkit.support.models import check_device, choose_attention, model_location, revision_of
from rlkit.tasks.problems import load_problems
from rlkit.tasks.prompts import load_prompt
from rlkit.tokenization import encode_prompts

# the parts of an algorithm that are names or functions
PARTS = {"baseline": BASELINES, "advantage_normalizer": NORMALIZERS}
PARTS |= {"importance_reweighting_method": REWEIGHTINGS, "loss_normalization": LOSS_NORMALIZATIONS}

# floating-point operations a second that the time estimate assumes, small matrices and overheads included
FLOPS = {"cpu": 3e10, "mps": 2e12, "cuda": 5e13}
GB = 1e9
VLLM_SHM_BYTES = 200e6


class _Page:
    """What is found out, line by line; ``attempt`` turns an error into a line that names the parameter."""

    def __init__(self, names):
        self.names, self.lines, self.errors, self.warnings = names, [], [], []

    def attempt(self, name, function, *arguments):
        try:
            return function(*arguments)
        except Exception as error:  # whatever a file, the hub or a parser raises: report it and look further
            line = (" ".join(str(error).split()) or repr(error)).removeprefix("n: ")
            self.refuse(line if line.partition(":")[0] in self.names else f"{name}: {line}")

    def refuse(self, line: str) -> None:
        if line not in self.errors:  # one dataset is read twice
            self.errors.append(line)

    def __str__(self):
        end = f"{len(self.errors)} problem(s), see above" if self.errors else "nothing stands in the way"
        warnings = [f"warning: {line}" for line in self.warnings]
        return "\n".join([*self.lines, *warnings, *(f"error: {e}" for e in self.errors), f"plan: {end}"])


def plan(
    config, *, algorithm=None, model=None, tokenizer=None, own_sampler: bool = True, problems=None
) -> dict:
    """Check all that can be checked without training, and estimate the rest.

    model, tokenizer: to be trained in place of ``config.model``. own_sampler: False where a sampler is given
    to ``train``, which then makes none. problems: in place of the dataset's, (to train on, to evaluate on).

    Returns a dict: ok (nothing stands in the way), errors and warnings (lists of lines), memory (bytes by
    part), memory_total, memory_free, device, prompt_tokens (longest, mean), tokens (upper bounds for the
    run), seconds (rough), disk (bytes), and text, all of it as a printable page.
    """
    algorithm = get_algorithm(config.algo if algorithm is None else algorithm)
    c = config.resolved(algorithm)
    page = _Page([*c.__dataclass_fields__, *PARTS])
    for part, table in PARTS.items():
        page.attempt(part, named_function, part, getattr(algorithm, part), table)
    prompt = page.attempt("prompt", load_prompt, c.prompt)
    if model is None:
        device = page.attempt("device", check_device, c.device) or torch.device("cpu")
    else:
        device = next(model.parameters()).device
    page.lines.append(
        f"{algorithm.name}, {c.n_steps} steps of {c.n_prompts} prompts x {c.group_size} responses, train "
        f"batches of {c.train_batch_size} rows in {c.gradient_accumulation_steps} microbatch(es), lr {c.lr:g}"
    )
    compute = c.autocast_dtype if c.autocast else c.dtype
    attention, why = choose_attention(c.attn_implementation, getattr(torch, compute), device)
    gpu = f" ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else ""
    if c.n_gpus > 1:
        gpu += f" and {c.n_gpus - 1} more, each with 1/{c.n_gpus} of the weights"
        page.attempt("n_gpus", check_ranks, c.n_gpus, c.sampler == "vllm", device)
    if device.type == "mps":
        gpu = f" (a part of the machine's memory: {_size(torch.mps.recommended_max_memory())} at most)"
        page.attempt("autocast_dtype" if c.autocast else "dtype", check_mps, compute)
    kind = c.dtype + (f" with {compute} autocast" if c.autocast else "")
    kind += f", LoRA of rank {c.lora_rank}" if c.lora_rank else ""
    kind += ", layers recomputed in the backward pass" if c.gradient_checkpointing else ""
    kind += f", attention {attention or 'as transformers chooses'}" + (f" ({why})" if why else "")
    page.lines.append(f"device {device}{gpu}, {kind}, {c.threads} CPU thread(s)")
    install = _server(page, c, device) if c.sampler == "vllm" and own_sampler else None
    versions = [f"{name} {version(name)}" for name in ("torch", "transformers")]
    if install:
        versions.append(
            f"{install.package} {install.version}" + ("" if install.here else f" in {install.python}")
        )
    page.lines.append("versions: " + ", ".join(versions))
    page.attempt("sink", check_sink, c.sink)
    page.warnings += without_effect(config, algorithm)

    found = {"memory": {}, "memory_total": 0, "memory_free": free_memory(device), "device": str(device)}
    found |= {"prompt_tokens": {}, "tokens": {}, "seconds": None, "disk": 0}
    if problems is None:
        columns = {"question_column": c.question_column, "answer_column": c.answer_column}
        n_val = max(c.n_val, c.n_val_final)
        load = partial(load_problems, **columns)
        problems = page.attempt("n_train", load, c.dataset, "train", c.n_train) or []
        val_problems = page.attempt("n_val", load, c.dataset, "validation", n_val) or []
    else:
        problems, val_problems = problems
    shape = None
    if model is None:
        location = page.attempt("model", model_location, c.model)
        opened = location and page.attempt("model", _open_model, c.model, location)
        tokenizer, shape = opened or (None, None)
        if opened and c.lora_rank:
            shape = page.attempt("lora_rank", shape_with_lora, location, c) or shape
    else:
        with suppress(AttributeError):  # a model of one's own may lack what its size is read from
            shape = shape_of(model)
        if c.lora_rank:
            shape = page.attempt("lora_rank", shape_with_lora, model, c) or shape
    if tokenizer and prompt:
        prompt = page.attempt("prompt", prompt.for_tokenizer, tokenizer)
    if tokenizer and prompt and problems:
        room = shape["positions"] - c.max_tokens if shape else 10**9
        lengths = found["prompt_tokens"] = lengths_of_all(tokenizer, problems, val_problems, prompt, room)
        average = f"{lengths['mean']:.0f} tokens on average, {lengths['longest']} at most"
        page.lines.append(f"prompt {prompt.name}: {average}; {c.max_tokens} new ones")
    if shape:
        lengths = found["prompt_tokens"] or {"longest": 256, "mean": 200.0}
        found["memory"] = memory_estimate(c, shape, lengths, device, install, own_sampler, attention)
        there = 0 if model is None else found["memory"]["weights"]
        found |= _needs(page, c, shape, lengths, device, found["memory"], found["memory_free"], there)
        if install:
            weights = shape["parameters"] * BYTES[compute]
            page.errors += server_shortages(weights, install, device)
    if c.run_dir is not None:
        page.attempt("run_dir", check_folder, c, algorithm)
    goes, disk = Path(c.run_dir or runs_folder()), f"about {_size(found['disk'])}"
    above = goes.expanduser().absolute()
    folder = next(folder for folder in (above, *above.parents) if os.path.isdir(folder))
    free = shutil.disk_usage(folder).free
    page.lines.append(
        f"disk: {disk} for checkpoints and weights, {_size(free)} free where {c.run_dir or 'runs'} goes"
    )
    if found["disk"] > free:
        needs = f"needs {disk} in {folder}, {_size(free)} free"
        page.refuse(f"run_dir: {needs}: try another run_dir, or checkpoint_every=0")
    said = {"errors": page.errors, "warnings": page.warnings, "text": str(page)}
    return {"ok": not page.errors} | said | found


def without_effect(config, algorithm) -> list[str]:
    """A line for each setting that this algorithm, or this machine, makes nothing of."""
    clips = algorithm.importance_reweighting_method not in ("none", "noclip")
    constant, cores = algorithm.loss_normalization == "constant", os.cpu_count() or 1
    idle = {
        "cliprange": not clips,
        "cliprange_high": not clips,
        "normalization_constant": not constant and not callable(algorithm.loss_normalization),
    }
    lines = [
        f"{name}: {getattr(config, name)} has no effect with {algorithm.name!r}"
        for name, applies in idle.items()
        if applies and getattr(config, name) is not None
    ]
    return lines + [f"threads: {config.threads} on {cores} cores"] * (config.threads > cores)


def check_folder(config, algorithm) -> None:
    """ValueError unless this run may write to its folder: a new one, or one whose run it may go on with."""
    if why := unusable_folder(config.run_dir):
        raise ValueError(f"run_dir: got {shown(config.run_dir)}, expected a folder to write to ({why})")
    path = Path(config.run_dir).expanduser().absolute()
    if recorded := earlier_run(path, config.resume):
        continued(recorded, run_record(config, algorithm), path)


def check_ranks(n: int, with_server: bool, device) -> None:
    """ValueError unless each rank here has a GPU of its own, and a server another; CPUs do for all."""
    n = int(os.environ.get("LOCAL_WORLD_SIZE", n))  # under torchrun: those on this machine
    if device.type == "cuda" and (there := torch.cuda.device_count()) < n + with_server:
        server = " and one more for vLLM" if with_server else ""
        raise ValueError(f"n_gpus: got {n}, but there are {there}; expected {n} or more{server}")


def check_mps(dtype: str) -> None:
    """ValueError where this macOS cannot compute in ``dtype`` on its GPU."""
    if dtype == "bfloat16" and not torch.backends.mps.is_macos_or_newer(14, 0):
        raise ValueError(
            "got 'bfloat16', which MPS has from macOS 14 on; expected dtype=float32, autocast off"
        )


def _server(page: _Page, config, device):
    """The vLLM install that a run will use, or None with the reason among the errors."""
    known = len(page.errors)
    install = page.attempt("sampler", find_vllm)
    if install is None:
        return page.refuse(f"sampler: {vllm_missing()}") if len(page.errors) == known else None
    gpu = config.n_gpus if config.n_gpus > 1 and device.type == "cuda" else None
    weight_sync = "shm" if config.n_gpus > 1 and config.weight_sync == "auto" else config.weight_sync
    where, reason = server_outlook(weight_sync, install, device, gpu)
    page.lines.append(where)
    unpinned = vllm_unpinned(install)
    page.warnings += [f"sampler: expected {unpinned}"] if unpinned else []
    page.warnings += [f"weight_sync: shm in place of {weight_sync} ({reason})"] if reason else []
    return install


def _needs(page, config, shape: dict, lengths: dict, device, memory: dict, free: int, there: int) -> dict:
    """memory_total, disk, tokens and seconds, with their lines; ``there`` bytes of the weights are loaded."""
    c, n, name = config, shape["parameters"], "given" if there else config.model
    longest, total = lengths["longest"] + c.max_tokens, memory_peak(memory)
    if longest > shape["positions"]:
        together = f"the longest prompt and response together are {longest} tokens"
        page.refuse(f"max_tokens: {together}, the model holds {shape['positions']}")
    parts = ", ".join(f"{part} {_size(value)}" for part, value in memory.items())
    about = f"memory about {_size(total)} on {device}, {_size(free)} free: {parts}"
    trained = f" ({shape['trained'] / 1e6:,.2f} M trained)" if shape["trained"] < n else ""
    page.lines.append(f"model {name}: {n / 1e6:,.1f} M parameters{trained}; {about}")
    if not shape["kv_width"] and c.sampler == "transformers":
        costs = "(Mamba-like?), so every sampled token costs a full forward pass: expect slow rollouts"
        page.warnings.append(f"model: {name} has no attention heads {costs}")
    if total - there > free:
        (page.errors if c.check_memory else page.warnings).append(too_little(c, device, total, free))
    tokens, flops = token_estimate(c, lengths), FLOPS[device.type]
    seconds = time_estimate(n, tokens, c.group_size, flops * (c.threads if device.type == "cpu" else 1))
    generated = (
        f"{tokens['rollouts']:,.0f} generated for training and {tokens['evaluations']:,.0f} for evaluation"
    )
    page.lines.append(f"tokens: at most {generated}")
    long = f"if every response had {c.max_tokens} tokens, assuming {flops:.0e} operations a second"
    page.lines.append(f"time: roughly {_duration(seconds)} {long}")
    disk = disk_estimate(memory["gradients"], c.checkpoint_every, c.n_steps)
    disk += n * BYTES[c.dtype] if shape["trained"] < n else 0  # model/ holds all of the weights
    return {"memory_total": total, "disk": disk, "tokens": tokens, "seconds": seconds}


def server_outlook(wanted: str, install, device, gpu: int | None = None) -> tuple[str, str]:
    """(where vLLM will run and how it gets the weights, why that is not the wanted way or "")."""
    gpu, shared = place(device, gpu)
    policy = (device.index or 0) if device.type == "cuda" else None
    places: dict[str, Any] = dict(server_on_cpu=install.on_cpu, server_gpu=gpu, policy_gpu=policy)
    way, reason = choose_way(wanted, **places, vllm_importable=vllm_importable())
    where = "the CPU" if install.on_cpu else f"GPU {gpu}"
    if shared and not install.on_cpu:
        where += f", the policy's own: {ONE_GPU_SHARE:.0%} of its memory, freed while the policy trains"
    return f"vLLM on {where}; weights by {way}", reason


def prompt_lengths(tokenizer, problems, prompt) -> dict:
    """longest and mean tokens of the problems' prompts."""
    texts = [prompt.fill(problem.question) for problem in problems]
    counts = [len(ids) for ids in encode_prompts(texts, tokenizer)]
    return {"longest": max(counts), "mean": sum(counts) / len(counts)}


def lengths_of_all(tokenizer, train_problems, val_problems, prompt, room: int) -> dict:
    """``prompt_lengths`` of a run: the mean from some, the longest from all that is evaluated and the longest
    texts that are trained on; from all of these, too, where twice that would not fit into ``room``
    tokens."""
    by_length = sorted(train_problems, key=lambda problem: len(problem.question.encode()))
    found = prompt_lengths(tokenizer, by_length[:: 1 + len(by_length) // 512], prompt)
    longest = prompt_lengths(tokenizer, [*by_length[-64:], *val_problems], prompt)["longest"]
    if longest <= room < 2 * longest:
        longest = max(longest, prompt_lengths(tokenizer, by_length, prompt)["longest"])
    return found | {"longest": max(longest, found["longest"])}


def _open_model(name: str, location: str):
    """(tokenizer, shape); one short ValueError if they are not there."""
    try:
        return AutoTokenizer.from_pretrained(**revision_of(location)), model_shape(location)
    except (OSError, ValueError, KeyError) as error:
        expected = "expected 'laptop', a folder, or a hub id and a network that reaches the hub"
        raise ValueError(f"model: could not load {name!r} ({first_line(error)}); {expected}") from error


def server_shortages(weights: int, install, device) -> list[str]:
    """What the server would lack: room for the weights (bytes) in its share of a GPU, or shared memory."""
    lines = []
    shm = shutil.disk_usage("/dev/shm").total if Path("/dev/shm").is_dir() else VLLM_SHM_BYTES
    if shm < VLLM_SHM_BYTES:
        through = f"vLLM's processes talk through {_size(VLLM_SHM_BYTES)} of it"
        lines.append(f"/dev/shm: {_size(shm)} in all, {through}: start the container with --shm-size=1g")
    if not install.on_cpu and torch.cuda.is_available():
        gpu, shared = place(device)
        free, total = torch.cuda.mem_get_info(gpu)
        share = (ONE_GPU_SHARE if shared else OWN_GPU_SHARE) * total
        if share < 1.2 * weights:
            alone = f"the model's weights alone are {_size(weights)}: try a second GPU, or a smaller model"
            lines.append(f"memory: vLLM's share of GPU {gpu} is {_size(share)}, {alone}")
        elif share > free:
            taken = f"vLLM takes {_size(share)} of GPU {gpu}, {_size(free)} free"
            lines.append(f"memory: {taken}: end what else uses it")
    return lines


def free_memory(device) -> int:
    """Bytes that this process can still get on the device."""
    if device.type == "cuda" and torch.cuda.is_available():
        return torch.cuda.mem_get_info(device)[0]
    free = machine.memory()[1]
    if device.type == "mps":  # the CPU's memory, up to what Metal allows one process
        free = min(free, torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory())
    return free


def too_little(config, device, total: int, free: int) -> str:
    """The message of a memory estimate that is above what is free: what to change, the most useful first."""
    tips = []
    if config.train_batch_size > config.gradient_accumulation_steps:
        tips.append(f"gradient_accumulation_steps={config.train_batch_size}")
    tips += [] if config.gradient_checkpointing else ["gradient_checkpointing=True"]
    tips += [] if config.lora_rank else ["lora_rank=16"]
    tips += ["dtype=bfloat16"] if config.dtype == "float32" else []
    tips += [f"max_tokens={config.max_tokens // 2}"] if config.max_tokens > 256 else []
    if config.sampler == "vllm" and device.type == "cuda" and torch.cuda.device_count() == 1:
        tips.append("a second GPU for vLLM")
    tips.append("a smaller model")
    end = ", or check_memory=False: the estimate is an upper bound" if config.check_memory else ""
    return f"memory: needs about {_size(total)} on {device}, {_size(free)} free: try {', '.join(tips)}{end}"


def disk_estimate(weights: int, checkpoint_every: int, n_steps: int) -> int:
    """Bytes: weights and two moments per checkpoint, three while one is written, and the final weights."""
    at_once = 3 if checkpoint_every and n_steps > checkpoint_every else 1
    return (3 * at_once + 1) * weights


def token_estimate(config, lengths: dict) -> dict:
    """Upper bounds over the run: generated tokens for training and evaluation, and prompt tokens read."""
    n_evaluations = (config.n_steps // config.eval_every if config.eval_every else 0) + config.eval_at_start
    evaluated = config.n_val_final + max(n_evaluations - 1, 0) * config.n_val if config.n_val else 0
    rows = config.n_steps * config.rollout_batch_size
    generated = {"rollouts": rows * config.max_tokens, "evaluations": evaluated * config.max_tokens}
    return generated | {"prompts": int((rows + evaluated) * lengths["mean"])}


def time_estimate(parameters: int, tokens: dict, group_size: int, per_second: float) -> float:
    """Seconds: 2 operations per parameter and token generated or read, 6 per token trained on."""
    read_once = tokens["prompts"] / group_size  # a group shares its prompt
    work = 2 * (tokens["rollouts"] + tokens["evaluations"] + read_once) + 6 * (tokens["rollouts"] + read_once)
    return work * parameters / per_second


def _size(n: float) -> str:
    return f"{n / GB:.{0 if n >= 10 * GB else 1}f} GB" if n >= 0.1 * GB else f"{n / 1e6:.0f} MB"


def _duration(s: float) -> str:
    return f"{s:.0f} s" if s < 120 else f"{s / 60:.0f} min" if s < 7200 else f"{s / 3600:.1f} h"
