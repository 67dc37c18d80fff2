"""The tables of the job notebooks: what several runs, or several prompts, say, with intervals."""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import get_close_matches

import pandas as pd

from rlkit.checks import shown
from rlkit.evaluation import Evaluation
from rlkit.runs import METRICS, Run
from rlkit.stats import mean_interval, wilson_interval

COMPARED = ("val_reward", "reward", "response_length", "token_entropy")     # what compare.ipynb draws by default


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
        if by != "algo" and by not in config:
            raise ValueError(f"by: {run.name} has no {by!r} in its config.json{hint(by, config)}")
        value = config["algorithm"]["name"] if by == "algo" else config[by]
        groups.setdefault(str(value), []).append(run)
    return groups


def find_group(groups: Mapping[str, Sequence[Run]], baseline=None) -> str:
    """The name of the group that a baseline means; None is the first one.

    Numbers are compared as numbers (0.001 is 1e-3), words whatever their case (true is True).
    """
    if baseline is None:
        return next(iter(groups))
    for same in (str, _plain):
        for name in groups:
            if same(name) == same(baseline):
                return name
    raise ValueError(f"baseline: got {shown(baseline)}{hint(str(baseline), groups)}")


def _plain(value) -> float | str:
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return str(value).casefold()


def shared_metrics(runs: Sequence[Run], metrics: Sequence[str] | None = None) -> tuple[str, ...]:
    """The metrics to compare: these, which every run must have, or by default those of ``COMPARED`` that all have."""
    tables = [(run.name, run.metrics.dropna(axis="columns", how="all")) for run in runs]
    empty = [name for name, table in tables if table.empty]
    if empty:
        raise ValueError(f"runs: no step is logged yet in {', '.join(empty)}; expected runs with metrics")
    names = list(dict.fromkeys(name for _, table in tables for name in table if name != "step"))
    lacking = {metric: [name for name, table in tables if metric not in table] for metric in metrics or COMPARED}
    if metrics is None:
        metrics = [metric for metric, without in lacking.items() if not without]
        if not metrics:
            raise ValueError(f"metrics: none of {', '.join(COMPARED)} is in every run; name some of {', '.join(names)}")
        return tuple(metrics)
    errors = []
    for metric, without in lacking.items():
        if metric not in names:
            unvalidated = metric.startswith("val_") and metric in METRICS
            errors.append(f"no run has {metric!r}" + (" (made without validation, n_val=0), expected one of "
                                                      f"{', '.join(names)}" if unvalidated else hint(metric, names)))
        elif without:
            errors.append(f"{metric!r} is not in {', '.join(without)}")
    if errors:
        raise ValueError(f"metrics: {'; '.join(errors)}")
    return tuple(metrics)


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


def difference_table(groups: Mapping[str, Sequence[Run]], baseline: str | float | None = None,
                     metric: str = "val_reward") -> pd.DataFrame:
    """Each group's last value minus the baseline group's, seed by seed, with the 95 % interval of the mean.

    Runs are paired by their seed, which gives them the same problems in the same order. A verdict is read off the
    interval alone: with fewer than two common seeds there is none.
    """
    names, baseline = list(groups), find_group(groups, baseline)
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
        raise ValueError(f"metric: {run.name} has no {metric!r}{hint(metric, table.columns)}")
    values = table[metric].dropna()
    return float(values.iloc[0]), float(values.iloc[-1])


def hint(name: str, known) -> str:
    """What may have been meant by this name: "; did you mean 'lr'?", or all that there is."""
    close = get_close_matches(name, known, n=1)
    return f"; did you mean {close[0]!r}?" if close else f"; expected one of {', '.join(known)}"
