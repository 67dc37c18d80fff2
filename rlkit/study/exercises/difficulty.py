"""Exercises on difficulty weights, and on RFT beside a mean baseline."""

from __future__ import annotations

import math

import sympy as sp

from rlkit.study import derivations
from rlkit.study.exercises.baselines import RATES
from rlkit.study.exercises.core import closed_form, exercise


def _binomial_weight(p, G, norm):
    total = 0.0
    for k in range(1, G):
        ways = 1.0
        for i in range(k):
            ways = ways * (G - i) / (i + 1)
        total += ways * p**k * (1 - p) ** (G - k) * (k / G) * (1 - k / G) / norm(k / G)
    return total / (p * (1 - p))


def _limit(normalizer, norm):
    def reference(p):
        return (p * (1 - p)) / norm(p) / (p * (1 - p))

    return reference, closed_form(
        lambda: sp.sympify(derivations.difficulty_weight_limit(normalizer)), p=derivations.p
    )


_LIMIT_CASES = [(f"p = {p}", (p,)) for p in RATES]
_LIMIT_HINT = (
    "With many responses the group's statistics are the policy's own: the divisor is a function of p.",
    "The estimator is then E[(r - p) score] / norm = grad p / norm.",
)


@exercise(
    title="Difficulty weight of Dr. GRPO, G to infinity",
    difficulty=1,
    minutes=5,
    problem="derive_difficulty_reweightings",
    notebook="05",
    reveals="rlkit.study.derivations:difficulty_weight_limit",
    symbols=("p",),
    solution=_limit("none", lambda p: 1.0)[1],
    cases=lambda: list(_LIMIT_CASES),
    hints=_LIMIT_HINT,
)
def difficulty_weight_none(p):
    """w in grad J_w = E_x[w grad eta] for advantages r - mean, in p (the success rate eta)."""
    return _limit("none", lambda x: 1.0)[0](p)


difficulty_weight_none.mistake(
    "p (1 - p), the gradient of a sigmoid policy, is counted twice: grad eta holds it", "none_twice"
)(lambda p: p * (1 - p))
difficulty_weight_none.mistake("this is MaxRL's weight", "none_is_maxrl")(lambda p: 1 / p)


@exercise(
    title="Difficulty weight of GRPO, G to infinity",
    difficulty=2,
    minutes=10,
    problem="derive_difficulty_reweightings",
    notebook="05",
    reveals="rlkit.study.derivations:difficulty_weight_limit",
    symbols=("p",),
    solution=_limit("std", lambda p: math.sqrt(p * (1 - p)))[1],
    cases=lambda: list(_LIMIT_CASES),
    hints=_LIMIT_HINT,
)
def difficulty_weight_std(p):
    """The same for advantages (r - mean) / std."""
    return _limit("std", lambda x: math.sqrt((1 - x) ** 2 * x + x**2 * (1 - x)))[0](p)


difficulty_weight_std.mistake(
    "the variance stands below the line; the deviation is its root", "std_variance"
)(lambda p: 1 / (p * (1 - p)))
difficulty_weight_std.mistake(
    "it is upside down: a small deviation should make a large weight", "std_inverted"
)(lambda p: (p * (1 - p)) ** 0.5)
difficulty_weight_std.mistake(
    "sqrt(p) is taken for the deviation of a 0/1 reward, sqrt(p (1 - p))", "std_root_p"
)(lambda p: p**-0.5)


@exercise(
    title="Difficulty weight of MaxRL, G to infinity",
    difficulty=1,
    minutes=5,
    problem="derive_difficulty_reweightings",
    notebook="05",
    reveals="rlkit.study.derivations:difficulty_weight_limit",
    symbols=("p",),
    solution=_limit("mean", lambda p: p)[1],
    cases=lambda: list(_LIMIT_CASES),
    hints=_LIMIT_HINT,
)
def difficulty_weight_mean(p):
    """The same for advantages (r - mean) / mean."""
    return _limit("mean", lambda x: x)[0](p)


difficulty_weight_mean.mistake(
    "it is upside down: hard prompts (small p) should weigh more", "mean_inverted"
)(lambda p: p)
difficulty_weight_mean.mistake("1 - p is taken for the mean reward, which is p", "mean_of_wrong")(
    lambda p: 1 / (1 - p)
)
difficulty_weight_mean.mistake("this is GRPO's weight", "mean_is_grpo")(lambda p: (p * (1 - p)) ** -0.5)


