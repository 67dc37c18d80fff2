"""What a problem is."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Problem:
    """A question, its final answer as text, and the steps of its solution, if known.

    metadata: what a scorer of your own needs to know of this problem.
    """

    question: str
    answer: str
    n_steps: int | None = None
    metadata: dict | None = field(default=None, compare=False, repr=False)


def check_n(n: int | None) -> None:
    """ValueError unless this is a number of problems."""
    if n is not None and (isinstance(n, bool) or not isinstance(n, int) or n < 0):
        raise ValueError(f"n: got {n!r}, expected a whole number >= 0 or None for all")
