"""The lenient reader, for audits: the number that a sentence, a label or an equation ends in, as a Fraction.

It knows words of doubt, denial and bounds; the strict reader (``strict.py``) knows none of this.
"""

import re
from fractions import Fraction

from rlkit.tasks.grading.arithmetic import read_expression
from rlkit.tasks.grading.cleaning import clean, undress
from rlkit.tasks.grading.strict import (
    END,
    FRACTIONAL,
    LENGTHS,
    LETTER_UNITS,
    MONEY,
    NUMBER,
    QUANTITY,
    RETRACTED,
    SCALE,
    SMALL,
    TENS,
    join_parts,
    read_quantity,
    value_of,
)

MAX_SENTENCE = 600  # characters read, counted from the end


def _any(phrases, before=r"\b", after=r"\b"):
    return rf"{before}(?:{'|'.join(phrases.split(', '))}){after}"


_DIGIT = rf"\s*[{MONEY}]?\s*-?\.?\d"
_HTML = re.compile(r"</?(?:b|i|u|p|em|strong|code|span|div|br)\s*/?>|\x1b\[[\d;]*m", re.I)
_MARKDOWN = re.compile(
    r"\*\*(?!\d)|(?<![\d)])\*\*|(?<![\s\d)])\*(?!\S)|(?<!\S)\*(?=[^\s\d])|`+|(?<![^\s(])_+|(?<=\w)_+(?!\w)"
)
# anywhere in the text: whatever number it holds, it is not stated as the answer, or the text is code
_DOUBTS = _any(
    r"maybe, perhaps, possibly, probably, presumably, guess\w*, unsure, uncertain, not sure, no idea, might, "
    r"could be, may be, either, wrong, incorrect, false, mistaken?, cannot, can't, don't know, do not know, "
    r"unknown, unclear, impossible, undetermined, hopefully, likely, unlikely, not certain, wait, oops, "
    r"nope, nah, never ?mind, (?<!without )(?<!without a )(?<!beyond )(?<!beyond a )doubt(?:s|ed|ful)?, "
    r"disagree, deny, refuted?, retract\w*, (?:scratch|strike|ignore|disregard|forget) (?:that|this|it), "
    r"take (?:that|this|it) back, lambda, import, echo, print, eval, exec, def, log, ln, sqrt, sin, cos, "
    r"tan, exp, mod, abs"
)
DOUBT = re.compile(_DOUBTS + r"|\b(?:user|assistant|human)\s*:", re.I)
# an equation that is still to be solved: 2x = 15, x + 3 = 15, 15 + y
_UNSOLVED = re.compile(
    r"(?<![A-Za-z])(?:\d\s?[b-zB-Z]\s?[-+=](?![A-Za-z])|[b-zB-Z]\s?[-+*/^]\s?[\d(]"
    r"|[\d)]\s?[-+*^]\s?[b-zB-Z](?![A-Za-z]))"
)
# in the sentence that states the answer: it is denied, conditional or one of several
_DENIALS = _any(
    "not, never, no, none, neither, nor, or, if, unless, else, otherwise, except, excluding, instead, "
    "rather, versus, vs, between, assuming, suppose, (?:is|was|are|does|do|did|wo|ca|ai)nt"
)
_NOT = re.compile(_DENIALS + r"|n't\b", re.I)
# next to a number: it is a bound or the start of a longer term, not the value
_BOUND_BEFORE = _any(
    "than, at least, at most, up to, almost, nearly, over, under, above, below, within, beyond, exceeds?, "
    "exceeding, minimum of, maximum of, upwards of, short of, out of, half, half of, third of, quarter of, "
    "twice, double, triple, root of, square of, inverse of, opposite of",
    after=_DIGIT,
)
_BOUND_AFTER = _any(
    "squared, cubed, factorial, remainder, modulo, plus, minus, pi, doubled, halved, ish, odd, below, mil, "
    "bil, grand, " + ", ".join(FRACTIONAL),
    before=r"\d[\s-]*",
)
_BOUND = re.compile(rf"{_BOUND_BEFORE}|{_BOUND_AFTER}|\d\s*\+\s*(?![\s(\d{MONEY}.-])", re.I)
# right beside the number in the part that states the answer: denied, taken back or a function's argument
_GOVERNED_BEFORE = _any(
    "hardly, barely, scarcely, supposedly, allegedly, hypothetically, far from, nowhere near, shy of, "
    "anything but, all but, besides, without, lacking, apart from, aside from, opposed to, reject, refuse, "
    "ignore, disregard, discard, question, root, reciprocal of, negation of, negative of, factorial of",
    after=_DIGIT,
)
_TAKEN_BACK = _any(", ".join(sorted(RETRACTED)), r"\d\W{0,3}(?:(?:an?|my|in|at)\s)?", r"\b(?!\s+[^\W\d])")
_GOVERNED = re.compile(f"{_GOVERNED_BEFORE}|{_TAKEN_BACK}", re.I)
# no sentence holds it: brackets, inequalities, code, leftover LaTeX, direction overrides, factorials, '15...'
_FOREIGN = re.compile(
    r"[<>\[\]{}|\\@_\u00b1\u2030\u2200-\u220d\u220f-\u2233\u2236-\u2247\u2249-\u22ff\u2308-\u230b"
    r"\u202a-\u202e\u2066-\u2069]|[A-Za-z]\(|\$\("  # all of mathematics but therefore, qed, about
    r"|!=|/=|\d(?:!|\.\.|\s?\u2026|\.[A-Za-z_])|\d\s*-\W*$"
)
_ANSWER = re.compile(r"\b(?:answers?|result|solution)\b|####", re.I)
_HENCES = "so, thus, therefore, hence, altogether, in all, totals?, totaling, equals?, comes? to, leaving"
_HENCE = re.compile(_any(_HENCES), re.I)
_UNIT_POWER = re.compile(
    rf"(\d\s?(?:{'|'.join(LENGTHS)})|/\s?s)(?:\s?\^\s?\{{?[23]\}}?|[23\u00b2\u00b3])(?!\d)"
)
_TERM = rf"(?:[{MONEY}]\s?)?{NUMBER}"
_SUM_TEXT = rf"(?<![\w.,:/^'\u00a0]){_TERM}(?:\s*(?:\*\*|[-+*/^x\u00f7])\s*-?{_TERM})+{END}"
_ROOT = re.compile(rf"(?<![\w.)])(?<![\d.)]\s)\u221a\s?({NUMBER}|\([^()]{{1,80}}\))")
_SUM = re.compile(_SUM_TEXT)
_SUM_IS = re.compile(rf"({_SUM_TEXT})\s+(?:is|makes|gives)\s+")
_BRACKETS = re.compile(r"\([^()]{1,80}\)")
_ONE_OF_MANY = re.compile(rf"(?<![\w.,:/^'\u00a0-]){QUANTITY}")
_NUMBER_WORDS = re.compile(
    r"\b(?:(%s)(?:[- ](%s))?|(%s))\b" % ("|".join(TENS), "|".join(list(SMALL)[1:10]), "|".join(SMALL)), re.I
)
_SIGNS = {"plus|added to": " + ", "minus": " - ", "times|multiplied by": " * ", "divided by": " / "}
_SPOKEN = [(re.compile(rf"(?<=[\d)%])\s+(?:{words})\s+(?=[{MONEY}\d(])"), _SIGNS[words]) for words in _SIGNS]


