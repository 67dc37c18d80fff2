"""The tables of the job notebooks: what several runs, or several prompts, say, with intervals."""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import get_close_matches

import pandas as pd

from rlkit.evaluation import Evaluation
from rlkit.runs import Run
from rlkit.stats import mean_interval, wilson_interval


def category_table(results: Mapping[str, Evaluation]) -> pd.DataFrame:
    """Counts of the three categories per prompt, with the share of each and its 95 % interval.

    With one response per problem the interval is Wilson's. With several, which are not independent, it is Student's
    over the problems' own shares (Wilson's for that many problems where the share is 0 or 1).
    """
    rows = []
    for name, result in results.items():
        for (formatted, right), count in result.counts.items():
            hit = (result.rows.format_reward >= 1) == bool(formatted)
            hit &= (result.rows.answer_reward >= 1) == bool(right)
            share, n = float(hit.mean()), result.n_problems
            if result.n_samples > 1 and 0 < share < 1:
                _, low, high = mean_interval(hit.groupby(result.rows.problem).mean())
            else:
                low, high = wilson_interval(round(share * n), n)
            rows.append({"prompt": name, "format": formatted, "answer": right, "count": count, "share": share,
                         "low": max(low, 0.0), "high": min(high, 1.0)})
    return pd.DataFrame(rows).set_index(["prompt", "format", "answer"]).round(3)


def group_runs(runs: Sequence[Run], by: str = "algo") -> dict[str, list[Run]]:
    """Runs with the same value of one config field, in order of first appearance: {value: runs}."""
    groups: dict[str, list[Run]] = {}
    for run in runs:
        config = run.config
        value = config["algorithm"]["name"] if by == "algo" else config[by]
        groups.setdefault(str(value), []).append(run)
    return groups


def final_table(groups: Mapping[str, Sequence[Run]], metric: str = "val_reward") -> pd.DataFrame:
    """First and last value of a metric per group: seeds, mean at the start, mean at the end and its 95 % interval.

    With one seed low and high are missing: one run says nothing about the spread.
    """
    rows = []
    for name, runs in groups.items():
        ends = [_ends(run, metric) for run in runs]
        start, (end, low, high) = mean_interval([e[0] for e in ends])[0], mean_interval([e[1] for e in ends])
        rows.append({"group": name, "seeds": len(runs), "start": start, "end": end,
                     "low": low if len(runs) > 1 else None, "high": high if len(runs) > 1 else None})
    return pd.DataFrame(rows).set_index("group").round(3)


def difference_table(groups: Mapping[str, Sequence[Run]], baseline: str | None = None,
                     metric: str = "val_reward") -> pd.DataFrame:
    """Each group's last value minus the baseline group's, seed by seed, with the 95 % interval of the mean.

    Runs are paired by their seed, which gives them the same problems in the same order. A verdict is read off the
    interval alone: with fewer than two common seeds there is none.
    """
    names = list(groups)
    baseline = names[0] if baseline is None else baseline
    if baseline not in groups:
        raise ValueError(f"baseline: got {baseline!r}{hint(baseline, names)}")
    reference, rows = {run.config["seed"]: _ends(run, metric)[1] for run in groups[baseline]}, []
    for name in names:
        if name == baseline:
            continue
        gaps = [_ends(run, metric)[1] - reference[seed] for run in groups[name]
                if (seed := run.config["seed"]) in reference]
        mean, low, high = mean_interval(gaps) if len(gaps) > 1 else (None, None, None)
        verdict = "no interval" if len(gaps) < 2 else "no difference shown" if low <= 0 <= high else \
            "higher" if low > 0 else "lower"
        rows.append({"group": f"{name} - {baseline}", "seeds": len(gaps), "difference": mean, "low": low,
                     "high": high, "verdict": verdict})
    columns = ["group", "seeds", "difference", "low", "high", "verdict"]
    return pd.DataFrame(rows, columns=columns).set_index("group").round(3)


def _ends(run: Run, metric: str) -> tuple[float, float]:
    table = run.metrics
    if metric not in table or table[metric].dropna().empty:
        raise ValueError(f"metric: {run.name} has no {metric!r}; expected one of {', '.join(table.columns)}")
    values = table[metric].dropna()
    return float(values.iloc[0]), float(values.iloc[-1])


def hint(name: str, known) -> str:
    close = get_close_matches(name, known, n=1)
    return f"; did you mean {close[0]!r}?" if close else f"; expected one of {', '.join(known)}"
