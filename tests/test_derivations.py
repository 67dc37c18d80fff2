"""The derivations give the handout's answers, and the library's functions give the derivations' numbers."""

import math

import pytest
import sympy as sp
import torch

from rlkit.study import derivations as d

RATES = [0.02, 0.3, 0.5, 0.75, 0.95]


def same(left, right):
    return sp.simplify(left - right) == 0


def numbers(expression, rates=RATES):
    f = sp.lambdify(d.p, expression)
    return torch.tensor([float(f(rate)) for rate in rates], dtype=torch.float64)


# ---- REINFORCE and baselines


@pytest.mark.parametrize("n_actions", [2, 3, 4])
def test_log_derivative_trick_and_score_mean_are_zero(n_actions):
    assert d.log_derivative_trick(n_actions).is_zero_matrix
    assert d.score_mean(n_actions).is_zero_matrix


@pytest.mark.parametrize("baseline", [0, d.b])
def test_reinforce_is_unbiased_and_a_constant_baseline_is_free(baseline):
    gradient, estimate = d.reinforce(3, baseline)
    assert (gradient - estimate).applyfunc(sp.simplify).is_zero_matrix
    # the textbook form pi_1 (r_1 - mean reward)
    logits, probs = d.softmax_policy(3)
    rewards = sp.symbols("r_1:4", real=True)
    assert same(gradient[0], probs[0] * (rewards[0] - sum(r * pr for r, pr in zip(rewards, probs))))


@pytest.mark.parametrize("group_size, n_actions", [(2, 2), (3, 2), (5, 2), (2, 3), (3, 3)])
def test_group_mean_costs_one_over_g(group_size, n_actions):
    assert d.group_mean_factor(group_size, n_actions) == sp.Rational(group_size - 1, group_size)
    assert d.group_mean_factor_general().subs(d.G, group_size) == sp.Rational(group_size - 1, group_size)


def test_baseline_calcs():
    p, b, n = d.p, d.b, d.n
    assert same(d.baseline_variance(sp.Integer(0)), p * (1 - p) ** 3 / n)
    assert same(d.baseline_variance(b), p * (1 - p) * (1 - p - b) ** 2 / n)
    assert same(d.baseline_variance(p), p * (1 - p) * (1 - 2 * p) ** 2 / n)
    assert d.baseline_crossing() == sp.Rational(2, 3)
    assert same(d.optimal_baseline(), 1 - p) and same(d.optimal_baseline_by_score_norms(), 1 - p)
    assert d.baseline_variance(1 - p) == 0


@pytest.mark.parametrize("rate, baseline", [(0.3, 0.0), (0.3, 0.3), (0.8, 0.8)])
def test_baseline_variance_by_monte_carlo(rate, baseline):
    exact = float(d.baseline_variance(d.b).subs({d.p: rate, d.b: baseline, d.n: 4}))
    assert d.sampled_baseline_variance(rate, baseline, 4, n_trials=40_000) == pytest.approx(exact, rel=0.04)


def test_length_normalisation_climbs_reward_per_token_and_makes_baselines_matter():
    without, with_baseline = d.length_normalized_gradient()
    assert without.is_zero_matrix and not with_baseline.is_zero_matrix
    equal = {length: 7 for length in sp.symbols("L_1:4", positive=True)}
    assert with_baseline.subs(equal).applyfunc(sp.simplify).is_zero_matrix


# ---- difficulty weights


def test_weights_in_the_limit():
    assert d.difficulty_weight_limit("none") == 1
    assert same(d.difficulty_weight_limit("mean"), 1 / d.p)
    assert same(d.difficulty_weight_limit("std"), 1 / sp.sqrt(d.p * (1 - d.p)))


@pytest.mark.parametrize("group_size", [2, 3, 8])
def test_weights_closed_forms_agree_with_the_sum(group_size):
    assert same(d.difficulty_weight_closed_form("none"), (d.G - 1) / d.G)
    closed = d.difficulty_weight_closed_form("mean")
    assert same(closed, (1 - (1 - d.p) ** (d.G - 1)) / d.p)
    assert same(closed.subs(d.G, group_size), d.difficulty_weight("mean", group_size))
    assert d.difficulty_weight("none", group_size) == sp.Rational(group_size - 1, group_size)
    with pytest.raises(ValueError, match="closed form"):
        d.difficulty_weight_closed_form("std")


def test_std_weight_of_a_pair_by_hand():
    # K = 1 with chance 2 p q; deviation of (1, 0) with the correction is sqrt(1/2); (1/2)(1/2)/sqrt(1/2) =
    # sqrt(2)/4
    assert same(d.difficulty_weight("std", 2), 1 / sp.sqrt(2))
    assert same(d.difficulty_weight("population_std", 2), 1)


