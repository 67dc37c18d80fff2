"""Reading JSONL, and writing files and folders so that a kill at any moment leaves a whole one or none."""

import gzip
import json
import os
import shutil
from codecs import BOM_UTF8
from pathlib import Path


def read_jsonl(path, *, growing: bool = False) -> list[dict]:
    """The objects of a .jsonl or .jsonl.gz file, one a line; blank lines are skipped.

    growing: for a log that is still written. It may be absent ([]), and a last line without its line break,
    which a kill cut short, is left out if it cannot be read. ValueError naming the file, and the line if one
    is broken.
    """
    path = Path(path)
    if not path.is_file():
        if growing:
            return []
        raise ValueError(f"path: {path} is not a file, expected .jsonl or .jsonl.gz")
    try:
        with (gzip.open if path.suffix == ".gz" else open)(path, "rb") as file:
            lines = (
                file.read().removeprefix(BOM_UTF8).split(b"\n")
            )  # bytes: a cut may fall inside a character
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error})") from error
    rows = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line.decode())
        except ValueError:  # not JSON, not UTF-8, or half a character
            if growing and number == len(lines):
                continue
            row = None
        if not isinstance(row, dict):
            raise ValueError(f"{path}: line {number} is not a JSON object in UTF-8")
        rows.append(row)
    return rows


def as_jsonl(rows) -> str:
    """The dicts as lines of JSON. ValueError for a number that is not finite."""
    return "".join(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n" for row in rows)


def write_json(path: Path, value) -> None:
    """A JSON file, whole or not at all."""
    write_text(path, json.dumps(value, indent=1, ensure_ascii=False) + "\n")


def write_text(path: Path, text: str) -> None:
    """A file, whole or not at all."""
    partial = path.with_name(f".partial-{path.name}")
    with open(partial, "w", encoding="utf-8", newline="\n") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


def fresh_folder(folder: Path) -> Path:
    """An empty folder of this name, whatever was there."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def publish(partial: Path, target: Path) -> None:
    """Give a finished folder its name, and make the rename itself durable."""
    os.rename(partial, target)
    try:
        descriptor = os.open(target.parent, os.O_RDONLY)
    except OSError:  # Windows opens no folders
        return
    os.fsync(descriptor)
    os.close(descriptor)
