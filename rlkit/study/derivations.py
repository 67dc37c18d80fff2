"""The handout's derivations, worked out by sympy from the definitions, and checked by enumeration through the
library.

Two kinds of functions live here. Symbolic ones start from a definition (an expectation over all outcomes, a
derivative) and let sympy find the closed form; nothing is typed in that should be derived. Numeric ones send
*every* outcome of a tiny policy through the library's own components, weighted by its probability, and let
autograd
differentiate: what comes out must be the symbolic result to rounding error.

Symbols: p = pi(right answer), b a baseline, n samples, G responses per group, A advantage, w importance
weight, e = epsilon = cliprange, l = log pi, l_0 = log pi_0.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import product
from math import comb

import sympy as sp
import torch

from rlkit.advantages import compute_group_normalized_rewards
from rlkit.losses import compute_policy_gradient_loss

theta = sp.Symbol("theta", real=True)
p, q = sp.symbols("p q", positive=True)  # chances of the right answer under pi and under pi_0
b = sp.Symbol("b", real=True)
n, G, L = sp.symbols("n G L", positive=True)
epsilon = sp.Symbol("epsilon", nonnegative=True)
A = sp.Symbol("A", real=True)


# ---- policies and their scores


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


# ---- REINFORCE and baselines (handout 4.1.4, 4.1.5)


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
    """E[(1/G) sum_j (r_j - mean) grad log pi(y_j)] / grad J, summed over all n_actions^G groups. Handout eq.
    24.

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
    """Var of (1/n) sum (r(A_i) - baseline) grad log pi(A_i) for the Bernoulli policy, in p and n.
    baseline_calcs.

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
    the
    second with a baseline b: not zero unless the lengths agree, so under sequence normalisation no baseline
    is free.
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


# ---- difficulty weights (handout 5.3, derive_difficulty_reweightings)


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


# ---- RFT beside Dr. GRPO (handout 5.2, think_about_rft)


@lru_cache
def group_estimator_moments(baseline, group_size):
    """(mean, variance) of (1/G) sum_j (r_j - baseline_j) grad log pi(y_j) for the Bernoulli policy, summed
    over K.

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


# ---- importance weights and surrogate objectives (handout 6.1, 6.2.1)


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
    """sum over blocks of E_{y ~ pi~_block} r(y), where pi~ draws the block's tokens from pi and all others
    from pi_0.

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
    """E_{y ~ pi_0}[sum over blocks (weight of the block) r grad log pi(block)] - grad of a surrogate
    objective.

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
    """E_{pi_0}[(w_1 w_2 ... w_L)^(order x power)] for L independent two-letter tokens; p under pi, q under
    pi_0.

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


# ---- clipping: PPO, CISPO, GSPO (handout 6.2.2, 6.3)


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
    """d (A s) / d log pi(y_t) over A s, for each t, where s = (w_1 ... w_L)^exponent and exponent = 1/L by
    default.

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
    entry per
    logit: "reverse" grad KL(pi, ref), "forward" grad KL(ref, pi), and "k1", "k2", "k3". k1 gives 0, k2 the
    reverse gradient, k3 the forward one, although all three *values* estimate KL(pi, ref).
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


# ---- the same by enumeration, through the library's functions


def enumerate_responses(vocab_size, length):
    """All N = vocab_size^length responses: tokens (N, length), and each token's prefix as a row of logits."""
    tokens = torch.tensor(list(product(range(vocab_size), repeat=length)))
    first_row = [sum(vocab_size**s for s in range(t)) for t in range(length)]
    rows = torch.zeros_like(tokens)
    for t in range(length):
        rows[:, t] = first_row[t] + sum(tokens[:, s] * vocab_size ** (t - 1 - s) for s in range(t))
    return tokens, rows


def tabular_logits(vocab_size, length, seed=0, scale=1.0):
    """A random policy for responses of ``length`` tokens: float64 logits (number of prefixes, vocab_size)."""
    n_prefixes = sum(vocab_size**t for t in range(length))
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.randn(n_prefixes, vocab_size, generator=generator, dtype=torch.float64)


def tabular_log_probs(logits, tokens, rows):
    """log pi(y_t | y_<t), (N, length), of a tabular policy."""
    return logits.log_softmax(dim=-1)[rows, tokens]


