"""Text made plain: one line, ordinary signs, spaces and digits, no LaTeX dressing. Linear in its length."""

import re
import unicodedata

_TWINS = (  # an ordinary character, then those that are read as it; the last are spaces typed inside numbers
    "-\u2212\u2010\u2011\u2012\u2013\u2014\ufe63\uff0d *\u00d7\u00b7\u22c5\u2217\u2219 +\uff0b ,\uff0c "
    ".\uff0e\u3002 %\uff05 /\uff0f\u2044\u2215 =\uff1d :\uff1a $\uff04 '\u2018\u2019 "
    '"\u201c\u201d\u00ab\u00bb \u2248\u2245\u223c\u2243 \u00a0\u202f\u2009\u2007'
)
_ORDINARY = {ord(twin): group[0] for group in _TWINS.split(" ") for twin in group[1:]}
_ORDINARY |= {
    ord(sign): f" {n}" for sign, n in zip("\u00bd\u00bc\u00be\u2153\u2154", "1/2 1/4 3/4 1/3 2/3".split())
}
# what cannot be seen becomes a blank, so that it never glues two digits into a number
_UNSEEN = re.compile(
    r"[\x00-\x1f\x7f\x85\u1680\u2000-\u2006\u2008\u200a\u200b\u200e\u200f\u2028\u2029\u205f\u2060\u3000\ufeff]"
)
_SPACING = (
    r"\\(?:[,;:! ()\[\]\\]|(?:q?quad|thinspace|displaystyle|textstyle|left|right|[bB]igg?|[lL]arge|huge|bf|rm"
    r"|checkmark|qed|square|blacksquare|hfill|newline)(?![A-Za-z]))|(?<=\S)~"
)
_LATEX = [
    (re.compile(pattern), new)
    for pattern, new in (
        (r"(?<=\d)(?:\\[,;: ]|\\thinspace\b|~)(?=\d{3}(?!\d))", "\u00a0"),  # 1\,200
        (r"\\!(?=,)|(?<=,)\\!|\{(?=,\})|(?<=\{,)\}|(?<=\d,)\}(?=\d)", ""),  # 1{,}200 and 1,\!200
        (_SPACING, " "),
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


def clean(text: str) -> str:
    """The text on one line, in ordinary characters, without LaTeX dressing."""
    if not (text.isascii() and text.isprintable()):
        text = _UNSEEN.sub(" ", text.translate(_ORDINARY))
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


def _inline_fraction(match) -> str:
    top, bottom = match[1].strip(), match[2].strip()
    plain = re.fullmatch(r"-?[\d.,]+", top) and re.fullmatch(r"[\d.,]+", bottom)
    plain = plain or re.fullmatch(r"[A-Za-z]+/[A-Za-z]+\s*(?:\^\s*\d)?", f"{top}/{bottom}")  # km/h
    return f" {top}/{bottom} " if plain else f" (({top})/({bottom})) "


def undress(text: str) -> str:
    """Without what may stand around an answer: quotes, markdown, brackets, dollars, ticks, one final stop."""
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
