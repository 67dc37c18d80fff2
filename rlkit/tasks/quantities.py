r"""What number does a text state? Cleaning, one quantity, and sentences that end in one.

Everything here is regular expressions and Fractions: exact, quick and safe in any thread. Nothing is
evaluated as code.
"""

import math
import re
import unicodedata
from fractions import Fraction

MAX_QUANTITY = 300  # characters; one quantity is never longer
MAX_SENTENCE = 600  # characters read in lenient mode, counted from the end
MAX_DIGITS = 400  # digits of one number (Python's own int() refuses beyond 4300)
MAX_BITS = 4096  # size of a power that is worked out


# ---- cleaning
def _table(pairs):
    return {ord(char): new for chars, new in pairs for char in chars}


_ORDINARY = _table(
    [
        ("\u2212\u2010\u2011\u2012\u2013\u2014\ufe63\uff0d", "-"),
        ("\u00d7\u00b7\u22c5\u2217\u2219", "*"),
        ("\uff0b", "+"),
        ("\uff0c", ","),
        ("\uff0e\u3002", "."),
        ("\uff05", "%"),
        ("\uff0f\u2044\u2215", "/"),
        ("\uff1d", "="),
        ("\uff1a", ":"),
        ("\uff04", "$"),
        ("\u2018\u2019", "'"),
        ("\u201c\u201d\u00ab\u00bb", '"'),
        ("\u2245\u223c\u2243", "\u2248"),
        ("\u00a0\u202f\u2009\u2007", "\u00a0"),  # the spaces that are typed inside numbers
        ("\u00bd", " 1/2"),
        ("\u00bc", " 1/4"),
        ("\u00be", " 3/4"),
        ("\u2153", " 1/3"),
        ("\u2154", " 2/3"),
        # what cannot be seen becomes a blank, so that it never glues two digits into a number
        (
            [
                chr(c)
                for c in (
                    *range(32),
                    127,
                    0x85,
                    0x1680,
                    *range(0x2000, 0x2007),
                    0x2008,
                    0x200A,
                    0x200B,
                    0x200E,
                    0x200F,
                    0x2028,
                    0x2029,
                    0x205F,
                    0x2060,
                    0x3000,
                    0xFEFF,
                )
            ],
            " ",
        ),
    ]
)
_LATEX = [
    (re.compile(pattern), new)
    for pattern, new in (
        (r"(?<=\d)(?:\\[,;: ]|\\thinspace\b|~)(?=\d{3}(?!\d))", "\u00a0"),  # 1\,200
        (r"\\!(?=,)|(?<=,)\\!|\{(?=,\})|(?<=\{,)\}|(?<=\d,)\}(?=\d)", ""),  # 1{,}200 and 1,\!200
        (
            r"\\(?:[,;:! ()\[\]\\]|(?:q?quad|thinspace|displaystyle|textstyle|left|right|[bB]igg?|[lL]arge|huge|bf|rm"
            r"|checkmark|qed|square|blacksquare|hfill|newline)(?![A-Za-z]))|(?<=\S)~",
            " ",
        ),
        (r"\\(?:text)?color\s*\{\w*\}", " "),
        (r"\^\s*\{?\s*\\circ\s*\}?|\\degrees?\b", "\u00b0"),
        (r"\\([$%{}])", r"\1"),
        (r"\\(?:pounds|euro|yen|textdollar)(?![A-Za-z])(?:\{\})?", "$"),
        (r"\\(?:cdot|times|ast)(?![A-Za-z])", "*"),
        (r"\\div(?![A-Za-z])", "\u00f7"),
        (r"\\(?:approx|sim|simeq)(?![A-Za-z])", "\u2248"),
        (r"\\[dtc]frac(?![A-Za-z])", r"\\frac"),
        (r"\\frac\s*(\d)\s*(\d)", r"\\frac{\1}{\2}"),
        (r"\\frac\s*(\d)\s*(?=\{)", r"\\frac{\1}"),
        (r"\\frac\s*(\{[^{}]*\})\s*(\d)", r"\\frac\1{\2}"),
    )
]
_WRAPPER = re.compile(
    r"\\(?:text(?:bf|it|rm|tt|sf|normal)?|math(?:bf|rm|it|sf|tt|normal)|mbox|operatorname|fbox"
    r"|underline|boldsymbol|bm|emph)\s*\{([^{}]*)\}"
)
_BLANKS = re.compile("[ \u00a0]{2,}")
_FRACTION = re.compile(r"\\frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}")


