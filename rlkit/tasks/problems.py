"""Where questions come from: GSM8K (a hub id or a folder of jsonl), or the laptop's generated problems."""

import os
from pathlib import Path

from rlkit.support.checks import first_line, hub_revision, missing_folder, shown, unusable_path
from rlkit.support.files import read_jsonl
from rlkit.tasks.problem import Problem, check_n

_GSM8K_SPLITS = {"train": "train", "validation": "test", "test": "test"}


def load_problems(dataset: str | Path, split: str, n: int | None = None, seed: int = 0) -> list[Problem]:
    """The first ``n`` problems of a split ("train" or "validation"); n=None is all of them, n=0 none.

    dataset: "laptop" (generated; ``seed`` picks which problems, all of them are 6400 and 512), or GSM8K as a
        hub id ("openai/gsm8k", or one with "@revision" behind it) or a folder with train.jsonl and
        test.jsonl, where the test set serves as validation.
    """
    if dataset == "laptop":
        from rlkit.laptop.problems import generate_problems

        return generate_problems(n, split, seed)
    return load_gsm8k(dataset, split, n)


def load_gsm8k(source: str | Path, split: str, n: int | None = None) -> list[Problem]:
    """GSM8K's problems in file order, each with its gold answer: the number after ``####``, without commas.

    source: a folder with train.jsonl and test.jsonl, or a hub id such as "openai/gsm8k" (needs `datasets`).
    split: "train" (7,473 problems) or "validation", which is GSM8K's test set (1,319).
    n: the first n; None for all. n_steps counts the calculator notes ``<<3*4=12>>`` of the worked answer.
    """
    if split not in _GSM8K_SPLITS:
        raise ValueError(f"split: got {split!r}, expected 'train' or 'validation'")
    check_n(n)
    if not isinstance(source, (str, Path)):
        raise ValueError(f"dataset: got {shown(source)}, expected 'laptop', a hub id or a folder")
    name, folder = _GSM8K_SPLITS[split], Path(os.path.expanduser(source))
    path = folder / f"{name}.jsonl"
    if os.path.isdir(folder) and not os.path.isfile(path):
        expected = "expected train.jsonl and test.jsonl in it"
        raise ValueError(f"dataset: {folder} has no {path.name}; {expected}")
    try:
        rows = read_jsonl(path) if os.path.isdir(folder) else _rows_from_hub(str(source), name)
    except ValueError as error:
        raise ValueError(f"dataset: {error}") from error
    if n is not None and n > len(rows):
        raise ValueError(f"n: got {n}, but {source} has {len(rows)} problems in {name!r}")
    return [_gsm8k_problem(row, f"{source} {name} row {i}") for i, row in enumerate(rows[:n])]


def gsm8k_gold(worked_answer: str) -> str:
    """The final answer of a worked GSM8K answer: the text after the last ``####``, commas removed, sign kept.

    >>> gsm8k_gold("He pays 600 * 2 = 1200. #### 1,200")
    '1200'
    """
    _, mark, gold = worked_answer.rpartition("####")
    gold = gold.strip().replace(",", "")
    if not mark or not gold:
        raise ValueError(f"answer: {worked_answer[-60:]!r} has no '#### number' at its end")
    return gold


def _gsm8k_problem(row: dict, where: str) -> Problem:
    try:
        question, worked = row["question"], row["answer"]
        return Problem(question, gsm8k_gold(worked), worked.count("<<") or None)
    except (KeyError, TypeError, ValueError) as error:
        expected = "expected a question and an answer ending in '#### n'"
        raise ValueError(f"dataset: {where}: {expected} ({error})") from error


def _rows_from_hub(hub_id: str, name: str) -> list:
    path, revision = hub_revision(hub_id)
    owner, _, repo = path.partition("/")
    if not (owner and repo) or missing_folder(path) or unusable_path(hub_id):
        expected = "expected 'laptop', a hub id like 'openai/gsm8k' or an existing folder"
        raise ValueError(f"got {shown(hub_id)}, {expected}")
    try:
        from datasets import load_dataset
    except ImportError as error:
        needs = "reading it from the hub needs the `datasets` package (pip install datasets)"
        raise ValueError(f"{hub_id!r} is not a folder here, and {needs}") from error
    try:
        return list(load_dataset(path, "main", split=name, revision=revision))
    except Exception as error:  # not there, no network, a broken file: each layer has errors of its own
        expected = "expected 'laptop', a folder or the hub id of GSM8K"
        raise ValueError(f"could not load {hub_id!r} ({first_line(error)}); {expected}") from error
