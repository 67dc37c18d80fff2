"""The figures: one style, curves of one run or of many seeds.

Every function returns a matplotlib Figure and draws nothing else; leave it as the last line of a cell to show
it. The colours are Okabe and Ito's, which people with colour-blindness can tell apart, and the ground is
white whatever the theme of the notebook, so that axes stay readable on a dark page.
"""

from collections.abc import Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import matplotlib.pyplot as plt
import pandas as pd
from cycler import cycler
from IPython import get_ipython
from matplotlib.figure import Figure

from rlkit.jobs.metrics import LABELS
from rlkit.jobs.tables import check_seeds, difference_table, find_group
from rlkit.support.progress import in_notebook
from rlkit.support.stats import bands, mean_interval

COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#F0E442")
_WHITE = ("figure.facecolor", "savefig.facecolor", "axes.facecolor")
_BLACK = ("text.color", "axes.labelcolor", "xtick.color", "ytick.color")
_ON = ("figure.constrained_layout.use", "axes.grid", "axes.axisbelow")
_OFF = ("axes.spines.top", "axes.spines.right", "legend.frameon")
STYLE: Any = dict.fromkeys(_WHITE, "white") | dict.fromkeys(_BLACK, "black") | dict.fromkeys(_OFF, False)
STYLE |= dict.fromkeys(_ON, True) | {"figure.dpi": 100, "font.size": 10, "lines.linewidth": 1.6}
STYLE |= {"axes.edgecolor": "0.3", "grid.color": "0.9", "image.cmap": "cividis"}
STYLE["axes.prop_cycle"] = cycler(color=COLORS)

if in_notebook() and plt.get_backend().lower().rpartition("_")[2] in ("agg", "inline"):
    # Servers set MPLBACKEND=Agg for scripts; a notebook that obeyed would be saved without its pictures. And
    # inline as it is by default shows no later pyplot figure if the first one is made in a style's context.
    get_ipython().run_line_magic("matplotlib", "inline")  # pyright: ignore[reportOptionalMemberAccess]

CURVES = ("val_reward", "reward", "format_reward", "response_length", "token_entropy", "grad_norm")


@contextmanager
def style():
    """The house style for your own figures: ``with style(): fig, ax = plt.subplots()``."""
    with plt.rc_context(STYLE):
        yield


def figure(rows: int = 1, columns: int = 1, width: float = 4.0, height: float = 2.8):
    """``(fig, axes)`` in the house style, axes a flat list; shown only where it is the cell's value."""
    with plt.rc_context(STYLE):
        fig, axes = plt.subplots(rows, columns, figsize=(width * columns, height * rows), squeeze=False)
    plt.close(fig)
    return fig, list(axes.flat)


def _table(run) -> pd.DataFrame:
    return run if isinstance(run, pd.DataFrame) else run.metrics


