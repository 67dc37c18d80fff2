"""Any Hugging Face causal language model with its tokenizer, ready to be sampled from and trained."""

import os
import tempfile
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.utils import logging as transformers_logging

from rlkit.laptop import MODELS, model_path
from rlkit.support.checks import first_line, hub_revision, missing_folder, shown, unusable_path
from rlkit.support.probes import check_causal


def load_model(
    name_or_path="laptop",
    dtype="float32",
    device=None,
    attn_implementation=None,
    autocast_dtype=None,
    on_host=False,
):
    """(model, tokenizer), the model in eval mode on its device.

    name_or_path: "laptop" or "laptop_long" (the models that ship with rlkit), a folder or a hub id, which
        may end in @ and a revision ("owner/name@main").
    dtype: the weights' type, "float32" or "bfloat16" (any torch dtype name).
    device: None is the first CUDA GPU if there is one, else the CPU.
    attn_implementation: "flash_attention_2", "sdpa", "eager"; None leaves it to transformers.
        FlashAttention-2 becomes SDPA, with one printed line, where flash-attn, the device or the type of the
        weights does not allow it.

    autocast_dtype: the type that autocast will compute in around these weights, which FlashAttention-2 looks
        at too; None is the weights'.
    on_host: leave the weights on the CPU, to be spread over several devices; all else is for ``device``.


    Eval mode is on purpose: dropout would make the on-policy ratio differ from 1. The tokenizer pads on the
    right, with its end-of-text token if it has no pad token (padding is masked by position, never by id).
    Raises ValueError for a model that is not there, or is not causal.
    """
    where = revision_of(model_location(name_or_path))
    torch_dtype = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not isinstance(torch_dtype, torch.dtype) or not torch_dtype.is_floating_point:
        raise ValueError(f"dtype: got {dtype!r}, expected 'float32' or 'bfloat16'")
    device = check_device(device)
    attention, reason = choose_attention(attn_implementation, autocast_dtype or torch_dtype, device)
    if reason:
        print(f"attention: sdpa in place of {attn_implementation} ({reason})", flush=True)
    try:
        tokenizer = AutoTokenizer.from_pretrained(**where)
        kinds = {"dtype": torch_dtype, "attn_implementation": attention, "use_safetensors": True}
        with no_progress_bars():
            model = AutoModelForCausalLM.from_pretrained(**where, **kinds)
    except Exception as error:  # readers of weights, configs and tokenizers raise too many kinds to list
        expected = "expected 'laptop', a folder or the hub id of a causal language model"
        what = f"could not load {shown(str(name_or_path))} ({first_line(error)})"
        if attention and ("attn_implementation" in str(error) or "scaled_dot_product" in str(error)):
            expected = "expected an attention that this architecture has: try -p attn_implementation eager"
        raise ValueError(f"model: {what}; {expected}") from error
    prepare_tokenizer(tokenizer)
    model = model.to("cpu" if on_host else device).eval()  # pyright: ignore[reportArgumentType]
    check_causal(model)
    return model, tokenizer


def save_model(model, tokenizer, folder) -> None:
    """Weights and tokenizer into a folder that ``load_model`` reads (of an adapter: that peft reads)."""
    with no_progress_bars():
        model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def try_saving(model, tokenizer, folder) -> None:
    """Save all but the weights once, so that nothing but a full disk can fail at the end of a run.

    Of a generation_config that transformers refuses to save only the token ids stay, with one printed line:
    nothing else of it is ever used here.
    """
    with tempfile.TemporaryDirectory(prefix=".try-", dir=folder) as place, no_progress_bars():
        try:
            if generation := getattr(model, "generation_config", None):
                generation.save_pretrained(place)
        except ValueError as error:
            print(
                f"model: its generation_config is left out ({' '.join(str(error).split())[:200]})", flush=True
            )
            ids = {
                f"{name}_token_id": getattr(generation, f"{name}_token_id") for name in ("bos", "eos", "pad")
            }
            model.generation_config = GenerationConfig(**ids)
        try:
            model.save_pretrained(place, state_dict={})
            tokenizer.save_pretrained(place)
        except Exception as error:  # a config or tokenizer of one's own may raise anything
            raise ValueError(
                f"model: it cannot be saved ({first_line(error)}); expected one that can"
            ) from error


@contextmanager
def no_progress_bars():
    """Keep transformers' bars for reading and writing weights out of a notebook's saved output."""
    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()


def model_location(name_or_path: str | Path) -> str:
    """What ``from_pretrained`` takes: an existing folder or a hub id. ValueError if it can be neither."""
    expected = "expected 'laptop', a hub id or a folder"
    if not isinstance(name_or_path, (str, Path)) or not str(name_or_path).strip():
        raise ValueError(f"model: got {shown(name_or_path)}, {expected}")
    text = str(name_or_path)
    if why := unusable_path(text):
        raise ValueError(f"model: got {shown(text)}, {expected} ({why})")
    if text in MODELS:
        return str(model_path(text))
    path = Path(os.path.expanduser(name_or_path))
    if os.path.isdir(path):
        if all((path / name).is_file() for name in ("config.json", "metrics.jsonl")):  # a run: its weights
            path = path / "model"
        if not (path / "config.json").is_file():
            raise ValueError(f"model: {shown(str(path))} has no config.json, so it is not a model's folder")
        return str(path)
    if missing_folder(hub_revision(text)[0]):
        raise ValueError(f"model: no folder {shown(text)}; {expected}")
    return text


def revision_of(location: str) -> dict:
    """``from_pretrained``'s arguments for a folder, or for a hub id that may end in @ and a revision.

    A model is data: code that comes with it is never run.
    """
    name, revision = hub_revision(location)
    data = {"pretrained_model_name_or_path": name, "trust_remote_code": False}
    return data | ({"revision": revision} if revision else {})


def check_device(device: str | None) -> torch.device:
    """The device asked for, or the first GPU, or the CPU. ValueError if it is not there."""
    if device is None:
        return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    try:
        chosen = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"device: got {shown(device)}, expected 'cpu', 'cuda', 'cuda:0' or 'mps'") from error
    if chosen.type == "cuda" and (chosen.index or 0) >= (n := torch.cuda.device_count()):
        there = f"torch sees {n} CUDA device(s) here; expected 'cpu' or one that is there"
        raise ValueError(f"device: got {device!r}, but {there}")
    if chosen.type == "mps" and not torch.backends.mps.is_available():
        raise ValueError(f"device: got {device!r}, but torch sees no MPS device here")
    return torch.device("cuda:0") if str(chosen) == "cuda" else chosen


def choose_attention(wanted: str | None, dtype: torch.dtype, device: torch.device) -> tuple[str | None, str]:
    """(implementation or None for transformers' choice, why it is not the one that was wanted or "")."""
    if wanted != "flash_attention_2":
        return wanted, ""
    if device.type != "cuda":
        return "sdpa", f"{device.type} has no FlashAttention"
    if find_spec("flash_attn") is None:
        return "sdpa", "flash-attn is not installed"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return "sdpa", f"{torch.cuda.get_device_name(device)} is older than Ampere"
    if dtype not in (torch.float16, torch.bfloat16):
        return "sdpa", "it needs bfloat16 weights, or autocast"
    return "flash_attention_2", ""


def prepare_tokenizer(tokenizer) -> None:
    """Right padding, and some valid pad token, whatever the tokenizer came with."""
    tokenizer.padding_side = "right"
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.convert_ids_to_tokens(0)
