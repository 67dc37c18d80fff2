"""Printing to consoles that know few characters: Windows' cp1252, a pipe in ASCII."""

import sys
from io import TextIOWrapper


def plain_console() -> None:
    """From now on what stdout's encoding lacks is printed as an escape; without this, print raises."""
    if isinstance(sys.stdout, TextIOWrapper):  # a notebook's is another, which knows them all
        sys.stdout.reconfigure(errors="backslashreplace")
