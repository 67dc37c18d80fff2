"""Text that came from a model, shown to a person."""

import re

# what would command a terminal (ESC and its kin) or turn a line around (bidirectional overrides)
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def visible(text: str) -> str:
    """The text with control characters in sight: pictures such as ␛, or escapes; line breaks and tabs stay.

    >>> visible("a\\x1b[2Jb")
    'a␛[2Jb'
    """
    return _CONTROLS.sub(lambda found: _picture(found[0]), text)


def _picture(character: str) -> str:
    code = ord(character)
    if code < 32:
        return chr(0x2400 + code)
    return "␡" if code == 127 else character.encode("unicode_escape").decode()
