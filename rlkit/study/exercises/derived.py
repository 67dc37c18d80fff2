"""Exercises on the derivations. An answer may be a sympy expression in the named symbols, a number, or a
function.

References enumerate outcomes with plain floats; no closed form is written in them that could be copied.
"""

from __future__ import annotations

import math
from itertools import product

import sympy as sp
import torch

from rlkit.study import derivations
from rlkit.study.exercises.core import exercise

RATES = (0.1, 0.3, 0.5, 0.8, 0.95)


def _substituted(expression, **symbols):
    """A closed form of the library as a function of its symbols' values."""

    def function(*values):
        return float(expression().subs({symbol: value for symbol, value in zip(symbols.values(), values)}))

    return function


def _bernoulli_moments(p, value):
    """Mean and variance of value(answer, score), A ~ Bernoulli(p); the score by a finite difference."""

    def log_prob(answer, theta):
        return -math.log1p(math.exp(-theta if answer else theta))

    theta, h = math.log(p / (1 - p)), 1e-5
    values = {a: value(a, (log_prob(a, theta + h) - log_prob(a, theta - h)) / (2 * h)) for a in (0, 1)}
    mean = p * values[1] + (1 - p) * values[0]
    return mean, p * (values[1] - mean) ** 2 + (1 - p) * (values[0] - mean) ** 2


