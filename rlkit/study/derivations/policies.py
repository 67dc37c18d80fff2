"""Symbols, policies with few answers, and their scores.

p = pi(right answer), b a baseline, n samples, G responses per group, A advantage, w importance weight,
e = epsilon = cliprange, l = log pi, l_0 = log pi_0.
"""

from functools import lru_cache

import sympy as sp

theta = sp.Symbol("theta", real=True)
p, q = sp.symbols("p q", positive=True)  # chances of the right answer under pi and under pi_0
b = sp.Symbol("b", real=True)
n, G, L = sp.symbols("n G L", positive=True)
epsilon = sp.Symbol("epsilon", nonnegative=True)
A = sp.Symbol("A", real=True)


@lru_cache
def softmax_policy(n_actions=3):
    """(logits, probabilities) of a policy with ``n_actions`` answers: pi_a = exp(theta_a) / sum exp."""
    logits = sp.symbols(f"theta_1:{n_actions + 1}", real=True)
    total = sum(sp.exp(logit) for logit in logits)
    return logits, tuple(sp.exp(logit) / total for logit in logits)


def score(probability, logits):
    """The score grad log pi as a column, one entry per logit."""
    return sp.Matrix([sp.diff(sp.log(probability), logit) for logit in logits]).applyfunc(sp.cancel)


def expectation(values, probabilities):
    """sum of value x probability over the outcomes, simplified; values may be expressions or columns."""
    total = sum((value * chance for value, chance in zip(values, probabilities)), start=0 * values[0])
    return total.applyfunc(sp.factor) if isinstance(total, sp.MatrixBase) else sp.factor(total)


@lru_cache
def bernoulli_policy():
    """baseline_calcs' policy: {1: pi(1), 0: pi(0)}, pi(1) = sigmoid(theta), and the two scores in p."""
    chance = 1 / (1 + sp.exp(-theta))
    scores = {1: sp.diff(sp.log(chance), theta), 0: sp.diff(sp.log(1 - chance), theta)}
    in_p = {theta: sp.log(p / (1 - p))}  # theta as a function of p
    return {1: p, 0: 1 - p}, {a: sp.simplify(s.subs(in_p)) for a, s in scores.items()}
