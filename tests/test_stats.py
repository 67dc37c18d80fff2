"""Statistics against enumeration, hand calculation and scipy's own routines."""

import math
from itertools import combinations

import numpy as np
import pandas as pd
import pytest
from scipy import stats as scipy_stats

from rlkit.support.stats import (
    area_under_curve,
    bands,
    binomial_se,
    bootstrap_interval,
    detectable_difference,
    holm,
    mcnemar,
    mean_interval,
    mean_se,
    paired_interval,
    pass_at_k,
    wilson_interval,
)


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


def test_pairs_lose_what_they_share():
    seeds = np.array([0.1, 0.5, 0.9, 0.3])
    gains = np.array([0.02, 0.03, 0.01, 0.02])
    reference = scipy_stats.ttest_rel(seeds + gains, seeds).confidence_interval(0.95)
    mean, low, high = paired_interval(seeds + gains, seeds)
    assert mean == pytest.approx(0.02) and (low, high) == (
        pytest.approx(reference.low),
        pytest.approx(reference.high),
    )
    unpaired = scipy_stats.ttest_ind(seeds + gains, seeds).confidence_interval(0.95)
    assert low > 0 > unpaired.low
    with pytest.raises(ValueError, match="a, b: got 2 and 3 values"):
        paired_interval([1, 2], [1, 2, 3])


def test_mcnemar_counts_the_coins_that_differ():
    both, only_a, only_b, none = [1, 1] * 5, [1, 0] * 7, [0, 1] * 2, [0, 0] * 9
    pairs = np.array(both + only_a + only_b + none).reshape(-1, 2)
    # 7 heads or more of 9, or 2 or fewer: 2 (36 + 9 + 1) of 512
    assert mcnemar(pairs[:, 0], pairs[:, 1]) == pytest.approx(2 * 46 / 512)
    assert mcnemar([1, 0], [1, 0]) == 1.0
    with pytest.raises(ValueError, match="the same problems"):
        mcnemar([1], [1, 0])


def test_holm_by_hand():
    # in order .005 x 4, .01 x 3, .03 x 2, .04 x 1 (at least the one before)
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.9, 0.8]) == [1.0, 1.0] and holm([0.04]) == [0.04] and holm([]) == []


def test_the_area_under_a_curve_by_hand():
    assert area_under_curve([0, 10, 40], [0.0, 0.8, 0.8]) == pytest.approx((4 + 24) / 40)
    for steps in ([0], [0, 0], [1, 0]):
        with pytest.raises(ValueError, match="steps: got"):
            area_under_curve(steps, [0.5] * len(steps))


def test_the_bootstrap_covers_a_median_and_is_the_same_each_time():
    rng = np.random.default_rng(1)
    hits = 0
    for _ in range(60):
        _, low, high = bootstrap_interval(rng.exponential(size=30), np.median, resamples=400)
        hits += low <= math.log(2) <= high  # the exponential's median
    assert 52 <= hits <= 60  # 95 % of 60 is 57
    values = [0.1, 0.4, 0.35, 0.2]
    assert bootstrap_interval(values) == bootstrap_interval(values)
    assert bootstrap_interval([0.5, 0.5]) == (0.5, 0.5, 0.5) == bootstrap_interval([0.5])


@pytest.mark.parametrize("n", [4, 8, 16])
def test_the_detectable_difference_is_found_in_four_of_five_tries(n):
    tries = np.random.default_rng(n).normal(detectable_difference(2.0, n), 2.0, size=(20_000, n))
    found = scipy_stats.ttest_1samp(tries, 0, axis=1).pvalue < 0.05
    assert found.mean() == pytest.approx(0.8, abs=0.01)


def test_the_detectable_difference_of_the_textbooks():
    assert detectable_difference(1.0, 34) == pytest.approx(
        0.5, abs=0.01
    )  # Cohen 1988: 34 pairs for half an SD
    assert detectable_difference(1.0, 8) == pytest.approx(1.16, abs=0.01)
    assert detectable_difference(0.0, 8) == 0.0
    for bad in (dict(sd=1, n=1), dict(sd=-1, n=8), dict(sd=1, n=8, power=1.0)):
        with pytest.raises(ValueError, match="sd, n, power"):
            detectable_difference(**bad)