@pytest.mark.parametrize("normalizer", ["none", "mean", "std"])
def test_first_order_correction_is_the_slope_in_one_over_g(normalizer):
    limit, slope = d.difficulty_weight_limit(normalizer), d.difficulty_weight_correction(normalizer)
    rates, size = [0.4, 0.6], 400
    exact = d.measured_difficulty_weight(rates, size, "mean", normalizer, 1e-12)
    expansion = numbers(limit * (1 + slope / size), rates)
    assert torch.allclose(exact, expansion, rtol=1e-5)


@pytest.mark.parametrize("normalizer, eps", [("none", 0), ("mean", 1e-6), ("std", 1e-6), ("std", 0.1)])
@pytest.mark.parametrize("group_size", [2, 5, 8])
def test_the_library_has_these_weights(normalizer, eps, group_size):
    measured = d.measured_difficulty_weight(RATES, group_size, "mean", normalizer, eps)
    assert torch.allclose(measured, numbers(d.difficulty_weight(normalizer, group_size, eps)), atol=1e-9)


def test_weight_of_a_readers_own_normaliser():
    mine = d.measured_difficulty_weight(RATES, 8, advantage_normalizer=lambda r: r.std(dim=1, keepdim=True))
    assert torch.allclose(mine, d.measured_difficulty_weight(RATES, 8), atol=1e-9)


def test_weight_by_monte_carlo():
    estimate, error = d.sampled_difficulty_weight(0.3, 8, "mean")
    assert (
        abs(estimate - d.measured_difficulty_weight([0.3], 8, advantage_normalizer="mean").item()) < 4 * error
    )


def test_rft_beside_drgrpo():
    p = d.p
    for size in (2, 4):
        mean, variance = d.group_estimator_moments("none", size)
        assert same(mean, p * (1 - p)) and same(variance, p * (1 - p) ** 3 / size)
        mean, _ = d.group_estimator_moments("mean", size)
        assert same(mean, p * (1 - p) * (size - 1) / size)
        assert same(d.group_estimator_moments("others", size)[0], p * (1 - p))
    assert [sp.expand(m) for m in d.second_moments_with_equal_norms()] == [p, sp.expand(p * (1 - p))]
    # a pair: the estimate is 1/4 when the two rewards differ, else 0
    assert same(d.group_estimator_moments("mean", 2)[1], 2 * p * (1 - p) / 16 - (p * (1 - p) / 2) ** 2)


# ---- surrogates, importance weights


@pytest.mark.parametrize("block, length", [(1, 2), (1, 3), (2, 4), (3, 3), (4, 4)])
def test_block_weights_climb_the_block_surrogate(block, length):
    assert set(d.surrogate_gap(block, length)) == {0}


def test_token_weights_do_not_climb_the_true_objective():
    assert any(gap != 0 for gap in d.surrogate_gap(1, 2, objective_block=2))


def test_surrogate_objective_by_hand_for_two_tokens():
    new, old = d.two_letter_policy("p", 2), d.two_letter_policy("q", 2)
    reward_only_11 = {
        s: int(str(s) == "r_11") for s in d.surrogate_objective(1, 2).free_symbols if str(s)[0] == "r"
    }
    expected = new[()] * old[(1,)] + old[()] * new[(1,)]
    assert same(d.surrogate_objective(1, 2).subs(reward_only_11), expected)