def read_sentence(text: str) -> Fraction | None:
    """The exact value that a sentence, label or equation ends in ('So he sold 48 + 24 = 72 clips.') or None.

    All numbers of the part that states the answer must agree; negated, doubted and bounded ones are not read.
    """
    text = text.strip()
    if "~~" in text:  # struck out
        return None
    cut, text = len(text) > MAX_SENTENCE, text[-MAX_SENTENCE:]
    text = _MARKDOWN.sub(" ", clean(_HTML.sub(" ", text)))
    if not cut and (exact := read_expression(text)) is not None:
        return exact
    text = re.sub(r"=+>|-+>|[\u2192\u21d2\u2248]|(?<!\S)~(?=\s?\S)(?!~)", "=", text)
    if re.search("[A-Za-z]", text):  # 'It is 15!' is glad, '15!' a factorial
        text = text.rstrip("! ")
    text = _ROOT.sub(lambda m: _worked_out(f"sqrt({m[1]})", "{}", m[0]), text)
    text = _UNIT_POWER.sub(r"\1", text)
    if any(sign.search(text) for sign in (_FOREIGN, DOUBT, _UNSOLVED)) or "?" in re.split(r"\d", text)[-1]:
        return None
    text = _NUMBER_WORDS.sub(_spell_out, re.sub(r"\b\d+(?:st|nd|rd|th)\b", "", join_parts(text)))
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


