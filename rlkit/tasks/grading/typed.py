r"""Golds that are not a plain number, compared as what they are.

``read`` gives a text its type: an interval, point or tuple (its brackets and order count), a set or a list
(order does not count), a union, a matrix, an equation or inequality, a number in a base, or else one
expression. Values of one type are compared part by part. What remains are single expressions: equal as text,
as exact numbers, or, after an inspection, as what math-verify reads in them. Letters keep their case.

math-verify's own verdict is not asked: it takes [1,2,3], (3,2,1) and {1,2,3} for one another and X for x, and
its simplification has no bound. Its parser gives the expressions; two are equal when their values agree, to 25
digits, at three points (a Schwartz-Zippel test).
"""

import logging
import math
import re
from functools import lru_cache
from typing import NamedTuple

from rlkit.tasks.grading.arithmetic import read_expression
from rlkit.tasks.grading.cleaning import clean
from rlkit.tasks.grading.lenient import denied
from rlkit.tasks.grading.strict import Quantity, quantity_of
from rlkit.tasks.grading.units import Unit, read_unit

MAX_TEXT, MAX_PARTS, MAX_DEPTH = 200, 10, 3
_SIGNS = [  # one spelling for each sign, as LaTeX
    (re.compile(pattern), new)
    for pattern, new in (
        (r"\u03c0|(?<![A-Za-z\\])pi(?![A-Za-z])", r"\\pi "),
        ("\u221e", r"\\infty "),
        (r"\u2264|<=|\\leq?(?:slant)?(?![A-Za-z])|\u2a7d", "\u2264"),
        (r"\u2265|>=|\\geq?(?:slant)?(?![A-Za-z])|\u2a7e", "\u2265"),
        (r"\u2260|!=|\\neq?(?![A-Za-z])", "\u2260"),
        (r"\\lt(?![A-Za-z])", "<"),
        (r"\\gt(?![A-Za-z])", ">"),
        (r"\\cup(?![A-Za-z])", "\u222a"),
        (r"\\in(?![A-Za-z])", "\u2208"),
        (r"\\(?:emptyset|varnothing)(?![A-Za-z])|\\\{\s*\\\}", "\u2205"),
        (r"\u221a\s*\(([^()]*)\)|(?<![A-Za-z\\])sqrt\s*\(([^()]*)\)", r"\\sqrt{\1\2}"),
        (r"\u221a\s*(\d+|[a-z])|\\sqrt\s*(\d|[a-z])", r"\\sqrt{\1\2}"),
        (r"(?<![A-Za-z\\])(sin|cos|tan|ln|log)(?![A-Za-z])", r"\\\1 "),
        (r"\*\*", "^"),
        (r"\\pm(?![A-Za-z])", "\u00b1"),
        (r"(?<![\w.)/])(\d+)/(\d+)\s+(?=[A-Za-z\\(])", r"((\1)/(\2))"),  # a fraction before a factor
        (r"\s*\(?\s*\bbase[\s-]*(\d{1,2})\)?$", r"_{\1}"),
    )
]
_MATRIX = re.compile(r"\W*\\begin\{([pbBvV]?)matrix\}(.*)\\end\{\1matrix\}\W*", re.S)
_UNIT_TEXT = re.compile(r"\\(?:text(?:rm|up)?|math(?:rm|up)|mbox)\s*\{([^{}]*)\}\s*((?:\^\s*\{?[23]\}?)?)[\s.$]*$")
_UNIT_WORDS = re.compile(r"(?<=[\d)}\w])\s+([A-Za-z]{2}[A-Za-z./ ]*(?:\^\{?[23]\}?)?|%|\u00b0)$")
_BASE = re.compile(r"(\w+)_\{?(\d{1,2})\}?")
_RELATION = re.compile("[=<>\u2264\u2265\u2260]")
_FLIPPED = {">": "<", "\u2265": "\u2264"}
_NAME = re.compile(r"[A-Za-z](?:_\{?\w\}?)?|[A-Za-z]\([A-Za-z]\)")


