"""When a run counts as collapsed: one rule, for the alarm while it trains and for comparisons after it.

Over five steps on average (``now``), against the best such five before them (those of the highest reward, or
well-formed share):
- reward, or the well-formed share, is under half of its best, and that was at least 0.1; or
- reward has lost a fifth of its best, and responses are under a quarter as long as then, or half of them or
  more are cut at max_tokens and at least twice as many as then.
"""

from collections.abc import Iterator, Sequence
from math import isfinite, nan

WINDOW = 5  # steps
_NAMES = ("reward", "format_reward", "response_length", "truncated_share")


def collapse(rows: Sequence[dict]) -> str:
    """Why the run has collapsed at the last of these steps' metrics (one dict each, oldest first), or ""."""
    return ([""] + [why for _, why in verdicts(rows)])[-1]


def collapsed_at(rows: Sequence[dict]) -> tuple[int, str] | None:
    """(the first step at which the rule holds, why), or None."""
    return next(((step, why) for step, why in verdicts(rows) if why), None)


def verdicts(rows: Sequence[dict]) -> Iterator[tuple[int, str]]:
    """(step, why it has collapsed there or "") of each step that has an earlier window to compare with."""
    rows = [row for row in rows if isfinite(row.get("reward", nan))]
    windows = [
        {name: sum(row.get(name, nan) for row in rows[i : i + WINDOW]) / WINDOW for name in _NAMES}
        for i in range(len(rows) - WINDOW + 1)
    ]
    best: dict[str, dict] = {}  # the window with the highest of each
    for i in range(WINDOW, len(windows)):
        for name in _NAMES[:2]:
            best[name] = max((best.get(name, windows[0]), windows[i - WINDOW]), key=lambda w: w[name])
        yield int(rows[i + WINDOW - 1]["step"]), _why(windows[i], best)


def _why(now: dict, best: dict[str, dict]) -> str:
    for name, what in (("reward", "the mean reward"), ("format_reward", "the well-formed share")):
        high = best[name][name]
        if high >= 0.1 and now[name] < high / 2:
            return f"{what} fell from {high:.2f} to {now[name]:.2f}"
    then = best["reward"]
    if now["reward"] > 0.8 * then["reward"]:
        return ""
    length, long = now["response_length"], then["response_length"]
    cut, few = now["truncated_share"], then["truncated_share"]
    if length < long / 4:
        return f"with a falling reward the mean length fell from {long:.0f} to {length:.0f} tokens"
    if cut >= 0.5 and cut >= 2 * few:
        return f"with a falling reward the share of cut responses rose from {few:.2f} to {cut:.2f}"
    return ""
