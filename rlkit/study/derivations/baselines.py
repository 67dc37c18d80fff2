"""REINFORCE and baselines (handout 4.1.4, 4.1.5), and RFT beside Dr. GRPO (5.2, think_about_rft)."""

from functools import lru_cache
from itertools import product

import sympy as sp

from rlkit.study.derivations.policies import G, b, bernoulli_policy, expectation, n, p, score, softmax_policy


@lru_cache
def log_derivative_trick(n_actions=3):
    """grad pi_a - pi_a grad log pi_a, a column for every action side by side: all zeros. Handout eq. 10."""
    logits, probs = softmax_policy(n_actions)
    columns = [
        sp.Matrix([sp.diff(prob, logit) for logit in logits]) - prob * score(prob, logits) for prob in probs
    ]
    return sp.Matrix.hstack(*columns).applyfunc(sp.simplify)


def score_mean(n_actions=3):
    """E[grad log pi], the reason why a constant baseline is free: a column of zeros. Handout eq. 17."""
    logits, probs = softmax_policy(n_actions)
    return expectation([score(prob, logits) for prob in probs], probs)


@lru_cache
def reinforce(n_actions=3, baseline=0):
    """(grad J, E[(r - baseline) grad log pi]) for symbolic rewards r_a: two equal columns. Eqs. 9-17."""
    logits, probs = softmax_policy(n_actions)
    rewards = sp.symbols(f"r_1:{n_actions + 1}", real=True)
    objective = sum(r * prob for r, prob in zip(rewards, probs))
    gradient = sp.Matrix([sp.diff(objective, logit) for logit in logits]).applyfunc(sp.factor)
    return gradient, expectation(
        [(r - baseline) * score(prob, logits) for r, prob in zip(rewards, probs)], probs
    )


@lru_cache
def group_mean_factor(group_size=2, n_actions=2):
    """E[(1/G) sum_j (r_j - mean) grad log pi(y_j)] / grad J, over all n_actions^G groups. Handout eq. 24.

    Every logit gives the same number, (G - 1) / G; group_size and n_actions are small integers.
    """
    logits, probs = softmax_policy(n_actions)
    rewards = sp.symbols(f"r_1:{n_actions + 1}", real=True)
    scores = [score(prob, logits) for prob in probs]
    estimates, chances = [], []
    for group in product(range(n_actions), repeat=group_size):
        mean = sum(rewards[a] for a in group) / group_size
        estimates.append(
            sum(((rewards[a] - mean) * scores[a] for a in group), sp.zeros(n_actions, 1)) / group_size
        )
        chances.append(sp.prod([probs[a] for a in group]))
    gradient, _ = reinforce(n_actions)
    ratios = {sp.cancel(e / g) for e, g in zip(expectation(estimates, chances), gradient)}
    (ratio,) = ratios
    return ratio


def group_mean_factor_general():
    """The same factor for any G: the other G - 1 rewards are independent of y_j, and E[score] = 0."""
    gradient, mean_reward, mean_score = sp.symbols("gradJ E_r E_score")
    own, others = (
        gradient,
        (G - 1) * mean_reward * mean_score,
    )  # E[r_j s_j] and sum over i != j of E[r_i] E[s_j]
    return sp.factor((gradient - (own + others) / G).subs(mean_score, 0) / gradient)


@lru_cache
def baseline_variance(baseline=b):
    """baseline_calcs: Var of (1/n) sum (r(A_i) - baseline) grad log pi(A_i), Bernoulli policy, in p and n.

    ``baseline`` is any expression in b and p: 0 answers (a), b answers (b), p answers (c).
    """
    chances, scores = bernoulli_policy()
    z = [(reward - sp.sympify(baseline)) * scores[reward] for reward in (0, 1)]
    weights = [chances[0], chances[1]]
    mean, second = expectation(z, weights), expectation([value**2 for value in z], weights)
    return _signs_out(sp.factor(sp.simplify(second - mean**2))) / n


