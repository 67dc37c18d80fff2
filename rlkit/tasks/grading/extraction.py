r"""Where an answer stands in a response, and the one rule for what stands around a box.

A box is the answer of its sentence. In front of it stands nothing, a word, an equals sign or a colon; behind
it nothing, a stop, a unit or the rest of a sentence ('is the answer', 'in April'). Signs, digits, operators,
number words, questions, and words that deny or doubt make it another answer, in either prompt:
``-\boxed{7}``, ``\boxed{7}00``, ``\boxed{7} thousand``, ``not \boxed{7}`` are not 7. Boxes joined by a comma
or 'and' are one list.
"""

import re

from rlkit.tasks.grading.arithmetic import read_expression
from rlkit.tasks.grading.cleaning import clean, undress
from rlkit.tasks.grading.lenient import denied, may_follow
from rlkit.tasks.grading.strict import read_quantity
from rlkit.tasks.grading.units import MONEY, read_unit

MAX_AROUND = 300  # characters looked at on each side of a box
_SPACE = r"\\(?:[,;:! \\]|(?:q?quad|displaystyle|left|right|[bB]igg?)(?![A-Za-z]))"
_WRAP = r"\\(?:text(?:bf|it|rm)?|math(?:bf|rm)|mbox|underline|large|Large)\s*\{"
_OPENERS = re.compile(rf"(?:{_WRAP}|{_SPACE}|\\[(\[$]|[\s*_`\"'(\[{{&#{MONEY}])+$")
_CLOSERS = re.compile(
    rf"^(?:{_SPACE}|\\end\{{[a-z]+\*?\}}|\\[)\]]|[ \t*_`\"')\]}}$]|\n(?=\s*(?:\\end|\\[)\]]|[$*}}])))+"
)
_MAY_PRECEDE = re.compile(
    r"(?:^|[^\W\d_]|[:,;\u2192\u21d2\u2234]|(?<![\d.])\.|(?<![!<>~/=\\])=+>?"
    r"|\\(?:text|math|boxed)\w*\{[^{}]*\}|\([^()]*[a-z]{2}[^()]*\)|\\(?:[rR]ightarrow|[lL]ongrightarrow|implies|therefore|to|in))$"
)
_LISTED = re.compile(r"\}[\s$)]*(?:[,;&]|,?\s*and)$")
_GLUED = re.compile(r"(?:\d[:.,]|[A-Za-z]\()[\\$]*\Z")  # 1:, 0., f(
_COMMAND = re.compile(r"\\[A-Za-z]+$")
_CLAUSE = re.compile(r"[,;:](?:\s|$)|\b(?:but|so|then|hence|thus|therefore|that)\b|=", re.I)
_SENTENCE_END = re.compile(r"[.!?;]\s")
_TAKEN_BACK = re.compile(
    r"\W*(?:no|not(?!\W*\d)|never|wait|oops|wrong|sorry|actually|that(?: is|'s) (?:not|wrong)|scratch)\b",
    re.I,
)
_HEDGED = re.compile(
    r"\W*(?:\d|(?:or|maybe|perhaps|possibly|if|unless|otherwise|else|plus|minus)\b)", re.I
)  # after a comma


def extract_answer(response) -> str | None:
    """Text of the LAST ``<answer>`` tag; None without ``</think> <answer>`` or its own ``</answer>``."""
    if not isinstance(response, str) or (start := response.find("</think> <answer>")) < 0:
        return None
    answer, closed, _ = response[start:].rpartition("<answer>")[2].partition("</answer>")
    return answer if closed else None


def last_boxed(text) -> str | None:
    r"""Content of the last ``\boxed{...}``, its braces balanced (not ``\{`` and ``\}``); None if cut off."""
    if not isinstance(text, str) or (start := text.rfind(r"\boxed{")) < 0:
        return None
    inside, depth = text[start + len(r"\boxed{") :], 1
    for brace in re.finditer(r"\\.|[{}]", inside, re.DOTALL):
        depth += {"{": 1, "}": -1}.get(brace.group(), 0)
        if depth == 0:
            return inside[: brace.start()]
    return None


def unboxed(text: str) -> str | None:
    """The last box's content, with a unit that stands behind it; None if what stands around it changes it."""
    if (inside := last_boxed(text)) is None:
        return None
    before, _, after = text.rpartition(r"\boxed{")
    if _GLUED.search(before[-8:]):
        return None
    opened = _OPENERS.sub("", before := before[-MAX_AROUND:])
    gap = before[len(opened) :]
    begins = "\n" in gap and re.search(
        r"[\d}\])|%!?.]$", opened
    )  # a line, or a sentence: '... = 39. \boxed{39}'
    begins = begins or (gap[:1].isspace() and opened.endswith((".", "!", "?", ";")))
    before = "" if begins else _SENTENCE_END.split(opened.rpartition("\n")[2])[-1]
    after = _CLOSERS.sub("", after[len(inside) + 1 :][:MAX_AROUND])
    after = re.sub(r"^([ap])\.\s?m\b\.?", r"\1m", after)
    command = _COMMAND.search(before)
    if not _MAY_PRECEDE.search(before) or (command and not _MAY_PRECEDE.fullmatch(command[0])):
        return None
    clause = clean(_CLAUSE.split(before.rstrip(": "))[-1])
    if denied(f"{clause} 7", f"{clause} 7"):
        return None
    other = last_boxed(before) if _LISTED.search(before) else None
    if other not in (None, inside):
        inside = f"{other}, {inside}"
    stop = re.search(r"[.,;:](?!\d)|\n|$", after)
    tail, rest = undress(clean(after[: stop.start()])), after[stop.end() :]
    if tail.startswith("="):
        value, side = read_quantity(inside), read_expression(tail[1:])
        return inside if value is not None and value == side else None
    if _TAKEN_BACK.match(rest) or (stop[0] in (",", ";") and _HEDGED.match(rest)) or "?" in tail:
        return None
    if read_unit(tail) is not None:
        return f"{inside} {tail}".rstrip()
    return inside if may_follow(tail) else None
