"""Exercises on REINFORCE and baselines. An answer is an expression in the symbols, a number or a function.

References enumerate outcomes with plain floats; no closed form is written in them that could be copied.
"""

from __future__ import annotations

import math
from itertools import product

import sympy as sp
import torch

from rlkit.study import derivations
from rlkit.study.exercises.core import closed_form, exercise

RATES = (0.1, 0.3, 0.5, 0.8, 0.95)


def bernoulli_moments(p, value):
    """Mean and variance of value(answer, score), A ~ Bernoulli(p); the score by a finite difference."""

    def log_prob(answer, theta):
        return -math.log1p(math.exp(-theta if answer else theta))

    theta, h = math.log(p / (1 - p)), 1e-5
    values = {a: value(a, (log_prob(a, theta + h) - log_prob(a, theta - h)) / (2 * h)) for a in (0, 1)}
    mean = p * values[1] + (1 - p) * values[0]
    return mean, p * (values[1] - mean) ** 2 + (1 - p) * (values[0] - mean) ** 2


@exercise(
    title="The score of a Bernoulli policy",
    difficulty=1,
    minutes=5,
    problem="baseline_calcs",
    notebook="02",
    reveals="rlkit.study.derivations:bernoulli_policy",
    symbols=("p",),
    axes=("answer",),
    solution=lambda p: [float(derivations.bernoulli_policy()[1][a].subs(derivations.p, p)) for a in (0, 1)],
    cases=lambda: [(f"p = {p}", (p,)) for p in RATES],
    hints=(
        "log pi(1) = log sigmoid(theta). Differentiate by theta, then write the result with p.",
        "sigmoid' = sigmoid (1 - sigmoid), so d log pi(1) = 1 - p. The two scores average to zero.",
    ),
)
def bernoulli_score(p):
    """(score of answer 0, of answer 1): d log pi(a) / d theta in p = sigmoid(theta). Two expressions."""
    h, theta = 1e-5, math.log(p / (1 - p))
    return [
        (-math.log1p(math.exp(sign * (theta + h))) + math.log1p(math.exp(sign * (theta - h)))) / (2 * h)
        for sign in (1, -1)
    ]


bernoulli_score.mistake("the derivative is with respect to p; the parameter is theta", "score_by_p")(
    lambda p: (-1 / (1 - p), 1 / p)
)
bernoulli_score.mistake("this is the derivative of pi itself, not of its logarithm", "score_without_log")(
    lambda p: (-p * (1 - p), p * (1 - p))
)
bernoulli_score.mistake("the score of answer 0 has lost its sign", "score_sign")(lambda p: (p, 1 - p))
bernoulli_score.mistake("the two scores are swapped", "score_swapped")(lambda p: (1 - p, -p))


@exercise(
    title="The exact policy gradient of a softmax",
    difficulty=2,
    minutes=10,
    problem="baseline_calcs",
    notebook="02",
    reveals="rlkit.study.derivations:reinforce",
    axes=("answer",),
    solution=lambda logits, rewards: derivations.exact_gradient(logits[None], rewards, 1)[0],
    cases=lambda: [
        (
            "three answers",
            (
                torch.tensor([0.5, -1.0, 0.2], dtype=torch.float64),
                torch.tensor([1.0, 0.0, 0.5], dtype=torch.float64),
            ),
        ),
        (
            "one right answer of four",
            (
                torch.tensor([0.0, 1.0, -2.0, 0.3], dtype=torch.float64),
                torch.tensor([0.0, 0.0, 1.0, 0.0], dtype=torch.float64),
            ),
        ),
        (
            "all right: nothing to learn",
            (torch.tensor([0.0, 1.0], dtype=torch.float64), torch.tensor([1.0, 1.0], dtype=torch.float64)),
        ),
    ],
    hints=(
        "d pi_a / d theta_k = pi_a ((a == k) - pi_k). Sum over a with the rewards.",
        "Two terms remain: pi_k r_k and pi_k times the mean reward.",
    ),
)
def softmax_gradient(logits, rewards):
    """d J / d logits, (n_answers,), for J = sum of softmax(logits) x rewards; no sampling."""

    def objective(x):
        weights = [math.exp(v) for v in x]
        return sum(w * r for w, r in zip(weights, rewards.tolist())) / sum(weights)

    x, h = logits.tolist(), 1e-5
    return [
        (objective([*x[:k], v + h, *x[k + 1 :]]) - objective([*x[:k], v - h, *x[k + 1 :]])) / (2 * h)
        for k, v in enumerate(x)
    ]


softmax_gradient.mistake(
    "the mean reward is not subtracted: the other answers' normaliser is forgotten", "no_normaliser"
)(lambda x, r: x.softmax(0) * r)
softmax_gradient.mistake(
    "pi_k is missing in front: this is the advantage, not the gradient", "advantage_only"
)(lambda x, r: r - (x.softmax(0) * r).sum())
softmax_gradient.mistake("the sign is reversed: this is the gradient of the loss -J", "softmax_sign")(
    lambda x, r: x.softmax(0) * ((x.softmax(0) * r).sum() - r)
)
softmax_gradient.mistake("the mean reward is added where it should be subtracted", "softmax_plus")(
    lambda x, r: x.softmax(0) * (r + (x.softmax(0) * r).sum())
)
softmax_gradient.mistake("the unweighted mean of the rewards is subtracted", "unweighted_mean")(
    lambda x, r: x.softmax(0) * (r - r.mean())
)


