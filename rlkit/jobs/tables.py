"""Tables for the job notebooks: comparisons of runs and of prompts, with intervals."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from datetime import datetime

import numpy as np
import pandas as pd

from rlkit.jobs.collapse import collapsed_at
from rlkit.jobs.config import OFF_POLICY_TRAIN_ROWS, Config
from rlkit.jobs.metrics import METRICS
from rlkit.jobs.runs import Run
from rlkit.support.checks import hint, shown
from rlkit.support.stats import (
    detectable_difference,
    mcnemar,
    mean_interval,
    paired_interval,
    wilson_interval,
)
from rlkit.tasks.evaluation import Evaluation

COMPARED = ("val_reward", "reward", "response_length", "token_entropy")  # what compare.ipynb draws by default
# fields that do not decide what is learned or how it is measured (but for last digits)
_NOT_COMPARED = set(
    "preset seed run_dir resume sink dry_run checkpoint_every rollouts_every check_memory weight_sync device "
    "threads gradient_accumulation_steps".split()
)


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
            rows.append((name, formatted, right, count, share, max(low, 0.0), min(high, 1.0)))
    columns = ["prompt", "format", "answer", "count", "share", "low", "high"]
    return pd.DataFrame(rows, columns=columns).set_index(columns[:3]).round(3)


def paired_table(results: Mapping[str, Evaluation], others: Mapping[str, Evaluation]) -> pd.DataFrame:
    """Two models on the same questions, a row per prompt: by how much and where their accuracies differ.

    The 95 % interval is of the mean difference problem by problem, so what makes a problem hard for both
    drops out. "better" and "worse" count the problems on which the first model was right more, or less,
    often; p_value is McNemar's, with one response per problem.
    """
    rows = {}
    for name, result in results.items():
        a, b = (r.rows.groupby("problem").reward.mean() for r in (result, others[name]))
        if not result.rows.question.equals(others[name].rows.question):
            raise ValueError(f"others: the questions of {name!r} are not the same in both")
        once = result.n_samples == others[name].n_samples == 1
        p_value = mcnemar(a >= 1, b >= 1) if once else None
        rows[name] = a.mean(), b.mean(), *paired_interval(a, b), (a > b).sum(), (a < b).sum(), p_value
    columns = ["accuracy", "other", "difference", "low", "high", "better", "worse", "p_value"]
    return _table(rows, columns).dropna(axis="columns", how="all").rename_axis("prompt")


# ---- runs that can be compared


def group_runs(runs: Sequence[Run], by: str = "algo") -> dict[str, list[Run]]:
    """Runs with the same value of one config field, in order of first appearance: {value: runs}."""
    groups: dict[str, list[Run]] = {}
    for run in runs:
        config = run.config
        if by != "algo" and by not in config:
            raise ValueError(f"by: {run.name} has no {by!r} in its config.json{_meant(by, config)}")
        value = config["algorithm"]["name"] if by == "algo" else config[by]
        groups.setdefault(str(value), []).append(run)
    return groups


def comparison(runs: Sequence[Run], by: str = "algo") -> tuple[dict[str, list[Run]], list[str]]:
    """The runs in groups for tables and figures, and lines about what a reader must know of them.

    A run without a step is left out. An interval over seeds needs one run of each: where a group has several
    of one seed, the one started last counts, of those that reached their last step if any did. The lines name
    what was left out, which runs are not at their last step, and in which settings runs differ besides ``by``
    and the seed. ValueError where no run has a step.
    """
    started = [run for run in runs if not run.metrics.empty]
    empty = [run.name for run in runs if run.metrics.empty]
    if not started:
        raise ValueError(f"runs: no step is logged yet in {', '.join(empty)}; expected runs with metrics")
    notes = [f"left out, no step is logged yet: {', '.join(empty)}"] if empty else []
    groups = group_runs(started, by)
    for name, members in groups.items():
        groups[name], more = _one_of_each_seed(name, members, by)
        notes += more
    return groups, notes + _inequalities(groups, by)


def _one_of_each_seed(name: str, runs: Sequence[Run], by: str) -> tuple[list[Run], list[str]]:
    """The runs that count, and a line about those that don't."""
    repeated = {seed: same for seed, same in _by_seed(runs).items() if len(same) > 1}
    if not repeated:
        return list(runs), []
    kept = [max(same, key=_complete_then_latest) for same in repeated.values()]
    several = [run for same in repeated.values() for run in same]
    left_out = [run for run in several if run not in kept]
    unequal = _listed(_differing(map(_settings, several), by))
    note = (
        f"{name}: several runs of seed {', '.join(map(str, repeated))}; the latest of each seed counts: "
        f"{_names(kept)}; left out: {_names(left_out)}" + (f" (they differ in {unequal})" if unequal else "")
    )
    return [run for run in runs if run not in left_out], [note]


