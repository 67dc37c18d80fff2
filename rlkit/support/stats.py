"""Small statistics: chances with their uncertainty, and the spread over seeds."""

import math
from typing import Any

import numpy as np
import pandas as pd
from scipy import optimize, stats


def pass_at_k(n: int, c: int, k: int) -> float:
    """Unbiased estimate of the chance that at least one of k responses is right, from c right ones of n.

    1 - C(n - c, k) / C(n, k): of all ways to pick k of the n responses, the share with a right one among
    them. Needs 0 <= c <= n and 1 <= k <= n. Source: Chen et al. 2021 (2107.03374).
    """
    if not 1 <= k <= n:
        raise ValueError(f"k: got {k}, expected 1 to n = {n}")
    if not 0 <= c <= n:
        raise ValueError(f"c: got {c}, expected 0 to n = {n}")
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def mean_se(values) -> tuple[float, float]:
    """(mean, its standard error s / sqrt(n) with the unbiased s); a single value has standard error 0."""
    values = np.asarray(values, dtype=float)
    if not values.size:
        raise ValueError("values: got none, expected at least one number")
    return float(values.mean()), float(stats.sem(values)) if values.size > 1 else 0.0


def binomial_se(p: float, n: int) -> float:
    """Standard error sqrt(p (1 - p) / n) of a share p counted over n independent trials."""
    if n < 1 or not 0 <= p <= 1:
        raise ValueError(f"p, n: got {p}, {n}, expected 0 <= p <= 1 and n >= 1")
    return math.sqrt(p * (1 - p) / n)


def wilson_interval(c: int, n: int, confidence: float = 0.95) -> tuple[float, float]:
    """(low, high) for the chance behind c successes in n trials; right also near 0 and 1, unlike p +- 2 SE.

    Source: Wilson 1927.
    """
    if n < 1 or not 0 <= c <= n:
        raise ValueError(f"c, n: got {c}, {n}, expected 0 <= c <= n and n >= 1")
    interval = stats.binomtest(c, n).proportion_ci(_checked(confidence), method="wilson")
    return float(interval.low), float(interval.high)


def mean_interval(values, confidence: float = 0.95) -> tuple[float, float, float]:
    """(mean, low, high): Student's t interval for the mean of independent runs (seeds).

    Values that are all the same, or one alone, say nothing about the spread: low and high are then the mean.
    """
    mean, se = mean_se(values)
    _checked(confidence)
    low, high = stats.t.interval(confidence, len(values) - 1, mean, se) if se else (mean, mean)
    return mean, float(low), float(high)


def bootstrap_interval(
    values, statistic=np.mean, confidence: float = 0.95, resamples: int = 9999, seed: int = 0
) -> tuple[float, float, float]:
    """(statistic, low, high) by the bias-corrected and accelerated bootstrap over independent values.

    For what has no formula: a median, a share of collapsed seeds, a maximum over steps. Values that are all
    the same say nothing about the spread: low and high are then the statistic.
    Source: Efron 1987, as in scipy.stats.bootstrap.
    """
    values, found = np.asarray(values, dtype=float), float(statistic(values))
    if len(values) < 2 or np.ptp(values) == 0:
        return found, found, found
    rng = np.random.default_rng(seed)
    options: dict[str, Any] = dict(
        confidence_level=_checked(confidence), n_resamples=resamples, rng=rng, vectorized=False
    )
    interval = stats.bootstrap((values,), statistic, **options).confidence_interval
    return found, float(interval.low), float(interval.high)


def paired_interval(a, b, confidence: float = 0.95) -> tuple[float, float, float]:
    """``mean_interval`` of a - b, pair by pair: variants on the same seeds, models on the same problems.

    What the pairs share (the seed's order of problems, a problem's difficulty) drops out of the spread.
    """
    if len(a) != len(b):
        raise ValueError(f"a, b: got {len(a)} and {len(b)} values, expected pairs")
    return mean_interval(np.subtract(a, b, dtype=float), confidence)


