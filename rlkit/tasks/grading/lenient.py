"""The lenient reader, for audits: the number that a sentence, a label or an equation ends in, as a Fraction.

It knows words of doubt, denial and bounds; the strict reader (``strict.py``) knows none of this.
"""

import re
from fractions import Fraction

from rlkit.tasks.grading.arithmetic import read_expression
from rlkit.tasks.grading.cleaning import clean, undress
from rlkit.tasks.grading.strict import END, NUMBER, QUANTITY, Quantity, join_parts, quantity_of, value_of
from rlkit.tasks.grading.units import LENGTHS, LETTER_UNITS, MONEY, NUMBER_WORD, SMALL, TENS, Unit, read_unit

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
_COUNTED_IN = r"\bin (?:ten|dozen|hundred|(?:ten |hundred )?thousand|million|billion)s\b"
_DENIALS = _any(
    "not, never, no, none, neither, nor, or, if, unless, else, otherwise, except, excluding, instead, "
    r"rather, versus, vs, between(?=\W*\d), assuming, suppose, "
    "(?:is|was|are|does|do|did|wo|ca|ai)nt, rejected, ruled out, contradicts?, violates?, fails, "
    "would fail, seems?, too (?:high|low|big|small|large|many|much|few), had (?:s?he|they|it|i|we|you), "
    "(?:would|could|should) have (?:been|had), makes no sense, off by, supposed to, used to be, refer to, "
    "were s?he, nobody, no one, nowhere, outside"
)
_NOT = re.compile(
    rf"{_DENIALS}|n't\b|\band (?:more|up|over|counting)\W*$|\bfrom \d\S* (?:on|up)\b|{_COUNTED_IN}"
    r"|^\W*(?:see )?(?:equation|section|chapter|page|figure|table|exercise|footnote|note)\s\d+\W*$",
    re.I,
)
# next to a number: it is a bound or the start of a longer term, not the value
_BOUND_BEFORE = _any(
    "than, at least, at most, up to, almost, nearly, over, under, above, below, within, beyond, exceeds?, "
    "exceeding, minimum of, maximum of, upwards of, short of, out of, half, half of, third of, quarter of, "
    "(?:twice|double|triple)(?: of)?, "
    "(?:root|squares?|cubes?|inverse|opposite|factors?|divisors?|multiples?|digits?|powers?) of, "
    "(?:predecessor|successor|complement) of, "
    "(?:starts?|starting|begins?|beginning) (?:at|from|with), (?<![a-z] )see, (?:(?:see|on|in)(?: the)? "
    "(?:step|page|question|problem|equation|line|chapter|section|figure|table|example|exercise|item|note)), "
    "(?:prime|number|integer|multiple|square) (?:to|after|before|above|below|preceding|following), "
    "as (?:many|much) as, difference from",
    after=_DIGIT,
)
_BOUND_AFTER = _any(
    "squared, cubed, factorial, remainder, modulo, plus, minus, pi, doubled, halved, ish, odd, below, mil, "
    "bil, grand, tripled, quadrupled, quintupled, negated, "
    "(?:on|up|down)wards?, and (?:up|above|over|beyond)",
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
# as the last word it speaks of the answer: '72 estimated', '72 invalid' (but '72 invalid votes')
_RETRACTED = (
    "estimated, est, approximated, rounded, guessed, assumed, supposedly, allegedly, presumably, "
    "hypothetically, tentative, tentatively, conjecture, unverified, unconfirmed, doubtful, dubious, "
    "questionable, debatable, disputed, untrue, refuted, retracted, discarded, excluded, eliminated, "
    "dismissed, invalid, void, error, typo, mistake, undo, scratch, disregard, nevermind, mind, oops, sorry, "
    "hmm, nope, nah, kidding, jk, max, maximum, minimum, tops, most, least"
)
_TAKEN_BACK = _any(_RETRACTED, r"\d\W{0,3}(?:(?:an?|my|in|at|is|was|were|been)\s)?", r"\b(?!\s+[^\W\d])")
_GOVERNED = re.compile(f"{_GOVERNED_BEFORE}|{_TAKEN_BACK}", re.I)
# no sentence holds it: brackets, inequalities, code, leftover LaTeX, direction overrides, factorials, '15...'
_FOREIGN = re.compile(
    r"[<>\[\]{}|\\@_\u00b1\u00ac\u2030\u2031\u2a00-\u2aff\u2200-\u220d\u220f-\u2233\u2236-\u2247\u2249-\u22ff"
    r"\u2308-\u230b\u202a-\u202e\u2066-\u2069]|[A-Za-z]\(|\$\("  # mathematics but therefore, qed, about
    r"|!=|/=|[-+]\s?/\s?[-+]|\d(?:!|\s?\.\.|\.[A-Za-z_])|\d\s*-\W*$"
    r"|\([-\d.\s]{1,20},[-\d.,\s]{1,40}\)"  # a point
)
_ANSWER = re.compile(r"\b(?:answers?|result|solution)\b|####", re.I)
_HENCES = (
    r"so, thus, therefore, hence, altogether, in all(?!\W*\d), totals?, totaling, equals?, comes? to, leaving"
)
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
_TWO = (
    rf"(?:(?:{'|'.join(TENS)})(?:[- ](?:{'|'.join(list(SMALL)[1:10])})(?!\w))?|(?:{'|'.join(SMALL)})(?!\w))"
)
_THREE = rf"{_TWO}(?:[- ]hundred(?:[- ](?:and[- ])?{_TWO})?)?"
_NUMBER_WORDS = re.compile(
    rf"\b{_THREE}(?:[- ](?:thousand|million|billion)(?:,? (?:and )?{_THREE})?){{0,3}}\b", re.I
)
# 'over 5 days', 'in these 3 weeks': a circumstance, if another number is stated
_CIRCUMSTANCE = re.compile(
    r"\b(?:over|after|for|in|within|during|these|those)(?: all)?(?: the)?(?: course of)?"
    rf"(?: next| first| last)? {NUMBER} (?:second|minute|hour|day|week|month|year)s?\b",
    re.I,
)
_GOES_ON = re.compile(
    r"(?:is|are|was|were|which|who|because|since|as|in|for|per|each|on|at|by|of|from|when|where|with|during"
    r"|remain|altogether|together|this|that|so|to(?!\W*\d| the [a-z]+(?:th|ird|ond)\b)"
    r"|and(?!\W*(?:\d|\\boxed)))\b",
    re.I,
)
_UNSAID = re.compile(
    r"(?:\bnot|n't|\bnever)\s+(?:an? |the )?(?:right|correct|answer|true|possible|valid|it)\b"
    rf"|{_COUNTED_IN}",
    re.I,
)
_JOINED = re.compile(r"\W*(?:(?:or|and|to|plus|minus|times|less|versus|vs)\b\W*)?(?:\d|\\boxed)", re.I)
_STARTS = re.compile(rf"[{MONEY}\s-]*{NUMBER}(?:\s*/\s*{NUMBER})?\s+(?=[^\W\d_]{{2}})")
_HOUR = re.compile(r"(?<![\d:.])(1[0-2]|0?[1-9])(?::00(?![\d:])|(?=\s?[ap]\.m))\s?(?:([ap])\.?m\b\.?)?", re.I)
_ON = re.compile(
    r"[-+*/^,;:]|\.\s|\b(?:plus|minus|and|or|but|then|so|less|more|fewer|times|which|is|are)\b", re.I
)
_IF_THEN = re.compile(r"\bif\b(?:[^.;]|\.\d){1,200}?(?:\bthen\b|,\s)", re.I)
_SIGNS = {"plus|added to": " + ", "minus": " - ", "times|multiplied by": " * ", "divided by": " / "}
_SPOKEN = [(re.compile(rf"(?<=[\d)%])\s+(?:{words})\s+(?=[{MONEY}\d(])"), _SIGNS[words]) for words in _SIGNS]


def read_sentence(text: str) -> Fraction | None:
    """The exact value that a sentence, label or equation ends in ('So he sold 48 + 24 = 72 clips.') or None.

    All numbers of the part that states the answer must agree; negated, doubted and bounded ones are not read.
    """
    return None if (quantity := sentence_quantity(text)) is None else quantity.value


def sentence_quantity(text: str) -> Quantity | None:
    """The value of ``read_sentence`` with the unit that stands beside it."""
    text = text.strip()
    if "~~" in text:  # struck out
        return None
    cut, text = len(text) > MAX_SENTENCE, text[-MAX_SENTENCE:]
    text = _MARKDOWN.sub(" ", clean(_HTML.sub(" ", text)))
    if not cut and (exact := read_expression(text)) is not None:
        return Quantity(exact, Unit())
    text = re.sub(r"=+>|-+>|[\u2192\u21d2\u2248]|(?<!\S)~(?=\s?\S)(?!~)", "=", text)
    if re.search("[A-Za-z]", text):  # 'It is 15!' is glad, '15!' a factorial
        text = text.rstrip("! ")
    text = _ROOT.sub(lambda m: _worked_out(f"sqrt({m[1]})", "{}", m[0]), text)
    text = _UNIT_POWER.sub(r"\1", text)
    if any(sign.search(text) for sign in (_FOREIGN, DOUBT, _UNSOLVED)) or "?" in re.split(r"\d", text)[-1]:
        return None
    text = re.sub(r"\ba (?=(?:hundred|thousand|million|billion)\b)", "one ", text, flags=re.I)
    text = _HOUR.sub(lambda m: f"{m[1]} {m[2]}m" if m[2] else m[1], text)
    text = _NUMBER_WORDS.sub(_spell_out, re.sub(r"\b\d+(?:st|nd|rd|th)\b", "", join_parts(text)))
    text = _IF_THEN.sub("so", text)
    for words, sign in _SPOKEN:
        text = words.sub(sign, text)
    text = _SUM_IS.sub(r"\1 = ", text)
    start, stated = _stated(text)
    if cut and not start:
        return None
    sentence = text[max(text.rfind(stop, 0, start) for stop in (". ", "! ", "? ", "; ")) + 1 : start]
    if re.search(r"\d", without := _CIRCUMSTANCE.sub(" ", stated)):
        sentence, stated = _CIRCUMSTANCE.sub(" ", sentence), without
    if (
        (head := _STARTS.match(text))
        and not re.search(r"\d", tail := text[head.end() :])
        and not may_follow(tail)
    ):
        return None
    if denied(f"{sentence} {stated}", stated) or (value := _agreed(stated)) is None:
        return None
    return Quantity(value, _unit_beside(stated, value))


def denied(sentence: str, stated: str) -> bool:
    """Whether the words of a sentence deny, doubt, bound or take back the number in it.

    stated: its part that states the answer. The one judge of words around a number, and around a box.
    """
    return bool(
        DOUBT.search(sentence) or _NOT.search(sentence) or _BOUND.search(sentence) or _GOVERNED.search(stated)
    )


def may_follow(tail: str) -> bool:
    """Whether this text behind a number or a box leaves it the answer: a unit, or the rest of a sentence."""
    if re.match(r"if\b(?!.*\b(?:had|were|would|could|did|else)\b|.*\d)", tail):
        tail = f"since{tail[2:]}"
    ends = [word.end() for word in re.finditer(r"\S+", tail)][:4]
    for end in reversed(ends):
        if not tail[:end].endswith("in") and read_unit(tail[:end].rstrip(".,;:")) is not None:
            rest = tail[end:]
            return not (DOUBT.search(rest) or _UNSAID.search(rest) or _JOINED.match(rest))
    return bool(_GOES_ON.match(tail)) and not denied(f"7 {tail}", f"7 {tail}")


def _unit_beside(text: str, value: Fraction) -> Unit:
    """The unit of one or two words behind this number, empty if there is none."""
    for head in _ONE_OF_MANY.finditer(text):
        words = text[head.end() :].split()
        for n in (2, 1):
            unit = read_unit(" ".join(words[:n]).rstrip(".,;:!"), head["money"] or "")
            if value_of(head) == value and unit is not None:
                return unit
    return Unit()


def _worked_out(expression: str, form: str, otherwise: str) -> str:
    """The expression's value in this form; the other text if it has none."""
    value = read_expression(expression)
    return otherwise if value is None else form.format(value)


def _spell_out(match) -> str:
    """'seventy-two' -> '72'. A 'one' among other words is left alone: it is more often a pronoun."""
    words = re.findall(r"[a-z]+", match.group().lower())
    if words == ["one"] and match.group() != match.string.strip(" ."):
        return match.group()
    total = part = 0
    for word in words:
        if word in SMALL or word in TENS:
            part += SMALL[word] if word in SMALL else TENS[word]
        elif word == "hundred":
            part *= 100
        elif word != "and":
            total, part = total + part * dict(thousand=10**3, million=10**6, billion=10**9)[word], 0
    return str(total + part)


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


def _proved(sides: list[str]) -> Fraction | None:
    """72 of '48 + 24 = 72 clips for 3 boxes': what a sum comes to, whatever number its circumstances hold."""
    head = _ONE_OF_MANY.match(last := sides[-1].strip())
    sums = list(_SUM.finditer(sides[-2]))
    if head is None or not sums or sides[-2][sums[-1].end() :].strip():
        return None
    value, tail = value_of(head), last[head.end() :].strip(" .")
    if _ON.search(tail) or not may_follow(tail) or read_expression(sums[-1][0]) != value:
        return None
    return value


def _agreed(part: str) -> Fraction | None:
    """The one value that all numbers of this part agree on; of an equation, the value of its last side."""
    sides = part.split("=")
    if len(sides) > 1 and re.search(r"\d", sides[-1]):
        if any(re.search(r"(?:^|[\s,;])[A-Za-z]\s*$", side) for side in sides[1:-1]):  # x = 72, y = 71
            return None
        value = _proved(sides) or _agreed(sides[-1])
        plain = {read_expression(side) for side in sides[:-1] if re.fullmatch(r"[-\d.,\s]+", side)}
        return value if plain <= {value, None} else None  # 72 = 71
    part = undress(part.replace("=", " "))
    if (quantity := quantity_of(part)) is not None:
        return quantity.value
    if (value := read_expression(part)) is not None:
        return value
    part = _BRACKETS.sub(lambda m: _worked_out(m[0], "({})", m[0]), part)
    part = _SUM.sub(lambda m: _worked_out(m[0], " {} ", m[0]), part)
    values, digits = set(), 0
    for head in _ONE_OF_MANY.finditer(part):
        letter = re.match(r"(\s?)([^\W\d_])(?![\w-])", part[head.end() :])
        if letter and letter[2] not in LETTER_UNITS and letter.groups() not in ((" ", "a"), (" ", "I")):
            return None  # 72x
        word = re.match(r"[\s-]*(?:dozens? )?([^\W\d_]+)", part[head.end() :])
        if word and (NUMBER_WORD.fullmatch(word[1]) or not (word[1] < "\u0250" or read_unit(word[1]))):
            return None  # 7 Millionen, or a word of a script that is not read
        if head["sign"] == "-" and re.match(r"-\s", head[0]) and re.search(r"\w\s*$", part[: head.start()]):
            return None  # 'total - 72': a dash or a minus?
        values.add(value_of(head))
        digits += sum(map(str.isdigit, head[0]))
    every_digit_read = digits == sum(map(str.isdigit, part))
    return values.pop() if len(values) == 1 and every_digit_read else None