def _inequalities(groups: Mapping[str, Sequence[Run]], by: str) -> list[str]:
    """What tells the groups' runs apart besides ``by`` and the seed, line by line."""
    settings = {name: [_settings(run) for run in runs] for name, runs in groups.items()}
    everyone = [run for runs in groups.values() for run in runs]
    early = [f"{r.name} ({_last_step(r)} of {r.config['n_steps']})" for r in everyone if not _complete(r)]
    notes = [f"not at the last step, taken where they are: {', '.join(early)}"] if early else []
    found = {run.name: collapsed_at(run.metrics.to_dict("records")) for run in everyone}
    fallen = [f"{name} (step {at[0]}: {at[1]})" for name, at in found.items() if at]
    notes += [f"collapsed, {len(fallen)} of {len(everyone)} runs: {', '.join(fallen)}"] if fallen else []
    for name, members in settings.items():
        if unequal := _listed(_differing(members, by)):
            notes.append(f"{name}: its runs differ in more than the seed: {unequal}")
    between = {}
    for field in _differing((run for members in settings.values() for run in members), by):
        values = [
            ", ".join(dict.fromkeys(str(run[field]) for run in members)) for members in settings.values()
        ]
        if len(set(values)) > 1:
            between[field] = values
    if between:
        notes.append(f"groups differ in more than {by}: {_listed(between)} ({' / '.join(groups)})")
    return notes


def _settings(run: Run) -> dict:
    """What decides the run, by field: "default" where it follows from the algorithm and the batch."""
    config, algorithm = run.config, run.config["algorithm"]
    compared = (field.name for field in fields(Config) if field.name not in _NOT_COMPARED)
    found = {name: config[name] for name in compared if name in config} | {"algo": algorithm["name"]}
    rollout, rows = config.get("rollout_batch_size"), config.get("train_batch_size")
    if rollout and rows:
        constant = algorithm.get("loss_normalization") == "constant"
        usual = {
            "train_batch_size": min(OFF_POLICY_TRAIN_ROWS, rollout)
            if algorithm.get("off_policy")
            else rollout,
            "cliprange": algorithm.get("cliprange"),
            "normalization_constant": rows * config["max_tokens"] if constant else None,
        }
        found |= {field: "default" for field, value in usual.items() if found.get(field) == value}
    rule = {k: v for k, v in algorithm.items() if k not in ("name", "summary", "cliprange")}
    return found | {f"{algorithm['name']}'s {name}": value for name, value in rule.items()}


def _differing(settings: Iterable[dict], by: str) -> dict[str, list[str]]:
    """The fields that all have and that are not the same in all, with their values."""
    settings = list(settings)
    shared = [field for field in settings[0] if field != by and all(field in run for run in settings)]
    values = {field: list(dict.fromkeys(str(run[field]) for run in settings)) for field in shared}
    return {field: found for field, found in values.items() if len(found) > 1}


def _listed(differing: Mapping[str, Sequence[str]]) -> str:
    return ", ".join(f"{field} {' / '.join(values)}" for field, values in differing.items())


def _names(runs: Iterable[Run]) -> str:
    return ", ".join(run.name for run in runs)


def _by_seed(runs: Sequence[Run]) -> dict[int, list[Run]]:
    found: dict[int, list[Run]] = {}
    for run in runs:
        found.setdefault(run.config["seed"], []).append(run)
    return found


def check_seeds(groups: Mapping[str, Sequence]) -> None:
    """ValueError if a group has two runs of one seed, which no interval over seeds may count twice.

    ``comparison`` keeps one of each. Metrics tables, which do not know their seed, are taken as they are.
    """
    expected = "expected one run of each seed (rlkit.jobs.tables.comparison keeps one)"
    for name, runs in groups.items():
        for seed, same in _by_seed([run for run in runs if isinstance(run, Run)]).items():
            if len(same) > 1:
                raise ValueError(f"groups: {_names(same)} of {name!r} all have seed {seed}; {expected}")


def _last_step(run: Run) -> int:
    return int(run.metrics.step.max())


def _complete(run: Run) -> bool:
    return _last_step(run) >= run.config["n_steps"]


def _complete_then_latest(run: Run) -> tuple[bool, float]:
    started = run.config.get("provenance", {}).get("started")
    return _complete(run), datetime.strptime(started, "%Y-%m-%dT%H:%M:%S%z").timestamp() if started else 0.0


def find_group(groups: Mapping[str, Sequence[Run]], baseline=None) -> str:
    """The name of the group that a baseline means; None is grpo, or the first where there is none.

    Numbers are compared as numbers (0.001 is 1e-3), words whatever their case (true is True).
    """
    if baseline is None:
        return "grpo" if "grpo" in groups else next(iter(groups))
    for same in (str, _plain):
        for name in groups:
            if same(name) == same(baseline):
                return name
    raise ValueError(f"baseline: got {shown(baseline)}{_meant(str(baseline), groups)}")


def _plain(value) -> float | str:
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return str(value).casefold()