def mcnemar(right_a, right_b) -> float:
    """p-value of "both models are right equally often" from their answers to the same problems.

    Only the problems on which they differ count: of those, each model would have half. Exact, two-sided.
    Source: McNemar 1947.
    """
    a, b = np.asarray(right_a, dtype=bool), np.asarray(right_b, dtype=bool)
    if a.shape != b.shape:
        raise ValueError(f"right_a, right_b: got {a.shape} and {b.shape}, expected the same problems")
    only_a, only_b = int((a & ~b).sum()), int((b & ~a).sum())
    return float(stats.binomtest(only_a, only_a + only_b).pvalue) if only_a + only_b else 1.0


def holm(p_values) -> list[float]:
    """The p-values of several comparisons, adjusted so that the chance of one false find stays what it says.

    The smallest counts m times, the next m - 1 times, ...; none below the one before it, none above 1.
    Source: Holm 1979.
    """
    p = np.asarray(p_values, dtype=float)
    order = np.argsort(p)
    adjusted = np.empty_like(p)
    adjusted[order] = np.minimum(np.maximum.accumulate(p[order] * (len(p) - np.arange(len(p)))), 1.0)
    return adjusted.tolist()


def area_under_curve(steps, values) -> float:
    """The mean height of a curve over its steps (trapezoids): a fast rise counts, not the end alone."""
    steps, values = np.asarray(steps, dtype=float), np.asarray(values, dtype=float)
    if len(steps) < 2 or (np.diff(steps) <= 0).any():
        raise ValueError(f"steps: got {steps.tolist()}, expected at least two, rising")
    return float(np.trapezoid(values, steps) / (steps[-1] - steps[0]))


def detectable_difference(sd: float, n: int, power: float = 0.8, confidence: float = 0.95) -> float:
    """The smallest true mean difference that ``n`` pairs show (an interval without 0) in ``power`` of tries.

    sd: standard deviation of the differences over pairs. It is 1.16 sd for 8 seeds, 0.75 sd for 16. A smaller
    difference may well be there: "no difference shown" then says little.
    """
    if n < 2 or not 0 < power < 1 or sd < 0:
        raise ValueError(f"sd, n, power: got {sd}, {n}, {power}, expected sd >= 0, n >= 2, 0 < power < 1")
    bound = stats.t.ppf((1 + _checked(confidence)) / 2, n - 1)

    def lacking(shift: float) -> float:  # power minus the chance that |t| is beyond the bound
        far = stats.nct(n - 1, shift * math.sqrt(n))
        return power - float(far.sf(bound) + np.nan_to_num(far.cdf(-bound)))  # NaN: too small

    return sd * optimize.root_scalar(lacking, bracket=(1e-9, 10 * bound)).root


def bands(runs, column: str, confidence: float = 0.95) -> pd.DataFrame:
    """A curve's spread over seeds, step by step.

    runs: Run objects or metrics DataFrames (one per seed) with the columns "step" and ``column``. Steps at
    which a run has no value are left out for that run. Returns a DataFrame indexed by step: n (runs with a
    value), mean, low, high (t interval), min, max.
    """
    frames = [getattr(run, "metrics", run) for run in runs]
    having = [frame[["step", column]] for frame in frames if column in frame]
    if not having:
        known = ", ".join(sorted({name for frame in frames for name in frame})) or "(no runs given)"
        raise ValueError(f"column: got {column!r}, expected one of {known}")
    groups = pd.concat(having).dropna().astype({"step": int}).groupby("step")[column]
    rows = {step: (len(v), *mean_interval(v, confidence), v.min(), v.max()) for step, v in groups}
    names = ["n", "mean", "low", "high", "min", "max"]
    return pd.DataFrame.from_dict(rows, orient="index", columns=names).rename_axis("step")


def _checked(confidence: float) -> float:
    if not 0 < confidence < 1:
        raise ValueError(f"confidence: got {confidence}, expected a number between 0 and 1")
    return confidence