def clean(text):
    """Plain text on one line: odd minus signs, spaces and digits made ordinary, LaTeX dressing taken off. Linear."""
    if not (text.isascii() and text.isprintable()):
        text = text.translate(_ORDINARY)
        text = "".join(str(unicodedata.decimal(c)) if c > "\x7f" and c.isdecimal() else c for c in text)
    if "\\" in text or "{,}" in text or "~" in text:
        text = text.replace("{,}", ",")
        for pattern, new in _LATEX:
            text = pattern.sub(new, text)
        for _ in range(6):  # innermost first; what nests deeper keeps its backslash and is refused later
            before, text = text, _FRACTION.sub(_inline_fraction, _WRAPPER.sub(r" \1 ", text))
            if text == before:
                break
    return _BLANKS.sub(" ", text).strip(" ")


def _inline_fraction(match):
    top, bottom = match[1].strip(), match[2].strip()
    plain = re.fullmatch(r"-?[\d.,]+", top) and re.fullmatch(r"[\d.,]+", bottom)
    plain = plain or re.fullmatch(r"[A-Za-z]+/[A-Za-z]+\s*(?:\^\s*\d)?", f"{top}/{bottom}")  # km/h
    return f" {top}/{bottom} " if plain else f" (({top})/({bottom})) "


def _undress(text):
    """Takes off what may stand around an answer: quotes, markdown, brackets, math dollars, ticks, one final stop."""
    for _ in range(8):
        before, text = text, text.strip(" *_`\"'\u00a0\u2713\u2714\u2705\ufe0f\U0001f389")
        if text[-1:] in tuple(".,;:") and text[-2:-1] != ".":  # but "72..." goes on
            text = text[:-1]
        for left, right in ("()", "[]", "{}", "$$"):
            if len(text) > 2 and text[0] == left and text[-1] == right:
                inside = text[1:-1]
                if left == "$" or not (left in inside or right in inside):
                    text = inside
        if text == before:
            break
    return text