def test_surrogates_on_three_letters_through_the_library():
    new, old = d.tabular_logits(3, 4, seed=0), d.tabular_logits(3, 4, seed=1)
    rewards = torch.rand(81, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    for block, method in ((1, "noclip"), (2, d.pairwise_loss)):
        by_definition = d.surrogate_gradient(new, old, rewards, 4, block)
        assert torch.allclose(
            d.gradient_through_library(new, rewards, 4, method, old), by_definition, atol=1e-12
        )
    assert torch.allclose(
        d.surrogate_gradient(new, old, rewards, 4, 4), d.exact_gradient(new, rewards, 4), atol=1e-12
    )


@pytest.mark.parametrize("vocab_size, length", [(3, 1), (3, 3)])
def test_autograd_through_the_library_is_the_sum_over_all_outcomes(vocab_size, length):
    logits = d.tabular_logits(vocab_size, length, seed=3)
    rewards = torch.rand(vocab_size**length, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    exact = d.exact_gradient(logits, rewards, length)
    assert torch.allclose(d.gradient_through_library(logits, rewards, length), exact, atol=1e-12)
    assert torch.allclose(d.gradient_through_library(logits, rewards - 0.7, length), exact, atol=1e-12)
    assert torch.allclose(d.gradient_through_library(logits, rewards, length, "noclip"), exact, atol=1e-12)


def test_autograd_matches_the_symbolic_gradient():
    logits, rewards = d.tabular_logits(3, 1, seed=5), torch.tensor([1.0, 0.0, 0.25], dtype=torch.float64)
    symbolic, _ = d.reinforce(3)
    values = dict(zip(sp.symbols("theta_1:4 r_1:4", real=True), [*logits[0].tolist(), *rewards.tolist()]))
    expected = torch.tensor([float(entry.subs(values)) for entry in symbolic], dtype=torch.float64)
    assert torch.allclose(d.gradient_through_library(logits, rewards, 1)[0], expected, atol=1e-12)


def test_groups_through_the_library():
    logits, rewards = d.tabular_logits(3, 1, seed=6), torch.tensor([1.0, 0.0, 0.0], dtype=torch.float64)
    exact = d.exact_gradient(logits, rewards, 1)[0]
    for size in (2, 4):
        assert torch.allclose(
            d.group_gradient_through_library(logits[0], rewards, size), exact * (size - 1) / size
        )
        assert torch.allclose(d.group_gradient_through_library(logits[0], rewards, size, "none"), exact)
        weight = d.measured_difficulty_weight([logits[0].softmax(0)[0].item()], size)
        with_std = d.group_gradient_through_library(logits[0], rewards, size, advantage_normalizer="std")
        assert torch.allclose(with_std, exact * weight, atol=1e-12)


def test_sequence_weights_grow_exponentially_and_their_geometric_mean_does_not():
    one = d.sequence_weight_moment(1)
    assert same(d.sequence_weight_moment(3), one**3) and same(d.sequence_weight_moment(2, order=1), 1)
    values = {d.p: 0.6, d.q: 0.5}
    assert float(one.subs(values)) == pytest.approx(1.04)
    measured = d.sampled_sequence_weights([1, 8, 32], [0.6, 0.4], [0.5, 0.5], n_samples=50_000)
    assert measured[8][0] == pytest.approx(1.04**8 - 1, rel=0.1)
    assert (
        measured[32][0] > measured[8][0] > measured[1][0]
        and measured[32][1] < measured[8][1] < measured[1][1]
    )
    geometric = [d.sequence_weight_moment(8, order, sp.Rational(1, 8)).subs(values) for order in (1, 2)]
    assert measured[8][1] == pytest.approx(float(geometric[1] - geometric[0] ** 2), rel=0.1)


# ---- clipping and KL


def test_clip_mask_is_ppos():
    assert d.clip_mask() == {
        (1, "low"): 1,
        (1, "inside"): 1,
        (1, "high"): 0,
        (-1, "low"): 0,
        (-1, "inside"): 1,
        (-1, "high"): 1,
    }


@pytest.mark.parametrize("method", ["none", "noclip", "grpo", "cispo"])
@pytest.mark.parametrize("sign", [1, -1])
def test_the_librarys_gradient_has_the_symbolic_coefficient(method, sign):
    ratios = {"low": 0.5, "inside": 1.1, "high": 1.5}
    measured = d.measured_score_coefficient(method, 2.0 * sign, list(ratios.values()), cliprange=0.2)
    w = sp.Symbol("w", positive=True)
    expected = [
        float(
            sp.sympify(d.score_coefficient(method, sign, region)).subs(
                {d.A: 2 * sign, d.epsilon: 0.2, w: ratio}
            )
        )
        for region, ratio in ratios.items()
    ]
    assert torch.allclose(measured, torch.tensor(expected, dtype=torch.float64), atol=1e-12)


def test_gspo_divides_by_the_length_by_itself():
    assert list(d.gspo_gradient(3)) == [sp.Rational(1, 3)] * 3
    assert list(d.gspo_gradient(2, exponent=1)) == [1, 1]


def test_kl_estimators():
    columns = d.kl_gradients(3)
    assert columns["k1"].is_zero_matrix
    assert (columns["k2"] - columns["reverse"]).applyfunc(sp.simplify).is_zero_matrix
    assert (columns["k3"] - columns["forward"]).applyfunc(sp.simplify).is_zero_matrix
    # autograd on the definition of KL(pi, ref)
    logits = torch.tensor([0.3, -0.2, 0.9], dtype=torch.float64, requires_grad=True)
    ref = torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64)
    pi = logits.softmax(0)
    (gradient,) = torch.autograd.grad((pi * (pi / ref).log()).sum(), logits)
    values = dict(
        zip(
            (*sp.symbols("theta_1:4", real=True), *sp.symbols("rho_1:3", positive=True)),
            (0.3, -0.2, 0.9, 0.2, 0.3),
        )
    )
    got = [float(entry.subs(values)) for entry in columns["reverse"]]
    assert all(math.isclose(x, y, abs_tol=1e-12) for x, y in zip(got, gradient.tolist()))
