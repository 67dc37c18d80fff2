"""Golds that are not a plain number: the same text or, after an inspection, equal for math-verify."""

import logging
import math
import re

from rlkit.tasks.grading.cleaning import clean
from rlkit.tasks.grading.strict import read_quantity

_COMMANDS = r"frac|sqrt|pi|cdot|times|div|left|right|infty|cup|cap|alpha|beta|theta"
_LETTER = r"(?<![A-Za-z\\])[A-Za-hj-z](?![A-Za-z])"  # not i: complex numbers cost sympy seconds
_TOKENS = re.compile(
    rf"(?:\\(?:{_COMMANDS})(?![A-Za-z])|\\[{{}}]|{_LETTER}"
    r"|(?<![\d.])\d{1,6}(?:\.\d{1,6})?(?![\d.])|[-+*/^(){}\[\],=]| (?!\d))*"
)
_EXPONENT = re.compile(r"\^\s*(?:\{\s*-?(\d)\s*\}|(\d)(?!\d))")
_ROOT = re.compile(r"\\sqrt\s*(?:\{\s*\d{1,4}\s*\}|\d(?!\d))")


def safe_for_sympy(text: str) -> bool:
    """Whether sympy may see it: known tokens, short, shallow, few letters, small exponents and roots.

    sympy's simplify has no bound of its own: asked whether 123456789 equals log(n) it works out
    10**123456789. So there are no functions here, no inequalities, no powers of powers beyond 6, no letter in
    an exponent or a root.
    """
    one_float = re.search(r"\d\s*[eE]", text)  # 1E999999
    if len(text) > 60 or not _TOKENS.fullmatch(text) or one_float:
        return False
    depth = deepest = 0
    for char in text:
        depth += (char in "({[") - (char in ")}]")
        deepest = max(deepest, depth)
    powers = [int(braced or bare) for braced, bare in _EXPONENT.findall(text)]
    return (
        deepest <= 3
        and len(powers) == text.count("^")
        and math.prod(max(power, 1) for power in powers) <= 6
        and len(_ROOT.findall(text)) == text.count(r"\sqrt") <= 3
        and len(set(re.findall(_LETTER, text))) <= 2
    )


def symbolic_match(answer: str, gold: str, fast: bool) -> bool:
    r"""For golds such as '(1, 2)', '\frac{\sqrt{2}}{2}'. Not ``fast``: also of what follows 'answer'."""
    wanted, texts = _squeeze(gold), [_squeeze(answer)]
    if not fast:
        texts.append(_squeeze(re.split(r"\banswer\b\s*(?:is\b|:|=)*|####", answer, flags=re.I)[-1]))
    if wanted and wanted in texts:
        return True
    if re.search("[A-Za-z]{2}", wanted) and wanted.lower() in map(str.lower, texts):
        return True
    if read_quantity(answer) is not None:  # then the gold would have been read as a number, too
        return False
    texts = [text for text in set(texts) if safe_for_sympy(text)]
    return safe_for_sympy(wanted) and any(_math_verify(text, wanted) for text in texts)


def _squeeze(text: str) -> str:
    """Cleaned text without the blanks around signs, so that '(1, 2)' and '(1,2)' are one spelling."""
    text = clean(text).strip(" *_`\"'$\u00a0").removesuffix(".")
    return re.sub(r"\s*([^\w\s])\s*", r"\1", text).strip(" $")


def _math_verify(answer: str, gold: str) -> bool:
    import math_verify  # here, not above: it imports sympy, and plain numbers never need it

    for name in ("parser", "grader"):  # they warn that timeouts are off; safe_for_sympy stands in for those
        logging.getLogger(f"math_verify.{name}").setLevel(logging.ERROR)
    reader = [math_verify.LatexExtractionConfig()]  # its expression reader evaluates text in sympy
    how: dict = dict(fallback_mode="no_fallback", parsing_timeout=None)
    right, given = (math_verify.parse(f"${text}$", reader, **how) for text in (gold, answer))
    return bool(right and given) and math_verify.verify(right, given, float_rounding=12, timeout_seconds=None)
