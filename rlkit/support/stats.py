"""Small statistics: chances with their uncertainty, and the spread over seeds."""

import math

import numpy as np
import pandas as pd
from scipy import stats


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
