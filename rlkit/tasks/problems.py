"""Where questions come from: GSM8K (a hub name or a folder of jsonl) and the laptop's generated word problems."""

from __future__ import annotations

import json
import os
import random
from dataclasses import dataclass
from pathlib import Path
from zlib import crc32

from rlkit.support.checks import missing_folder, shown, unusable_path

LAPTOP_SIZES = {"train": 6400, "validation": 512}  # how many generated problems n=None stands for
_GSM8K_SPLITS = {"train": "train", "validation": "test", "test": "test"}


@dataclass(frozen=True)
class Problem:
    """A question, its final answer as text (a plain number), and how many steps its solution takes if known."""

    question: str
    answer: str
    n_steps: int | None = None


def load_problems(dataset: str | Path, split: str, n: int | None = None, seed: int = 0) -> list[Problem]:
    """The first ``n`` problems of a split ("train" or "validation"); n=None is all of them, n=0 none.

    dataset: "laptop" (generated; ``seed`` picks which problems, all of them are 6400 and 512), or GSM8K as a
        hub id ("openai/gsm8k") or a folder with train.jsonl and test.jsonl, where the test set serves as
        validation.
    """
    if dataset == "laptop":
        return generate_problems(LAPTOP_SIZES.get(split, 0) if n is None else n, split, seed)
    return load_gsm8k(dataset, split, n)


# ---- GSM8K
# ---------------------------------------------------------------------------------------------------------


def load_gsm8k(source: str | Path, split: str, n: int | None = None) -> list[Problem]:
    """GSM8K's problems in file order, each with its gold answer: what follows ``####``, without thousands
    commas.

    source: a folder with train.jsonl and test.jsonl, or a hub id such as "openai/gsm8k" (needs `datasets`).
    split: "train" (7,473 problems) or "validation", which is GSM8K's test set (1,319).
    n: the first n; None for all. n_steps counts the calculator notes ``<<3*4=12>>`` of the worked answer.
    """
    if split not in _GSM8K_SPLITS:
        raise ValueError(f"split: got {split!r}, expected 'train' or 'validation'")
    _check_n(n)
    if not isinstance(source, (str, Path)):
        raise ValueError(f"dataset: got {shown(source)}, expected 'laptop', a hub id or a folder")
    name = _GSM8K_SPLITS[split]
    folder = Path(os.path.expanduser(source))
    if os.path.isdir(folder):
        path = folder / f"{name}.jsonl"
        if not os.path.isfile(path):
            raise ValueError(
                f"dataset: {folder} has no {path.name}; expected train.jsonl and test.jsonl in it"
            )
        rows = _read_rows(path)
    else:
        rows = _rows_from_hub(str(source), name)
    if n is not None and n > len(rows):
        raise ValueError(f"n: got {n}, but {source} has {len(rows)} problems in {name!r}")
    return [_gsm8k_problem(row, f"{source} {name} row {i}") for i, row in enumerate(rows[:n])]


def _read_rows(path: Path) -> list:
    """The objects of a JSONL file. A line may hold any character but a line feed."""
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"dataset: {path} cannot be read as UTF-8 text ({error})") from error
    rows = []
    for i, line in enumerate(lines, 1):
        try:
            rows += [json.loads(line)] if line.strip() else []
        except ValueError as error:
            raise ValueError(f"dataset: {path}: line {i} is no JSON ({error})") from error
    return rows


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
        raise ValueError(
            f"dataset: {where}: expected a question and an answer ending in '#### n' ({error})"
        ) from error


def _rows_from_hub(hub_id: str, name: str):
    owner, _, repo = hub_id.partition("/")
    if not (owner and repo) or missing_folder(hub_id) or unusable_path(hub_id):
        raise ValueError(
            f"dataset: got {shown(hub_id)}, expected 'laptop', a hub id like 'openai/gsm8k' or an "
            "existing folder"
        )
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise ValueError(
            f"dataset: {hub_id!r} is no folder here, and reading it from the hub needs the `datasets` "
            "package (pip install datasets)"
        ) from error
    try:
        return list(load_dataset(hub_id, "main", split=name))
    except (
        Exception
    ) as error:  # not there, no network, a broken file: every layer below has errors of its own
        first_line = str(error).strip().partition("\n")[0] or type(error).__name__
        raise ValueError(
            f"dataset: could not load {hub_id!r} ({first_line}); expected 'laptop', a folder or the "
            "hub id of GSM8K"
        ) from error


# ---- the laptop's word problems
# ------------------------------------------------------------------------------------

