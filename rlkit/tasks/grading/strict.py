"""The strict reader: ONE quantity, such as '$1,200.50', '7 1/2 cups' or '2 thousand', as an exact Fraction.

Money signs, separators, percent, a scale and a few unit words are fine; a sentence, a sum left unevaluated or
a second number is not. Regular expressions and Fractions only: exact, quick and safe in any thread.
"""

import re
from fractions import Fraction

from rlkit.tasks.grading.cleaning import clean, undress

MAX_QUANTITY = 300  # characters; one quantity is never longer
MAX_DIGITS = 400  # digits of one number (Python's own int() refuses beyond 4300)

MONEY = "$\u00a2\u00a3\u00a4\u00a5\uffe1\uffe5" + "".join(map(chr, range(0x20A0, 0x20C1)))
_CODES = (
    "usd|eur|gbp|cad|aud|nzd|inr|jpy|cny|rmb|chf|sgd|hkd|mxn|brl|zar|krw|sek|nok|dkk|pln|php|thb|idr|myr|rs"
)
_CODES += "|kr|rm"
_SCALES = dict(
    hundred=2, thousand=3, k=3, million=6, mn=6, m=6, billion=9, bn=9, trillion=12, lakh=5, crore=7
)
SCALE = r"(?:hundred|thousand|million|billion|trillion|lakh|crore|bn|mn)s?\b"
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
_UNIT = re.compile(
    rf"\s*(?:(?P<word>[^\W\d_]+(?:['-][^\W\d_]+)*\.?)"
    rf"(?P<power>\s*\^\s*\{{?[23]\}}?|[23](?!\d)|[\u00b2\u00b3])?|(?P<mark>[/%\u00b0{MONEY}]))"
)
_CENTS = re.compile(
    rf"(?<![.\d])(?P<money>[{MONEY}]\s?)?(?P<units>\d[\d,]*)(?!\d)"
    r"(?P<word>\s*(?:dollar|euro|pound)s?)?\s*(?:and|,)?\s*(?P<cents>\d{1,2})\s*(?:cents?|pence)\b"
)
_PART = dict(half="1/2", third="1/3", quarter="1/4", fourth="1/4", fifth="1/5")
_AND_A_PART = re.compile(r"(?<=\d)\s+and\s+(?:an?|one)[\s-](%s)\b" % "|".join(_PART))
LETTER_UNITS = set("mghslLCFWVJ\u00b5\u03a9\u5143\u5186\uc6d0")
LENGTHS = set("m cm mm km ft in yd mi inch inches foot feet meter meters metre metres yards miles".split())
_ONES = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen "
    "seventeen eighteen nineteen"
)
SMALL = {word: i for i, word in enumerate(_ONES.split())}
TENS = {w: 10 * i for i, w in enumerate("twenty thirty forty fifty sixty seventy eighty ninety".split(), 2)}
FRACTIONAL = "half halves thirds fourths fifths sixths eighths tenths hundredths thousandths".split()
# with one of these '15 word' is not that number of words
_NOT_UNITS = {*SMALL, *TENS, *FRACTIONAL} | set(
    "and or nor not no but if else than then to by plus minus times less remainder mod squared cubed doubled "
    "halved factorial choose divided multiplied add subtract wrong incorrect false maybe perhaps possibly "
    "probably guess unsure unknown uncertain cannot might could may hopefully likely ish odd below above "
    "negative mil bil grand estimate about approx approximately roughly is was are were equals equal pi sqrt "
    "log ln sin cos tan exp inf nan infinity none true while for between st nd rd th xy yz xz xyz versus vs "
    "import lambda short shy through until unless except instead rather because since that it".split()
)
# as the last word it speaks of the answer: '72 estimated', '72 invalid' (but '72 invalid votes')
RETRACTED = set(
    "estimated est approximated rounded guessed assumed supposedly allegedly presumably hypothetically "
    "tentative tentatively conjecture unverified unconfirmed doubtful dubious questionable debatable "
    "disputed untrue refuted retracted invalid void error typo mistake undo scratch disregard nevermind "
    "mind oops sorry hmm nope nah kidding jk max maximum minimum tops most least".split()
)


def read_quantity(text: str) -> Fraction | None:
    """The exact value of text that is one quantity, else None."""
    text = text.strip()
    if len(text) > MAX_QUANTITY:
        text = " ".join(text.split())  # only blanks may make it long
        if len(text) > MAX_QUANTITY:
            return None
    if text.isascii() and text.isdigit():
        return Fraction(int(text))
    text = re.sub(r"^(?:[A-Za-z]\s*)?=\s*", "", undress(clean(text)))  # 'x = 72'
    text = join_parts(undress(text))
    head = _HEAD.match(text)
    return value_of(head) if head and _is_unit(text[head.end() :]) else None


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


def _is_unit(tail: str) -> bool:
    """Whether only a few unit words and signs follow the number: '%', 'km/h', 'dollars a week'."""
    words, marks, position, last = 0, 0, 0, ""
    while position < len(tail):
        unit = _UNIT.match(tail, position)
        if unit is None:
            return False
        if unit["mark"]:
            marks, last = marks + 1, unit["mark"]
        else:
            words, last = words + 1, unit["word"].rstrip(".")
            lower = last.lower()
            if lower in _NOT_UNITS or (len(last) == 1 and last not in LETTER_UNITS and last != "a"):
                return False  # '72 or', '72x'
            if unit["power"] in ("2", "3") and lower not in LENGTHS:
                return False  # m2 is a unit, men2 is not
        position = unit.end()
    ends = last not in ("a", "an", "per", "/") and last.lower() not in RETRACTED
    return words <= 4 and marks <= 3 and ends
