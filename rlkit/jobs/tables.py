"""The tables of the job notebooks: what several runs, or several prompts, say, with intervals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from datetime import datetime

import pandas as pd

from rlkit.jobs.config import OFF_POLICY_TRAIN_ROWS, Config
from rlkit.jobs.metrics import METRICS
from rlkit.jobs.runs import Run
from rlkit.support.checks import hint, shown
from rlkit.support.stats import mean_interval, wilson_interval
from rlkit.tasks.evaluation import Evaluation

COMPARED = ("val_reward", "reward", "response_length", "token_entropy")  # what compare.ipynb draws by default
# fields that do not decide what is learned or how it is measured (but for last digits): none makes runs
# unequal
_NOT_COMPARED = {
    "preset",
    "seed",
    "run_dir",
    "resume",
    "sink",
    "dry_run",
    "checkpoint_every",
    "rollouts_every",
    "check_memory",
    "weight_sync",
    "device",
    "threads",
    "gradient_accumulation_steps",
}


def category_table(results: Mapping[str, Evaluation]) -> pd.DataFrame:
    """Counts of the three categories per prompt, with the share of each and its 95 % interval.

    With one response per problem the interval is Wilson's. With several, which are not independent, it is
    Student's over the problems' own shares (Wilson's for that many problems where the share is 0 or 1).
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
            rows.append(
                {
                    "prompt": name,
                    "format": formatted,
                    "answer": right,
                    "count": count,
                    "share": share,
                    "low": max(low, 0.0),
                    "high": min(high, 1.0),
                }
            )
    return pd.DataFrame(rows).set_index(["prompt", "format", "answer"]).round(3)


def group_runs(runs: Sequence[Run], by: str = "algo") -> dict[str, list[Run]]:
    """Runs with the same value of one config field, in order of first appearance: {value: runs}."""
    groups: dict[str, list[Run]] = {}
    for run in runs:
        config = run.config
        if by != "algo" and by not in config:
            raise ValueError(f"by: {run.name} has no {by!r} in its config.json{_choice(by, config)}")
        value = config["algorithm"]["name"] if by == "algo" else config[by]
        groups.setdefault(str(value), []).append(run)
    return groups


def comparison(runs: Sequence[Run], by: str = "algo") -> tuple[dict[str, list[Run]], list[str]]:
    """The runs in groups that tables and figures can be made of, and what a reader must know of them, line by
    line.

    A run without a step is left out. An interval over seeds needs one run of each: where a group has several
    of one seed, the one started last counts, of those that reached their last step if any did. The lines say
    what was left out, which runs are not at their last step, and in which settings runs differ besides ``by``
    and the seed. ValueError where no run has a step.
    """
    empty = [run.name for run in runs if run.metrics.empty]
    if len(empty) == len(runs):
        raise ValueError(f"runs: no step is logged yet in {', '.join(empty)}; expected runs with metrics")
    notes = [f"left out, no step is logged yet: {', '.join(empty)}"] if empty else []
    groups = group_runs([run for run in runs if not run.metrics.empty], by)
    for name, members in groups.items():
        groups[name], more = _one_of_each_seed(name, members, by)
        notes += more
    return groups, notes + _inequalities(groups, by)


def _one_of_each_seed(name: str, runs: Sequence[Run], by: str) -> tuple[list[Run], list[str]]:
    """The runs that count, and a line about those that don't."""
    repeated = {seed: same for seed, same in _by_seed(runs).items() if len(same) > 1}
    if not repeated:
        return list(runs), []
    kept = {seed: max(same, key=_finished_then_latest) for seed, same in repeated.items()}
    left_out = [run for seed, same in repeated.items() for run in same if run is not kept[seed]]
    unequal = _listed(_differing([_settings(run) for same in repeated.values() for run in same], by))
    return [run for run in runs if run not in left_out], [
        f"{name}: several runs of seed {', '.join(map(str, repeated))}; the latest of each seed counts: "
        f"{', '.join(run.name for run in kept.values())}; left out: {', '.join(run.name for run in left_out)}"
        + (f" (they differ in {unequal})" if unequal else "")
    ]


def _inequalities(groups: Mapping[str, Sequence[Run]], by: str) -> list[str]:
    """What tells the groups' runs apart besides ``by`` and the seed, line by line."""
    notes, settings = [], {name: [_settings(run) for run in runs] for name, runs in groups.items()}
    early = [
        f"{run.name} ({_last_step(run)} of {run.config['n_steps']})"
        for runs in groups.values()
        for run in runs
        if not _complete(run)
    ]
    if early:
        notes.append(f"not at the last step, taken where they are: {', '.join(early)}")
    for name, members in settings.items():
        if unequal := _listed(_differing(members, by)):
            notes.append(f"{name}: its runs differ in more than the seed: {unequal}")
    between = {
        field: [", ".join(dict.fromkeys(str(run[field]) for run in members)) for members in settings.values()]
        for field in _differing([run for members in settings.values() for run in members], by)
    }
    between = {field: values for field, values in between.items() if len(set(values)) > 1}
    if between:
        notes.append(f"groups differ in more than {by}: {_listed(between)} ({' / '.join(groups)})")
    return notes


def _settings(run: Run) -> dict:
    """What decides the run, by field: "default" where it follows from the algorithm and the batch."""
    config, algorithm = run.config, run.config["algorithm"]
    found = {
        field.name: config[field.name]
        for field in fields(Config)
        if field.name in config and field.name not in _NOT_COMPARED
    } | {"algo": algorithm["name"]}
    rollout, rows = config.get("rollout_batch_size"), config.get("train_batch_size")
    if rollout and rows:
        usual = {
            "train_batch_size": min(OFF_POLICY_TRAIN_ROWS, rollout)
            if algorithm.get("off_policy")
            else rollout,
            "cliprange": algorithm.get("cliprange"),
            "normalization_constant": rows * config["max_tokens"]
            if algorithm.get("loss_normalization") == "constant"
            else None,
        }
        found |= {field: "default" for field, value in usual.items() if found.get(field) == value}
    return found | {
        f"{algorithm['name']}'s {name}": value
        for name, value in algorithm.items()
        if name not in ("name", "summary", "cliprange")
    }


def _differing(settings: Sequence[dict], by: str) -> dict[str, list[str]]:
    """The fields that all have and that are not the same in all, with their values."""
    values = {
        field: list(dict.fromkeys(str(run[field]) for run in settings))
        for field in settings[0]
        if field != by and all(field in run for run in settings)
    }
    return {field: found for field, found in values.items() if len(found) > 1}


def _listed(differing: Mapping[str, Sequence[str]]) -> str:
    return ", ".join(f"{field} {' / '.join(values)}" for field, values in differing.items())


def _by_seed(runs: Sequence[Run]) -> dict[int, list[Run]]:
    found: dict[int, list[Run]] = {}
    for run in runs:
        found.setdefault(run.config["seed"], []).append(run)
    return found


def check_seeds(groups: Mapping[str, Sequence]) -> None:
    """ValueError if a group has two runs of one seed, which no interval over seeds may count twice.

    ``comparison`` keeps one of each. Metrics tables, which do not know their seed, are taken as they are.
    """
    for name, runs in groups.items():
        for seed, same in _by_seed([run for run in runs if isinstance(run, Run)]).items():
            if len(same) > 1:
                raise ValueError(
                    f"groups: {', '.join(run.name for run in same)} of {name!r} all have seed {seed}; "
                    "expected one run of each seed (rlkit.jobs.tables.comparison keeps one)"
                )


def _last_step(run: Run) -> int:
    return int(run.metrics.step.max())


def _complete(run: Run) -> bool:
    return _last_step(run) >= run.config["n_steps"]


def _finished_then_latest(run: Run) -> tuple[bool, float]:
    started = run.config.get("provenance", {}).get("started")
    return _complete(run), datetime.strptime(started, "%Y-%m-%dT%H:%M:%S%z").timestamp() if started else 0.0


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
    raise ValueError(f"baseline: got {shown(baseline)}{_choice(str(baseline), groups)}")


def _plain(value) -> float | str:
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return str(value).casefold()


def shared_metrics(runs: Sequence[Run], metrics: Sequence[str] | None = None) -> tuple[str, ...]:
    """The metrics to compare: these, which every run must have; None is those of ``COMPARED`` that all have."""
    tables = [(run.name, run.metrics.dropna(axis="columns", how="all")) for run in runs]
    empty = [name for name, table in tables if table.empty]
    if empty:
        raise ValueError(f"runs: no step is logged yet in {', '.join(empty)}; expected runs with metrics")
    names = list(dict.fromkeys(name for _, table in tables for name in table if name != "step"))
    lacking = {
        metric: [name for name, table in tables if metric not in table] for metric in metrics or COMPARED
    }
    if metrics is None:
        metrics = [metric for metric, without in lacking.items() if not without]
        if not metrics:
            raise ValueError(
                f"metrics: none of {', '.join(COMPARED)} is in every run; name some of {', '.join(names)}"
            )
        return tuple(metrics)
    errors = []
    for metric, without in lacking.items():
        if metric not in names:
            unvalidated = metric.startswith("val_") and metric in METRICS
            errors.append(
                f"no run has {metric!r}"
                + (
                    f" (made without validation, n_val=0), expected one of {', '.join(names)}"
                    if unvalidated
                    else _choice(metric, names)
                )
            )
        elif without:
            errors.append(f"{metric!r} is not in {', '.join(without)}")
    if errors:
        raise ValueError(f"metrics: {'; '.join(errors)}")
    return tuple(metrics)


def validation_table(run: Run) -> pd.DataFrame:
    """The evaluations of one run, a row each; if there were none, ten training rewards."""
    columns, metrics = (
        ["val_reward", "val_reward_se", "val_format_reward", "val_response_length", "val_n"],
        run.metrics,
    )
    if "val_reward" not in metrics:
        print(
            "no validation was made; "
            + (
                "the rewards of the training rollouts instead"
                if "reward" in metrics
                else "no step was trained either"
            )
        )
        columns = ["reward", "format_reward", "response_length"]
        metrics = metrics.iloc[
            sorted({round(i * (len(metrics) - 1) / 9) for i in range(10)} if len(metrics) else [])
        ]
    table = metrics.set_index("step").reindex(columns=columns)
    return table.dropna(subset=columns[:1]).round(3)


def final_table(groups: Mapping[str, Sequence[Run]], metric: str = "val_reward") -> pd.DataFrame:
    """First and last value of a metric per group: seeds, mean at the start, mean at the end and its 95 %
    interval.

    With one seed low and high are missing: one run says nothing about the spread. ValueError for two runs of
    one seed.
    """
    check_seeds(groups)
    rows = []
    for name, runs in groups.items():
        ends = [_ends(run, metric) for run in runs]
        start, (end, low, high) = mean_interval([e[0] for e in ends])[0], mean_interval([e[1] for e in ends])
        rows.append(
            {
                "group": name,
                "seeds": len(runs),
                "start": start,
                "end": end,
                "low": low if len(runs) > 1 else None,
                "high": high if len(runs) > 1 else None,
            }
        )
    return pd.DataFrame(rows).set_index("group").round(3)


def difference_table(
    groups: Mapping[str, Sequence[Run]], baseline: str | float | None = None, metric: str = "val_reward"
) -> pd.DataFrame:
    """Each group's last value minus the baseline group's, seed by seed, with the 95 % interval of the mean.

    Runs are paired by their seed, which gives them the same problems in the same order. A verdict is read off
    the
    interval alone: with fewer than two common seeds there is none. ValueError for two runs of one seed.
    """
    check_seeds(groups)
    names, baseline = list(groups), find_group(groups, baseline)
    reference, rows = {run.config["seed"]: _ends(run, metric)[1] for run in groups[baseline]}, []
    for name in names:
        if name == baseline:
            continue
        gaps = [
            _ends(run, metric)[1] - reference[seed]
            for run in groups[name]
            if (seed := run.config["seed"]) in reference
        ]
        mean, low, high = mean_interval(gaps) if len(gaps) > 1 else (None, None, None)
        verdict = (
            "no interval"
            if len(gaps) < 2
            else "no difference shown"
            if low <= 0 <= high
            else "higher"
            if low > 0
            else "lower"
        )
        rows.append(
            {
                "group": f"{name} - {baseline}",
                "seeds": len(gaps),
                "difference": mean,
                "low": low,
                "high": high,
                "verdict": verdict,
            }
        )
    columns = ["group", "seeds", "difference", "low", "high", "verdict"]
    return pd.DataFrame(rows, columns=columns).set_index("group").round(3)


def _ends(run: Run, metric: str) -> tuple[float, float]:
    table = run.metrics
    if metric not in table or table[metric].dropna().empty:
        raise ValueError(f"metric: {run.name} has no {metric!r}{_choice(metric, table.columns)}")
    values = table[metric].dropna()
    return float(values.iloc[0]), float(values.iloc[-1])


def _choice(name: str, known) -> str:
    """The known name that may have been meant, or all there are."""
    return hint(name, known) or f"; expected one of {', '.join(known)}"
