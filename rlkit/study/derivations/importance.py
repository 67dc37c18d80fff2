"""Importance weights and surrogate objectives (handout 6.1, 6.2.1), clipping (6.2.2, 6.3), KL penalties."""

from functools import lru_cache
from itertools import product

import sympy as sp

from rlkit.study.derivations.policies import A, epsilon, p, q, score, softmax_policy

# ---- weights and surrogates


def _prefixes(length):
    return [prefix for size in range(length) for prefix in product((0, 1), repeat=size)]


@lru_cache
def two_letter_policy(name, length):
    """A symbol for the chance of letter 1 after every prefix of a two-letter language: {prefix: symbol}."""
    return {
        prefix: sp.Symbol(f"{name}_{''.join(map(str, prefix)) or 'start'}", positive=True)
        for prefix in _prefixes(length)
    }


def _token_probability(policy, response, t):
    chance = policy[response[:t]]
    return chance if response[t] else 1 - chance


@lru_cache
def surrogate_objective(block=1, length=2):
    """sum over blocks of E_{y ~ pi~_block} r(y): pi~ draws the block's tokens from pi, the rest from pi_0.

    block=1 is the handout's token-level surrogate (eq. 51), block=2 the pairwise one, block=length is J
    itself. Two letters, ``length`` tokens, a free reward symbol for every response; summed over all 2^length
    responses.
    """
    new, old = two_letter_policy("p", length), two_letter_policy("q", length)
    total = sp.Integer(0)
    for response in product((0, 1), repeat=length):
        reward = sp.Symbol("r_" + "".join(map(str, response)), real=True)
        for start in range(0, length, block):
            inside = range(start, min(start + block, length))
            total += reward * sp.prod(
                [_token_probability(new if t in inside else old, response, t) for t in range(length)]
            )
    return total


@lru_cache
def surrogate_gap(block=1, length=2, objective_block=None):
    """E_{y ~ pi_0}[sum over blocks of weight x r grad log pi(block)] - grad of a surrogate objective.

    One entry per prefix: the derivative by the logit of that prefix. All zeros when the surrogate is the one
    of the same block (the default): the estimator that weights blocks climbs ``surrogate_objective(block)``.
    Pass another ``objective_block`` to see a pair that does not fit.
    """
    new, old = two_letter_policy("p", length), two_letter_policy("q", length)
    objective = surrogate_objective(objective_block or block, length)
    expected = {prefix: sp.Integer(0) for prefix in new}
    for response in product((0, 1), repeat=length):
        reward = sp.Symbol("r_" + "".join(map(str, response)), real=True)
        chance = sp.prod([_token_probability(old, response, t) for t in range(length)])
        for start in range(0, length, block):
            inside = range(start, min(start + block, length))
            top = sp.prod([_token_probability(new, response, t) for t in inside])
            weight = top / sp.prod([_token_probability(old, response, t) for t in inside])
            for t in inside:  # d log pi(y_t) / d logit = p (1 - p) d log pi(y_t) / d p
                knob = new[response[:t]]
                slope = sp.diff(sp.log(_token_probability(new, response, t)), knob) * knob * (1 - knob)
                expected[response[:t]] += chance * weight * reward * slope
    return [
        sp.factor(expected[prefix] - sp.diff(objective, new[prefix]) * new[prefix] * (1 - new[prefix]))
        for prefix in new
    ]


@lru_cache
def sequence_weight_moment(length, order=2, power=1):
    """E_{pi_0}[(w_1 ... w_L)^(order x power)], L independent two-letter tokens; p under pi, q under pi_0.

    Summed over how often letter 1 was drawn. power=1 is the plain sequence weight (order 2: the per-token
    moment to the power L, so it grows exponentially), power=1/L GSPO's geometric mean.
    """
    size, exponent = sp.Integer(length), sp.nsimplify(order * power)
    moment = sum(
        sp.binomial(size, k)
        * q**k
        * (1 - q) ** (size - k)
        * (p / q) ** (k * exponent)
        * ((1 - p) / (1 - q)) ** ((size - k) * exponent)
        for k in range(length + 1)
    )
    return sp.factor(moment) if exponent.is_Integer else moment


# ---- clipping: PPO, CISPO, GSPO


