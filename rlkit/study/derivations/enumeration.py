"""The same by enumeration: every outcome of a tiny policy through the library's own components.

Each outcome counts with its probability and autograd differentiates, so what comes out must be the symbolic
result to rounding error. The sampled versions come with a standard error.
"""

from itertools import product
from math import comb

import torch

from rlkit.advantages import compute_group_normalized_rewards
from rlkit.losses import compute_policy_gradient_loss


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
    """E[(1/G) sum_j A_j grad log pi(y_j)] over all n^G groups, one-token answers: (n_answers,).

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
    """w_G(p) of any baseline and normaliser, functions too: K = 0..G through the library's advantages.

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
    """Variance, over sampled trials, of the mean of n samples of (r - b) grad log pi, Bernoulli policy.

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
    """{length: (variance of the product of token weights, of GSPO's geometric mean)}, tokens from pi_0.

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
