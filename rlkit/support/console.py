"""Printing to consoles that know few characters: Windows' cp1252, a pipe in ASCII."""

import sys


def plain_console() -> None:
    """From now on what stdout's encoding lacks is printed as an escape; without this, print raises."""
    if hasattr(sys.stdout, "reconfigure"):  # not in a notebook, which knows them all
        sys.stdout.reconfigure(errors="backslashreplace")
