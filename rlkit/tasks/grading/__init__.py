r"""How a response becomes a reward.

    response --extract--> answer text --clean--> plain text --read--> exact Fraction == the gold's Fraction?

Two questions are kept apart. *Format*: is there an answer where the prompt wants one? *Answer*: does it equal
the gold?

``fast=True`` (strict, the training reward) accepts ONE quantity (``strict.py``). ``fast=False`` (lenient, for
audits) also reads sentences, labels, markdown, arithmetic and equations that end in it (``lenient.py``).

What keeps it exact, quick and safe in any thread: a numeric gold is settled by regular expressions and
Fractions alone. math-verify (``symbolic.py``) is handed only short text whose every token and exponent has
been inspected, with its signal-based timeouts off. Nothing is evaluated as code.

Where people differ, these files decide: a percent sign is a unit (50% is 50, not 0.5) and so is "dozen";
rounding is not equality (0.333 is not 1/3); a plain blank parts two numbers (7 2 is not 72), a no-break or
thin space groups thousands; two candidates, a denial or a doubt are not an answer, whatever number they name.
"""

import math
import re
from fractions import Fraction
from functools import lru_cache

from rlkit.tasks.grading.arithmetic import read_expression
from rlkit.tasks.grading.cleaning import clean
from rlkit.tasks.grading.lenient import DOUBT, MAX_SENTENCE, read_sentence
from rlkit.tasks.grading.strict import SCALE, read_quantity
from rlkit.tasks.grading.symbolic import symbolic_match


def r1_zero_reward_fn(response, ground_truth, fast=True) -> dict[str, float]:
    """Reward for the r1_zero prompts, whose responses end ``... </think> <answer> 72 </answer>``.

    response: the sampled text (it starts inside the prompt's ``<think>``). ground_truth: str, int, float, or
    a list of them, any of which may match. fast: strict (True) or lenient (False). Returns {"reward",
    "format_reward", "answer_reward"}, each 0.0 or 1.0; reward is 1.0 only when both others are. Never raises.
    """
    return _rewards(extract_answer(response), ground_truth, fast)


def question_only_reward_fn(response, ground_truth, fast=True) -> dict[str, float]:
    r"""Reward for the question_only prompt: the last ``\boxed{...}``. Otherwise as r1_zero_reward_fn."""
    return _rewards(last_boxed(response), ground_truth, fast)


def _rewards(answer, ground_truth, fast):
    right = float(answer is not None and answers_match(answer, ground_truth, fast))
    return {"reward": right, "format_reward": float(answer is not None), "answer_reward": right}


def extract_answer(response) -> str | None:
    """Text of the LAST ``<answer>`` tag; None without ``</think> <answer>`` and a later ``</answer>``."""
    if not isinstance(response, str) or (start := response.find("</think> <answer>")) < 0:
        return None
    if "</answer>" not in response[start:]:
        return None
    return response.rpartition("<answer>")[2].partition("</answer>")[0]


def last_boxed(text) -> str | None:
    r"""Content of the last ``\boxed{...}``, its braces balanced (not ``\{`` and ``\}``); None if cut off."""
    if not isinstance(text, str) or (start := text.rfind(r"\boxed{")) < 0:
        return None
    inside, depth = text[start + len(r"\boxed{") :], 1
    for brace in re.finditer(r"\\.|[{}]", inside, re.DOTALL):
        depth += {"{": 1, "}": -1}.get(brace.group(), 0)
        if depth == 0:
            return inside[: brace.start()]
    return None


def answers_match(answer, gold, fast=True) -> bool:
    r"""True when the answer text equals the gold mathematically.

    answer: str (a ``\boxed{}`` in it is unwrapped). gold: str, int, float, Fraction, or a list/tuple/set (any
    of them); None, "" and non-finite floats match nothing. fast as in r1_zero_reward_fn. Never raises.
    """
    try:
        if isinstance(gold, (list, tuple, set, frozenset)):
            return any(answers_match(answer, one, fast) for one in gold)
        finite = not isinstance(gold, float) or math.isfinite(gold)
        gold = str(gold).strip() if gold is not None and finite else ""
        if not gold or not isinstance(answer, str):
            return False
        if answer.strip() == gold:  # the everyday case, and the only way in for a number of 5,000 digits
            return True
        if r"\boxed" in answer and (answer := _unboxed(answer)) is None:
            return False
        value = _gold_value(gold)
        if value is None:
            return len(answer) <= MAX_SENTENCE and symbolic_match(answer, gold, fast)
        read = read_quantity(answer)
        if read is None and not fast:
            read = read_sentence(answer)
        return read == value
    except Exception:  # a grader that raises would stop a training run: what cannot be read is not right
        return False


_DISOWNED_BEFORE = re.compile(r"(?:\bnot|n't|\bnever|\bno|\bor|\beither)(?: be| equal| equal to)?\W*$", re.I)
_DISOWNED_AFTER = re.compile(r"\W{0,9}(?:or|and|no|is (?:not|wrong|incorrect|false)|isn't)\b", re.I)
_GLUED_BEFORE = re.compile(r"(?:\d|[-+*/^~!<>\u2212\u221a\u2248\u00d7\u00f7])[\s($]*$")  # beside a box
_GLUED_AFTER = re.compile(rf"[\s)]*(?:\d|[-+*/^!?\u2212\u00d7\u00f7]|{SCALE})", re.I)


def _unboxed(answer: str) -> str | None:
    r"""The last box's content; None if what stands around it makes it another answer.

    That is '-\boxed{7}', '\boxed{7}00', 'not \boxed{7}', a list of boxes, a word of doubt.
    """
    inside = last_boxed(answer)
    before, _, after = answer.rpartition(r"\boxed{%s}" % inside)
    if inside is None or _DISOWNED_BEFORE.search(before[-40:]) or _DISOWNED_AFTER.match(after):
        return None
    before, after = before[-MAX_SENTENCE:], after[:MAX_SENTENCE]
    glued = _GLUED_BEFORE.search(before) or _GLUED_AFTER.match(after)
    other = last_boxed(before) if before.rstrip(" $").endswith((",", ";")) else None
    listed = other is not None and other.strip() != inside.strip()
    return None if glued or listed or DOUBT.search(f"{before} {after}") else inside


@lru_cache(maxsize=1 << 16)
def _gold_value(gold: str) -> Fraction | None:
    value = read_quantity(gold)
    return read_expression(clean(gold)) if value is None else value