def exact_gradient(logits, rewards, length):
    """grad J by autograd on J = sum over all responses of pi(y) r(y); rewards is (vocab_size^length,)."""
    logits = logits.detach().clone().requires_grad_()
    log_probs = tabular_log_probs(logits, *enumerate_responses(logits.shape[1], length))
    (gradient,) = torch.autograd.grad((log_probs.sum(dim=1).exp() * rewards).sum(), logits)
    return gradient


def gradient_through_library(logits, advantages, length, method="none", old_logits=None, cliprange=None):
    """The estimator's exact expectation: every response goes through ``compute_policy_gradient_loss``.

    Row y counts with the probability that the sampling policy (``old_logits``, else the policy itself) gives
    it; its tokens are summed. Returns minus the gradient of that loss, (n_prefixes, vocab_size): the expected
    update.
    """
    logits = logits.detach().clone().requires_grad_()
    tokens, rows = enumerate_responses(logits.shape[1], length)
    log_probs = tabular_log_probs(logits, tokens, rows)
    old = log_probs.detach() if old_logits is None else tabular_log_probs(old_logits, tokens, rows)
    loss, _ = compute_policy_gradient_loss(
        advantages,
        log_probs,
        method,
        old_log_probs=old,
        cliprange=cliprange,
        response_mask=torch.ones_like(tokens, dtype=torch.bool),
    )
    chance = old.sum(dim=1).exp()
    (gradient,) = torch.autograd.grad((loss.sum(dim=1) * chance).sum(), logits)
    return -gradient


def surrogate_gradient(logits, old_logits, rewards, length, block=1):
    """grad of ``surrogate_objective(block)`` by autograd: a sum over responses and blocks."""
    logits = logits.detach().clone().requires_grad_()
    tokens, rows = enumerate_responses(logits.shape[1], length)
    new, old = tabular_log_probs(logits, tokens, rows), tabular_log_probs(old_logits, tokens, rows)
    total = 0.0
    for start in range(0, length, block):
        inside = torch.zeros(length, dtype=torch.bool)
        inside[start : start + block] = True
        total = total + (torch.where(inside, new, old).sum(dim=1).exp() * rewards).sum()
    (gradient,) = torch.autograd.grad(total, logits)
    return gradient


def pairwise_loss(advantages, log_probs, old_log_probs, response_mask=None, cliprange=None):
    """The handout's pairwise estimator as a loss for ``importance_reweighting_method=``: -A w_{2t-1} w_{2t}.

    Each pair's term stands at both of its tokens, half and half, so that a sum over tokens counts it once.
    """
    log_ratio = log_probs - old_log_probs
    even = log_ratio.shape[1] // 2 * 2
    pair = log_ratio[:, :even].unflatten(1, (-1, 2)).sum(dim=2).repeat_interleave(2, dim=1)
    loss = torch.cat([pair.exp() / 2, log_ratio[:, even:].exp()], dim=1)
    return -advantages * loss


def group_gradient_through_library(
    logits, rewards, group_size, baseline="mean", advantage_normalizer="none", advantage_eps=1e-6
):
    """E[(1/G) sum_j A_j grad log pi(y_j)], over all n^G groups, for a policy with one-token answers,
    (n_answers,).

    Advantages come from ``compute_group_normalized_rewards``, gradients from
    ``compute_policy_gradient_loss``. logits and rewards are (n_answers,) float64.
    """
    logits = logits.detach().clone().requires_grad_()
    groups = torch.tensor(list(product(range(len(logits)), repeat=group_size)))  # (N, G)
    advantages, _ = compute_group_normalized_rewards(
        rewards[groups].flatten(), group_size, baseline, advantage_eps, advantage_normalizer
    )
    log_probs = logits.log_softmax(dim=0)[groups]  # (N, G)
    loss, _ = compute_policy_gradient_loss(advantages, log_probs.reshape(-1, 1))
    chance = log_probs.detach().sum(dim=1).exp()
    (gradient,) = torch.autograd.grad((loss.reshape(groups.shape).mean(dim=1) * chance).sum(), logits)
    return -gradient


