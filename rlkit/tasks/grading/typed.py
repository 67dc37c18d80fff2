r"""Golds that are not a plain number, compared as what they are.

``read`` gives a text its type: an interval, point or tuple (its brackets and order count), a set or a list
(order does not count), a union, a matrix, an equation or inequality, a number in a base, or else one
expression. Values of one type are compared part by part, down to single expressions (``expressions.py``). The
only crossings are 5 for x = 5, [2, 3) for 2 <= x < 3 and 1, 2 for {1, 2}. Letters keep their case, words need
not.
"""

import re
from functools import lru_cache
from typing import NamedTuple

from rlkit.tasks.grading.cleaning import clean
from rlkit.tasks.grading.expressions import same_expression
from rlkit.tasks.grading.lenient import denied
from rlkit.tasks.grading.units import Unit, read_unit

MAX_TEXT, MAX_PARTS, MAX_DEPTH = 200, 10, 3
_SIGNS = [  # one spelling for each sign, as LaTeX
    (re.compile(pattern), new)
    for pattern, new in (
        (r"\u03c0|(?<![A-Za-z\\])pi(?![A-Za-z])", r"\\pi "),
        (r"\u221e|(?<![A-Za-z\\])(?:inf|infinity|oo)(?![A-Za-z])", r"\\infty "),
        (r"\u2264|<=|\\leq?(?:slant)?(?![A-Za-z])|\u2a7d", "\u2264"),
        (r"\u2265|>=|\\geq?(?:slant)?(?![A-Za-z])|\u2a7e", "\u2265"),
        (r"\u2260|!=|\\neq?(?![A-Za-z])", "\u2260"),
        (r"\\lt(?![A-Za-z])", "<"),
        (r"\\gt(?![A-Za-z])", ">"),
        (r"\\cup(?![A-Za-z])", "\u222a"),
        (r"\\in(?![A-Za-z])", "\u2208"),
        (r"\\(?:emptyset|varnothing)(?![A-Za-z])|\\\{\s*\\\}", "\u2205"),
        (r"\u221a\s*\(([^()]*)\)|(?<![A-Za-z\\])sqrt\s*\(([^()]*)\)", r"\\sqrt{\1\2}"),
        (r"(?:\u221a|(?<![A-Za-z\\])sqrt(?![A-Za-z{]))\s*(\d+|[a-z])|\\sqrt\s*(\d|[a-z])", r"\\sqrt{\1\2}"),
        (r"(?<![A-Za-z\\])(sin|cos|tan|cot|sec|csc|ln|log)(?![A-Za-z])", r"\\\1 "),
        (r"\\log_\{?(\d+)\}?\s*(?:\((\w+)\)|(\w+))", r"((\\log(\2\3))/(\\log(\1)))"),
        (r"\*\*", "^"),
        (r"\\pm(?![A-Za-z])", "\u00b1"),
        (r"(?<![\w.)/])(\d+)/(\d+)\s+(?=[A-Za-z\\(])", r"((\1)/(\2))"),  # a fraction before a factor
        (r"\s*\(?\s*\bbase[\s-]*(\d{1,2})\)?$", r"_{\1}"),
    )
]
_MATRIX = re.compile(r"\W*\\begin\{([pbBvV]?)matrix\}(.*)\\end\{\1matrix\}\W*", re.S)
_UNIT_TEXT = re.compile(
    r"\\(?:text(?:rm|up)?|math(?:rm|up)|mbox)\s*\{([^{}]*)\}((?:\s*\^\s*\{?[23]\}?)?)[\s.$]*$"
)
_UNIT_WORDS = re.compile(
    r"(?<=[\w)}])\s+([A-Za-z]{2}[A-Za-z./ ]*|%|\u00b0)((?:\^\{?[23]\}?|[\u00b2\u00b3])?)$"
)
_BASE = re.compile(r"(\w+)_\{?(\d{1,2})\}?")
_RELATION = re.compile("[=<>\u2264\u2265\u2260]")
_ENDS = {"<": "()", "\u2264": "[]"}
_FLIPPED = {">": "<", "\u2265": "\u2264"}
_NAME = re.compile(r"[A-Za-z](?:_\{?\w\}?)?|[A-Za-z]\([A-Za-z]\)")  # x, x_1, f(x)


class Typed(NamedTuple):
    """kind: "()", "[)", "{}", "list", "union", "rows", "base", a relation's signs, or "" (one expression)."""

    kind: str
    parts: tuple  # of Typed; of str for "base" and ""