# ---- one quantity
_MONEY = "$\u00a2\u00a3\u00a4\u00a5\uffe1\uffe5" + "".join(map(chr, range(0x20A0, 0x20C1)))
_CODES = "usd|eur|gbp|cad|aud|nzd|inr|jpy|cny|rmb|chf|sgd|hkd|mxn|brl|zar|krw|sek|nok|dkk|pln|php|thb|idr|myr|rs|kr|rm"
_SCALES = {
    "hundred": 2,
    "thousand": 3,
    "k": 3,
    "million": 6,
    "mn": 6,
    "m": 6,
    "billion": 9,
    "bn": 9,
    "trillion": 12,
    "lakh": 5,
    "crore": 7,
}
SCALE = r"(?:hundred|thousand|million|billion|trillion|lakh|crore|bn|mn)s?\b"
_NUMBER = (
    # unmistakably European: 1.200,50  1.450.000  0,5
    r"(?:\d{1,3}(?:\.\d{3})+,\d+|\d{1,3}(?:\.\d{3}){2,}|0,\d+"
    r"|(?:\d{1,3}(?:(?:,\d{3})+|(?:\u00a0\d{3})+|(?:'\d{3})+)|\d{1,2}(?:,\d\d)+,\d{3}|\d+)(?:\.\d*)?|\.\d+)"
    r"(?:[eE][-+]?\d{1,3}(?![\d.]))?"
)
_END = r"(?![.,'\u00a0:]?\d|\s*/\s*[-\d])"  # the number is over: not 7.2.1, 12,00, 7:30 or 1/2/2024
_QUANTITY = (
    rf"(?P<sign>[-+]|(?i:minus|negative)\s)?\s*"
    rf"(?P<money>(?:(?:US|CA?|AU?|NZ|HK|S|R|MX|(?i:{_CODES}))\s?)?[{_MONEY}]|(?i:{_CODES})\b\.?)?\s*(?P<sign2>[-+])?\s*"
    rf"(?:(?P<whole>\d+)\s+(?P<top>\d+)\s*/\s*(?P<bottom>\d+)"
    rf"|(?P<number>{_NUMBER})(?:\s*/\s*(?P<over>{_NUMBER}))?){_END}"
    rf"(?:\s*[*x]\s*10\s*(?:\^|\*\*)\s*[{{(]?\s*(?P<ten>[-+]?\d{{1,3}})\s*[}})]?(?!\d))?"
    rf"(?P<scale>(?:\s*(?i:{SCALE}))+|(?<=\d)[kKM]\b)?"
)
_HEAD = re.compile(_QUANTITY)
_UNIT = re.compile(
    rf"\s*(?:(?P<word>[^\W\d_]+(?:['-][^\W\d_]+)*\.?)"
    rf"(?P<power>\s*\^\s*\{{?[23]\}}?|[23](?!\d)|[\u00b2\u00b3])?|(?P<mark>[/%\u00b0{_MONEY}]))"
)
_CENTS = re.compile(
    rf"(?<![.\d])(?P<money>[{_MONEY}]\s?)?(?P<units>\d[\d,]*)(?!\d)"
    r"(?P<word>\s*(?:dollar|euro|pound)s?)?\s*(?:and|,)?\s*(?P<cents>\d{1,2})\s*(?:cents?|pence)\b"
)
_PART = {"half": "1/2", "third": "1/3", "quarter": "1/4", "fourth": "1/4", "fifth": "1/5"}
_AND_A_PART = re.compile(r"(?<=\d)\s+and\s+(?:an?|one)[\s-](%s)\b" % "|".join(_PART))
_LETTER_UNITS = set("mghslLCFWVJ\u00b5\u03a9\u5143\u5186\uc6d0")
_LENGTHS = set("m cm mm km ft in yd mi inch inches foot feet meter meters metre metres yards miles".split())
_SMALL = dict(
    zip(
        "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen "
        "sixteen seventeen eighteen nineteen".split(),
        range(20),
    )
)
_TENS = dict(zip("twenty thirty forty fifty sixty seventy eighty ninety".split(), range(20, 100, 10)))
_FRACTIONAL = "half halves thirds fourths fifths sixths eighths tenths hundredths thousandths"
_NOT_UNITS = {
    *_SMALL,
    *_TENS,
    *_FRACTIONAL.split(),
} | set(  # with one of these '15 word' is not that number of words
    "and or nor not no but if else than then to by plus minus times less remainder mod squared cubed "
    "doubled halved "
    "factorial choose divided multiplied add subtract wrong incorrect false maybe perhaps possibly "
    "probably guess "
    "unsure unknown uncertain cannot might could may hopefully likely ish odd below above negative mil bil "
    "grand "
    "estimate about approx approximately roughly is was are were equals equal pi sqrt log ln sin cos tan "
    "exp inf nan "
    "infinity none true while for between st nd rd th xy yz xz xyz versus vs import lambda short shy "
    "through until "
    "unless except instead rather because since that it".split()
)
# as the last word it speaks of the answer: '72 estimated', '72 invalid' (but '72 invalid votes')
_RETRACTED = set(
    "estimated est approximated rounded guessed assumed supposedly allegedly presumably hypothetically "
    "tentative "
    "tentatively conjecture unverified unconfirmed doubtful dubious questionable debatable disputed untrue "
    "refuted "
    "retracted invalid void error typo mistake undo scratch disregard nevermind mind oops sorry hmm nope "
    "nah kidding "
    "jk max maximum minimum tops most least".split()
)


