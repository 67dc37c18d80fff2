"""The wrong functions of ``bugs``, what they should be, and how each symptom is measured.

A symptom is measured by a small simulation of a second or less.
"""

import torch

from rlkit.losses import aggregate_loss_across_microbatch

# ---- 1: the mask


def response_mask(labels, prompt_lengths, response_lengths, pad_id):
    """(B, T) bool: the labels that are trained on."""
    return labels != pad_id


def mask_by_position(labels, prompt_lengths, response_lengths, pad_id):
    position = torch.arange(1, labels.shape[1] + 1)
    start, end = prompt_lengths[:, None], (prompt_lengths + response_lengths)[:, None]
    return (position >= start) & (position < end)


def prompt_log_prob(make_mask, n_steps=40):
    """Mean log-prob of the prompts' own tokens while a bigram model imitates its right answers (RFT)."""
    prompts, answers = [[2, 3, 4], [2, 5, 4]], [[6, 7, 1], [8, 1]]
    rows = [p + a + [0] * (6 - len(p) - len(a)) for p, a in zip(prompts, answers)]
    ids = torch.tensor(rows)
    inputs, labels = ids[:, :-1], ids[:, 1:]
    mask = make_mask(labels, torch.tensor([3, 3]), torch.tensor([3, 2]), 0)
    table = torch.zeros(9, 9, dtype=torch.float64, requires_grad=True)
    curve = []
    for _ in range(n_steps):
        log_probs = table.log_softmax(-1)[inputs, labels]
        curve.append(log_probs[:, :2].mean().item())  # the labels inside the prompt
        (gradient,) = torch.autograd.grad(aggregate_loss_across_microbatch(-log_probs, mask), table)
        table = (table - 2.0 * gradient).detach().requires_grad_()
    return list(range(n_steps)), curve


# ---- 2: microbatches


def accumulated_loss(per_token_loss, mask, n_microbatches):
    """The batch's loss, accumulated over microbatches; per_token_loss and mask are (B, T)."""
    total = 0.0
    for loss, flags in zip(per_token_loss.chunk(n_microbatches), mask.chunk(n_microbatches)):
        total = total + loss[flags].mean() / n_microbatches
    return total


def microbatch_sequence_mean(per_token_loss, mask, n_microbatches):
    return sum(
        aggregate_loss_across_microbatch(loss, flags) * len(loss) / len(per_token_loss)
        for loss, flags in zip(per_token_loss.chunk(n_microbatches), mask.chunk(n_microbatches))
    )


def gradient_error(accumulate):
    """Relative distance of the gradient with k microbatches from the gradient with one."""
    lengths = torch.tensor([3, 40, 5, 37, 4, 4, 36, 39])
    mask = torch.arange(40) < lengths[:, None]
    generator = torch.Generator().manual_seed(0)
    loss = torch.randn(8, 40, generator=generator, dtype=torch.float64).requires_grad_()
    gradients = {k: torch.autograd.grad(accumulate(loss, mask, k), loss)[0] for k in (1, 2, 4, 8)}
    return list(gradients), [
        ((g - gradients[1]).norm() / gradients[1].norm()).item() for g in gradients.values()
    ]


# ---- 3: pruning


def pruned_loss(advantages, row_log_probs):
    """The batch's loss, rows of advantage zero left out; both arguments are (B,)."""
    kept = advantages != 0
    return -(advantages[kept] * row_log_probs[kept]).mean()


def pruned_by_batch(advantages, row_log_probs):
    kept = advantages != 0
    return -(advantages[kept] * row_log_probs[kept]).sum() / len(advantages)


def step_against_pruning(loss):
    """Size of one right row's gradient against the share of rows whose advantage is zero, times B."""
    shares, sizes = [], []
    for n_zero in (0, 32, 64, 96, 112, 120):
        advantages = torch.ones(128, dtype=torch.float64)
        advantages[:n_zero] = 0.0
        leaf = torch.zeros(128, dtype=torch.float64, requires_grad=True)
        (gradient,) = torch.autograd.grad(loss(advantages, leaf), leaf)
        shares.append(n_zero / 128)
        sizes.append(gradient[-1].abs().item() * 128)
    return shares, sizes


# ---- 4: Dr. GRPO with a mean left in


def drgrpo_loss(per_token_loss, mask, normalization_constant):
    """Dr. GRPO's loss: the length of a response plays no part."""
    row_losses = (per_token_loss * mask).sum(dim=1) / mask.sum(dim=1)
    return row_losses.sum() / normalization_constant


def drgrpo_constant(per_token_loss, mask, normalization_constant):
    return aggregate_loss_across_microbatch(per_token_loss, mask, "constant", normalization_constant)


