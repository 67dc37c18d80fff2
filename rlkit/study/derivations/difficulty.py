"""Difficulty weights (handout 5.3, derive_difficulty_reweightings): how much each prompt counts."""

from functools import lru_cache

import sympy as sp

from rlkit.study.derivations.policies import G, p


def group_norm(normalizer, right, group_size, eps=0):
    """What the advantages of a group with ``right`` right answers of ``group_size`` are divided by.

    "none" 1; "mean" right/G + eps; "std" torch.std's unbiased deviation of the 0/1 rewards, from its
    definition, + eps; "population_std" the handout's formula with 1/G under the root, + eps.
    """
    share = right / group_size
    squares = right * (1 - share) ** 2 + (group_size - right) * share**2
    return {
        "none": sp.Integer(1),
        "mean": share + eps,
        "std": sp.sqrt(sp.factor(squares / (group_size - 1))) + eps,
        "population_std": sp.sqrt(sp.factor(squares / group_size)) + eps,
    }[normalizer]


@lru_cache
def difficulty_weight(normalizer, group_size, eps=0):
    """w_G(p): the expected update of a prompt over p's own gradient, exactly, for a group of ``group_size``.

    With K ~ Binomial(G, p) right answers, grad log pi averages grad p / p over right answers and -grad p / (1
    - p) over wrong ones, so E[(1/G) sum_j A_j grad log pi(y_j)] = w_G(p) grad p with w_G(p) = E[(K/G)(1 -
    K/G) / norm(K)] / (p (1 - p)). Groups with K = 0 or G add nothing. A sympy expression in p; normalizer as
    in ``group_norm``; eps a number or a symbol.
    """
    size = sp.Integer(group_size)
    total = sum(
        sp.binomial(size, k)
        * p**k
        * (1 - p) ** (size - k)
        * (k / size)
        * (1 - k / size)
        / group_norm(normalizer, sp.Integer(k), size, eps)
        for k in range(1, group_size)
    )
    return sp.cancel(total / (p * (1 - p))) if normalizer != "std" and eps == 0 else total / (p * (1 - p))


def difficulty_weight_closed_form(normalizer):
    """w_G(p) for a symbolic G ("none" and "mean"), from the generating function E[z^K] = (1 - p + p z)^G.

    "none" needs E[K (G - K)], "mean" E[(1 - K/G) 1{K > 0}] = E[1 - K/G] - P(K = 0).
    """
    z, wrong = sp.symbols("z wrong", positive=True)  # wrong = 1 - p
    generating = (1 - p + p * z) ** G
    mean = sp.diff(generating, z).subs(z, 1)
    mean_square = sp.diff(generating, z, 2).subs(z, 1) + mean
    if normalizer == "none":
        top = (G * mean - mean_square) / G**2
    elif normalizer == "mean":
        top = (1 - mean / G) - generating.subs(z, 0)
    else:
        raise ValueError(
            f"normalizer: got {normalizer!r}, expected 'none' or 'mean' (the deviation's root has no "
            "closed form: use difficulty_weight for a given G)"
        )
    power = sp.Symbol("power")  # stands for wrong^(G - 1) while we cancel
    weight = sp.cancel(top.subs(p, 1 - wrong).subs(wrong**G, wrong * power) / (wrong * (1 - wrong)))
    top, bottom = (sp.expand(-part) if weight.has(wrong) else part for part in sp.fraction(weight))
    return top.subs(power, wrong ** (G - 1)).subs(wrong, 1 - p) / bottom.subs(wrong, 1 - p)


def difficulty_weight_limit(normalizer):
    """w(p) as G -> infinity: K/G -> p, so w = f(p) / (p (1 - p)) with f(x) = x (1 - x) / norm(x)."""
    x = sp.Symbol("x", positive=True)
    norm = sp.limit(group_norm(normalizer, x * G, G), G, sp.oo)
    return sp.simplify((x * (1 - x) / norm / (p * (1 - p))).subs(x, p))


def difficulty_weight_correction(normalizer):
    """The coefficient c(p) in w_G = w (1 + c / G + ...): E f(K/G) = f(p) + f''(p) p (1 - p) / (2 G) + ..."""
    x, small = sp.symbols("x small", positive=True)  # small = 1 / G
    size = 1 / small
    f = sp.simplify(x * (1 - x) / group_norm(normalizer, x * size, size))
    mean = f + sp.diff(f, x, 2) * x * (1 - x) * small / 2
    limit = sp.limit(mean, small, 0)
    return sp.factor(sp.simplify(sp.limit(sp.diff(mean, small) / limit, small, 0)).subs(x, p))
