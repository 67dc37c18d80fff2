r"""How a response becomes a reward.

    response --extract--> answer text --clean--> plain text --read--> value and unit == the gold's

Two questions are kept apart. *Format*: is there an answer where the prompt wants one? *Answer*: does it equal
the gold?

1. What stands around a box belongs to the answer: ``-\boxed{72}`` or ``\boxed{72} thousand`` is not 72
   (``extraction.py``).
2. ``fast=True`` (strict, the training reward) accepts ONE quantity (``strict.py``): a number, and behind it
   a unit or nothing (``units.py``). ``fast=False`` (lenient, for audits) also reads sentences, labels,
   markdown, arithmetic and equations that end in it (``lenient.py``).
3. A gold that is no number is compared as what it is: interval, point, set, matrix, equation, base,
   expression, word (``typed.py``). A gold's unit is compared, too, where the answer names one.

What keeps it exact, quick and safe in any thread: a numeric gold is settled by regular expressions and
Fractions alone. math-verify (``expressions.py``) is handed only short text whose every token and exponent has
been inspected, with its signal-based timeouts off. Nothing is evaluated as code.

Where people differ, these files decide: a percent sign is a unit (50% is 50, not 0.5) and so is "dozen";
rounding is not equality (0.333 is not 1/3); 1 200 as the whole answer is a grouped number, 7 2 is two; 7:00
is 7, 7:30 is not; two candidates, a denial or a doubt are not an answer, whatever number they name.
"""

import math
import re

from rlkit.tasks.grading.expressions import exact_quantity
from rlkit.tasks.grading.expressions import warm as warm
from rlkit.tasks.grading.extraction import extract_answer, last_boxed, unboxed
from rlkit.tasks.grading.lenient import MAX_SENTENCE, sentence_quantity
from rlkit.tasks.grading.strict import quantity_of
from rlkit.tasks.grading.typed import squeezed, typed_match

_NAMED = re.compile(r"[\s$\\(\[]*([A-Za-z])\s*=")


def r1_zero_reward_fn(response, ground_truth, fast=True) -> dict[str, float]:
    """Reward for the r1_zero prompts, whose responses end ``... </think> <answer> 72 </answer>``.

    response: the sampled text (it starts inside the prompt's ``<think>``). ground_truth: str, int, float, or
    a list of them, any of which may match. fast: strict (True) or lenient (False). Returns {"reward",
    "format_reward", "answer_reward"}, each 0.0 or 1.0; reward is 1.0 only when both others are. Never raises.
    """
    return _rewards(extract_answer(response), ground_truth, fast)


def question_only_reward_fn(response, ground_truth, fast=True) -> dict[str, float]:
    r"""Reward for the question_only prompt: the last ``\boxed{...}`` (or ``\fbox``) and what stands around it
    in its sentence (``extraction.py``). Otherwise as r1_zero_reward_fn."""
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
        gold = gold if (content := last_boxed(gold)) is None else content
        names = _NAMED.match(answer), _NAMED.match(gold)
        if None not in names and names[0][1] != names[1][1]:  # y = 5 is not x = 5
            return False
        if (wanted := exact_quantity(gold)) is None:
            return len(answer) <= MAX_SENTENCE and typed_match(answer, gold, fast)
        given = quantity_of(answer)
        if given is None and quantity_of(gold) is None:  # a gold that is left to work out: 2^{10}
            given = wanted if _unbraced(answer) == _unbraced(gold) else None
        if given is None and not fast:
            given = sentence_quantity(answer)
        return given is not None and given.value == wanted.value and given.unit.agrees(wanted.unit)
    except Exception:  # a grader that raises would stop a training run: what cannot be read is not right
        return False


def _unbraced(text: str) -> str:
    return squeezed(text).replace("{", "").replace("}", "")