def _panels(metrics: Sequence[str], columns: int, **size):
    """(fig, an axis for each metric); the rest of the grid stays empty."""
    columns = min(columns, len(metrics))
    fig, axes = figure(-(-len(metrics) // columns), columns, **size)
    for ax, metric in zip(axes, metrics):
        ax.set(xlabel="step", ylabel=LABELS.get(metric, metric))
    for ax in axes[len(metrics) :]:
        ax.set_visible(False)
    return fig, axes


def curves(run, metrics: Sequence[str] = CURVES) -> Figure:
    """One panel per metric over the steps of one run; validation accuracy with its 95 % interval.

    run: a Run, or its metrics as a DataFrame with a ``step`` column. Metrics that the run did not log are
    left out. Training metrics are noisy: their curve is the mean over nine steps around each, over the raw
    values in pale.
    """
    table = _table(run).set_index("step")
    logged = [metric for metric in metrics if metric in table and len(table[metric].dropna())]
    if not logged:
        raise ValueError(f"metrics: got {list(metrics)}, expected some of {', '.join(table.columns)}")
    fig, axes = _panels(logged, 3)
    for ax, metric in zip(axes, logged):
        series = table[metric].dropna()
        if not metric.startswith("val_"):
            ax.plot(series.index, series, alpha=0.3)
            ax.plot(series.index, series.rolling(9, min_periods=1, center=True).mean(), color=COLORS[0])
            continue
        ax.plot(series.index, series, marker="o", markersize=4)
        if f"{metric}_se" in table:
            half = 1.96 * table[f"{metric}_se"].reindex(series.index)
            ax.fill_between(series.index, series - half, series + half, alpha=0.2, linewidth=0)
    return fig


def _place(run, x: str) -> pd.Series:
    """Where each row of a run stands on the axis ``x``: its step, the rollouts or the updates so far."""
    table = _table(run)
    if x == "rollouts":
        return table.step * run.config["rollout_batch_size"]
    return table.optimizer_steps.fillna(0).cumsum() if x == "updates" else table.step


def seeds(
    groups: Mapping[str, Sequence], metrics: str | Sequence[str] = "val_reward", x: str = "step"
) -> Figure:
    """Several algorithms, several seeds each: a thin line per seed, the mean thick, its 95 % interval a band.

    groups: name -> runs (or metrics tables). x: "step", "rollouts" (responses sampled so far) or "updates"
    (optimizer steps so far). The band is Student's interval of the mean over the seeds, at the steps that
    every seed has; with one seed there is none, and the legend notes it. ValueError for two runs of one seed.
    """
    check_seeds(groups)
    if x not in ("step", "rollouts", "updates"):
        raise ValueError(f"x: got {x!r}, expected 'step', 'rollouts' or 'updates'")
    metrics = [metrics] if isinstance(metrics, str) else list(metrics)
    fig, axes = _panels(metrics, 2, width=5.0, height=3.4)
    for ax, metric in zip(axes, metrics):
        ax.set_xlabel(x)
        for i, (name, runs) in enumerate(groups.items()):
            color, n = COLORS[i % len(COLORS)], len(runs)
            for run in runs:
                values = _table(run)[metric]
                ax.plot(
                    _place(run, x)[values.notna()], values.dropna(), color=color, alpha=0.35, linewidth=0.8
                )
            band = bands(runs, metric)
            band = band[band.n == n]
            label = f"{name} ({n} seeds)" if n > 1 else f"{name} (one seed, no interval)"
            places: Any = pd.concat([_place(run, x).set_axis(_table(run).step.astype(int)) for run in runs])
            at = places.groupby(level=0).mean().reindex(band.index)
            ax.plot(at, band["mean"], color=color, linewidth=2, label=label)
            if n > 1:
                ax.fill_between(at, band.low, band.high, color=color, alpha=0.15, linewidth=0)
    axes[0].legend()
    return fig


def ends(groups: Mapping[str, Sequence], baseline: str | None = None, metric: str = "val_reward") -> Figure:
    """Where the runs end: a dot per seed, the mean and its interval; beside it the differences by seed.

    The right panel is ``difference_table``: each group minus the baseline (None is the first), paired by
    seed, with the 95 % interval of the mean. One that crosses the line at 0 shows no difference.
    """
    reference = find_group(groups, baseline)
    finals = {name: [float(_table(r)[metric].dropna().iloc[-1]) for r in g] for name, g in groups.items()}
    rows = range(len(finals), 0, -1)
    fig, (left, right) = figure(1, 2, width=4.6, height=1.2 + 0.34 * len(finals))
    for i, (y, values) in enumerate(zip(rows, finals.values())):
        mean, low, high = mean_interval(values)
        left.plot(values, [y] * len(values), "o", color=COLORS[i % len(COLORS)], alpha=0.45, markersize=5)
        left.errorbar(mean, y, xerr=[[mean - low], [high - mean]], fmt="|", color="black", capsize=3)
    gaps = difference_table(groups, reference, metric)
    for i, (y, name) in enumerate(zip(rows, finals)):
        if name != reference and (row := gaps.loc[f"{name} - {reference}"]).seeds > 1:
            error = [[row.difference - row.low], [row.high - row.difference]]
            right.errorbar(row.difference, y, xerr=error, fmt="o", color=COLORS[i % len(COLORS)], capsize=3)
    right.axvline(0, color="0.4", linewidth=1)
    left.set(yticks=list(rows), yticklabels=list(finals), xlabel=f"last {LABELS.get(metric, metric)}")
    right.set(yticks=list(rows), yticklabels=[], xlabel=f"difference to {reference}, by seed")
    right.set_ylim(left.get_ylim())
    return fig


def against(lines: Mapping[str, Mapping[float, Sequence]], xlabel: str, metric: str = "val_reward") -> Figure:
    """The last value of a metric over a setting, such as the learning rate: a line per name.

    lines: name -> {value of the setting: runs}. Dots are runs, the line goes through their means, bars are
    95 % intervals of these. The axis is logarithmic.
    """
    fig, (ax,) = figure(width=6.4, height=3.4)
    for i, (name, groups) in enumerate(lines.items()):
        color, values = COLORS[i % len(COLORS)], sorted(groups)
        finals = [[float(_table(run)[metric].dropna().iloc[-1]) for run in groups[v]] for v in values]
        for value, ends_there in zip(values, finals):
            ax.plot([value] * len(ends_there), ends_there, "o", color=color, alpha=0.35, markersize=4)
        means, low, high = zip(*map(mean_interval, finals))
        error = [[m - b for m, b in zip(means, low)], [t - m for m, t in zip(means, high)]]
        ax.errorbar(values, means, yerr=error, color=color, capsize=3, label=name)
    ax.set(xlabel=xlabel, ylabel=f"last {LABELS.get(metric, metric)}", xscale="log")
    ax.legend()
    return fig
