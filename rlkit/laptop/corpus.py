"""Synthetic text to pretrain the laptop's base models: documents of a task drawn from one seed.

It imitates the text that base models read. The same word problems appear in many formats (worked answers
ending in ``#### n``, boxed answers, bare question lists, conversations); the think/answer format that RL
rewards is rare; some reasoning is wrong, some documents stop half-way. The share of right answers in the rare
format sets the accuracy that RL starts from. Questions of the validation split never appear
(``draw_train_story``).
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

from rlkit.laptop.problems import TASKS, Step, Story, Task, draw_story, split_of
from rlkit.tasks.prompts import SLOT, load_prompt

WRONG = 0.12  # share of worked answers with one altered number; after "<think>" a task's own
GUESS_WRONG = 0.6  # how often such a guess is off
CUT = 0.05  # share of documents that stop half-way
QA_HEADERS = [("Question: ", "\nAnswer:"), ("Q: ", "\nA:"), ("Problem: ", "\nSolution:"), ("", "\n")]

PREAMBLE = load_prompt("r1_zero").template.split("User:")[0]
BOX_ASK = load_prompt("question_only").template.split(SLOT)[1]


class Rng(random.Random):
    """Random numbers for the documents of one task."""

    task: Task = TASKS["laptop"]


def documents(seed: int, task: str = "laptop") -> Iterator[str]:
    """An endless stream of a task's documents, the same for the same seed."""
    rng = Rng(f"corpus {seed}")
    rng.task = TASKS[task]
    kinds, weights = zip(*KINDS)
    while True:
        text = rng.choices(kinds, weights)[0](rng)
        yield text[: rng.randint(20, len(text))] if rng.random() < CUT and len(text) > 20 else text


def draw_train_story(rng: Rng) -> Story:
    """A word problem of the training split, or one with fewer steps."""
    while True:
        story = draw_story(rng, replace(rng.task, steps=rng.task.corpus_steps))
        if split_of(story.question, rng.task) == "train":
            return story


# ---- solutions


def solve(rng: Rng, story: Story, style: str, wrong: float = WRONG) -> tuple[str, int]:
    """A worked solution and the answer it ends with, wrong with probability ``wrong``.

    style "short": "15 + 6 = 21. 21 - 5 = 16."; "long": "Tom has 15 plums. Then Tom has 15 + 6 = 21 plums.";
    "guess": "It must be 17.", without work and mostly wrong. A wrong worked solution has another number in
    one step and continues from there, as people do.
    """
    if style == "guess":
        answer = story.answer if rng.random() > GUESS_WRONG else max(1, story.answer + rng.randint(-9, 9))
        return f"It must be {answer}.", answer
    steps = list(story.steps)
    if rng.random() < wrong:
        steps = _slip(rng, steps)
    slip = next((i for i, (s, right) in enumerate(zip(steps, story.steps)) if s != right), None)
    if style == "short":
        lines = [f"{s.left} {s.op} {s.right} = {s.result}." for s in steps]
        return " ".join(talk(rng, lines, slip)), steps[-1].result
    lines = [f"{story.name} has {story.start} {story.things}."] if story.start is not None else []
    for s in steps:
        lines.append(
            f"{'Then ' if lines else ''}{s.name} has {s.left} {s.op} {s.right} = {s.result} {story.things}."
        )
    if slip is not None:
        slip += len(lines) - len(steps)
    return " ".join(talk(rng, lines, slip)), steps[-1].result


HMM, HMM_FALSE = 0.9, 0.01  # how often a line is doubted: a wrong one, and a right one
CHECK, CHECK_DOUBTED = 0.35, 0.7  # how often the last lines are said again, each time anew


def talk(rng: Rng, lines: list[str], slip: int | None) -> list[str]:
    """The lines with remarks that change nothing: a doubt behind a line, the last two lines said again.

    A length that is free: doubt tells that the answer may be wrong, and what is said again leaves it so.
    """
    if not rng.task.talks:
        return lines
    said, doubted = [], False
    for i, line in enumerate(lines):
        doubt = rng.random() < (HMM if i == slip else HMM_FALSE)
        said += [line, "Hmm."] if doubt else [line]
        doubted |= doubt
    while rng.random() < (CHECK_DOUBTED if doubted else CHECK):
        said += ["Let me check.", *lines[-2:]]
    return said


def _slip(rng: Rng, steps: list[Step]) -> list[Step]:
    at, by = rng.randrange(len(steps)), rng.choice([-2, -1, 1, 2, 10])
    of_sum = rng.task.talks and rng.random() < 0.5  # the result is off, not the number that was read
    out = list(steps[:at])
    for i, s in enumerate(steps[at:], at):
        left = out[-1].result if i > at else s.left
        right = max(1, s.right + by) if i == at and not of_sum else s.right
        result = {"+": left + right, "-": left - right, "*": left * right}[s.op]
        result += by if i == at and of_sum else 0
        out.append(Step(s.name, left, s.op, right, max(0, result)))
    return out


def _style(rng: Rng, guess: float = 0.0) -> str:
    return "guess" if rng.random() < guess else "short" if rng.random() < rng.task.short else "long"


# ---- kinds of documents


def question_answer(rng: Rng) -> str:
    """One worked problem, mostly ending in '#### n'."""
    story, (head, tail) = draw_train_story(rng), rng.choice(QA_HEADERS)
    work, answer = solve(rng, story, _style(rng))
    end = f"\n#### {answer}" if rng.random() < 0.75 else rng.choice(["", f" The answer is {answer}."])
    return f"{head}{story.question}{tail} {work}{end}"


