"""Exercises on importance weights: the objectives behind them, what clipping leaves, the k3 estimator."""

from __future__ import annotations

import math
from itertools import product

import sympy as sp
import torch

from rlkit.study import derivations
from rlkit.study.exercises.core import exercise


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
    "is never negative.",
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
