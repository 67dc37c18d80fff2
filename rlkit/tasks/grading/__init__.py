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
from functools import lru_cache

from rlkit.tasks.grading.arithmetic import read_expression
from rlkit.tasks.grading.cleaning import clean
from rlkit.tasks.grading.expressions import warm
from rlkit.tasks.grading.extraction import extract_answer, last_boxed, unboxed
from rlkit.tasks.grading.lenient import MAX_SENTENCE, sentence_quantity
from rlkit.tasks.grading.strict import Quantity, quantity_of
from rlkit.tasks.grading.typed import typed_match
from rlkit.tasks.grading.units import Unit


def r1_zero_reward_fn(response, ground_truth, fast=True) -> dict[str, float]:
    """Reward for the r1_zero prompts, whose responses end ``... </think> <answer> 72 </answer>``.

    response: the sampled text (it starts inside the prompt's ``<think>``). ground_truth: str, int, float, or
    a list of them, any of which may match. fast: strict (True) or lenient (False). Returns {"reward",
    "format_reward", "answer_reward"}, each 0.0 or 1.0; reward is 1.0 only when both others are. Never raises.
    """
    return _rewards(extract_answer(response), ground_truth, fast)


def question_only_reward_fn(response, ground_truth, fast=True) -> dict[str, float]:
    r"""Reward for the question_only prompt: the last ``\boxed{...}`` (or ``\fbox``), with what stands around it in
    its sentence (``extraction.py``). Otherwise as r1_zero_reward_fn."""
    if isinstance(response, str):
        response = response.replace(r"\fbox{", r"\boxed{")
    return _rewards(None if last_boxed(response) is None else response, ground_truth, fast)


def _rewards(answer, ground_truth, fast):
    right = float(answer is not None and answers_match(answer, ground_truth, fast))
    return {"reward": right, "format_reward": float(answer is not None), "answer_reward": right}


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
        if r"\boxed" in answer and (answer := unboxed(answer)) is None:
            return False
        wanted = _gold_quantity(gold if (content := last_boxed(gold)) is None else content)
        if not isinstance(wanted, Quantity):
            return len(answer) <= MAX_SENTENCE and typed_match(answer, wanted, fast)
        given = quantity_of(answer)
        if given is None and not fast:
            given = sentence_quantity(answer)
        return given is not None and given.value == wanted.value and given.unit.agrees(wanted.unit)
    except Exception:  # a grader that raises would stop a training run: what cannot be read is not right
        return False


@lru_cache(maxsize=1 << 16)
def _gold_quantity(gold: str) -> Quantity | str:
    """The gold as a number with its unit, or its text if it is no number: 0,5 is a list of two, 5m is algebra."""
    if re.fullmatch(r"0,\d+|.*\d[A-Za-z]", gold):
        return gold
    quantity = quantity_of(gold)
    if quantity is None and (value := read_expression(clean(gold))) is not None:
        quantity = Quantity(value, Unit())
    return gold if quantity is None else quantity