@exercise(
    title="Difficulty weight of a finite group",
    difficulty=4,
    minutes=25,
    problem="derive_difficulty_reweightings",
    notebook="05",
    reveals="rlkit.study.derivations:difficulty_weight",
    axes=(),
    solution=lambda p, G, eps: float(derivations.measured_difficulty_weight([p], G, "mean", "std", eps)[0]),
    cases=lambda: [
        (f"p = {p}, G = {size}, eps = {eps}", (p, size, eps))
        for p, size, eps in ((0.3, 2, 1e-6), (0.1, 8, 1e-6), (0.5, 4, 0.1), (0.9, 5, 1e-6))
    ],
    hints=(
        "K of G responses are right with chance C(G, K) p^K (1 - p)^(G - K). What is the estimator for a "
        "given K?",
        "(K/G)(1 - K/G) / (std + eps) / (p (1 - p)); torch.std of K ones and G - K zeros is sqrt(K (G - K) / "
        "(G (G - 1))).",
    ),
)
def finite_group_weight(p, G, eps):
    """w_G(p) = E_K[(K/G)(1 - K/G) / (std_K + eps)] / (p (1 - p)), K ~ Binomial(G, p), std as torch.std."""
    return _binomial_weight(p, G, lambda share: math.sqrt(G / (G - 1) * share * (1 - share)) + eps)


finite_group_weight.mistake(
    "the deviation divides by G; torch.std's default divides by G - 1", "finite_population_std"
)(lambda p, G, eps: _binomial_weight(p, G, lambda x: math.sqrt(x * (1 - x)) + eps))
finite_group_weight.mistake("this is the limit of infinitely many responses", "finite_is_limit")(
    lambda p, G, eps: 1 / (math.sqrt(p * (1 - p)) + eps)
)
finite_group_weight.mistake("p (1 - p), the gradient's own size, is not divided out", "finite_not_divided")(
    lambda p, G, eps: (
        p * (1 - p) * _binomial_weight(p, G, lambda x: math.sqrt(G / (G - 1) * x * (1 - x)) + eps)
    )
)
finite_group_weight.mistake(
    "groups that are all right or all wrong are left out of the chances as well", "finite_conditional"
)(
    lambda p, G, eps: (
        _binomial_weight(p, G, lambda x: math.sqrt(G / (G - 1) * x * (1 - x)) + eps)
        / (1 - p**G - (1 - p) ** G)
    )
)
finite_group_weight.mistake("eps is missing", "finite_no_eps")(
    lambda p, G, eps: _binomial_weight(p, G, lambda x: math.sqrt(G / (G - 1) * x * (1 - x)))
)
finite_group_weight.mistake("the deviation is not in it: this is Dr. GRPO's (G - 1)/G", "finite_none")(
    lambda p, G, eps: _binomial_weight(p, G, lambda x: 1.0)
)


@exercise(
    title="MaxRL's weight of a finite group",
    difficulty=3,
    minutes=15,
    problem="derive_difficulty_reweightings",
    notebook="05",
    reveals="rlkit.study.derivations:difficulty_weight_closed_form",
    symbols=("p", "G"),
    solution=closed_form(
        lambda: derivations.difficulty_weight_closed_form("mean"), p=derivations.p, G=derivations.G
    ),
    cases=lambda: [(f"p = {p}, G = {size}", (p, size)) for p in RATES for size in (2, 8)],
    hints=(
        "(K/G)(1 - K/G) / (K/G) = 1 - K/G, but only where K > 0.",
        "E[1 - K/G] = 1 - p, and K = 0, where it would be 1, has the chance (1 - p)^G. Divide by p (1 - p).",
    ),
)
def finite_weight_mean(p, G):
    """w_G(p) for advantages (r - mean) / mean, eps = 0, in p and G."""
    return _binomial_weight(p, G, lambda share: share)


finite_weight_mean.mistake("this is the limit of infinitely many responses", "maxrl_limit")(
    lambda p, G: 1 / p + 0 * G
)
finite_weight_mean.mistake(
    "the exponent is G, not G - 1: one factor 1 - p was divided out", "maxrl_exponent"
)(lambda p, G: (1 - (1 - p) ** G) / p)
finite_weight_mean.mistake("1 - p, from the gradient's own size, is not divided out", "maxrl_not_divided")(
    lambda p, G: ((1 - p) - (1 - p) ** G) / p
)


@exercise(
    title="Second moments of RFT and of a mean baseline",
    difficulty=2,
    minutes=10,
    problem="think_about_rft",
    notebook="05",
    reveals="rlkit.study.derivations:second_moments_with_equal_norms",
    symbols=("p",),
    axes=("estimator",),
    solution=lambda p: [
        float(m.subs(derivations.p, p)) for m in derivations.second_moments_with_equal_norms()
    ],
    cases=lambda: [(f"p = {p}", (p,)) for p in RATES],
    hints="With |score| = 1 the second moment is E[coefficient^2]: the coefficient is 1 or 0 for RFT.",
)
def rft_second_moments(p):
    """(RFT's, mean baseline's) E[|coefficient x score|^2], every |score| = 1: coefficients r and r - p."""
    return [p * 1.0**2 + (1 - p) * 0.0, p * (1 - p) ** 2 + (1 - p) * (0 - p) ** 2]


rft_second_moments.mistake("the two are swapped", "moments_swapped")(lambda p: (p * (1 - p), p))
rft_second_moments.mistake(
    "wrong answers are forgotten: the baseline pushes them down, too", "moments_right_only"
)(lambda p: (p, p * (1 - p) ** 2))
rft_second_moments.mistake(
    "RFT's is the variance of r where its second moment is asked for", "moments_variance"
)(lambda p: (p * (1 - p), p * (1 - p)))