def read_quantity(text):
    """The exact value of text that is one quantity ('$1,200.50', '7 1/2 cups', '2 thousand'), else None. -> Fraction"""
    text = text.strip()
    if len(text) > MAX_QUANTITY:
        text = " ".join(text.split())  # only blanks may make it long
        if len(text) > MAX_QUANTITY:
            return None
    if text.isascii() and text.isdigit():
        return Fraction(int(text))
    text = re.sub(r"^(?:[A-Za-z]\s*)?=\s*", "", _undress(clean(text)))  # 'x = 72'
    text = _join_parts(_undress(text))
    head = _HEAD.match(text)
    return _value(head) if head and _is_unit(text[head.end() :]) else None


def _join_parts(text):
    """Two numbers that make one: '3 dollars and 50 cents' -> '3.50', '7 and a half' -> '7 1/2'."""
    if " and " in text:
        text = _AND_A_PART.sub(lambda m: " " + _PART[m[1]], text)
    if "cent" in text or "pence" in text:
        text = _CENTS.sub(
            lambda m: f"{m['units']}.{m['cents']:0>2}" if m["money"] or m["word"] else m[0], text
        )
    return text


def _value(head):
    """Value of a _QUANTITY match, or None where it is none (4 10/3, 1/0, -$-3, too long)."""
    if head["whole"]:
        whole, top, bottom = (_number(head[part]) for part in ("whole", "top", "bottom"))
        if None in (whole, top, bottom) or not 0 < top < bottom:
            return None
        value = whole + top / bottom
    else:
        value, over = _number(head["number"]), _number(head["over"] or "1")
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


def _number(text):
    """'1,200.50', '1.200,50', '1.450.000', '7.2e1' -> Fraction; None when it has too many digits to be an answer."""
    if len(text) > MAX_DIGITS:
        return None
    digits, _, power = text.lower().partition("e")
    if digits.rfind(",") > digits.rfind(".") > -1 or digits.count(".") > 1:
        digits = digits.replace(".", "").replace(",", ".")
    elif digits.startswith("0,") and digits.count(",") == 1:
        digits = digits.replace(",", ".")
    return Fraction(re.sub("[,'\u00a0]", "", digits)) * Fraction(10) ** int(power or 0)


def _is_unit(tail):
    """True when a number is followed by at most four unit words and signs, no more: '%', 'km/h', 'dollars a week'."""
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
            if lower in _NOT_UNITS or (len(last) == 1 and last not in _LETTER_UNITS and last != "a"):
                return False  # '72 or', '72x'
            if unit["power"] and unit["power"].isdigit() and unit["power"] in "23" and lower not in _LENGTHS:
                return False  # m2 is a unit, men2 is not
        position = unit.end()
    return (
        words <= 4 and marks <= 3 and last not in ("a", "an", "per", "/") and last.lower() not in _RETRACTED
    )


# ---- sentences
def _any(phrases, before=r"\b", after=r"\b"):
    return rf"{before}(?:{'|'.join(phrases.split(', '))}){after}"


