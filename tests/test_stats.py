"""Statistics against enumeration, hand calculation and scipy's own routines."""

import math
from itertools import combinations

import numpy as np
import pandas as pd
import pytest
from scipy import stats as scipy_stats

from rlkit.support.stats import bands, binomial_se, mean_interval, mean_se, pass_at_k, wilson_interval


@pytest.mark.parametrize("n, c", [(1, 0), (1, 1), (4, 1), (5, 2), (6, 6), (6, 0)])
def test_pass_at_k_counts_all_ways_to_pick_k(n, c):
    right = [i < c for i in range(n)]
    for k in range(1, n + 1):
        picks = list(combinations(right, k))
        assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, picks)) / len(picks))


def test_pass_at_k_is_unbiased_where_the_plug_in_is_not():
    p, n, k = 0.3, 5, 3
    expected = sum(math.comb(n, c) * p**c * (1 - p) ** (n - c) * pass_at_k(n, c, k) for c in range(n + 1))
    plug_in = sum(math.comb(n, c) * p**c * (1 - p) ** (n - c) * (1 - (1 - c / n) ** k) for c in range(n + 1))
    assert expected == pytest.approx(1 - 0.7**3) and plug_in < expected - 0.03


@pytest.mark.parametrize("arguments, name", [((4, 1, 5), "k"), ((4, 1, 0), "k"), ((4, 5, 1), "c")])
def test_pass_at_k_refuses(arguments, name):
    with pytest.raises(ValueError, match=f"^{name}: "):
        pass_at_k(*arguments)


def test_standard_errors_by_hand():
    assert mean_se([1, 0, 0, 0]) == (0.25, pytest.approx(0.25))  # s = 1/2, n = 4
    assert mean_se([3.0]) == (3.0, 0.0)
    assert binomial_se(0.5, 1024) == pytest.approx(0.015625)  # the handout's validation set
    with pytest.raises(ValueError, match="values"):
        mean_se([])


@pytest.mark.parametrize("c, n", [(0, 10), (3, 10), (10, 10), (70, 1024)])
def test_wilson_against_scipy(c, n):
    reference = scipy_stats.binomtest(c, n).proportion_ci(0.95, method="wilson")
    assert wilson_interval(c, n) == (
        pytest.approx(reference.low, abs=1e-12),
        pytest.approx(reference.high, abs=1e-12),
    )


def test_mean_interval_against_scipy():
    values = [0.732, 0.727, 0.748, 0.744]
    mean, low, high = mean_interval(values)
    reference = scipy_stats.ttest_1samp(values, 0).confidence_interval(0.95)
    assert (low, high) == (pytest.approx(reference.low), pytest.approx(reference.high))
    assert mean == pytest.approx(0.73775)
    assert mean_interval([2.0]) == (2.0, 2.0, 2.0)
    with pytest.raises(ValueError, match="confidence"):
        mean_interval(values, 95)


def test_bands_by_step():
    a = pd.DataFrame({"step": [0, 1, 2], "val_reward": [0.1, np.nan, 0.5]})
    b = pd.DataFrame({"step": [0, 2, 4], "val_reward": [0.3, 0.7, 0.9]})
    frame = bands([a, b], "val_reward")
    assert frame.index.tolist() == [0, 2, 4] and frame.n.tolist() == [2, 2, 1]
    assert frame["mean"].tolist() == pytest.approx([0.2, 0.6, 0.9])
    # n = 2: t = 12.706, standard error = |a - b| / 2 = 0.1
    assert frame.low[0] == pytest.approx(0.2 - 1.2706, abs=1e-4) and frame["min"].tolist() == [0.1, 0.5, 0.9]
    assert (frame.low[4], frame.high[4], frame["max"][4]) == (0.9, 0.9, 0.9)
    with pytest.raises(ValueError, match="column: got 'vall'.*val_reward"):
        bands([a], "vall")
