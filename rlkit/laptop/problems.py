"""The laptop testbeds' word problems: steps of adding, subtracting and multiplying, one to three (``laptop``)
or four to eight between sentences that do not count (``laptop_long``)."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import lru_cache
from zlib import crc32

from rlkit.tasks.problem import Problem, check_n

SIZES = {"train": 6400, "validation": 512, "tuning": 512}  # how many problems n=None stands for
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
ASIDES = [  # of others, who play no part: nothing to count
    "{other} has {b} {things}.",
    "{other} finds {b} {things}.",
    "{other} gives away {b} {things}.",
    "{other} is {b} years old.",
]
ASKS = [
    "How many {things} does {name} have now?",
    "How many {things} does {name} have?",
    "How many {things} are there with {name} in the end?",
]


@dataclass(frozen=True)
class Task:
    """What tells the testbeds apart.

    steps: {number of steps: weight} of its problems; corpus_steps: of those that its base model reads.
    large: share of problems with large numbers. asides: {sentences that do not count: weight}.
    splits: the split of a question by its checksum's rest, the last one for all rests beyond.
    short: share of solutions in sums alone. think_ok: weight of the rewarded format.
    wrong, guess: share of wrong work, and of answers without work, after "<think>".
    talks: remarks and repeated lines (``corpus.talk``).
    """

    steps: dict[int, int]
    corpus_steps: dict[int, int]
    large: float
    asides: dict[int, int]
    splits: tuple[str, ...]
    short: float
    think_ok: float
    wrong: float
    guess: float
    talks: bool


_SHORT = {1: 35, 2: 40, 3: 25}
TASKS = {
    "laptop": Task(_SHORT, _SHORT, 0.35, {0: 1}, ("validation", "train"), 0.4, 0.11, 0.20, 0.35, False),
    "laptop_long": Task(
        steps={4: 36, 5: 22, 6: 16, 7: 14, 8: 12},
        corpus_steps={1: 8, 2: 12, 3: 14, 4: 20, 5: 16, 6: 12, 7: 9, 8: 9},
        large=0.25,
        asides={0: 50, 1: 30, 2: 20},
        splits=("validation", "tuning", "train"),
        short=0.2,
        think_ok=0.30,
        wrong=0.20,
        guess=0.10,
        talks=True,
    ),
}


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


def generate_problems(
    n: int | None, split: str = "train", seed: int = 0, task: str = "laptop"
) -> list[Problem]:
    """``n`` different word problems of a task, numbers 1 to 99; n=None is the split's own size.

    The split belongs to the question, not to the draw (``split_of``): splits never meet, whatever the seeds.
    "tuning" (``laptop_long`` only) is for choices, so that validation stays unseen. The same (n, split, seed)
    gives the same problems, and a smaller n the first of them.
    """
    if task not in TASKS:
        raise ValueError(f"task: got {task!r}, expected {' or '.join(map(repr, TASKS))}")
    if split not in TASKS[task].splits:
        raise ValueError(
            f"split: got {split!r}, expected {' or '.join(map(repr, sorted(TASKS[task].splits)))}"
        )
    check_n(n)
    n = SIZES[split] if n is None else n
    return list(_draw(n, split, seed, task))


@lru_cache(maxsize=4)  # a plan, a training and an evaluation ask for the same ones
def _draw(n: int, split: str, seed: int, task: str) -> tuple[Problem, ...]:
    rng, problems = random.Random(f"{split} {seed}"), {}
    while len(problems) < n:
        story = draw_story(rng, TASKS[task])
        if split_of(story.question, TASKS[task]) == split:
            problems.setdefault(story.question, Problem(story.question, str(story.answer), len(story.steps)))
    return tuple(problems.values())


def split_of(question: str, task: Task = TASKS["laptop"]) -> str:
    """The split a generated question belongs to, by a checksum of its text: one in eight is validation."""
    return task.splits[min(crc32(question.encode()) % 8, len(task.splits) - 1)]


def draw_story(rng: random.Random, task: Task = TASKS["laptop"]) -> Story:
    """One random word problem. Dials set how hard it is: number of steps, size of the numbers, asides."""
    n_steps = rng.choices([*task.steps], weights=[*task.steps.values()])[0]
    large = rng.random() < task.large
    n_asides = rng.choices([*task.asides], weights=[*task.asides.values()])[0] if len(task.asides) > 1 else 0
    name, *others = rng.sample(NAMES, max(task.steps) + max(task.asides) + 1)
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
    for _ in range(n_asides):
        aside = rng.choice(ASIDES).format(other=others.pop(), b=rng.randint(2, 25), things=things)
        sentences.insert(rng.randint(1, len(sentences)), aside)
    sentences.append(rng.choice(ASKS).format(name=name, things=things))
    return Story(first_name, things, start, tuple(steps), " ".join(sentences))


def _draw_step(rng: random.Random, now: int, large: bool) -> tuple[str, int]:
    """An operation and its right operand such that the result stays within 1..99."""
    b = rng.randint(6, 25) if large else rng.randint(2, 9)
    k = rng.randint(2, 4 if large else 3)
    allowed = (["+"] if now + b <= 99 else []) + (["-"] if b < now else []) + (["*"] if now * k <= 48 else [])
    op = rng.choice(allowed)
    return op, (k if op == "*" else b)
