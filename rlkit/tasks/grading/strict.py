"""The strict reader: ONE quantity, such as '$1,200.50', '7 1/2 cups' or '2 thousand', as an exact Fraction.

Around the number stands a money sign, a unit (``units.py``) or nothing; a sentence, a sum left unevaluated or
a second number is not read. Regular expressions and Fractions only: exact, quick and safe in any thread.
"""

import re
from fractions import Fraction
from typing import NamedTuple

from rlkit.tasks.grading.cleaning import clean, undress
from rlkit.tasks.grading.units import MONEY, Unit, read_unit

MAX_QUANTITY = 300  # characters; one quantity is never longer
MAX_DIGITS = 400  # digits of one number (Python's own int() refuses beyond 4300)

_CODES = (
    "usd|eur|gbp|cad|aud|nzd|inr|jpy|cny|rmb|chf|sgd|hkd|mxn|brl|zar|krw|sek|nok|dkk|pln|php|thb|idr|myr|rs"
)
_CODES += "|kr|rm"
_SCALES = dict(
    hundred=2, thousand=3, k=3, million=6, mn=6, mln=6, m=6, billion=9, bn=9, bln=9, trillion=12, tn=12
)
_SCALES |= dict(quadrillion=15, quintillion=18, sextillion=21, lakh=5, crore=7)
SCALE = rf"(?:{'|'.join(name for name in _SCALES if len(name) > 1)})s?\b"
NUMBER = (
    # unmistakably European: 1.200,50  1.450.000  0,5
    r"(?:\d{1,3}(?:\.\d{3})+,\d+|\d{1,3}(?:\.\d{3}){2,}|0,\d+"
    r"|(?:\d{1,3}(?:(?:,\d{3})+|(?:\u00a0\d{3})+|(?:'\d{3})+)|\d{1,2}(?:,\d\d)+,\d{3}|\d+)(?:\.\d*)?|\.\d+)"
    r"(?:[eE][-+]?\d{1,3}(?![\d.]))?"
)
END = r"(?![.,'\u00a0:]?\d|\s*/\s*[-\d])"  # the number is over: not 7.2.1, 12,00, 7:30 or 1/2/2024
_COIN = rf"(?:(?:US|CA?|AU?|NZ|HK|S|R|MX|(?i:{_CODES}))\s?)?[{MONEY}]|(?i:{_CODES})\b\.?"
QUANTITY = (
    rf"(?P<sign>[-+]|(?i:minus|negative)\s)?\s*(?P<money>{_COIN})?\s*(?P<sign2>[-+])?\s*"
    rf"(?:(?P<whole>\d+)\s+(?P<top>\d+)\s*/\s*(?P<bottom>\d+)"
    rf"|(?P<number>{NUMBER})(?:\s*/\s*(?P<over>{NUMBER}))?){END}"
    rf"(?:\s*[*x]\s*10\s*(?:\^|\*\*)\s*[{{(]?\s*(?P<ten>[-+]?\d{{1,3}})\s*[}})]?(?!\d))?"
    rf"(?P<scale>(?:\s*(?i:{SCALE}))+|(?<=\d)[kKM]\b)?"
)
_HEAD = re.compile(QUANTITY)
_CENTS = re.compile(
    rf"(?<![.\d])(?P<money>[{MONEY}]\s?)?(?P<units>\d[\d,]*)(?!\d)"
    r"(?P<word>\s*(?:dollar|euro|pound)s?)?\s*(?:and|,)?\s*(?P<cents>\d{1,2})\s*(?:cents?|pence)\b"
)
_PART = dict(half="1/2", third="1/3", quarter="1/4", fourth="1/4", fifth="1/5")
_AND_A_PART = re.compile(r"(?<=\d)\s+and\s+(?:an?|one)[\s-](%s)\b" % "|".join(_PART))
_CLOCK = re.compile(r"^(1[0-2]|0?[1-9]):00(?=\s*(?:[ap]\.?\s?m\b\.?)?$)", re.I)  # 7:00 is 7 o'clock
_GROUPED = re.compile(rf"[-+]?(?:[{MONEY}]\s?)?\d{{1,3}}(?: \d{{3}})+")  # 1 200, if it is the whole text


class Quantity(NamedTuple):
    value: Fraction
    unit: Unit


def read_quantity(text: str) -> Fraction | None:
    """The exact value of text that is one quantity, else None."""
    return None if (quantity := quantity_of(text)) is None else quantity.value


def quantity_of(text: str) -> Quantity | None:
    """The value and the unit of text that is one quantity, else None."""
    text = text.strip()
    if len(text) > MAX_QUANTITY:
        text = " ".join(text.split())  # only blanks may make it long
        if len(text) > MAX_QUANTITY:
            return None
    if text.isascii() and text.isdigit():
        return Quantity(Fraction(int(text)), Unit())
    text = re.sub(r"^(?:[A-Za-z]\s*)?=\s*", "", undress(clean(text)))  # 'x = 72'
    text = _CLOCK.sub(r"\1", join_parts(undress(text)))
    if _GROUPED.fullmatch(text):
        text = text.replace(" ", "\u00a0")
    head = _HEAD.match(text)
    value = value_of(head) if head else None
    if head is None or value is None:
        return None
    unit = read_unit(text[head.end() :], head["money"] or "", one=abs(value) <= 1 or bool(head["whole"]))
    return None if unit is None else Quantity(value, unit)


def join_parts(text: str) -> str:
    """Two numbers that make one: '3 dollars and 50 cents' -> '3.50', '7 and a half' -> '7 1/2'."""
    if " and " in text:
        text = _AND_A_PART.sub(lambda m: " " + _PART[m[1]], text)
    if "cent" in text or "pence" in text:
        text = _CENTS.sub(
            lambda m: f"{m['units']}.{m['cents']:0>2}" if m["money"] or m["word"] else m[0], text
        )
    return text


def value_of(head) -> Fraction | None:
    """Value of a QUANTITY match, or None if it has none (4 10/3, 1/0, -$-3, too long)."""
    if head["whole"]:
        whole, top, bottom = (number_of(head[part]) for part in ("whole", "top", "bottom"))
        if whole is None or top is None or bottom is None or not 0 < top < bottom:
            return None
        value = whole + top / bottom
    else:
        value, over = number_of(head["number"]), number_of(head["over"] or "1")
        if value is None or not over:
            return None
        value /= over
    if head["ten"]:
        value *= Fraction(10) ** int(head["ten"])
    for scale in re.findall(r"[a-z]+", (head["scale"] or "").lower()):
        value *= 10 ** _SCALES[scale if scale in _SCALES else scale.rstrip("s")]
    if head["sign"] and head["sign2"]:
        return None
    return -value if (head["sign"] or head["sign2"] or "+").strip() != "+" else value


def number_of(text: str) -> Fraction | None:
    """'1,200.50', '1.200,50', '1.450.000', '7.2e1' -> Fraction; None for more digits than an answer has."""
    if len(text) > MAX_DIGITS:
        return None
    digits, _, power = text.lower().partition("e")
    if digits.rfind(",") > digits.rfind(".") > -1 or digits.count(".") > 1:
        digits = digits.replace(".", "").replace(",", ".")
    elif digits.startswith("0,") and digits.count(",") == 1:
        digits = digits.replace(",", ".")
    return Fraction(re.sub("[,'\u00a0]", "", digits)) * Fraction(10) ** int(power or 0)
