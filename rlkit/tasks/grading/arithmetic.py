"""Plain arithmetic, such as '48 + 24' or '2^3*9', worked out exactly: for sums in answers and for golds."""

import math
import re
from fractions import Fraction

from rlkit.tasks.grading.strict import MAX_QUANTITY, NUMBER, number_of
from rlkit.tasks.grading.units import MONEY

MAX_BITS = 4096  # size of a power that is worked out
_OUTSIDE_NUMBERS = re.compile(rf"(?<![\d.,])[{MONEY}]|(?<=\d)[{MONEY}](?!\s*[\d.])")
_POINT = re.compile(r"\([-\d.\s]*,[-\d.,\s]*\)|^\[.*\]$")  # (1,234) is no number
_TOKEN = re.compile(rf"\s*({NUMBER}|sqrt|[-+*/^()!\u00f7]|\S)")
_TIMES = re.compile(r"(?<=[\d)\s])x(?=\s*[\d($])")  # 9 x 2, but the x of 3x + 2 is a letter


def read_expression(text: str) -> Fraction | None:
    r"""Exact value of plain arithmetic ('48 + 24', '\sqrt{5184}', '4!'), else None. Powers are bounded."""
    text = text.strip(" ,;:").replace(r"\sqrt", "sqrt").replace("{", "(").replace("}", ")").replace("**", "^")
    text = _TIMES.sub("*", _OUTSIDE_NUMBERS.sub("", text))
    tokens = _TOKEN.findall(text)[::-1]
    if len(text) > MAX_QUANTITY or text.count("(") > 40 or not tokens or _POINT.search(text):
        return None

    def peek():
        return tokens[-1] if tokens else ""

    def total():
        value = product()
        while peek() in ("+", "-"):
            value = value + product() if tokens.pop() == "+" else value - product()
        return value

    def product():
        value = signed()
        while peek() in ("*", "/", "\u00f7"):
            value = value * signed() if tokens.pop() == "*" else value / signed()
        return value

    def signed():
        if peek() in ("-", "+"):
            return -signed() if tokens.pop() == "-" else signed()
        base = atom()
        if peek() == "!" and tokens.pop():
            base = Fraction(math.factorial(int(base) if base == int(base) <= 20 else -1))
        return base ** exponent(base) if peek() == "^" and tokens.pop() else base

    def exponent(base):
        power = signed()
        bits = max(base.numerator.bit_length(), base.denominator.bit_length())
        if power.denominator > 1 or abs(power) * bits > MAX_BITS:
            raise ValueError("not a power to work out")
        return int(power)

    def atom():
        token = tokens.pop()
        if token == "sqrt":
            square = atom()
            root = Fraction(math.isqrt(square.numerator), math.isqrt(square.denominator))
            return root if root * root == square else None
        if token != "(":
            return number_of(token)
        value = total()
        return value if tokens.pop() == ")" else None

    try:
        value = total()
        return None if tokens else value
    except (ValueError, TypeError, AttributeError, ZeroDivisionError, IndexError):
        return None  # letters, None, 1/0, no bracket