def typed_match(answer: str, gold: str, fast: bool) -> bool:
    r"""For golds such as '(1, 2)', '\frac{\sqrt{2}}{2}', 'x \le 5', 'Tuesday', '3\pi \text{ cm}'."""
    wanted, unit = _read_gold(gold)
    texts = [answer]
    if not fast:
        stated = re.split(r"\banswer\b\s*(?:is\b|:|=)*|\b(?:is|are)\b|####", answer, flags=re.I)[-1]
        said_before = answer.removesuffix(stated)
        texts += [] if denied(said_before, said_before) else [stated]
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
    return re.sub(r"\s*(?:\\text\s*\{\s*(?:and|or)\s*\}|,?\s(?:and|or)\b)\s*", ",", text)


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
    text = re.sub(r"^(?:\\[(\[]|[\s$])+|(?:\\[)\]]|[\s$.])+$", "", text)
    for pattern in (_UNIT_TEXT, _UNIT_WORDS):
        match = pattern.search(text)
        if match and re.search(r"[\d})]|\\pi", text[: match.start()]):
            if (unit := read_unit(clean(match[1] + match[2]))) is not None:
                return text[: match.start()].rstrip(" $\\,;"), unit
    return text, Unit()


def read(text: str) -> Typed:
    """The text with its type; what is too long or too deep stays one expression."""
    if len(text) > MAX_TEXT:
        return Typed("", (text,))
    if matrix := _MATRIX.fullmatch(text):
        rows = re.sub(r"\\\\\s*$", "", matrix[2]).split("\\\\")
        cells = [Typed("row", tuple(map(read, row.split("&")))) for row in rows]
        return Typed("determinant" if matrix[1] in ("v", "V") else "rows", tuple(cells))
    return _read_squeezed(re.sub("^[A-Za-z]\u2208", "", squeezed(text)), MAX_DEPTH)


def _read_squeezed(text: str, depth: int) -> Typed:
    if text.count("\u00b1") == 1 and "," not in text:  # two values
        text = ",".join(text.replace("\u00b1", sign) for sign in "+-").lstrip("+").replace("(+", "(")
    for sign, kind in (("\u222a", "union"), (",", "list")):
        parts = _split(text, sign)
        if 1 < len(parts) <= MAX_PARTS and depth:
            return Typed(kind, tuple(_read_squeezed(part, depth - 1) for part in parts))
    if based := _BASE.fullmatch(text):
        if based[1].isalnum() and any(map(str.isdigit, based[1])):
            return Typed("base", (based[1].lower(), based[2]))
    signs = _RELATION.findall(text)
    if signs and len(signs) <= 2 and depth:
        sides = [_read_squeezed(side, depth - 1) for side in _RELATION.split(text)]
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


def squeezed(text: str) -> str:
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
    if text[:1] + text[-1:] == "{}" and "," in text:
        text = f"\\{text[:-1]}\\}}"
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
        return same_expression(given.parts[0], gold.parts[0])
    if gold.kind == given.kind == "base":
        return given == gold
    for side, other in ((gold, given), (given, gold)):  # 5 for x = 5, and x = 5 for 5
        if side.kind == "=" and _names(side.parts[0]) and not _RELATION.search(other.kind):
            return _equal(given, gold.parts[1]) if side is gold else _equal(given.parts[1], gold)
    if {given.kind, gold.kind} == {"{}", "list"} or given.kind == gold.kind in ("{}", "list", "union"):
        return _equal_unordered(given.parts, gold.parts)
    if gold.kind != given.kind:
        given, gold = _interval(given), _interval(gold)
    if gold.kind != given.kind or len(gold.parts) != len(given.parts):
        return False
    if all(map(_equal, given.parts, gold.parts)):
        return True
    if gold.kind not in ("=", "\u2260"):
        return False
    differences = (f"{_text(sides[0])}-({_text(sides[1])})" for sides in (given.parts, gold.parts))
    return all(map(_equal, given.parts, gold.parts[::-1])) or same_expression(*differences, scaled=True)


def _equal_unordered(given: tuple, gold: tuple) -> bool:
    named = {_text(part.parts[0]) if part.kind == "=" else "" for part in (*given, *gold)}
    if "" in named and len(named) > 2:  # 1, 2 does not say which is x and which is y
        return False
    left = list(gold)
    for part in given:
        if (match := next((other for other in left if _equal(part, other)), None)) is None:
            return False
        left.remove(match)
    return not left


def _interval(relation: Typed) -> Typed:
    """x < 5 as the interval (-oo, 5), 1 < x <= 3 as (1, 3]; anything else as it is."""
    if not relation.kind or not set(relation.kind) <= set(_ENDS):
        return relation
    where = [i for i, side in enumerate(relation.parts) if _names(side)]
    if where == [1] and len(relation.parts) == 3:
        (low, high), (left, _, right) = relation.kind, relation.parts
        return Typed(_ENDS[low][0] + _ENDS[high][1], (left, right))
    if where == [0]:
        return Typed("(" + _ENDS[relation.kind][1], (Typed("", ("-\\infty",)), relation.parts[1]))
    if where == [1]:
        return Typed(_ENDS[relation.kind][0] + ")", (relation.parts[0], Typed("", ("\\infty",))))
    return relation


def _names(part: Typed) -> bool:
    """Whether this is a name, or names in brackets: x, f(x), (x, y)."""
    return all(map(_names, part.parts)) if part.kind == "()" else bool(_NAME.fullmatch(_text(part)))


def _text(part: Typed) -> str:
    return part.parts[0] if part.kind == "" else ""