_DIGIT = rf"\s*[{_MONEY}]?\s*-?\.?\d"
_HTML = re.compile(r"</?(?:b|i|u|p|em|strong|code|span|div|br)\s*/?>|\x1b\[[\d;]*m", re.I)
_MARKDOWN = re.compile(
    r"\*\*(?!\d)|(?<![\d)])\*\*|(?<![\s\d)])\*(?!\S)|(?<!\S)\*(?=[^\s\d])|`+|(?<![^\s(])_+"
    r"|(?<=\w)_+(?!\w)"
)
# anywhere in the text: whatever number it holds, it is not stated as the answer, or the text is code
DOUBT = re.compile(
    _any(
        r"maybe, perhaps, possibly, probably, presumably, guess\w*, unsure, uncertain, not sure, no idea, "
        r"might, could be, "
        r"may be, either, wrong, incorrect, false, mistaken?, cannot, can't, don't know, do not know, "
        r"unknown, unclear, "
        r"impossible, undetermined, hopefully, likely, unlikely, not certain, wait, oops, nope, nah, never "
        r"?mind, "
        r"(?<!without )(?<!without a )(?<!beyond )(?<!beyond a )doubt(?:s|ed|ful)?, disagree, deny, "
        r"refuted?, retract\w*, "
        r"(?:scratch|strike|ignore|disregard|forget) (?:that|this|it), take (?:that|this|it) back, "
        r"lambda, import, echo, print, eval, exec, def, log, ln, sqrt, sin, cos, tan, exp, mod, abs"
    )
    + r"|\b(?:user|assistant|human)\s*:",
    re.I,
)
# an equation that is still to be solved: 2x = 15, x + 3 = 15, 15 + y
_UNSOLVED = re.compile(
    r"(?<![A-Za-z])(?:\d\s?[b-zB-Z]\s?[-+=](?![A-Za-z])|[b-zB-Z]\s?[-+*/^]\s?[\d(]"
    r"|[\d)]\s?[-+*^]\s?[b-zB-Z](?![A-Za-z]))"
)
# in the sentence that states the answer: it is denied, conditional or one of several
_NOT = re.compile(
    _any(
        "not, never, no, none, neither, nor, or, if, unless, else, otherwise, except, excluding, "
        "instead, rather, versus, vs, between, assuming, suppose, (?:is|was|are|does|do|did|wo|ca|ai)nt"
    )
    + r"|n't\b",
    re.I,
)
# next to a number: it is a bound or the start of a longer term, not the value
_BOUND = re.compile(
    _any(
        "than, at least, at most, up to, almost, nearly, over, under, above, below, within, beyond, "
        "exceeds?, "
        "exceeding, minimum of, maximum of, upwards of, short of, out of, half, half of, "
        "third of, quarter of, twice, double, triple, root of, square of, inverse of, opposite of",
        after=_DIGIT,
    )
    + "|"
    + _any(
        "squared, cubed, factorial, remainder, modulo, plus, minus, pi, doubled, halved, ish, odd, below, "
        "mil, bil, "
        "grand, " + _FRACTIONAL.replace(" ", ", "),
        before=r"\d[\s-]*",
    )
    + rf"|\d\s*\+\s*(?![\s(\d{_MONEY}.-])",
    re.I,
)
# in the part that states the answer, right beside the number: it is denied, taken back or a function's
# argument
_GOVERNED = re.compile(
    _any(
        "hardly, barely, scarcely, supposedly, allegedly, hypothetically, far from, nowhere near, shy of, "
        "anything but, all but, besides, without, lacking, apart from, aside from, opposed to, reject, "
        "refuse, "
        "ignore, disregard, discard, question, root, reciprocal of, negation of, negative of, factorial of",
        after=_DIGIT,
    )
    + "|"
    + _any(
        ", ".join(sorted(_RETRACTED)), before=r"\d\W{0,3}(?:(?:an?|my|in|at)\s)?", after=r"\b(?!\s+[^\W\d])"
    ),
    re.I,
)
# what sentences do not hold: brackets, inequalities, code, LaTeX left over, direction overrides, factorials,
# '15...'
_FOREIGN = re.compile(
    r"[<>\[\]{}|\\@_\u00b1\u2030\u2200-\u220d\u220f-\u2233\u2236-\u2247\u2249-\u22ff\u2308-\u230b"
    r"\u202a-\u202e\u2066-\u2069]|[A-Za-z]\(|\$\("  # all of mathematics but therefore, qed, about
    r"|!=|/=|\d(?:!|\.\.|\s?\u2026|\.[A-Za-z_])|\d\s*-\W*$"
)
_ANSWER = re.compile(r"\b(?:answers?|result|solution)\b|####", re.I)
_HENCE = re.compile(
    _any("so, thus, therefore, hence, altogether, in all, totals?, totaling, equals?, comes? to, leaving"),
    re.I,
)
_UNIT_POWER = re.compile(
    rf"(\d\s?(?:{'|'.join(_LENGTHS)})|/\s?s)(?:\s?\^\s?\{{?[23]\}}?|[23\u00b2\u00b3])(?!\d)"
)
_TERM = rf"(?:[{_MONEY}]\s?)?{_NUMBER}"
_SUM = rf"(?<![\w.,:/^'\u00a0]){_TERM}(?:\s*(?:\*\*|[-+*/^x\u00f7])\s*-?{_TERM})+{_END}"
_ROOT = re.compile(rf"(?<![\w.)])(?<![\d.)]\s)\u221a\s?({_NUMBER}|\([^()]{{1,80}}\))")
_SUM_IS, _SUM = re.compile(rf"({_SUM})\s+(?:is|makes|gives)\s+"), re.compile(_SUM)
_ONE_OF_MANY = re.compile(rf"(?<![\w.,:/^'\u00a0-]){_QUANTITY}")
_NUMBER_WORDS = re.compile(
    r"\b(?:(%s)(?:[- ](%s))?|(%s))\b" % ("|".join(_TENS), "|".join(list(_SMALL)[1:10]), "|".join(_SMALL)),
    re.I,
)
_SPOKEN = [
    (re.compile(rf"(?<=[\d)%])\s+(?:{words})\s+(?=[{_MONEY}\d(])"), sign)
    for words, sign in (
        ("plus|added to", " + "),
        ("minus", " - "),
        ("times|multiplied by", " * "),
        ("divided by", " / "),
    )
]