def worked_list(rng: Rng) -> str:
    """Two to four worked problems in one format: here a model learns to keep to a page's format."""
    (head, tail), style = rng.choice(QA_HEADERS), _style(rng)
    end = rng.choice(["\n#### {}", " The answer is {}.", " \\boxed{{{}}}"])
    parts = []
    for _ in range(rng.randint(2, 4)):
        story = draw_train_story(rng)
        work, answer = solve(rng, story, style)
        parts.append(f"{head}{story.question}{tail} {work}{end.format(answer)}")
    return "\n\n".join(parts)


def question_list(rng: Rng) -> str:
    """Questions only, as on an exercise sheet."""
    questions = [draw_train_story(rng).question for _ in range(rng.randint(2, 5))]
    if rng.random() < 0.5:
        questions = [f"{i}. {question}" for i, question in enumerate(questions, 1)]
    return "\n".join(questions)


def boxed(rng: Rng) -> str:
    """The question_only prompt: often worked and boxed, sometimes boxed at once, not boxed, or ignored."""
    story = draw_train_story(rng)
    ask = (
        BOX_ASK
        if rng.random() < 0.6
        else rng.choice(
            [" Put the answer in a box.", " Give your final answer in \\boxed{}.", " Box the answer."]
        )
    )
    work, answer = solve(rng, story, _style(rng))
    draw = rng.random()
    if draw < 0.5:
        reply = f"{work} {rng.choice(['So the answer is ', '', 'Answer: '])}\\boxed{{{answer}}}."
    elif draw < 0.68:
        reply = f"\\boxed{{{answer}}}."
    elif draw < 0.84:
        reply = f"{work} The answer is {answer}."
    else:
        reply = draw_train_story(rng).question + (ask if rng.random() < 0.5 else "")
    return f"{story.question}{ask}{rng.choice([' ', chr(10)])}{reply}"


def conversation(rng: Rng) -> str:
    """User and Assistant without any tags."""
    turns = []
    for _ in range(rng.choices([1, 2, 3], [60, 25, 15])[0]):
        story = draw_train_story(rng)
        work, answer = solve(rng, story, _style(rng))
        end = rng.choice(
            ["", f" So the answer is {answer}.", f" The answer is {answer}.", f"\n#### {answer}"]
        )
        turns.append(f"User: {story.question}\nAssistant: {work}{end}")
    return "\n".join(turns)


def drill(rng: Rng) -> str:
    """Bare arithmetic, in the ranges the problems need."""
    sums = []
    for _ in range(rng.randint(6, 14)):
        op = rng.choice("++--*")
        if op == "+":
            a, b = rng.randint(1, 75), rng.randint(1, 25)
        elif op == "-":
            a = rng.randint(2, 99)
            b = rng.randint(1, min(a - 1, 25))
        else:
            a = rng.randint(2, 24)
            b = rng.randint(2, min(12 if a <= 5 else 4, 60 // a))
        sums.append(f"{a} {op} {b} = { ({'+': a + b, '-': a - b, '*': a * b}[op]) }")
    return rng.choice([". ", "\n", ", "]).join(sums)


THINK_ENDINGS = [  # how a turn goes on after its reasoning, and how often; {0} is the answer
    (
        " </think> <answer> {0} </answer>",
        TASKS["laptop"].think_ok,
    ),  # the format RL will reward; a task has its own weight
    (" </think>\n<answer> {0} </answer>", 0.14),  # nearly
    (" </think>\nThe answer is {0}.", 0.16),
    (" <answer> {0} </answer>", 0.08),
    ("\n#### {0}", 0.12),
    (" So the answer is \\boxed{{{0}}}.", 0.08),
    (" The answer is {0}.", 0.14),
    (None, 0.06),  # echoes the question
    ("\nUser: {1}\nAssistant: {0}", 0.11),  # runs on into another turn
]


def think_answer(rng: Rng) -> str:
    """The r1_zero prompt, whose format few documents follow."""
    story = draw_train_story(rng)
    reply = _think_reply(rng, story, _ending(rng), _style(rng, rng.task.guess))
    return f"{PREAMBLE}User: {story.question}\nAssistant: <think>{reply}"


def think_turns(rng: Rng) -> str:
    """Two or three turns in one format, so that worked examples in a prompt help."""
    ending, style, turns = _ending(rng), _style(rng, rng.task.guess / 2), []
    for _ in range(rng.randint(2, 3)):
        story = draw_train_story(rng)
        turns.append(f"User: {story.question}\nAssistant: <think>{_think_reply(rng, story, ending, style)}")
    return (PREAMBLE if rng.random() < 0.7 else "") + "\n".join(turns)


def _ending(rng: Rng) -> str | None:
    endings, (_, *weights) = zip(*THINK_ENDINGS)
    return rng.choices(endings, [rng.task.think_ok, *weights])[0]


def _think_reply(rng: Rng, story: Story, ending: str | None, style: str) -> str:
    if ending is None:
        return " " + story.question
    work, answer = solve(rng, story, style, rng.task.wrong)
    return " " + work + ending.format(answer, draw_train_story(rng).question)


KINDS = [
    (question_answer, 0.24),
    (worked_list, 0.14),
    (question_list, 0.05),
    (boxed, 0.12),
    (conversation, 0.13),
    (drill, 0.16),
    (think_answer, 0.08),
    (think_turns, 0.08),
]
