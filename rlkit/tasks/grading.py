r"""How a response becomes a reward.

    response --extract--> answer text --clean--> plain text --read--> an exact Fraction == the gold's
    Fraction?

Two questions are kept apart. *Format*: is there an answer where the prompt wants one? *Answer*: does it equal
the gold?

``fast=True`` (strict, the training reward) accepts ONE quantity: money signs, separators, LaTeX wrapping,
percent, a scale ("2 thousand") and a few unit words are fine; a sentence, a sum left unevaluated or a second
number is not. ``fast=False`` (lenient, for audits) also reads sentences, labels, markdown, arithmetic and
equations that end in it.

What keeps it exact, quick and safe in any thread: a numeric gold is settled by regular expressions and
Fractions alone. math-verify (sympy) is handed only short text whose every token and exponent
``_safe_for_sympy`` has looked at, with its signal-based timeouts off. Nothing is evaluated as code.

Where people differ, this file and quantities.py decide: a percent sign is a unit (50% is 50, not 0.5) and so
is "dozen"; rounding is not equality (0.333 is not 1/3); a plain blank parts two numbers (7 2 is not 72), a
no-break or thin space groups thousands; two candidates, a negation or a doubt is no answer, whichever number
it names.
"""

import logging
import math
import re
from functools import lru_cache

from rlkit.tasks.quantities import (
    DOUBT,
    MAX_SENTENCE,
    SCALE,
    clean,
    read_expression,
    read_quantity,
    read_sentence,
)


# ---- rewards
def r1_zero_reward_fn(response, ground_truth, fast=True):
    """Reward for the r1_zero prompts, whose responses end ``... </think> <answer> 72 </answer>``.

    response: the sampled text (it starts inside the prompt's ``<think>``). ground_truth: str, int, float, or
    a list of them, any of which may match. fast: strict (True) or lenient (False). Returns {"reward",
    "format_reward", "answer_reward"}, each 0.0 or 1.0; reward is 1.0 only when both others are. Never raises,
    whatever the text.
    """
    return _rewards(extract_answer(response), ground_truth, fast)


def question_only_reward_fn(response, ground_truth, fast=True):
    r"""Reward for the question_only prompt: the last ``\boxed{...}``. Arguments and result as in r1_zero_reward_fn."""
    return _rewards(last_boxed(response), ground_truth, fast)


def _rewards(answer, ground_truth, fast):
    right = float(answer is not None and answers_match(answer, ground_truth, fast))
    return {"reward": right, "format_reward": float(answer is not None), "answer_reward": right}


def extract_answer(response):
    """Text of the LAST ``<answer>`` tag; None unless ``</think> <answer>`` and, after it, ``</answer>`` are there."""
    if not isinstance(response, str) or (start := response.find("</think> <answer>")) < 0:
        return None
    if "</answer>" not in response[start:]:
        return None
    return response.rpartition("<answer>")[2].partition("</answer>")[0]


def last_boxed(text):
    r"""Content of the last ``\boxed{...}``, its braces balanced (``\{`` and ``\}`` don't count); None if cut off."""
    if not isinstance(text, str) or (start := text.rfind(r"\boxed{")) < 0:
        return None
    inside, depth = text[start + len(r"\boxed{") :], 1
    for brace in re.finditer(r"\\.|[{}]", inside, re.DOTALL):
        depth += {"{": 1, "}": -1}.get(brace.group(), 0)
        if depth == 0:
            return inside[: brace.start()]
    return None


def answers_match(answer, gold, fast=True):
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
        if r"\boxed" in answer:
            inside = last_boxed(answer)
            before, _, after = answer.rpartition(r"\boxed{%s}" % inside)
            if inside is None or _DISOWNED_BEFORE.search(before[-40:]) or _DISOWNED_AFTER.match(after):
                return False
            if _changes_the_box(before[-MAX_SENTENCE:], inside, after[:MAX_SENTENCE]):
                return False
            answer = inside
        value = _gold_value(gold)
        if value is None:
            return _symbolic_match(answer, gold, fast)
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


def _changes_the_box(before, inside, after):
    r"""True when the text around the last box makes it another answer: '-\boxed{7}', '\boxed{7}00', a list, doubt."""
    other = last_boxed(before) if before.rstrip(" $").endswith((",", ";")) else None
    return bool(
        _GLUED_BEFORE.search(before)
        or _GLUED_AFTER.match(after)
        or DOUBT.search(f"{before} {after}")
        or other is not None
        and other.strip() != inside.strip()
    )