@exercise(
    title="baseline_calcs (a): variance without a baseline",
    difficulty=2,
    minutes=10,
    problem="baseline_calcs",
    notebook="02",
    reveals="rlkit.study.derivations:baseline_variance",
    symbols=("p", "n"),
    solution=closed_form(
        lambda: derivations.baseline_variance(sp.Integer(0)), p=derivations.p, n=derivations.n
    ),
    cases=lambda: [(f"p = {p}, n = {n}", (p, n)) for p in RATES for n in (1, 4)],
    hints=(
        "Z = r score is 1 - p with chance p and 0 otherwise. Var Z = E[Z^2] - E[Z]^2.",
        "E[Z^2] = p (1 - p)^2 and E[Z] = p (1 - p). A mean of n independent samples has Var Z / n.",
    ),
)
def baseline_variance_a(p, n):
    """Var of (1/n) sum_i r(A_i) grad log pi(A_i), in p and n."""
    return bernoulli_moments(p, lambda a, s: a * s)[1] / n


baseline_variance_a.mistake("E[Z]^2 is not subtracted: this is the second moment", "a_second_moment")(
    lambda p, n: p * (1 - p) ** 2 / n
)
baseline_variance_a.mistake("the variance is not divided by n", "a_without_n")(lambda p, n: p * (1 - p) ** 3)
baseline_variance_a.mistake("it is the variance of the reward: the score is forgotten", "a_reward_only")(
    lambda p, n: p * (1 - p) / n
)
baseline_variance_a.mistake("it is divided by n^2, but the n variances add up first", "a_n_squared")(
    lambda p, n: p * (1 - p) ** 3 / n**2
)


@exercise(
    title="baseline_calcs (b): variance with a constant baseline",
    difficulty=3,
    minutes=15,
    problem="baseline_calcs",
    notebook="02",
    reveals="rlkit.study.derivations:baseline_variance",
    symbols=("p", "b", "n"),
    solution=closed_form(derivations.baseline_variance, p=derivations.p, b=derivations.b, n=derivations.n),
    cases=lambda: [
        (f"p = {p}, b = {b}, n = {n}", (p, b, n)) for p in RATES for b in (0.0, 0.4, -1.0) for n in (1, 3)
    ],
    hints=(
        "Z is (1 - b)(1 - p) with chance p and (-b)(-p) = b p with chance 1 - p.",
        "A two-valued variable has variance p (1 - p) (difference of the values)^2. The difference is 1 - p "
        "- b.",
    ),
)
def baseline_variance_b(p, b, n):
    """Var of (1/n) sum_i (r(A_i) - b) grad log pi(A_i), in p, b and n."""
    return bernoulli_moments(p, lambda a, s: (a - b) * s)[1] / n


baseline_variance_b.mistake("E[Z]^2 is not subtracted: this is the second moment", "b_second_moment")(
    lambda p, b, n: (p * ((1 - b) * (1 - p)) ** 2 + (1 - p) * (b * p) ** 2) / n
)
baseline_variance_b.mistake("the baseline enters with the wrong sign", "b_sign")(
    lambda p, b, n: p * (1 - p) * (1 - p + b) ** 2 / n
)
baseline_variance_b.mistake("the baseline is subtracted for right answers only", "b_right_only")(
    lambda p, b, n: p * (1 - p) ** 3 * (1 - b) ** 2 / n
)
baseline_variance_b.mistake(
    "b is taken for a mere shift, which changes no variance; but it is multiplied by the score", "b_no_effect"
)(lambda p, b, n: p * (1 - p) ** 3 / n)
baseline_variance_b.mistake("the variance is not divided by n", "b_without_n")(
    lambda p, b, n: p * (1 - p) * (1 - p - b) ** 2
)


@exercise(
    title="baseline_calcs (c): the mean reward as baseline",
    difficulty=2,
    minutes=5,
    problem="baseline_calcs",
    notebook="02",
    reveals="rlkit.study.derivations:baseline_variance",
    symbols=("p", "n"),
    solution=closed_form(
        lambda: derivations.baseline_variance(derivations.p), p=derivations.p, n=derivations.n
    ),
    cases=lambda: [(f"p = {p}, n = {n}", (p, n)) for p in RATES for n in (1, 4)],
    hints="Put b = p into your answer to (b).",
)
def baseline_variance_c(p, n):
    """The variance of (b) with b = p, in p and n."""
    return bernoulli_moments(p, lambda a, s: (a - p) * s)[1] / n


