"""What checks of arguments share: how a value is shown in an error, what counts as a number, what a text may name."""

from __future__ import annotations

import glob
import os

SHOWN = 120  # characters of a value in an error
LONGEST_PATH = 4096  # characters; no file system takes a longer path


def shown(value) -> str:
    """The value's repr for an error message, its middle left out if it is long."""
    try:
        text = repr(value)
    except ValueError:  # an integer beyond Python's own limit of digits
        text = f"an integer of {value.bit_length()} bits" if isinstance(value, int) else type(value).__name__
    half = SHOWN // 2
    return text if len(text) <= SHOWN else f"{text[:half]}...{text[-half:]} ({len(text)} characters)"


def number(value) -> float:
    """The value as a float, for comparing; NaN, which every comparison refuses, for whatever is no number.

    A text or a bool is no number; a tensor of one element is.
    """
    try:
        return float("nan") if isinstance(value, (str, bytes, bool)) else float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return float("nan")


def unusable_path(text: str) -> str:
    """Why no path can be this text, or ""."""
    if "\0" in text:
        return "it holds a NUL character"
    return f"it is {len(text)} characters long" if len(text) > LONGEST_PATH else ""


def missing_folder(text: str) -> bool:
    """True for a text that means a folder which is not there; False for a folder, or what may be a hub id.

    A hub id is ``name`` or ``owner/name``. So a path with a root, a dot, a tilde or two slashes means a
    folder; so does ``runs/nope`` where ``runs`` is a folder here, unless it is one that models or data sets
    lie in under their owner.
    """
    if os.path.isdir(os.path.expanduser(text)):
        return False
    owner, slash, _ = text.partition("/")
    if text.startswith(("/", ".", "~")) or text.count("/") > 1:
        return True
    return bool(slash) and os.path.isdir(owner) and not _is_an_owners(owner)


def _is_an_owners(folder: str) -> bool:
    inside = os.path.join(glob.escape(folder), "*", "")
    models = [
        path
        for path in glob.glob(inside + "config.json")
        if not os.path.exists(os.path.join(os.path.dirname(path), "metrics.jsonl"))
    ]  # that one is a run
    return bool(models or glob.glob(inside + "train.jsonl"))


def unusable_folder(text: str) -> str:
    """Why nothing can be written into the folder of this name (which need not be there yet), or ""."""
    path = os.path.abspath(os.path.expanduser(text))
    while not os.path.lexists(path) and os.path.dirname(path) != path:
        path = os.path.dirname(path)
    if not os.path.isdir(path):
        return f"{shown(path)} is no folder"
    return "" if os.access(path, os.W_OK | os.X_OK) else f"{shown(path)} cannot be written to"