class Typed(NamedTuple):
    """kind: "()", "[)", "{}", "list", "union", "rows", "base", "<" (the signs of a relation) or "" (one expression)."""

    kind: str
    parts: tuple  # of Typed; of str for "base" and ""


def typed_match(answer: str, gold: str, fast: bool) -> bool:
    r"""For golds such as '(1, 2)', '\frac{\sqrt{2}}{2}', 'x \le 5', 'Tuesday', '3\pi \text{ cm}'."""
    wanted, unit = _read_gold(gold)
    texts = [answer]
    if not fast:
        texts.append(re.split(r"\banswer\b\s*(?:is\b|:|=)*|####", answer, flags=re.I)[-1])
    for text in dict.fromkeys(texts):
        if len(text) <= MAX_TEXT:
            given, beside = _split_unit(text)
            if unit.agrees(beside) and _equal(read(given if fast else _joined(given)), wanted):
                return True
    return not fast and _says(answer, gold)


@lru_cache(maxsize=1 << 14)
def _read_gold(gold: str) -> tuple[Typed, Unit]:
    text, unit = _split_unit(gold) if len(gold) <= MAX_TEXT else (gold, Unit())
    return read(_joined(text)), unit


def _joined(text: str) -> str:
    return re.sub(r"\s*(?:\\text\s*\{\s*and\s*\}|,?\s\band\b)\s*", ",", text)


def _says(answer: str, gold: str) -> bool:
    """'It is Tuesday' says Tuesday."""
    words = clean(gold)
    sentence = clean(answer).rstrip(" .!")
    if not re.fullmatch(r"[A-Za-z][A-Za-z -]{2,40}", words) or not sentence.lower().endswith(words.lower()):
        return False
    before = sentence[: -len(words)].rpartition(". ")[2]
    states = re.search(r"(?:^|\b(?:is|are|was|were|be|on|answer)\b|[:=])\s*(?:(?:an?|the)\s+)?$", before)
    return bool(states) and not denied(before, before)


def _split_unit(text: str) -> tuple[str, Unit]:
    """(expression, unit): the unit that stands in roman letters or as a word of two letters behind it."""
    text = text.strip(" $.")
    for pattern in (_UNIT_TEXT, _UNIT_WORDS):
        if (match := pattern.search(text)) and match.start() and re.search(r"[\d})]|\\pi", text[: match.start()]):
            unit = read_unit(clean(" ".join(match.groups(""))) if match.re is _UNIT_TEXT else match[1])
            if unit is not None:
                return text[: match.start()].strip(" $\\,;"), unit
    return text, Unit()


def read(text: str, depth: int = MAX_DEPTH) -> Typed:
    """The text with its type; what is too long or too deep stays one expression."""
    if len(text) > MAX_TEXT or not depth:
        return Typed("", (_squeezed(text[:MAX_TEXT]) if len(text) <= MAX_TEXT else text,))
    if matrix := _MATRIX.fullmatch(text):
        rows = re.split(r"\\\\", re.sub(r"\\\\\s*$", "", matrix[2]))
        cells = [Typed("row", tuple(read(cell, depth - 1) for cell in row.split("&"))) for row in rows]
        return Typed("rows" if matrix[1] not in ("v", "V") else "determinant", tuple(cells))
    text = re.sub("^[A-Za-z]\u2208", "", _squeezed(text))
    return _read_squeezed(text, depth)