def push_against_length(loss):
    """How hard each token of a wrong response is pushed down, against the response's length (Z = 64)."""
    lengths, advantage = torch.tensor([4, 8, 16, 32, 64]), -0.5
    mask = torch.arange(64) < lengths[:, None]
    log_probs = torch.full((5, 64), -1.0, dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(loss(-advantage * log_probs, mask, 64), log_probs)
    return lengths.tolist(), gradient[:, 0].abs().tolist()


# ---- 5: KL in the loss


def kl_penalty(log_probs, ref_log_probs):
    """The KL penalty per token, added to the loss."""
    return log_probs - ref_log_probs


def kl_k3_in_loss(log_probs, ref_log_probs):
    log_ratio = ref_log_probs - log_probs
    return log_ratio.exp() - 1 - log_ratio


def kl_over_steps(penalty, n_steps=80, n_samples=256):
    """KL(pi, ref) while nothing but the penalty is minimised, on samples from a policy with eight answers."""
    generator = torch.Generator().manual_seed(0)
    ref = torch.zeros(8, dtype=torch.float64).log_softmax(0)
    logits = torch.tensor(
        [1.5, 1.0, 0.5, 0.0, -0.5, -0.5, -1.0, -1.0], dtype=torch.float64, requires_grad=True
    )
    curve = []
    for _ in range(n_steps):
        log_pi = logits.log_softmax(0)
        curve.append((log_pi.exp() * (log_pi - ref)).sum().item())
        sampled = torch.multinomial(log_pi.exp().detach(), n_samples, replacement=True, generator=generator)
        (gradient,) = torch.autograd.grad(penalty(log_pi[sampled], ref[sampled]).mean(), logits)
        logits = (logits - 0.5 * gradient).detach().requires_grad_()
    return list(range(n_steps)), curve


# ---- 6: seeds


def request_seeds(n_prompts, group_size, step, seed):
    """The seed of every request (one per response): n_prompts lists of group_size integers."""
    return [[seed] * group_size for _ in range(n_prompts)]


def seed_per_request(n_prompts, group_size, step, seed):
    first = (seed * 1_000_003 + step) * n_prompts * group_size
    return [[first + i * group_size + j for j in range(group_size)] for i in range(n_prompts)]


def new_answers(make_seeds, n_steps=10, n_prompts=4, group_size=8):
    """New answers per group (mean); the sampler is a function of (prompt, seed)."""
    curve, seen = [], [set() for _ in range(n_prompts)]
    for step in range(n_steps):
        before = sum(len(answers) for answers in seen)
        for prompt, seeds in enumerate(make_seeds(n_prompts, group_size, step, 0)):
            for seed in seeds:
                generator = torch.Generator().manual_seed(1_000_000_007 * (prompt + 1) + seed)
                seen[prompt].add(int(torch.randint(10**9, (4,), generator=generator)[-1]))
        curve.append((sum(len(answers) for answers in seen) - before) / n_prompts)
    return list(range(n_steps)), curve


# ---- 7: temperature


def token_log_probs(logits, tokens, temperature):
    """Log-probs (N,) of sampled tokens for the trainer; logits (N, V), drawn at this temperature."""
    return logits.log_softmax(dim=-1).gather(1, tokens[:, None]).squeeze(1)


def right_temperature(logits, tokens, temperature):
    return (logits / temperature).log_softmax(dim=-1).gather(1, tokens[:, None]).squeeze(1)


def ratio_against_temperature(score):
    """Mean |log ratio| between trainer and sampler before any update, against the sampler's temperature."""
    generator = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(500, 20, generator=generator, dtype=torch.float64)
    temperatures, gaps = [0.5, 0.7, 0.85, 1.0, 1.2, 1.5], []
    for temperature in temperatures:
        sampler = (logits / temperature).log_softmax(-1)
        tokens = torch.multinomial(sampler.exp(), 1, generator=generator).squeeze(1)
        drawn = sampler.gather(1, tokens[:, None]).squeeze(1)
        gaps.append((score(logits, tokens, temperature) - drawn).abs().mean().item())
    return temperatures, gaps


# ---- 8: GSPO's range


def cliprange_of(method):
    """The clip range of an off-policy method."""
    return {"grpo": 0.2, "cispo": 0.2, "gspo": 0.2}[method]


def gspo_cliprange_of_the_paper(method):
    return {"grpo": 0.2, "cispo": 0.2, "gspo": 3e-4}[method]


def gspo_clip_fraction(cliprange_of):
    """Share of sequences clipped in 32 updates on one rollout batch, while the policy drifts away."""
    generator = torch.Generator().manual_seed(0)
    cliprange, drift, curve = cliprange_of("gspo"), torch.zeros(256, 64, dtype=torch.float64), []
    signs = torch.where(torch.rand(256, generator=generator) < 0.5, -1.0, 1.0).double()
    for _ in range(32):
        noise = torch.randn(256, 64, generator=generator, dtype=torch.float64)
        drift = drift + 0.0004 * noise + 0.00001 * signs[:, None]
        s = drift.mean(dim=1).exp()
        clipped = ((signs > 0) & (s > 1 + cliprange)) | ((signs < 0) & (s < 1 - cliprange))
        curve.append(clipped.double().mean().item())
    return list(range(1, 33)), curve