baseline_variance_c.mistake("this is (a): the baseline is gone", "c_is_a")(lambda p, n: p * (1 - p) ** 3 / n)
baseline_variance_c.mistake("E[Z]^2 is not subtracted: this is the second moment", "c_second_moment")(
    lambda p, n: (p * (1 - p) ** 4 + (1 - p) * p**4) / n
)
baseline_variance_c.mistake("the bracket 1 - 2p is not squared", "c_not_squared")(
    lambda p, n: p * (1 - p) * (1 - 2 * p) / n
)


@exercise(
    title="The baseline with the least variance",
    difficulty=2,
    minutes=10,
    problem="baseline_calcs",
    notebook="02",
    reveals=(
        "rlkit.study.derivations:optimal_baseline",
        "rlkit.study.derivations:optimal_baseline_by_score_norms",
    ),
    symbols=("p",),
    solution=closed_form(derivations.optimal_baseline, p=derivations.p),
    cases=lambda: [(f"p = {p}", (p,)) for p in RATES],
    hints=(
        "Your answer to (b) is a parabola in b. Where is it lowest?",
        "The rare answer has the large score: a baseline should weigh rewards by the squared score.",
    ),
)
def optimal_baseline(p):
    """The b that makes the variance of (b) smallest, in p."""
    low, high = -1.0, 2.0  # a golden-section search on the enumerated variance
    for _ in range(200):
        x, y = low + 0.382 * (high - low), low + 0.618 * (high - low)
        first, second = (bernoulli_moments(p, lambda a, s, b=b: (a - b) * s)[1] for b in (x, y))
        low, high = (low, y) if first < second else (x, high)
    return round((low + high) / 2, 6)


optimal_baseline.mistake(
    "the mean reward is subtracted: the usual choice, but not the best one here", "optimal_is_mean"
)(lambda p: p)
optimal_baseline.mistake(
    "1/2 lies halfway between the rewards, but the two answers' scores differ in size", "optimal_half"
)(lambda p: 0.5 + 0 * p)
optimal_baseline.mistake("b = 0, no baseline, is best only at p = 1", "optimal_zero")(lambda p: 0 * p)


@exercise(
    title="Where the mean stops helping",
    difficulty=1,
    minutes=5,
    problem="baseline_calcs",
    notebook="02",
    reveals="rlkit.study.derivations:baseline_crossing",
    symbols=("n",),
    solution=lambda n: float(derivations.baseline_crossing()),
    cases=lambda: [("any n", (1,))],
    hints="Set (a) equal to (c): (1 - p)^2 = (1 - 2p)^2. Two roots; one is p = 0.",
)
def baseline_crossing(n):
    """The p strictly between 0 and 1 at which (a) and (c) have the same variance; a number."""

    def gap(p):
        return baseline_variance_c.reference(p, 1) - baseline_variance_a.reference(p, 1)

    low, high = 0.5, 0.9
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if gap(middle) < 0 else (low, middle)
    return round((low + high) / 2, 7)


baseline_crossing.mistake("1/2 is where (c)'s variance is zero, not where it equals (a)'s", "crossing_half")(
    lambda n: 0.5
)
baseline_crossing.mistake("both are zero at p = 1, but the inside is asked for", "crossing_one")(
    lambda n: 1.0
)
baseline_crossing.mistake("both are zero at p = 0, but the inside is asked for", "crossing_zero")(
    lambda n: 0.0
)


@exercise(
    title="What the group mean costs",
    difficulty=2,
    minutes=10,
    problem="baseline_calcs",
    notebook="02",
    reveals=(
        "rlkit.study.derivations:group_mean_factor",
        "rlkit.study.derivations:group_mean_factor_general",
    ),
    symbols=("G",),
    solution=closed_form(derivations.group_mean_factor_general, G=derivations.G),
    cases=lambda: [(f"G = {size}", (size,)) for size in (2, 3, 5)],
    hints=(
        "The group mean holds the row's own reward with weight 1/G; the other rewards are independent of its "
        "score.",
        "E[(r_j - r_j / G) score_j] is all that is left.",
    ),
)
def group_mean_factor(G):
    """E[(1/G) sum_j (r_j - group mean) grad log pi(y_j)] divided by grad J, in G."""
    p, total = 0.3, 0.0
    for group in product((0, 1), repeat=G):
        chance = math.prod(p if r else 1 - p for r in group)
        total += chance * sum((r - sum(group) / G) * (r - p) for r in group) / G
    return total / (p * (1 - p))


group_mean_factor.mistake(
    "the mean is treated as a constant, but it holds the row's own reward", "factor_one"
)(lambda G: 1 + 0 * G)
group_mean_factor.mistake("it is upside down: G/(G-1) is what you multiply by to undo it", "factor_inverted")(
    lambda G: G / (G - 1)
)
group_mean_factor.mistake("1/G is what the baseline takes away, not what remains", "factor_lost")(
    lambda G: 1 / G
)
group_mean_factor.mistake(
    "the rows are summed, but the estimator is their mean and does not grow with G", "factor_sum"
)(lambda G: G - 1)