def score_coefficient(method, sign=1, region="inside"):
    """What multiplies grad log pi in the gradient of the objective, by differentiation; in A, w and epsilon.

    method: "none", "noclip", "grpo" or "cispo". sign: that of A. region: where w lies, "low" (below 1 -
    epsilon), "inside" or "high" (above 1 + epsilon). The min and the clip are decided by sympy from the signs
    alone.
    """
    l, l_0, gap, e = (
        sp.Symbol("l"),
        sp.Symbol("l_0"),
        sp.Symbol("d", positive=True),
        sp.Symbol("e", positive=True),
    )
    w, size, held = sp.exp(l - l_0), sp.Symbol("a", positive=True), sp.Symbol("held", positive=True)
    advantage = size * sign
    # w as a number in its region: below, in (u is any number in (-1, 1)), or above
    where = {"low": 1 - e - gap, "inside": sp.Symbol("w_in", positive=True), "high": 1 + e + gap}[region]
    clipped = {"low": 1 - e, "inside": None, "high": 1 + e}[region]  # None: clip(w) is w itself
    if method == "none":
        objective = advantage * l
    elif method == "noclip" or (method == "grpo" and clipped is None):
        objective = advantage * w
    elif method == "grpo":
        takes_clipped = sp.expand(advantage * clipped - advantage * where).is_negative
        objective = advantage * (clipped if takes_clipped else w)
    elif method == "cispo":
        objective = held * advantage * l  # held: no gradient through the weight
    else:
        raise ValueError(f"method: got {method!r}, expected 'none', 'noclip', 'grpo' or 'cispo'")
    coefficient = sp.diff(objective, l).subs(sp.exp(l - l_0), sp.Symbol("w", positive=True))
    weight = 1 + e if region == "high" else sp.Symbol("w", positive=True)  # min(w, 1 + e)
    return coefficient.subs({held: weight, size: A / sign}).subs(e, epsilon)


def clip_mask():
    """{(sign of A, region of w): 1 where PPO's objective has a gradient, 0 where it is flat}. Eqs. 57-60."""
    return {
        (sign, region): int(score_coefficient("grpo", sign, region) != 0)
        for sign in (1, -1)
        for region in ("low", "inside", "high")
    }


def gspo_gradient(length, exponent=None):
    """d (A s) / d log pi(y_t) over A s, for each t; s = (w_1 ... w_L)^exponent, by default 1/L.

    Each entry is the exponent: the geometric mean brings sequence normalisation with it. Handout eqs. 63-65.
    """
    power = sp.Rational(1, length) if exponent is None else sp.sympify(exponent)
    new, old = sp.symbols(f"l_1:{length + 1}", real=True), sp.symbols(f"l0_1:{length + 1}", real=True)
    s = sp.exp(power * sum(x - y for x, y in zip(new, old)))
    return sp.Matrix([sp.simplify(sp.diff(A * s, x) / (A * s)) for x in new])


# ---- KL penalties


@lru_cache
def kl_gradients(n_actions=3):
    """Expected gradients of KL estimators that are differentiated inside the loss, samples drawn from pi.

    With d = log pi - log ref: k1 = d, k2 = d^2 / 2, k3 = exp(-d) - 1 + d (Schulman's names). Columns, one
    entry per logit: "reverse" grad KL(pi, ref), "forward" grad KL(ref, pi), and "k1", "k2", "k3". k1 gives 0,
    k2 the reverse gradient, k3 the forward one, although all three *values* estimate KL(pi, ref).
    """
    logits, probs = softmax_policy(n_actions)
    log_total = sp.log(sum(sp.exp(logit) for logit in logits))
    log_probs = [logit - log_total for logit in logits]
    ref = (*sp.symbols(f"rho_1:{n_actions}", positive=True),)
    ref = (*ref, 1 - sum(ref))  # the reference policy's probabilities
    gaps = [l - sp.log(r) for l, r in zip(log_probs, ref)]  # d for every answer
    reverse = sum(pi * gap for pi, gap in zip(probs, gaps))
    forward = sum(-r * gap for r, gap in zip(ref, gaps))
    columns = {
        name: sp.Matrix([sp.diff(value, logit) for logit in logits])
        for name, value in (("reverse", reverse), ("forward", forward))
    }
    d = sp.Symbol("d", real=True)
    for name, k in (("k1", d), ("k2", d**2 / 2), ("k3", sp.exp(-d) - 1 + d)):
        slope = sp.diff(k, d)  # grad k(d) = k'(d) grad log pi
        terms = [
            pi * slope.subs({sp.exp(-d): r / pi, d: gap}) * score(pi, logits)
            for pi, r, gap in zip(probs, ref, gaps)
        ]
        columns[name] = sum(terms, sp.zeros(n_actions, 1))
    return {name: column.applyfunc(sp.factor) for name, column in columns.items()}