def _read_squeezed(text: str, depth: int) -> Typed:
    for sign, kind in (("\u222a", "union"), (",", "list")):
        parts = _split(text, sign)
        if 1 < len(parts) <= MAX_PARTS and depth:
            return Typed(kind, tuple(_read_squeezed(part, depth - 1) for part in parts))
    if based := _BASE.fullmatch(text):
        if based[1].isalnum() and any(map(str.isdigit, based[1])):
            return Typed("base", (based[1].lower(), based[2]))
    signs = _RELATION.findall(text)
    if signs and len(signs) <= 2 and depth:
        sides = [_read_squeezed(side, 0) for side in _RELATION.split(text)]
        if set(signs) <= set(_FLIPPED):  # 5 > x is x < 5
            signs, sides = [_FLIPPED[sign] for sign in signs][::-1], sides[::-1]
        return Typed("".join(signs), tuple(sides))
    inner = _inside(text)
    if inner is not None and depth:
        opening, inside, closing = inner
        parts = _split(inside, ",")
        if opening + closing == "{}" or 1 < len(parts) <= MAX_PARTS:
            return Typed(opening + closing, tuple(_read_squeezed(part, depth - 1) for part in parts))
        return _read_squeezed(inside, depth - 1)
    return Typed("", (text,))


def _squeezed(text: str) -> str:
    """Cleaned text with one spelling for each sign and without the blanks around signs."""
    text = clean(text).strip(" *_`\"'$\u00a0").removesuffix(".")
    for pattern, new in _SIGNS:
        text = pattern.sub(new, text)
    return re.sub(r"\s*([^\w\s])\s*|\s+", lambda m: m[1] or " ", text).strip(" $")


def _split(text: str, sign: str) -> list[str]:
    """The parts between this sign, outside all brackets."""
    parts, depth, start = [], 0, 0
    for i, char in enumerate(text):
        depth += (char in "([{") - (char in ")]}")
        if char == sign and depth == 0:
            parts.append(text[start:i])
            start = i + 1
    return [*parts, text[start:]]


def _inside(text: str) -> tuple[str, str, str] | None:
    r"""(opening, inside, closing) of a text that one pair of brackets holds; \{ and \} are those of a set."""
    set_like = text.startswith("\\{") and text.endswith("\\}")
    if not set_like and (text[:1] not in ("(", "[") or text[-1:] not in (")", "]")):
        return None
    depth = 0
    for i, char in enumerate(text):
        depth += (char in "([{") - (char in ")]}")
        if depth == 0 and i >= set_like and i < len(text) - 1:
            return None
    return ("{", text[2:-2], "}") if set_like else (text[0], text[1:-1], text[-1])


def _equal(given: Typed, gold: Typed) -> bool:
    if gold.kind == given.kind == "":
        return _same_expression(given.parts[0], gold.parts[0])
    if gold.kind == given.kind == "base":
        return given == gold
    if gold.kind == "=" and not _RELATION.search(given.kind) and _NAME.fullmatch(_text(gold.parts[0])):
        return _equal(given, gold.parts[1])  # 5 for x = 5
    if given.kind == "=" and not _RELATION.search(gold.kind) and _NAME.fullmatch(_text(given.parts[0])):
        return _equal(given.parts[1], gold)  # x = 5 for 5
    if {given.kind, gold.kind} == {"{}", "list"} or given.kind == gold.kind in ("{}", "list", "union"):
        if len({_text(part.parts[0]) for side in (given, gold) for part in side.parts if part.kind == "="}) > 1 and any(
            part.kind != "=" for side in (given, gold) for part in side.parts
        ):
            return False  # 1, 2 does not say which is x and which is y
        left = list(gold.parts)
        for part in given.parts:
            if (match := next((other for other in left if _equal(part, other)), None)) is None:
                return False
            left.remove(match)
        return not left
    if gold.kind != given.kind:
        given, gold = _interval(given), _interval(gold)
    if gold.kind == given.kind and len(gold.parts) == len(given.parts):
        if all(map(_equal, given.parts, gold.parts)):
            return True
        if gold.kind in ("=", "\u2260"):
            return all(map(_equal, given.parts, gold.parts[::-1])) or _same_expression(
                *(f"{_text(sides[0])}-({_text(sides[1])})" for sides in (given.parts, gold.parts)), scaled=True
            )
    return False