def _meant(name: str, known) -> str:
    """The known name that may have been meant, or all there are."""
    return hint(name, known) or f"; expected one of {', '.join(known)}"


def shared_metrics(runs: Sequence[Run], metrics: Sequence[str] | None = None) -> tuple[str, ...]:
    """The metrics to compare: these, which all runs must have; None: those of ``COMPARED`` that all have."""
    tables = {run.name: run.metrics.dropna(axis="columns", how="all") for run in runs}
    if empty := [name for name, table in tables.items() if table.empty]:
        raise ValueError(f"runs: no step is logged yet in {', '.join(empty)}; expected runs with metrics")
    names = list(dict.fromkeys(name for table in tables.values() for name in table if name != "step"))
    wanted = COMPARED if metrics is None else metrics
    lacking = {metric: [run for run, table in tables.items() if metric not in table] for metric in wanted}
    if metrics is None:
        if found := tuple(metric for metric, without in lacking.items() if not without):
            return found
        expected = f"name some of {', '.join(names)}"
        raise ValueError(f"metrics: none of {', '.join(COMPARED)} is in every run; {expected}")
    errors = []
    for metric, without in lacking.items():
        if metric not in names:
            why = _meant(metric, names)
            if metric.startswith("val_") and metric in METRICS:
                why = f" (made without validation, n_val=0), expected one of {', '.join(names)}"
            errors.append(f"no run has {metric!r}{why}")
        elif without:
            errors.append(f"{metric!r} is not in {', '.join(without)}")
    if errors:
        raise ValueError(f"metrics: {'; '.join(errors)}")
    return tuple(metrics)


# ---- tables of runs


def validation_table(run: Run) -> pd.DataFrame:
    """The evaluations of one run, a row each; without any, training rewards."""
    metrics = run.metrics
    columns = ["val_reward", "val_reward_se", "val_format_reward", "val_response_length", "val_n"]
    if "val_reward" not in metrics:
        trained = "the rewards of the training rollouts instead"
        print("no validation was made;", trained if "reward" in metrics else "no step was trained either")
        columns = ["reward", "format_reward", "response_length"]
        last = len(metrics) - 1
        metrics = metrics.iloc[sorted({round(i * last / 9) for i in range(10)}) if last >= 0 else []]
    return metrics.set_index("step").reindex(columns=columns).dropna(subset=columns[:1]).round(3)


def final_table(groups: Mapping[str, Sequence[Run]], metric: str = "val_reward") -> pd.DataFrame:
    """First and last value of a metric per group: seeds, mean start, mean end and its 95 % interval.

    With one seed low and high are missing: one run says nothing about the spread. ValueError for two runs of
    one seed.
    """
    check_seeds(groups)
    rows = {}
    for name, runs in groups.items():
        starts, ends = zip(*(_ends(run, metric) for run in runs))
        end, *interval = mean_interval(ends)
        rows[name] = len(runs), mean_interval(starts)[0], end, *(interval if len(runs) > 1 else (None, None))
    return _table(rows, ["seeds", "start", "end", "low", "high"])


def difference_table(
    groups: Mapping[str, Sequence[Run]], baseline: str | float | None = None, metric: str = "val_reward"
) -> pd.DataFrame:
    """Each group's last value minus the baseline group's, seed by seed, with the 95 % interval of the mean.

    Runs are paired by their seed, which gives them the same problems in the same order. A verdict is read off
    the interval alone: with fewer than two common seeds there is none. ``detectable``: the true difference
    that so many seeds with this spread would show in four of five tries. ValueError for two runs of one seed.
    """
    check_seeds(groups)
    ends = {
        name: {run.config["seed"]: _ends(run, metric)[1] for run in runs} for name, runs in groups.items()
    }
    baseline, rows = find_group(groups, baseline), {}
    reference = ends.pop(baseline)
    for name, found in ends.items():
        gaps = [end - reference[seed] for seed, end in found.items() if seed in reference]
        row = None, None, None, "no interval", None
        if len(gaps) > 1:
            mean, low, high = mean_interval(gaps)
            verdict = "no difference shown" if low <= 0 <= high else "higher" if low > 0 else "lower"
            row = mean, low, high, verdict, detectable_difference(float(np.std(gaps, ddof=1)), len(gaps))
        rows[f"{name} - {baseline}"] = len(gaps), *row
    return _table(rows, ["seeds", "difference", "low", "high", "verdict", "detectable"])


def _table(rows: dict[str, tuple], columns: list[str]) -> pd.DataFrame:
    return pd.DataFrame.from_dict(rows, "index", columns=columns).rename_axis("group").round(3)


def _ends(run: Run, metric: str) -> tuple[float, float]:
    table = run.metrics
    if metric not in table or table[metric].dropna().empty:
        raise ValueError(f"metric: {run.name} has no {metric!r}{_meant(metric, table.columns)}")
    values = table[metric].dropna()
    return float(values.iloc[0]), float(values.iloc[-1])
