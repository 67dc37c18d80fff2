"""Exercises that check themselves.

    from rlkit.study.exercises import check, hint, reveal

    def group_advantages_std(raw_rewards, group_size, advantage_eps): ...   # a stub
    check.group_advantages_std(group_advantages_std)    # open, ✓, or what is wrong and why
    hint("group_advantages_std")                        # one more hint per call
    reveal("group_advantages_std")                      # the library's own source
    check.summary()                                     # your progress in this kernel

``with plugged_in(compute_policy_gradient_loss=mine):`` lets the library's train step use your function.
"""

from __future__ import annotations

import sys
from contextlib import contextmanager
from importlib import import_module

import pandas as pd

from rlkit.study.exercises.core import EXERCISES, Exercise, Mistake, OpenExercise, Result, exercise
from rlkit.support.checks import hint as close_name

_FILES = "prompts tokens scoring advantages losses clipping steps baselines difficulty surrogates supplement"
for _module in _FILES.split():
    import_module(f"rlkit.study.exercises.{_module}")
EXERCISES = dict(sorted(EXERCISES.items(), key=lambda item: item[1].notebook))  # then as written

__all__ = [
    "EXERCISES",
    "Exercise",
    "Mistake",
    "OpenExercise",
    "Result",
    "check",
    "exercise",
    "hint",
    "plugged_in",
    "reveal",
]


def get_exercise(name: str) -> Exercise:
    if name in EXERCISES:
        return EXERCISES[name]
    known = f"expected one of the {len(EXERCISES)} names in check.summary()"
    raise ValueError(f"exercise: got {name!r}{close_name(name, EXERCISES)}; {known}")


class _Check:
    """``check.<name>(your_function)`` prints one line; ``check.summary()`` is a table of your progress."""

    def __init__(self):
        self._status: dict[str, str] = {}
        self._hints: dict[str, int] = {}

    def __getattr__(self, name):
        if name.startswith("_"):
            raise AttributeError(name)
        try:
            entry = get_exercise(name)
        except ValueError as error:
            raise AttributeError(str(error)) from None

        def run(attempt):
            result = entry.check(attempt)
            if not (result.status == "open" and self._status.get(name) in ("right", "wrong")):
                self._status[name] = result.status
            print(result.message)

        run.__name__, run.__doc__ = name, f"{entry.title}\n\n{entry.stub()}"
        return run

    def __dir__(self):
        return ["summary", *EXERCISES]

    def summary(self, notebook: str | None = None) -> pd.DataFrame:
        """One row per exercise (of one notebook, such as "02"): what it is, how hard, and where you stand."""
        rows = [
            {
                "exercise": e.name,
                "notebook": e.notebook,
                "title": e.title,
                "difficulty": "★" * e.difficulty,
                "minutes": e.minutes,
                "status": {"right": "✓", "wrong": "✗"}.get(self._status.get(e.name), "○"),
            }
            for e in EXERCISES.values()
            if notebook in (None, e.notebook)
        ]
        return pd.DataFrame(rows).set_index("exercise")


check = _Check()


def hint(name: str) -> None:
    """Print the next hint. The last one says so, and the call after it starts again."""
    entry = get_exercise(name)
    if not entry.hints:
        print(f"{name} has no hints; reveal({name!r}) shows the library's own code.")
        return
    count = check._hints.get(name, 0)
    check._hints[name] = count + 1
    position = count % len(entry.hints)
    print(f"hint {position + 1} of {len(entry.hints)}: {entry.hints[position]}")
    if position + 1 == len(entry.hints):
        print(
            f"(That was the last one; hint({name!r}) starts again. reveal({name!r}) shows the library's own "
            f"code.)"
        )


def reveal(name: str) -> None:
    """Print the library's own source for this exercise."""
    print(get_exercise(name).source())


@contextmanager
def plugged_in(**functions):
    """The library uses your function instead of its own: ``with plugged_in(compute_policy_gradient_loss=f):``

    Names are those of the handout's components; a function takes the component's arguments and returns the
    same kind of result. Inside the ``with``, ``grpo_train_step`` and ``train`` call yours, afterwards ours.
    """
    import rlkit

    replaced = []
    try:
        for name, function in functions.items():
            if name not in rlkit.__all__ or not callable(function):
                raise ValueError(
                    f"plugged_in: got {name!r} = {function!r}, expected a function for one of the "
                    "handout's components, such as compute_policy_gradient_loss"
                )
            original = getattr(rlkit, name)
            import_module("rlkit.grpo")
            # not in its home, nor in the checkers
            keep = (original.__module__, "rlkit.study.exercises", "rlkit.study.derivations")
            for module_name, module in list(sys.modules.items()):
                if (
                    module_name.startswith("rlkit.")
                    and not module_name.startswith(keep)
                    and getattr(module, "__dict__", {}).get(name) is original
                ):
                    setattr(module, name, function)
                    replaced.append((module, name, original))
        yield
    finally:
        for module, name, original in replaced:
            setattr(module, name, original)