def measured_difficulty_weight(
    success_rates, group_size, baseline="mean", advantage_normalizer="std", advantage_eps=1e-6
):
    """w_G(p) of any baseline and normaliser, functions included, exact: K = 0..G through the library's
    advantages.

    success_rates: a list of p in (0, 1). Returns a float64 tensor of their length. For the Bernoulli policy
    the score is 1 - p at a right answer and -p at a wrong one, and grad J = p (1 - p).
    """
    rewards = torch.tensor(
        [[1.0] * k + [0.0] * (group_size - k) for k in range(group_size + 1)], dtype=torch.float64
    )
    advantages, _ = compute_group_normalized_rewards(
        rewards.flatten(), group_size, baseline, advantage_eps, advantage_normalizer
    )
    advantages = advantages.reshape(rewards.shape)
    weights = []
    for rate in success_rates:
        estimate = (advantages * (rewards - rate)).mean(dim=1)  # (G + 1,): score = r - p
        chance = torch.tensor(
            [comb(group_size, k) * rate**k * (1 - rate) ** (group_size - k) for k in range(group_size + 1)],
            dtype=torch.float64,
        )
        weights.append((estimate * chance).sum() / (rate * (1 - rate)))
    return torch.stack(weights)


def sampled_difficulty_weight(
    success_rate,
    group_size,
    advantage_normalizer="std",
    n_groups=20_000,
    seed=0,
    baseline="mean",
    advantage_eps=1e-6,
):
    """(estimate, standard error) of w_G(p): sampled groups through the library's advantages."""
    draws = torch.rand(
        n_groups, group_size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )
    rewards = (draws < success_rate).double()
    advantages, _ = compute_group_normalized_rewards(
        rewards.flatten(), group_size, baseline, advantage_eps, advantage_normalizer
    )
    estimate = (advantages.reshape(rewards.shape) * (rewards - success_rate)).mean(dim=1)
    estimate = estimate / (success_rate * (1 - success_rate))
    return estimate.mean().item(), (estimate.std() / n_groups**0.5).item()


def sampled_baseline_variance(success_rate, baseline, n_samples, n_trials=20_000, seed=0):
    """Variance, over trials, of the mean of n samples of (r - b) grad log pi for the Bernoulli policy (Monte
    Carlo).

    The score comes from autograd through ``compute_policy_gradient_loss`` on both answers.
    """
    logit = torch.logit(torch.tensor(success_rate, dtype=torch.float64)).requires_grad_()
    per_answer = []
    for reward in (0.0, 1.0):
        log_prob = torch.nn.functional.logsigmoid(logit if reward else -logit).reshape(1, 1)
        loss, _ = compute_policy_gradient_loss(
            torch.tensor([reward - baseline], dtype=torch.float64), log_prob
        )
        per_answer.append(-torch.autograd.grad(loss.sum(), logit)[0])
    draws = torch.rand(
        n_trials, n_samples, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )
    return torch.stack(per_answer)[(draws < success_rate).long()].mean(dim=1).var().item()


def sampled_sequence_weights(lengths, new_probs, old_probs, n_samples=20_000, seed=0):
    """{length: (variance of the product of token weights, variance of GSPO's geometric mean)}, tokens drawn
    from pi_0.

    new_probs, old_probs: (vocab,) distributions, the same at every position.
    """
    new, old = (
        torch.as_tensor(new_probs, dtype=torch.float64),
        torch.as_tensor(old_probs, dtype=torch.float64),
    )
    generator = torch.Generator().manual_seed(seed)
    result = {}
    for length in lengths:
        tokens = torch.multinomial(old.expand(n_samples, -1), length, replacement=True, generator=generator)
        log_weight = (new / old).log()[tokens].sum(dim=1)
        result[length] = (log_weight.exp().var().item(), (log_weight / length).exp().var().item())
    return result


def measured_score_coefficient(method, advantage, ratio, cliprange=0.2):
    """-d loss / d log pi at the ratios, (N,), by autograd through ``compute_policy_gradient_loss``."""
    ratio = torch.as_tensor(ratio, dtype=torch.float64).reshape(-1, 1)
    log_probs = ratio.log().requires_grad_()
    advantages = torch.full((len(ratio),), float(advantage), dtype=torch.float64)
    loss, _ = compute_policy_gradient_loss(advantages, log_probs, method, torch.zeros_like(ratio), cliprange)
    (gradient,) = torch.autograd.grad(loss.sum(), log_probs)
    return -gradient.flatten()