def _signs_out(product):
    """The same product with factors such as 1 - p where sympy writes p - 1."""
    sign, result = 1, sp.Integer(1)
    for factor in sp.Mul.make_args(product):
        base, exponent = factor.as_base_exp()
        turn = base.is_Add and base.subs({p: 0, b: 0}).is_negative
        sign, result = (
            (sign * (-1) ** exponent, result * (-base) ** exponent) if turn else (sign, result * factor)
        )
    return sign * result


def optimal_baseline():
    """The baseline with the least variance: the root of dVar/db, a minimum since Var is a parabola in b."""
    variance = baseline_variance(b)
    (root,) = sp.solve(sp.diff(variance, b), b)
    return sp.simplify(root)


def optimal_baseline_by_score_norms():
    """The general rule E[r |score|^2] / E[|score|^2], for the Bernoulli policy: the same answer."""
    chances, scores = bernoulli_policy()
    weighted = expectation([reward * scores[reward] ** 2 for reward in (0, 1)], [chances[0], chances[1]])
    return sp.simplify(weighted / expectation([scores[r] ** 2 for r in (0, 1)], [chances[0], chances[1]]))


def baseline_crossing():
    """The p inside (0, 1) where baseline p and no baseline have the same variance."""
    roots = sp.solve(sp.Eq(baseline_variance(sp.Integer(0)), baseline_variance(p)), p)
    (root,) = [r for r in roots if 0 < r < 1]
    return root


@lru_cache
def length_normalized_gradient(n_actions=3):
    """E[(r - b) / len x grad log pi] minus grad E[r / len], for answers of lengths L_a: what 1/len does.

    The first entry returned is that difference with b = 0 (zeros: the estimator climbs reward *per token*),
    the second with a baseline b: not zero unless the lengths agree, so under sequence normalisation no
    baseline is free.
    """
    logits, probs = softmax_policy(n_actions)
    rewards = sp.symbols(f"r_1:{n_actions + 1}", real=True)
    lengths = sp.symbols(f"L_1:{n_actions + 1}", positive=True)
    per_token = sum(r / length * prob for r, length, prob in zip(rewards, lengths, probs))
    gradient = sp.Matrix([sp.diff(per_token, logit) for logit in logits])
    gaps = []
    for base in (0, b):
        terms = [
            (r - base) / length * score(prob, logits) for r, length, prob in zip(rewards, lengths, probs)
        ]
        gaps.append((expectation(terms, probs) - gradient).applyfunc(sp.factor))
    return tuple(gaps)


# ---- RFT beside Dr. GRPO


@lru_cache
def group_estimator_moments(baseline, group_size):
    """(mean, variance) of (1/G) sum_j (r_j - baseline_j) grad log pi(y_j), Bernoulli policy: a sum over K.

    baseline: "none" (RFT), "mean" (Dr. GRPO: the group's mean) or "others" (leave-one-out: the mean of the
    others). Polynomials in p. (RFT's mean is p (1 - p), the gradient itself.)
    """
    _, scores = bernoulli_policy()
    size = sp.Integer(group_size)
    values, chances = [], []
    for k in range(group_size + 1):
        base = {
            "none": (0, 0),
            "mean": (k / size, k / size),
            "others": ((k - 1) / (size - 1), k / (size - 1)) if group_size > 1 else (0, 0),
        }[baseline]
        values.append((k * (1 - base[0]) * scores[1] + (size - k) * (0 - base[1]) * scores[0]) / size)
        chances.append(sp.binomial(size, k) * p**k * (1 - p) ** (size - k))
    mean = expectation(values, chances)
    return mean, sp.factor(expectation([value**2 for value in values], chances) - mean**2)


def second_moments_with_equal_norms():
    """(RFT's, mean baseline's) E[(r - baseline)^2 |score|^2] when every score has norm 1: p and p (1 - p)."""
    chances, _ = bernoulli_policy()
    weights = [chances[0], chances[1]]
    return expectation([sp.Integer(0), sp.Integer(1)], weights), expectation([p**2, (1 - p) ** 2], weights)
