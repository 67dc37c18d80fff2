"""Reading JSONL, and writing files and folders so that a kill at any moment leaves a whole one or none."""

import gzip
import hashlib
import json
import os
import shutil
from codecs import BOM_UTF8
from contextlib import suppress
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
    partial.unlink(missing_ok=True)  # a leftover, or a link to somewhere else
    try:
        with open(partial, "xb") as file:
            file.write(text.encode())
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


class GrowingFile:
    """A file that only this object writes to: texts are appended, each with the system when ``add`` returns.

    OSError if they cannot be written, or if the file is no longer what was written: removed, cut, replaced.
    """

    def __init__(self, path: Path):
        self.path, self.file = path, open(path, "ab", buffering=0)
        self.size = self.file.tell()

    def add(self, text: str) -> None:
        left = memoryview(text.encode())
        self.size += len(left)
        while left:
            left = left[self.file.write(left) :]
        if not self.path.exists() or self.path.stat().st_size != self.size:
            raise OSError(f"{self.path.name} was removed or changed meanwhile")

    def sync(self) -> None:
        os.fsync(self.file.fileno())

    def close(self) -> None:
        self.file.close()


def fresh_folder(folder: Path) -> Path:
    """An empty folder of this name, whatever was there."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def publish(partial: Path, target: Path) -> None:
    """Give a finished folder its name, and make the rename itself durable where the file system can."""
    os.rename(partial, target)
    with suppress(OSError):  # Windows opens no folders, and some network file systems sync none
        descriptor = os.open(target.parent, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


CHECKSUMS = "checksums.json"


def write_checksums(folder: Path) -> None:
    """The SHA-256 of each file in the folder, into its checksums.json."""
    write_json(folder / CHECKSUMS, {path.name: _sha256(path) for path in sorted(folder.iterdir())})


def damage(folder: Path) -> str:
    """What is not as it was written, by the folder's checksums; "" if all is."""
    if not (folder / CHECKSUMS).is_file():
        return f"{CHECKSUMS} is missing"
    try:
        wanted = dict(json.loads((folder / CHECKSUMS).read_bytes()))
    except (ValueError, TypeError):
        wanted = {}
    if not wanted:
        return f"{CHECKSUMS} is not as it was written"
    for name, sha in wanted.items():
        if not (folder / name).is_file():
            return f"{name} is missing"
        if _sha256(folder / name) != sha:
            return f"{name} is not as it was written"
    return ""


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
