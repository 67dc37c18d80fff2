r"""Single expressions with letters, roots or functions: whether two are equal.

math-verify reads the LaTeX. Its verdict is not asked: it takes X for x, and its simplification has no bound.
Two expressions are equal when their values agree, to 25 digits, at three points (a Schwartz-Zippel test).
"""

import logging
import math
import re
from functools import lru_cache

from rlkit.tasks.grading.arithmetic import read_expression
from rlkit.tasks.grading.cleaning import clean
from rlkit.tasks.grading.strict import Quantity, quantity_of
from rlkit.tasks.grading.units import Unit

_FUNCTIONS = "sin|cos|tan|cot|sec|csc|arcsin|arccos|arctan|ln|log|sqrt"
_COMMANDS = rf"frac|pi|cdot|times|div|infty|alpha|beta|gamma|theta|lambda|{_FUNCTIONS}"
_LETTER = re.compile(r"(?<!\\)(?<![A-Za-z])[A-Za-z]+|(?<=\\pi )[A-Za-z]")
_TOKENS = re.compile(
    rf"(?:\\(?:{_COMMANDS})(?![A-Za-z])|(?<![A-Za-z])[A-Za-z]{{1,4}}(?![A-Za-z])"
    r"|(?<![\d.])\d{1,6}(?:\.\d{1,6})?(?![\d.])|[-+*/^(){}\[\]]| (?!\d)|(?<=[a-z]) )*"
)
_EXPONENT = re.compile(  # 12, -3, 1/2 or one letter; never a power of a power
    r"\^\s*(?:\{\s*-?(\d{1,2})\s*\}|(\d)(?!\d)|\{\s*-?\d/\d\s*\}|\{\s*\(\(\d\)/\(\d\)\)\s*\}"
    r"|\{[a-z]\}|[a-z])(?!\s*\^)"
)
_INDEX = re.compile(r"\\sqrt\[(?!\d\])")
_DECIMAL = re.compile(r"(\d*)\.(\d+)")
_POINTS = 3


@lru_cache(maxsize=1 << 16)
def exact_quantity(text: str) -> Quantity | None:
    """A gold's number with its unit, sums worked out; else None: 0,5 is a list of two, 5m is algebra."""
    if re.fullmatch(r"0,\d+|.*\d[A-Za-z]", text):
        return None
    quantity = quantity_of(text)
    if quantity is None and (value := read_expression(clean(text))) is not None:
        quantity = Quantity(value, Unit())
    return quantity


def same_expression(given: str, gold: str, scaled: bool = False) -> bool:
    """Whether two expressions are equal; scaled: whether one is a constant times the other (equations)."""
    if given == gold:
        return bool(gold)
    if re.fullmatch("[A-Z]{2,}", gold):  # the points DEF, not the product of D, E and F
        return given.upper() == gold and len(gold) > 2
    if re.fullmatch("[A-Za-z][A-Za-z ]{2,}|[Nn][Oo]", gold) and given.lower() == gold.lower():
        return True  # a word
    numbers = exact_quantity(given), exact_quantity(gold)
    if None not in numbers and not scaled:
        return numbers[0].value == numbers[1].value and numbers[0].unit.agrees(numbers[1].unit)
    letters = _letters(given)
    one_case = len(letters) == len({letter.lower() for letter in letters})
    if letters != _letters(gold) or not one_case or not (_safe(given) and _safe(gold)):
        return False
    return _agree(_values(given), _values(gold), scaled)


def _letters(text: str) -> set[str]:
    return set("".join(_LETTER.findall(text)))


def _safe(text: str) -> bool:
    """Whether sympy may see it: known tokens, short, shallow, few letters, small exponents and roots.

    sympy works out what it is shown: 10**123456789, or a tower of exponents. So the product of all exponents
    is bounded, and no number has more than six digits.
    """
    depth = deepest = 0
    for char in text:
        depth += (char in "({[") - (char in ")}]")
        deepest = max(deepest, depth)
    powers = [int(braced or bare or 3) for braced, bare in _EXPONENT.findall(text)]
    return (
        len(text) <= 100
        and _TOKENS.fullmatch(text) is not None
        and deepest <= 5
        and len(powers) == text.count("^") <= 6
        and math.prod(max(power, 1) for power in powers) <= 400
        and not _INDEX.search(text)
        and len(_letters(text)) <= 4
    )


def _agree(given, gold, scaled: bool) -> bool:
    """Whether the values at all points are equal, to 25 digits, or (scaled) in one ratio."""
    if not given or not gold:
        return False
    if not (isinstance(given, list) and isinstance(gold, list)):  # infinite or undefined: the same expression
        return given == gold and not scaled
    tiny = 10**-25
    if scaled:
        a, b = given[0], gold[0]
        return abs(a * b) > tiny and all(abs(a * d - b * c) < tiny * abs(a * b) for c, d in zip(given, gold))
    return all(abs(a - b) <= tiny * max(1, abs(a)) for a, b in zip(given, gold))


def warm() -> None:
    """Imports sympy and math-verify (0.3 s) and reads one expression, so that no response waits for them."""
    _values("x+1")


@lru_cache(maxsize=1 << 12)
def _values(text: str):
    """What math-verify reads in LaTeX, as values at three points, where each letter has a value of its own.

    The sympy expression itself if it has no finite values (infinity); None if nothing is read."""
    import math_verify  # here, not above: it imports sympy, and plain numbers never need it
    import sympy
    from latex2sympy2_extended import NormalizationConfig

    for name in ("parser", "grader"):  # they warn that timeouts are off; _safe stands in for those
        logging.getLogger(f"math_verify.{name}").setLevel(logging.ERROR)
    text = _DECIMAL.sub(lambda m: f"\\frac{{{int(m[1] + m[2])}}}{{{10 ** len(m[2])}}}", text)
    asis = dict.fromkeys(("units", "malformed_operators", "nits", "equations"), False)
    reader = math_verify.LatexExtractionConfig(
        normalization_config=NormalizationConfig(basic_latex=True, boxed="none", **asis)
    )
    found = math_verify.parse(f"${text}$", [reader], fallback_mode="no_fallback", parsing_timeout=None)  # pyright: ignore
    if not found or not isinstance(found[0], sympy.Expr):
        return None
    values = []
    for k in range(_POINTS):
        at = {"i": sympy.I, "e": sympy.E}
        for letter in found[0].free_symbols:
            spread = int.from_bytes(str(letter).encode(), "big") * 7919 + k * 104729
            at.setdefault(str(letter), sympy.Rational(spread % 10007 - 5000, 2003))
        value = sympy.N(found[0].subs({letter: at[str(letter)] for letter in found[0].free_symbols}), 40)
        if not (value.is_number and value.is_finite):
            return found[0]
        values.append(value)
    return values