@lru_cache(maxsize=1 << 16)
def _gold_value(gold):
    value = read_quantity(gold)
    return read_expression(clean(gold)) if value is None else value


# ---- symbols
_COMMANDS = r"frac|sqrt|pi|cdot|times|div|left|right|infty|cup|cap|alpha|beta|theta"
_LETTER = r"(?<![A-Za-z\\])[A-Za-hj-z](?![A-Za-z])"  # not i: complex numbers cost sympy seconds
_TOKENS = re.compile(
    rf"(?:\\(?:{_COMMANDS})(?![A-Za-z])|\\[{{}}]|{_LETTER}"
    r"|(?<![\d.])\d{1,6}(?:\.\d{1,6})?(?![\d.])|[-+*/^(){}\[\],=]| (?!\d))*"
)
_EXPONENT = re.compile(r"\^\s*(?:\{\s*-?(\d)\s*\}|(\d)(?!\d))")
_ROOT = re.compile(r"\\sqrt\s*(?:\{\s*\d{1,4}\s*\}|\d(?!\d))")


def _safe_for_sympy(text):
    """Inspection before sympy sees anything: known tokens, short, shallow, few letters, small exponents and
    roots.

    sympy's simplify has no bound of its own: asked whether 123456789 equals log(n) it works out
    10**123456789. So there are no functions here, no inequalities, no powers of powers beyond 6, no letter in
    an exponent or a root.
    """
    if (
        len(text) > 60 or not _TOKENS.fullmatch(text) or re.search(r"\d\s*[eE]", text)
    ):  # 1E999999 is read as one float
        return False
    depth = deepest = 0
    for char in text:
        depth += (char in "({[") - (char in ")}]")
        deepest = max(deepest, depth)
    powers = [int(braced or bare) for braced, bare in _EXPONENT.findall(text)]
    roots = len(_ROOT.findall(text))
    return (
        deepest <= 3
        and len(powers) == text.count("^")
        and math.prod(max(power, 1) for power in powers) <= 6
        and roots == text.count(r"\sqrt") <= 3
        and len(set(re.findall(_LETTER, text))) <= 2
    )


def _symbolic_match(answer, gold, fast):
    r"""For golds that are no plain number ('(1, 2)', '\frac{\sqrt{2}}{2}'): the same text, or equal for math-verify."""
    if len(answer) > MAX_SENTENCE:
        return False
    wanted, texts = _squeeze(gold), [_squeeze(answer)]
    if not fast:
        texts.append(_squeeze(re.split(r"\banswer\b\s*(?:is\b|:|=)*|####", answer, flags=re.I)[-1]))
    if (
        wanted
        and wanted in texts
        or re.search("[A-Za-z]{2}", wanted)
        and wanted.lower() in map(str.lower, texts)
    ):
        return True
    if read_quantity(answer) is not None:  # no plain number: the gold would have been read as one, too
        return False
    return _safe_for_sympy(wanted) and any(
        _safe_for_sympy(text) and _math_verify(text, wanted) for text in set(texts)
    )


def _squeeze(text):
    """Cleaned text without the blanks around signs, so that '(1, 2)' and '(1,2)' are one spelling."""
    text = clean(text).strip(" *_`\"'$\u00a0").removesuffix(".")
    return re.sub(r"\s*([^\w\s])\s*", r"\1", text).strip(" $")


def _math_verify(answer, gold):
    import math_verify  # here, not above: it imports sympy, and plain numbers never need it

    for name in (
        "parser",
        "grader",
    ):  # it warns that its timeouts are off; _safe_for_sympy stands in for them
        logging.getLogger(f"math_verify.{name}").setLevel(logging.ERROR)
    reader = [
        math_verify.LatexExtractionConfig()
    ]  # not its expression reader: that one evaluates text in sympy
    gold, answer = (
        math_verify.parse(f"${text}$", reader, fallback_mode="no_fallback", parsing_timeout=None)
        for text in (gold, answer)
    )
    return bool(gold and answer) and math_verify.verify(gold, answer, float_rounding=12, timeout_seconds=None)