def read_sentence(text):
    """The exact value a sentence, label or equation ends in ('So she sold 48 + 24 = 72 clips.'), else None.
    -> Fraction

    All numbers of the part that states the answer must agree; negated, doubted and bounded numbers are not
    read.
    """
    text = text.strip()
    if "~~" in text:  # struck out
        return None
    cut, text = len(text) > MAX_SENTENCE, text[-MAX_SENTENCE:]
    text = _MARKDOWN.sub(" ", clean(_HTML.sub(" ", text)))
    if not cut and (exact := read_expression(text)) is not None:
        return exact
    text = re.sub(r"=+>|-+>|[\u2192\u21d2\u2248]|(?<!\S)~(?=\s?\S)(?!~)", "=", text)
    text = (
        text.rstrip("! ") if re.search("[A-Za-z]", text) else text
    )  # 'It is 15!' is glad, '15!' a factorial
    text = _ROOT.sub(lambda m: m[0] if (v := read_expression(f"sqrt({m[1]})")) is None else str(v), text)
    text = _UNIT_POWER.sub(r"\1", text)
    if any(sign.search(text) for sign in (_FOREIGN, DOUBT, _UNSOLVED)) or "?" in re.split(r"\d", text)[-1]:
        return None
    text = _NUMBER_WORDS.sub(_spell_out, re.sub(r"\b\d+(?:st|nd|rd|th)\b", "", _join_parts(text)))
    for words, sign in _SPOKEN:
        text = words.sub(sign, text)
    text = _SUM_IS.sub(r"\1 = ", text)
    start, stated = _stated(text)
    if cut and not start:
        return None
    sentence = max(text.rfind(stop, 0, start) for stop in (". ", "! ", "? ", "; ")) + 1
    sentence = text[sentence:start] + stated
    if _NOT.search(sentence) or _BOUND.search(sentence) or _GOVERNED.search(stated):
        return None
    return _agreed(stated)