def _interval(relation: Typed) -> Typed:
    """x < 5 is the interval (-oo, 5), 1 < x <= 3 is (1, 3]."""
    if not relation.kind or not set(relation.kind) <= {"<", "\u2264"}:
        return relation
    parts = [_text(part) for part in relation.parts]
    infinite = Typed("", ("\\infty",))
    ends = {"<": "()", "\u2264": "[]"}
    if len(parts) == 3 and len(relation.kind) == 2 and _NAME.fullmatch(parts[1]):
        low, high = relation.kind
        return Typed(ends[low][0] + ends[high][1], (relation.parts[0], relation.parts[2]))
    if len(parts) == 2 and relation.kind in ends:
        if _NAME.fullmatch(parts[0]):
            return Typed("(" + ends[relation.kind][1], (Typed("", ("-\\infty",)), relation.parts[1]))
        if _NAME.fullmatch(parts[1]):
            return Typed(ends[relation.kind][0] + ")", (relation.parts[0], infinite))
    return relation


def _text(part: Typed) -> str:
    return part.parts[0] if part.kind == "" else ""


# ---- single expressions
_FUNCTIONS = "sin|cos|tan|ln|log|sqrt"
_COMMANDS = rf"frac|pi|cdot|times|div|infty|alpha|beta|gamma|theta|lambda|{_FUNCTIONS}"
_LETTER = re.compile(r"(?<!\\)(?<![A-Za-z])[A-Za-z]+|(?<=\\pi )[A-Za-z]")
_TOKENS = re.compile(
    rf"(?:\\(?:{_COMMANDS})(?![A-Za-z])|(?<![A-Za-z])[A-Za-z]{{1,4}}(?![A-Za-z])"
    r"|(?<![\d.])\d{1,6}(?:\.\d{1,6})?(?![\d.])|[-+*/^(){}\[\]]| (?!\d)|(?<=[a-z]) )*"
)
_EXPONENT = re.compile(  # 12, -3, 1/2 or one letter; never a power of a power
    r"\^\s*(?:\{\s*-?(\d{1,2})\s*\}|(\d)(?!\d)|\{\s*-?\d/\d\s*\}|\{\s*\(\(\d\)/\(\d\)\)\s*\}|\{[a-z]\}|[a-z])(?!\s*\^)"
)
_INDEX = re.compile(r"\\sqrt\[(?!\d\])")
_DECIMAL = re.compile(r"(\d*)\.(\d+)")
_POINTS = 3


def _same_expression(given: str, gold: str, scaled: bool = False) -> bool:
    """Whether two expressions are equal; scaled: whether one is a constant times the other (equations)."""
    if given == gold:
        return not scaled or bool(gold)
    if re.fullmatch("[A-Za-z][A-Za-z ]{2,}|[Nn][Oo]", gold) and given.lower() == gold.lower():
        return True  # a word
    numbers = _number(given), _number(gold)
    if None not in numbers and not scaled:
        return numbers[0].value == numbers[1].value and numbers[0].unit.agrees(numbers[1].unit)
    letters = _letters(given)
    one_case = len(letters) == len({letter.lower() for letter in letters})
    if letters != _letters(gold) or not one_case or not (_safe(given) and _safe(gold)):
        return False
    return _agree(_values(given), _values(gold), scaled)


def _number(text: str) -> Quantity | None:
    quantity = quantity_of(text)
    if quantity is None and (value := read_expression(text)) is not None:
        quantity = Quantity(value, Unit())
    return quantity


def _letters(text: str) -> set[str]:
    return set("".join(_LETTER.findall(text)))


def _safe(text: str) -> bool:
    """Whether sympy may see it: known tokens, short, shallow, few letters, small exponents and roots.

    sympy works out what it is shown: 10**123456789, or a tower of exponents. So the product of all exponents is
    bounded, and no number has more than six digits.
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
    """What math-verify reads in LaTeX, in numbers: a list of the values at three points, each letter having its
    own value there; the sympy expression itself if it has none (infinity); None if nothing is read."""
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
    found = math_verify.parse(f"${text}$", [reader], fallback_mode="no_fallback", parsing_timeout=None)
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