NAMES = "Tom Mia Sam Ana Ben Leo Rosa Omar Lily Max Nina Eva Ivan Zoe Amir Kim".split()
THINGS = (
    "apples plums shells stamps pencils marbles cards coins books cookies beads stickers rocks balls toys "
    "nuts"
).split()
STARTS = ["{name} has {a} {things}.", "{name} starts with {a} {things}.", "{name} owns {a} {things}."]
GROUPS = ["{name} has {a} boxes with {b} {things} in each box.", "{name} buys {a} bags of {b} {things} each."]
EVENTS = {
    "+": [
        "{name} finds {b} more {things}.",
        "{name} buys {b} more {things}.",
        "{other} gives {name} {b} {things}.",
        "Then {name} gets {b} more.",
    ],
    "-": [
        "{name} gives away {b} {things}.",
        "{name} loses {b} {things}.",
        "{name} gives {other} {b} {things}.",
        "Then {name} sells {b}.",
    ],
    "*": ["{other} has {b} times as many {things} as {name}."],
}
ASKS = [
    "How many {things} does {name} have now?",
    "How many {things} does {name} have?",
    "How many {things} are there with {name} in the end?",
]


@dataclass(frozen=True)
class Step:
    """One line of a solution: ``name`` ends up with ``left op right = result`` things."""

    name: str
    left: int
    op: str
    right: int
    result: int


@dataclass(frozen=True)
class Story:
    """A word problem with its solution, step by step. ``start`` is None when the first step counts groups."""

    name: str
    things: str
    start: int | None
    steps: tuple[Step, ...]
    question: str

    @property
    def answer(self) -> int:
        return self.steps[-1].result


def generate_problems(n: int, split: str = "train", seed: int = 0) -> list[Problem]:
    """``n`` different word problems of one to three steps of adding, subtracting and multiplying, numbers 1
    to 99.

    The split belongs to the question, not to the draw (``split_of``): train and validation never meet,
    whatever the seeds. The same (n, split, seed) gives the same problems, and a smaller n the first of them.
    """
    if split not in LAPTOP_SIZES:
        raise ValueError(f"split: got {split!r}, expected 'train' or 'validation'")
    _check_n(n)
    rng, problems = random.Random(f"{split} {seed}"), {}
    while len(problems) < n:
        story = draw_story(rng)
        if split_of(story.question) == split:
            problems.setdefault(story.question, Problem(story.question, str(story.answer), len(story.steps)))
    return list(problems.values())


def split_of(question: str) -> str:
    """The split a generated question belongs to, fixed by a checksum of its text: one in eight is validation."""
    return "validation" if crc32(question.encode()) % 8 == 0 else "train"


def draw_story(rng: random.Random) -> Story:
    """One random word problem. Two dials set how hard it is: the number of steps and the size of the numbers."""
    n_steps = rng.choices([1, 2, 3], weights=[35, 40, 25])[0]
    large = rng.random() < 0.35
    name, *others = rng.sample(NAMES, 4)
    things = rng.choice(THINGS)
    sentences, steps, start = [], [], None

    if rng.random() < 0.25:  # groups: the first step multiplies
        a, b = rng.randint(2, 5), rng.randint(2, 12 if large else 6)
        sentences.append(rng.choice(GROUPS).format(name=name, a=a, b=b, things=things))
        steps.append(Step(name, a, "*", b, a * b))
        now = a * b
    else:
        start = now = rng.randint(12, 45) if large else rng.randint(3, 15)
        sentences.append(rng.choice(STARTS).format(name=name, a=now, things=things))
    first_name = name

    while len(steps) < n_steps:
        op, b = _draw_step(rng, now, large)
        other = others.pop()
        sentences.append(rng.choice(EVENTS[op]).format(name=name, other=other, b=b, things=things))
        if op == "*":
            name = other  # the story goes on with the one who has more
        result = {"+": now + b, "-": now - b, "*": now * b}[op]
        steps.append(Step(name, now, op, b, result))
        now = result
    sentences.append(rng.choice(ASKS).format(name=name, things=things))
    return Story(first_name, things, start, tuple(steps), " ".join(sentences))


def _draw_step(rng: random.Random, now: int, large: bool) -> tuple[str, int]:
    """An operation and its right operand such that the result stays within 1..99."""
    b = rng.randint(6, 25) if large else rng.randint(2, 9)
    k = rng.randint(2, 4 if large else 3)
    allowed = (["+"] if now + b <= 99 else []) + (["-"] if b < now else []) + (["*"] if now * k <= 48 else [])
    op = rng.choice(allowed)
    return op, (k if op == "*" else b)


def _check_n(n) -> None:
    if n is not None and (isinstance(n, bool) or not isinstance(n, int) or n < 0):
        raise ValueError(f"n: got {n!r}, expected a whole number >= 0 or None for all")