def _spell_out(match):
    """'seventy-two' -> '72'. A 'one' among other words is left alone: it is more often a pronoun."""
    tens, ones, small = ((word or "").lower() for word in match.groups())
    alone = match.group() == match.string.strip(" .") or re.match(rf"\s+{SCALE}", match.string[match.end() :])
    if small == "one" and not alone:
        return match.group()
    return str(_SMALL[small] if small else _TENS[tens] + _SMALL.get(ones, 0))


def _stated(text):
    """(start, part) of the text that states the answer: after the first 'answer', else the last 'so', else all."""
    for markers in (_ANSWER.finditer(text), reversed(list(_HENCE.finditer(text)))):
        for marker in markers:
            part = text[marker.end() :]
            if re.search(r"\d", part):
                if marker.re is _ANSWER:
                    part = re.split(r"\b(?:because|since)\b", part)[0]
                return marker.end(), part.lstrip(" :=\u00a0")
    return 0, text


def _agreed(part):
    """The one value that all numbers of this part agree on; of an equation, the value of its last side."""
    sides = part.split("=")
    if len(sides) > 1 and re.search(r"\d", sides[-1]):
        if any(re.search(r"(?:^|[\s,;])[A-Za-z]\s*$", side) for side in sides[1:-1]):  # x = 72, y = 71
            return None
        value = _agreed(sides[-1])
        plain = {read_expression(side) for side in sides[:-1] if re.fullmatch(r"[-\d.,\s]+", side)}
        return value if plain <= {value, None} else None  # 72 = 71
    part = _undress(part.replace("=", " "))
    if (value := read_quantity(part)) is not None or (value := read_expression(part)) is not None:
        return value
    part = re.sub(
        r"\([^()]{1,80}\)", lambda m: m[0] if (v := read_expression(m[0])) is None else f"({v})", part
    )
    part = _SUM.sub(lambda m: m[0] if (v := read_expression(m[0])) is None else f" {v} ", part)
    values, digits = set(), 0
    for head in _ONE_OF_MANY.finditer(part):
        letter = re.match(r"(\s?)([^\W\d_])(?![\w-])", part[head.end() :])
        if letter and letter[2] not in _LETTER_UNITS and letter.groups() not in ((" ", "a"), (" ", "I")):
            return None  # 72x
        if head["sign"] == "-" and re.match(r"-\s", head[0]) and re.search(r"\w\s*$", part[: head.start()]):
            return None  # 'total - 72': a dash or a minus?
        values.add(_value(head))
        digits += sum(map(str.isdigit, head[0]))
    every_digit_read = digits == sum(map(str.isdigit, part))
    return values.pop() if len(values) == 1 and every_digit_read else None


def read_expression(text):
    r"""Exact value of plain arithmetic ('48 + 24', '2^3*9', '\sqrt{5184}', '-(-3)'), else None. Powers are bounded."""
    text = text.strip(" ,;:").replace(r"\sqrt", "sqrt").replace("{", "(").replace("}", ")").replace("**", "^")
    text = re.sub(
        rf"(?<![\d.,])[{_MONEY}]|(?<=\d)[{_MONEY}](?!\s*[\d.])", "", text
    )  # money signs outside numbers
    tokens = re.findall(rf"\s*({_NUMBER}|sqrt|[-+*/^()\u00f7]|x(?=\s*[\d(])|\S)", text)[::-1]
    if len(text) > MAX_QUANTITY or text.count("(") > 40 or not tokens:
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
        while peek() in ("*", "x", "/", "\u00f7"):
            value = value * signed() if tokens.pop() in "*x" else value / signed()
        return value

    def signed():
        if peek() in ("-", "+"):
            return -signed() if tokens.pop() == "-" else signed()
        base = atom()
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
            return _number(token)
        value = total()
        return value if tokens.pop() == ")" else None

    try:
        value = total()
        return None if tokens else value
    except (
        ValueError,
        TypeError,
        AttributeError,
        ZeroDivisionError,
        IndexError,
    ):  # letters, None, 1/0, no bracket
        return None