# ---- REINFORCE and baselines


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
    solution=_substituted(
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
    return _bernoulli_moments(p, lambda a, s: a * s)[1] / n


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
    solution=_substituted(derivations.baseline_variance, p=derivations.p, b=derivations.b, n=derivations.n),
    cases=lambda: [
        (f"p = {p}, b = {b}, n = {n}", (p, b, n)) for p in RATES for b in (0.0, 0.4, -1.0) for n in (1, 3)
    ],
    hints=(
        "Z is (1 - b)(1 - p) with chance p and (-b)(-p) = b p with chance 1 - p.",
        "A two-valued variable has variance p (1 - p) (difference of the values)^2. The difference is 1 - "
        "p - b.",
    ),
)
def baseline_variance_b(p, b, n):
    """Var of (1/n) sum_i (r(A_i) - b) grad log pi(A_i), in p, b and n."""
    return _bernoulli_moments(p, lambda a, s: (a - b) * s)[1] / n


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
    solution=_substituted(
        lambda: derivations.baseline_variance(derivations.p), p=derivations.p, n=derivations.n
    ),
    cases=lambda: [(f"p = {p}, n = {n}", (p, n)) for p in RATES for n in (1, 4)],
    hints="Put b = p into your answer to (b).",
)
def baseline_variance_c(p, n):
    """The variance of (b) with b = p, in p and n."""
    return _bernoulli_moments(p, lambda a, s: (a - p) * s)[1] / n


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
    solution=_substituted(derivations.optimal_baseline, p=derivations.p),
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
        first, second = (_bernoulli_moments(p, lambda a, s, b=b: (a - b) * s)[1] for b in (x, y))
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
    solution=_substituted(derivations.group_mean_factor_general, G=derivations.G),
    cases=lambda: [(f"G = {size}", (size,)) for size in (2, 3, 5)],
    hints=(
        "The group mean holds the row's own reward with weight 1/G; the other rewards are independent of "
        "its score.",
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


# ---- difficulty weights


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

    return reference, _substituted(
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
        "(K/G)(1 - K/G) / (std + eps) / (p (1 - p)); torch.std of K ones and G - K zeros is "
        "sqrt(K (G - K) / (G (G - 1))).",
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
    solution=_substituted(
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


# ---- off-policy


def _two_policies(length, seed):
    """Two policies over two letters, {prefix: chance of letter 1}, and the rewards, {response: r}."""
    generator = torch.Generator().manual_seed(seed)
    prefixes = [prefix for t in range(length) for prefix in product((0, 1), repeat=t)]
    responses = list(product((0, 1), repeat=length))
    draw = torch.rand(2 * len(prefixes) + len(responses), generator=generator, dtype=torch.float64).tolist()
    new = dict(zip(prefixes, draw))
    old = dict(zip(prefixes, draw[len(prefixes) :]))
    return new, old, dict(zip(responses, draw[2 * len(prefixes) :]))


def _surrogate(new, old, rewards, blocks):
    """sum over blocks (sets of positions drawn from ``new``) of the expected reward, over all responses."""
    total = 0.0
    for block in blocks:
        for response, reward in rewards.items():
            chance = 1.0
            for t, letter in enumerate(response):
                one = (new if t in block else old)[response[:t]]
                chance *= one if letter else 1 - one
            total += chance * reward
    return total


def _length(rewards):
    return len(next(iter(rewards)))


def _library_surrogate(block):
    def solution(new, old, rewards):
        length = _length(rewards)
        values = {sp.Symbol("r_" + "".join(map(str, y)), real=True): r for y, r in rewards.items()}
        for name, policy in (("p", new), ("q", old)):
            symbols = derivations.two_letter_policy(name, length)
            values |= {symbols[prefix]: chance for prefix, chance in policy.items()}
        return float(derivations.surrogate_objective(block, length).subs(values))

    return solution


@exercise(
    title="What token-level weights optimise",
    difficulty=3,
    minutes=20,
    problem="derive_surrogate_objectives",
    notebook="06",
    reveals="rlkit.study.derivations:surrogate_objective",
    axes=(),
    solution=_library_surrogate(1),
    cases=lambda: [("two tokens", _two_policies(2, 0)), ("three tokens", _two_policies(3, 1))],
    hints=(
        "One term per position t: only token t is drawn from the new policy, all before and after from the "
        "old.",
        "Loop over positions, inside over responses; multiply the chances of the letters; add chance x "
        "reward.",
    ),
)
def token_surrogate(new, old, rewards):
    """sum over t of E[r], where token t is drawn from ``new`` and every other token from ``old``.

    new, old: {prefix (tuple): chance that the next letter is 1}. rewards: {response (tuple of 0 and 1): r}.
    """
    return _surrogate(new, old, rewards, [{t} for t in range(_length(rewards))])


token_surrogate.mistake("this is J itself: every token is drawn from the new policy", "surrogate_true")(
    lambda new, old, r: _surrogate(new, old, r, [set(range(_length(r)))])
)
token_surrogate.mistake("the prefix is drawn from the new policy as well", "surrogate_new_prefix")(
    lambda new, old, r: _surrogate(new, old, r, [set(range(t + 1)) for t in range(_length(r))])
)
token_surrogate.mistake("the suffix is drawn from the new policy as well", "surrogate_new_suffix")(
    lambda new, old, r: _surrogate(new, old, r, [set(range(t, _length(r))) for t in range(_length(r))])
)
token_surrogate.mistake("it is a mean over positions, not a sum", "surrogate_mean")(
    lambda new, old, r: _surrogate(new, old, r, [{t} for t in range(_length(r))]) / _length(r)
)
token_surrogate.mistake("old and new policy are swapped", "surrogate_swapped")(
    lambda new, old, r: _surrogate(old, new, r, [{t} for t in range(_length(r))])
)


@exercise(
    title="What pairwise weights optimise",
    difficulty=3,
    minutes=15,
    problem="derive_surrogate_objectives",
    notebook="06",
    reveals="rlkit.study.derivations:surrogate_objective",
    axes=(),
    solution=_library_surrogate(2),
    cases=lambda: [("two tokens", _two_policies(2, 2)), ("four tokens", _two_policies(4, 3))],
    hints="The pairs are (1, 2), (3, 4), ...: which tokens does each term draw from the new policy?",
)
def pairwise_surrogate(new, old, rewards):
    """The pairwise surrogate: sum over t = 1 .. L/2 of E[r], tokens 2t-1 and 2t drawn from ``new``.

    Arguments as in token_surrogate; the length is even.
    """
    return _surrogate(new, old, rewards, [{t, t + 1} for t in range(0, _length(rewards), 2)])


pairwise_surrogate.mistake(
    "only one token of each pair is drawn from the new policy: the token-level surrogate", "pairs_of_one"
)(lambda new, old, r: _surrogate(new, old, r, [{t} for t in range(_length(r))]))
pairwise_surrogate.mistake("the pairs overlap: (1, 2), (2, 3) and so on", "pairs_overlap")(
    lambda new, old, r: _surrogate(new, old, r, [{t, t + 1} for t in range(_length(r) - 1)])
)
pairwise_surrogate.mistake("this is J itself: every token is drawn from the new policy", "pairs_true")(
    lambda new, old, r: _surrogate(new, old, r, [set(range(_length(r)))])
)
pairwise_surrogate.mistake("everything up to the pair is drawn from the new policy", "pairs_new_prefix")(
    lambda new, old, r: _surrogate(new, old, r, [set(range(t + 2)) for t in range(0, _length(r), 2)])
)


_RATIO_CASES = [(f"A = {a}, w = {w}", (a, w, 0.2)) for a in (1.0, -2.0) for w in (0.5, 0.9, 1.1, 1.5)]


def _slope(objective, a, w, eps):
    """d objective / d log w by a central difference."""
    h = 1e-6
    return round((objective(a, w * math.exp(h), eps) - objective(a, w * math.exp(-h), eps)) / (2 * h), 6)


@exercise(
    title="The gradient that PPO's clip leaves",
    difficulty=2,
    minutes=10,
    problem="derive_surrogate_objectives",
    notebook="06",
    reveals=("rlkit.study.derivations:score_coefficient", "rlkit.study.derivations:clip_mask"),
    axes=(),
    solution=lambda a, w, eps: derivations.measured_score_coefficient("grpo", a, [w], eps)[0],
    cases=lambda: list(_RATIO_CASES),
    hints="d(A w) / d log pi = A w. Where the min takes the clipped branch, w is not in it any more.",
)
def ppo_coefficient(A, w, epsilon):
    """The factor of grad log pi in the gradient of min(A w, A clip(w, 1 - epsilon, 1 + epsilon))."""
    return _slope(lambda a, x, e: min(a * x, a * min(max(x, 1 - e), 1 + e)), A, w, epsilon)


ppo_coefficient.mistake("the clip is symmetric here, whatever the sign of A", "mask_symmetric")(
    lambda a, w, e: a * w * (1 - e <= w <= 1 + e)
)
ppo_coefficient.mistake("there is no mask: the clip is forgotten", "mask_missing")(lambda a, w, e: a * w)
ppo_coefficient.mistake("the sides are swapped: A > 0 loses small ratios", "mask_swapped")(
    lambda a, w, e: a * w * (w >= 1 - e if a > 0 else w <= 1 + e)
)
ppo_coefficient.mistake("w is missing: this would be the on-policy gradient", "mask_without_w")(
    lambda a, w, e: a * (w <= 1 + e if a > 0 else w >= 1 - e)
)
ppo_coefficient.mistake(
    "clipped tokens keep a gradient of A (1 +- epsilon): this is CISPO-like", "mask_keeps_bound"
)(lambda a, w, e: min(a * w, a * min(max(w, 1 - e), 1 + e)))


@exercise(
    title="The gradient that CISPO leaves",
    difficulty=2,
    minutes=5,
    problem="derive_surrogate_objectives",
    notebook="06",
    reveals="rlkit.study.derivations:score_coefficient",
    axes=(),
    solution=lambda a, w, eps: derivations.measured_score_coefficient("cispo", a, [w], eps)[0],
    cases=lambda: list(_RATIO_CASES),
    hints="The weight is a constant, min(w, 1 + epsilon); only log pi is differentiated.",
)
def cispo_coefficient(A, w, epsilon):
    """The factor of grad log pi in the gradient of stop_gradient(min(w, 1 + epsilon)) A log pi."""
    return A * (w if w < 1 + epsilon else 1 + epsilon)


cispo_coefficient.mistake("this is PPO's: tokens beyond the bound lose their gradient", "cispo_masked")(
    lambda a, w, e: a * w * (w <= 1 + e if a > 0 else w >= 1 - e)
)
cispo_coefficient.mistake("the weight is held from below as well", "cispo_two_sided")(
    lambda a, w, e: a * min(max(w, 1 - e), 1 + e)
)
cispo_coefficient.mistake("the weight is not held at 1 + epsilon", "cispo_free")(lambda a, w, e: a * w)
cispo_coefficient.mistake(
    "the bound is taken of A w: negative advantages are never held", "cispo_of_product"
)(lambda a, w, e: min(a * w, a * (1 + e)) if a > 0 else a * w)


@exercise(
    title="GSPO's gradient at each token",
    difficulty=3,
    minutes=15,
    problem="compute_policy_gradient_loss_off_policy_gspo",
    notebook="06",
    reveals="rlkit.study.derivations:gspo_gradient",
    axes=("token",),
    cases=lambda: [("two tokens", ([0.3, 0.1], 1.0)), ("three tokens", ([0.3, -0.2, 0.4], -2.0))],
    solution=lambda ratios, a: [
        float(x) * a * math.exp(sum(ratios) / len(ratios)) for x in derivations.gspo_gradient(len(ratios))
    ],
    hints=(
        "s = exp(mean of the log-ratios). What is ds / d log pi(y_t)?",
        "The chain rule gives s times 1/L: the same at every token.",
    ),
)
def gspo_token_gradient(log_ratios, A):
    """d(A s) / d log pi(y_t) for every token, a list, s the geometric mean of the ratios (no clipping)."""

    def objective(x):
        return A * math.exp(sum(x) / len(x))

    h = 1e-5
    return [
        round(
            (
                objective([*log_ratios[:t], v + h, *log_ratios[t + 1 :]])
                - objective([*log_ratios[:t], v - h, *log_ratios[t + 1 :]])
            )
            / (2 * h),
            6,
        )
        for t, v in enumerate(log_ratios)
    ]


def _s(x):
    return math.exp(sum(x) / len(x))


gspo_token_gradient.mistake("the factor 1/L from the mean is forgotten", "gspo_no_length")(
    lambda x, a: [a * _s(x)] * len(x)
)
gspo_token_gradient.mistake("each token has its own ratio in front: this is PPO's", "gspo_own_ratio")(
    lambda x, a: [a * math.exp(v) / len(x) for v in x]
)
gspo_token_gradient.mistake("the weight s is missing", "gspo_no_weight")(lambda x, a: [a / len(x)] * len(x))
gspo_token_gradient.mistake("the root is missing: the whole product stands in front", "gspo_whole_product")(
    lambda x, a: [a * math.exp(sum(x)) / len(x)] * len(x)
)
gspo_token_gradient.mistake("the length is divided out twice", "gspo_twice")(
    lambda x, a: [a * _s(x) / len(x) ** 2] * len(x)
)


@exercise(
    title="How sequence weights explode",
    difficulty=2,
    minutes=10,
    problem="think_about_importance_reweighting",
    notebook="06",
    reveals="rlkit.study.derivations:sequence_weight_moment",
    symbols=("m", "L"),
    solution=lambda m, L: m**L - 1,
    cases=lambda: [(f"m = {m}, L = {length}", (m, length)) for m in (1.04, 1.3) for length in (1, 2, 6)],
    hints=(
        "E[W] = 1 for any importance weight. What is E[W^2] for a product of independent factors?",
        "Independent factors: the expectation of the product is the product of the expectations.",
    ),
)
def sequence_weight_variance(m, L):
    """Var of W = w_1 ... w_L under pi_0, independent tokens with E[w] = 1 and E[w^2] = m, in m and L."""
    second = 1.0
    for _ in range(L):
        second *= m
    return second - 1.0


sequence_weight_variance.mistake("variances are added, as for a sum; this is a product", "weights_add")(
    lambda m, L: L * (m - 1)
)
sequence_weight_variance.mistake("E[W]^2 = 1 is not subtracted", "weights_second_moment")(lambda m, L: m**L)
sequence_weight_variance.mistake(
    "the variances are multiplied; it is the second moments that are", "weights_var_product"
)(lambda m, L: (m - 1) ** L)


@exercise(
    title="The k3 estimator of a KL divergence",
    difficulty=2,
    minutes=5,
    problem="think_about_importance_reweighting",
    notebook="06",
    reveals="rlkit.study.derivations:kl_gradients",
    symbols=("log_pi", "log_ref"),
    solution=lambda log_pi, log_ref: math.exp(log_ref - log_pi) - 1 - (log_ref - log_pi),
    cases=lambda: [
        (f"log pi = {x}, log ref = {y}", (x, y))
        for x, y in ((-1.0, -1.0), (-1.0, -2.0), (-2.0, -1.0), (-0.1, -3.0))
    ],
    hints="Samples come from pi. r = ref / pi has E[r] = 1, so r - 1 - log r has the mean KL(pi, ref) and "
    "is never "
    "negative.",
)
def k3_estimator(log_pi, log_ref):
    """k3 at one sample from pi: non-negative, with the mean KL(pi, ref). A number or an expression."""
    ratio = math.exp(log_ref) / math.exp(log_pi)
    return ratio - 1 - math.log(ratio)


def _exp(x):
    return sp.exp(x) if isinstance(x, sp.Basic) else math.exp(x)


k3_estimator.mistake("the ratio is upside down: pi / ref does not have the mean 1 under pi", "k3_inverted")(
    lambda x, y: _exp(x - y) - 1 - (x - y)
)
k3_estimator.mistake("this is k1, the log-ratio, which may be negative", "k3_is_k1")(lambda x, y: x - y)
k3_estimator.mistake("this is k2, half the squared log-ratio, which is biased", "k3_is_k2")(
    lambda x, y: (x - y) ** 2 / 2
)
k3_estimator.mistake("the log-ratio is added with the wrong sign", "k3_sign")(
    lambda x, y: _exp(y - x) - 1 + (y - x)
)
