"""Helpers for checks of arguments: values in error messages, names close to a wrong one, numbers, paths."""

import glob
import os
from collections.abc import Iterable
from difflib import get_close_matches

SHOWN = 120  # characters of a value in an error
LONGEST_NAME = 255  # bytes of a file's or folder's name, on nearly every file system
LONGEST_PATH = 4096  # characters; no file system takes a longer path


def shown(value) -> str:
    """The value's repr for an error message, its middle left out if it is long."""
    try:
        text = repr(value)
    except ValueError:  # an integer beyond Python's own limit of digits
        text = f"an integer of {value.bit_length()} bits" if isinstance(value, int) else type(value).__name__
    half = SHOWN // 2
    return text if len(text) <= SHOWN else f"{text[:half]}...{text[-half:]} ({len(text)} characters)"


def hint(name: str, known: Iterable[str]) -> str:
    """ "; did you mean 'lr'?" for the known name that is closest to this one, "" if none is close."""
    by_lower = {text.lower(): text for text in known}
    close = get_close_matches(str(name).lower(), list(by_lower), n=1)
    return f"; did you mean {by_lower[close[0]]!r}?" if close else ""


def first_line(error: BaseException) -> str:
    """An error's first line, or its name where it has no text."""
    return str(error).strip().partition("\n")[0] or type(error).__name__


def number(value) -> float:
    """float(value), or NaN if it is not a number, so that range checks fail.

    A text or a bool is not a number; a tensor of one element is.
    """
    try:
        return float("nan") if isinstance(value, (str, bytes, bool)) else float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return float("nan")


def unusable_path(text: str) -> str:
    """Why this text cannot be a path; "" if it can."""
    if "\0" in text:
        return "it holds a NUL character"
    if any("\ud800" <= character <= "\udfff" for character in text):
        return "it holds bytes that are no UTF-8"
    return f"it is {len(text)} characters long" if len(text) > LONGEST_PATH else ""


def hub_revision(text: str) -> tuple[str, str | None]:
    """(name, revision or None) of a hub id such as ``owner/name@revision``; a folder's name may hold an @."""
    name, at, revision = text.partition("@")
    return (name, revision) if at and not os.path.isdir(os.path.expanduser(text)) else (text, None)


def missing_folder(text: str) -> bool:
    """True if the text looks like a local path and there is no such folder; False for what may be a hub id.

    A hub id is ``name`` or ``owner/name``. So a path with a root, a dot, a tilde or two slashes means a
    folder; so does ``runs/nope`` where ``runs`` is a folder here, unless models or data sets lie in it.
    """
    if os.path.isdir(os.path.expanduser(text)):
        return False
    owner, slash, _ = text.partition("/")
    if text.startswith(("/", ".", "~")) or text.count("/") > 1:
        return True
    return bool(slash) and os.path.isdir(owner) and not _is_an_owners(owner)


def _is_an_owners(folder: str) -> bool:
    inside = os.path.join(glob.escape(folder), "*", "")
    folders = map(os.path.dirname, glob.glob(inside + "config.json"))
    models = [f for f in folders if not os.path.exists(os.path.join(f, "metrics.jsonl"))]  # that one is a run
    return bool(models or glob.glob(inside + "train.jsonl"))


def unusable_folder(text: str) -> str:
    """Why nothing can be written into the folder of this name (which need not exist yet); "" if it can."""
    path = os.path.abspath(os.path.expanduser(text))
    while not os.path.lexists(path) and os.path.dirname(path) != path:
        path = os.path.dirname(path)
    if not os.path.isdir(path):
        return f"{shown(path)} is not a folder"
    if long := [
        part for part in os.path.normpath(text).split(os.sep) if len(os.fsencode(part)) > LONGEST_NAME
    ]:
        return f"a name of {len(os.fsencode(long[0]))} bytes"
    return "" if os.access(path, os.W_OK | os.X_OK) else f"{shown(path)} cannot be written to"
