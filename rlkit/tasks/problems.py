"""Where questions come from: GSM8K or data like it (a hub id, a folder of jsonl), or the laptop's generated
problems."""

import math
import os
import re
from pathlib import Path

from rlkit.support.checks import first_line, hub_revision, missing_folder, shown, unusable_path
from rlkit.support.files import read_jsonl
from rlkit.tasks.grading import last_boxed
from rlkit.tasks.problem import Problem, check_n

_SPLITS = {"train": ("train",), "validation": ("validation", "test"), "test": ("test", "validation")}
_ON_HUB = {"train": "train", "validation": "test", "test": "test"}


def load_problems(
    dataset: str | Path,
    split: str,
    n: int | None = None,
    seed: int = 0,
    question_column: str = "question",
    answer_column: str = "answer",
) -> list[Problem]:
    r"""The first ``n`` problems of a split ("train" or "validation"); n=None is all of them, n=0 none.

    dataset: "laptop" or "laptop_long" (generated; ``seed`` picks which problems, all of them are 6400 and
        512; the second has a split "tuning" too), or questions and answers as a hub id ("openai/gsm8k", or
        one with "@revision" behind it) or a folder with train.jsonl and test.jsonl, where the test set serves
        as validation unless there is a validation.jsonl.
    question_column, answer_column: their names there. The gold answer is a number, what stands after ``####``
        (as in GSM8K), what stands in the last ``\boxed{}`` (as in MATH), or else the whole text.
    """
    if dataset in ("laptop", "laptop_long"):
        from rlkit.laptop.problems import generate_problems

        return generate_problems(n, split, seed, str(dataset))
    return _load_table(dataset, split, n, question_column, answer_column, gold_of)


def load_gsm8k(source: str | Path, split: str, n: int | None = None) -> list[Problem]:
    """GSM8K's problems in file order, each with its gold answer: the number after ``####``, without commas.

    source: a folder with train.jsonl and test.jsonl, or a hub id such as "openai/gsm8k" (needs `datasets`).
    split: "train" (7,473 problems) or "validation", which is GSM8K's test set (1,319).
    n: the first n; None for all. n_steps counts the calculator notes ``<<3*4=12>>`` of the worked answer.
    """
    return _load_table(source, split, n, "question", "answer", gsm8k_gold)


def _load_table(source, split: str, n: int | None, question_column: str, answer_column: str, gold) -> list:
    if split not in _SPLITS:
        raise ValueError(f"split: got {split!r}, expected 'train' or 'validation'")
    check_n(n)
    if not isinstance(source, (str, Path)):
        raise ValueError(f"dataset: got {shown(source)}, expected 'laptop', a hub id or a folder")
    names, folder = _SPLITS[split], Path(os.path.expanduser(source))
    here = os.path.isdir(folder)
    name = next((name for name in names if here and os.path.isfile(folder / f"{name}.jsonl")), _ON_HUB[split])
    path = folder / f"{name}.jsonl"
    if here and not os.path.isfile(path):
        expected = "expected train.jsonl and test.jsonl in it"
        raise ValueError(f"dataset: {folder} has no {path.name}; {expected}")
    try:
        rows = read_jsonl(path) if here else _rows_from_hub(str(source), name)
    except ValueError as error:
        raise ValueError(f"dataset: {error}") from error
    if n is not None and n > len(rows):
        raise ValueError(f"n: got {n}, but {source} has {len(rows)} problems in {name!r}")
    problems = []
    for i, row in enumerate(rows[:n]):
        try:
            worked = row[answer_column]
            answer, steps = gold(worked), worked.count("<<") if isinstance(worked, str) else 0
            if not (isinstance(question := row[question_column], str) and question.strip()):
                raise ValueError(f"question: got {shown(question)}, expected a text")
            problems.append(Problem(question, answer, steps or None))
        except (KeyError, AttributeError, TypeError, ValueError) as error:
            where = f"{path} line {_line_of_row(path, i)}" if here else f"{source} {name} row {i}"
            there = f", its columns are {', '.join(map(str, row))}" if isinstance(error, KeyError) else ""
            needed = f"a text in column {question_column!r} and an answer in {answer_column!r}"
            needed += " ending in '#### n'" if gold is gsm8k_gold else ""
            raise ValueError(f"dataset: {where}: expected {needed} ({error}{there})") from error
    return problems


def _line_of_row(path: Path, row: int) -> int:
    lines = path.read_bytes().split(b"\n")
    return [number for number, line in enumerate(lines, 1) if line.strip()][row]


def gold_of(answer) -> str:
    r"""A gold answer as text: of a worked answer what follows its last ``####`` (GSM8K) or stands in its last
    ``\boxed{}`` (MATH), else all of it; 42.0 is 42.

    >>> gold_of("so 6 * 7 = 42 #### 42"), gold_of(r"It is $\boxed{(1, 2)}$."), gold_of(" 4.5 "), gold_of(42.0)
    ('42', '(1, 2)', '4.5', '42')
    """
    if isinstance(answer, float) and math.isfinite(answer):
        answer = int(answer) if answer == int(answer) else str(answer)
    if isinstance(answer, int) and not isinstance(answer, bool):
        return str(answer)
    if not isinstance(answer, str) or not answer.strip():
        raise ValueError(f"answer: got {shown(answer)}, expected a text or a finite number")
    if "####" in answer:
        gold = answer.rpartition("####")[2]
        return gold.strip() if re.search(r"[(\[{]", gold) else gsm8k_gold(answer)  # a point keeps its comma
    return (last_boxed(answer) or answer).strip()


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
        part = "main" if repo == "gsm8k" else None
        return list(load_dataset(path, part, split=name, revision=revision))
    except Exception as error:  # not there, no network, a broken file: each layer has errors of its own
        expected = "expected 'laptop', a folder or the hub id of GSM8K"
        raise ValueError(f"could not load {hub_id!r} ({first_line(error)}); {expected}") from error


def check_problems(config, problems, val_problems) -> tuple[list[Problem], list[Problem]] | None:
    """The problems of one's own, to train on and to validate on; None for none.

    ValueError for what no run can use.
    """
    if problems is None and val_problems is None:
        return None
    needed = config.n_prompts
    n_val = max(config.n_val, config.n_val_final or 0) if config.n_val else 0
    for name, given, least in (("problems", problems, needed), ("val_problems", val_problems, bool(n_val))):
        if given is None and not least:
            continue
        if not isinstance(given, list) or not all(isinstance(problem, Problem) for problem in given):
            raise ValueError(f"{name}: got {shown(given)}, expected a list of Problem")
        if len(given) < least:
            raise ValueError(f"{name}: got {len(given)}, expected at least {int(least)}")
        for i, problem in enumerate(given):
            if not (isinstance(problem.question, str) and isinstance(problem.answer, str)):
                raise ValueError(f"{name}[{i}]: got {shown(problem)}, expected question and answer as texts")
    return [*problems], [*(val_problems or [])]
