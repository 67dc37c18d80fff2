"""Text made plain: one line, ordinary signs, spaces and digits, no LaTeX dressing. Linear in its length."""

import html
import re
import unicodedata
from functools import lru_cache

_TWINS = (  # an ordinary character, then those read as it that Unicode does not map; last, blanks in numbers
    "-\u2212\u2010\u2011\u2012\u2013\u2014\ufe63 *\u00d7\u00b7\u22c5\u2217\u2219 ,\u066c\u060c "
    ".\u066b\u3002 %\u066a /\u2044\u2215 '\u2018\u2019 ?\u061f "
    '"\u201c\u201d\u00ab\u00bb \u00b0\u00ba \u2248\u2245\u223c\u2243 \u00a0\u202f\u2009\u2007'
)
_ORDINARY = {twin: group[0] for group in _TWINS.split(" ") for twin in group}
# raised and lowered digits are an exponent and a base, never digits of the number before them
_SCRIPTS = re.compile("([\u2070\u00b9\u00b2\u00b3\u2074-\u2079\u207a\u207b]+)|[\u2080-\u2089]+")
# what cannot be seen becomes a blank, so that it never glues two digits into a number
_UNSEEN = re.compile(
    r"[\x00-\x1f\x7f\x85\u1680\u2000-\u2006\u2008\u200a\u200b\u200e\u200f\u2028\u2029\u205f\u2060\u3000\ufeff]"
)
_SPACING = (
    r"\\(?:[,;:! ()\[\]\\]|(?:q?quad|thinspace|displaystyle|textstyle|left|right|[bB]igg?|[lL]arge|huge|bf|rm"
    r"|checkmark|qed|square|blacksquare|hfill|newline)(?![A-Za-z])|[hv]space\*?\s*\{[^{}]*\})|(?<=\S)~"
)
_LATEX = [
    (re.compile(pattern), new)
    for pattern, new in (
        (r"(?<=\d)(?:\\[,;: ]|\\thinspace\b|~)(?=\d{3}(?!\d))", "\u00a0"),  # 1\,200
        (r"\\!(?=,)|(?<=,)\\!\s*|\{(?=,\})|(?<=\{,)\}|(?<=\d,)\}(?=\d)", ""),  # 1{,}200 and 1,\!200
        (_SPACING, " "),
        (r"\\(?:text)?color\s*\{\w*\}", " "),
        (r"\^\s*\{?\s*\\circ\s*\}?|\\degrees?\b", "\u00b0"),
        (r"\\([$%*])", r"\1"),
        (r"\\(?:pounds|euro|yen|textdollar)(?![A-Za-z])(?:\{\})?", "$"),
        (r"\\(?:cdot|times|ast)(?![A-Za-z])", "*"),
        (r"\\div(?![A-Za-z])", "\u00f7"),
        (r"\\(?:approx|sim|simeq)(?![A-Za-z])", "\u2248"),
        (r"\\[dtc]frac(?![A-Za-z])", r"\\frac"),
        (
            r"(?<![\d.,])(\d{0,12})\.(\d{0,12})\\(?:overline|bar)\s*(?:\{\s*(\d{1,12})\s*\}|(\d))",
            lambda m: _repeating(m),
        ),
        (r"\\frac\s*(\d)\s*(\d)", r"\\frac{\1}{\2}"),
        (r"\\frac\s*(\d)\s*(?=\{)", r"\\frac{\1}"),
        (r"\\frac\s*(\{[^{}]*\})\s*(\d)", r"\\frac\1{\2}"),
    )
]
_WRAPPER = re.compile(
    r"\\(?:text(?:bf|it|rm|tt|sf|up|sl|md|normal)?|math(?:bf|rm|it|sf|tt|normal)|mbox|operatorname|fbox"
    r"|underline|boldsymbol|bm|emph)\s*\{([^{}]*)\}"
)
_BRACE = re.compile(r"\\(?:under|over)brace\s*\{([^{}]*)\}\s*[_^]\s*\{[^{}]*\}")
_BLANKS = re.compile("[ \u00a0]{2,}")
_FRACTION = re.compile(r"\\frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}")


def clean(text: str) -> str:
    """The text on one line, in ordinary characters (NFKC, HTML entities read), without LaTeX dressing."""
    if "&" in text:
        text = html.unescape(html.unescape(text))
    if not (text.isascii() and text.isprintable()):
        text = _SCRIPTS.sub(
            lambda m: f"{'^' if m[1] else '_'}{{{unicodedata.normalize('NFKC', m[0])}}}", text
        )
        text = "".join(map(_ordinary, _UNSEEN.sub(" ", text)))
    if "\\" in text or "{,}" in text or "~" in text:
        text = text.replace("{,}", ",")
        for pattern, new in _LATEX:
            text = pattern.sub(new, text)
        for _ in range(6):  # innermost first; what nests deeper keeps its backslash and is refused later
            before, text = (
                text,
                _FRACTION.sub(_inline_fraction, _WRAPPER.sub(r" \1 ", _BRACE.sub(r"\1", text))),
            )
            if text == before:
                break
    return _BLANKS.sub(" ", text).strip(" ")


@lru_cache(maxsize=1 << 12)
def _ordinary(char: str) -> str:
    if char < "\x80" or char in _ORDINARY:
        return _ORDINARY.get(char, char)
    if char.isdecimal():
        return str(unicodedata.decimal(char))
    kind = unicodedata.decomposition(char).partition(" ")[0]
    if kind == "<fraction>":
        return " " + unicodedata.normalize("NFKC", char).replace("\u2044", "/")
    return char if kind == "<circle>" else unicodedata.normalize("NFKC", char)


def _repeating(match) -> str:
    whole, once, again = match[1] or "0", match[2], match[3] or match[4]
    bottom = 10 ** len(once) * (10 ** len(again) - 1)
    return f"{int(whole + once + again) - int(whole + once)}/{bottom}"


def _inline_fraction(match) -> str:
    top, bottom = match[1].strip(), match[2].strip()
    if bottom.startswith("-"):
        top, bottom = top[1:] if top.startswith("-") else f"-{top}", bottom[1:]
    plain = re.fullmatch(r"-?[\d.,]+", top) and re.fullmatch(r"[\d.,]+", bottom)
    plain = plain or re.fullmatch(r"[A-Za-z]+/[A-Za-z]+\s*(?:\^\s*\d)?", f"{top}/{bottom}")  # km/h
    return f" {top}/{bottom} " if plain else f" (({top})/({bottom})) "


def undress(text: str) -> str:
    """Without what may stand around an answer: quotes, markdown, dollars, ticks, one final stop, and brackets
    that hold no comma: (72) is 72, but (1,234) is a point."""
    for _ in range(8):
        before, text = text, text.strip(" *_`\"'\u00a0\u2713\u2714\u2705\ufe0f\U0001f389")
        if text[-1:] in tuple(".,;:") and text[-2:-1] != ".":  # but "72..." goes on
            text = text[:-1]
        for left, right in (("(", ")"), ("[", "]"), ("{", "}"), ("$", "$"), ("\\{", "\\}")):
            inside = text[len(left) : -len(right)]
            if inside and text.startswith(left) and text.endswith(right):
                if left == "$" or not (left in inside or right in inside or "," in inside):
                    text = inside
        if text == before:
            break
    return text