def _worked_out(expression: str, form: str, otherwise: str) -> str:
    """The expression's value in this form; the other text if it has none."""
    value = read_expression(expression)
    return otherwise if value is None else form.format(value)


def _spell_out(match) -> str:
    """'seventy-two' -> '72'. A 'one' among other words is left alone: it is more often a pronoun."""
    tens, ones, small = ((word or "").lower() for word in match.groups())
    alone = match.group() == match.string.strip(" .") or re.match(rf"\s+{SCALE}", match.string[match.end() :])
    if small == "one" and not alone:
        return match.group()
    return str(SMALL[small] if small else TENS[tens] + SMALL.get(ones, 0))


def _stated(text: str) -> tuple[int, str]:
    """(start, part) of the text that states the answer: after the first 'answer', the last 'so', else all."""
    for markers in (_ANSWER.finditer(text), reversed(list(_HENCE.finditer(text)))):
        for marker in markers:
            part = text[marker.end() :]
            if re.search(r"\d", part):
                if marker.re is _ANSWER:
                    part = re.split(r"\b(?:because|since)\b", part)[0]
                return marker.end(), part.lstrip(" :=\u00a0")
    return 0, text


def _agreed(part: str) -> Fraction | None:
    """The one value that all numbers of this part agree on; of an equation, the value of its last side."""
    sides = part.split("=")
    if len(sides) > 1 and re.search(r"\d", sides[-1]):
        if any(re.search(r"(?:^|[\s,;])[A-Za-z]\s*$", side) for side in sides[1:-1]):  # x = 72, y = 71
            return None
        value = _agreed(sides[-1])
        plain = {read_expression(side) for side in sides[:-1] if re.fullmatch(r"[-\d.,\s]+", side)}
        return value if plain <= {value, None} else None  # 72 = 71
    part = undress(part.replace("=", " "))
    if (value := read_quantity(part)) is not None or (value := read_expression(part)) is not None:
        return value
    part = _BRACKETS.sub(lambda m: _worked_out(m[0], "({})", m[0]), part)
    part = _SUM.sub(lambda m: _worked_out(m[0], " {} ", m[0]), part)
    values, digits = set(), 0
    for head in _ONE_OF_MANY.finditer(part):
        letter = re.match(r"(\s?)([^\W\d_])(?![\w-])", part[head.end() :])
        if letter and letter[2] not in LETTER_UNITS and letter.groups() not in ((" ", "a"), (" ", "I")):
            return None  # 72x
        if head["sign"] == "-" and re.match(r"-\s", head[0]) and re.search(r"\w\s*$", part[: head.start()]):
            return None  # 'total - 72': a dash or a minus?
        values.add(value_of(head))
        digits += sum(map(str.isdigit, head[0]))
    every_digit_read = digits == sum(map(str.isdigit, part))
    return values.pop() if len(values) == 1 and every_digit_read else None
