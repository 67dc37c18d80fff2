"""Find the bug: real mistakes of public GRPO code, each met first as a symptom in a plot.

    symptom("growing_step")                 # the picture: what one sees in the logs
    show_code("growing_step")               # the function behind it
    check_fix("growing_step", mine)         # your corrected version: does the symptom go away?
    answer("growing_step")                  # what it was

The wrong functions live here and nowhere else. A symptom is measured, by a small simulation of a second or
less.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass

import torch

from rlkit.losses import aggregate_loss_across_microbatch
from rlkit.study.exercises.core import OpenExercise
from rlkit.support.checks import hint


@dataclass(frozen=True)
class Bug:
    """``measure(function) -> (x, y)`` is the curve: ``buggy`` gives the symptom, ``fixed`` the right one."""

    name: str
    title: str
    question: str  # what one wonders about, looking at the plot
    xlabel: str
    ylabel: str
    measure: Callable
    buggy: Callable
    fixed: Callable
    answer: str
    notebook: str
    exercise: str | None = None  # the exercise that checks the whole function
    accept: Callable | None = None  # accept(y of the attempt, y of fixed); None: they agree

    def is_fixed(self, attempt) -> bool:
        _, wanted = self.measure(self.fixed)
        _, seen = self.measure(attempt)
        if self.accept:
            return bool(self.accept(seen, wanted))
        return torch.allclose(torch.as_tensor(seen).double(), torch.as_tensor(wanted).double(), atol=1e-5)


# ---- 1: the mask


def response_mask(labels, prompt_lengths, response_lengths, pad_id):
    """(B, T) bool: the labels that are trained on."""
    return labels != pad_id


def _mask_by_position(labels, prompt_lengths, response_lengths, pad_id):
    position = torch.arange(1, labels.shape[1] + 1)
    start, end = prompt_lengths[:, None], (prompt_lengths + response_lengths)[:, None]
    return (position >= start) & (position < end)


def _prompt_log_prob(make_mask, n_steps=40):
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


def _microbatch_sequence_mean(per_token_loss, mask, n_microbatches):
    return sum(
        aggregate_loss_across_microbatch(loss, flags) * len(loss) / len(per_token_loss)
        for loss, flags in zip(per_token_loss.chunk(n_microbatches), mask.chunk(n_microbatches))
    )


def _gradient_error(accumulate):
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


def _pruned_by_batch(advantages, row_log_probs):
    kept = advantages != 0
    return -(advantages[kept] * row_log_probs[kept]).sum() / len(advantages)


def _step_against_pruning(loss):
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


def _drgrpo_constant(per_token_loss, mask, normalization_constant):
    return aggregate_loss_across_microbatch(per_token_loss, mask, "constant", normalization_constant)


def _push_against_length(loss):
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


def _kl_k3_in_loss(log_probs, ref_log_probs):
    log_ratio = ref_log_probs - log_probs
    return log_ratio.exp() - 1 - log_ratio


def _kl_over_steps(penalty, n_steps=80, n_samples=256):
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


def _seed_per_request(n_prompts, group_size, step, seed):
    first = (seed * 1_000_003 + step) * n_prompts * group_size
    return [[first + i * group_size + j for j in range(group_size)] for i in range(n_prompts)]


def _new_answers(make_seeds, n_steps=10, n_prompts=4, group_size=8):
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


def _right_temperature(logits, tokens, temperature):
    return (logits / temperature).log_softmax(dim=-1).gather(1, tokens[:, None]).squeeze(1)


def _ratio_against_temperature(score):
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


def _gspo_cliprange_of_the_paper(method):
    return {"grpo": 0.2, "cispo": 0.2, "gspo": 3e-4}[method]


def _gspo_clip_fraction(cliprange_of):
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


def _table(*bugs) -> dict[str, Bug]:
    return {bug.name: bug for bug in bugs}


BUGS = _table(
    Bug(
        "questions_by_heart",
        "The model learns the questions by heart",
        "Nobody rewards the prompt. Why does the log-probability of the prompt's own tokens climb?",
        "step",
        "log-prob of prompt tokens (nats)",
        _prompt_log_prob,
        response_mask,
        _mask_by_position,
        "The mask is `labels != pad`: it leaves out padding, and keeps the prompt. It also drops a "
        "response's own "
        "end-of-text where pad and end-of-text share an id. Masks come from positions, never from ids.",
        "03",
        "tokenize_prompt_and_output",
    ),
    Bug(
        "gradient_depends_on_memory",
        "The batch learns something else when memory is short",
        "Same batch, same weights. Why does the gradient depend on the number of microbatches?",
        "microbatches",
        "distance from one microbatch's gradient",
        _gradient_error,
        accumulated_loss,
        _microbatch_sequence_mean,
        "Each microbatch takes its own mean over tokens. A token in a microbatch of short rows weighs more "
        "than one in "
        "a microbatch of long rows. Sum first and divide by the whole batch's count, or average per "
        "sequence.",
        "03",
        "microbatch_losses",
    ),
    Bug(
        "growing_step",
        "The fewer rows are left, the larger the step",
        "Pruning rows without a gradient should change nothing. Why does a row's gradient grow with it?",
        "share of rows pruned",
        "gradient of one row (times B)",
        _step_against_pruning,
        pruned_loss,
        _pruned_by_batch,
        "The mean runs over the kept rows only, so the divisor shrinks with them: at 94 % pruned the step "
        "is 16 times "
        "as large. The pruned rows have loss 0; they still count in B.",
        "05",
        "pruned_loss",
    ),
    Bug(
        "long_answers_get_away",
        "Long wrong answers get away",
        "Dr. GRPO is meant to be blind to length. Why is a token of a long wrong answer pushed less?",
        "length of the wrong response (tokens)",
        "push per token",
        _push_against_length,
        drgrpo_loss,
        _drgrpo_constant,
        "A mean over each sequence was left in before the division by the constant: every token of a "
        "response of "
        "length L weighs 1/L. That is the length bias Dr. GRPO set out to remove.",
        "05",
        "aggregate_constant",
    ),
    Bug(
        "penalty_without_pull",
        "A penalty that does not pull",
        "Only the KL penalty is minimised here. Why does the policy not come back to the reference?",
        "step",
        "KL(policy, reference) (nats)",
        _kl_over_steps,
        kl_penalty,
        _kl_k3_in_loss,
        "k1 = log pi - log ref is a fine estimate of the KL, but its gradient is the score alone, whose "
        "mean is zero: "
        "in expectation nothing is pulled. Differentiate k2 or k3, or put k1 into the reward.",
        "06",
        "k3_estimator",
        accept=lambda seen, wanted: seen[-1] < 0.1 * seen[0],
    ),
    Bug(
        "identical_groups",
        "Groups of eight, one answer each",
        "Temperature 1, eight responses per prompt and step. Why is there nothing new after the first?",
        "step",
        "new answers per group of 8",
        _new_answers,
        request_seeds,
        _seed_per_request,
        "Every request carries the same seed, and prompts are repeated: a sampler that is deterministic in "
        "(prompt, "
        "seed) gives eight identical responses, and every advantage is zero for ever. One seed per prompt, "
        "copy and "
        "step.",
        "04",
        accept=lambda seen, wanted: min(seen) == 8,
    ),
    Bug(
        "off_policy_at_step_zero",
        "Off-policy before the first update",
        "No update has been made. Why do trainer and sampler disagree, except at temperature 1?",
        "sampler's temperature",
        "mean |log ratio| (nats)",
        _ratio_against_temperature,
        token_log_probs,
        _right_temperature,
        "The sampler draws from softmax(logits / T) and the trainer scores softmax(logits). Ratios are not "
        "1, clipping "
        "bites at random, and the gradient is that of another distribution.",
        "06",
        "log_prob_at_temperature",
    ),
    Bug(
        "clip_that_never_clips",
        "A clip that never clips",
        "32 updates on one batch, and not one sequence is clipped. Is the policy not moving?",
        "update on the same rollout batch",
        "clip fraction (sequences)",
        _gspo_clip_fraction,
        cliprange_of,
        _gspo_cliprange_of_the_paper,
        "0.2 is PPO's range for single-token ratios. GSPO's ratio is a geometric mean over the response, "
        "which stays "
        "within a fraction of a per cent of 1: its range is 3e-4.",
        "06",
        "loss_gspo",
    ),
)


def get_bug(name: str) -> Bug:
    if name in BUGS:
        return BUGS[name]
    raise ValueError(f"bug: got {name!r}{hint(name, BUGS)}; expected one of {', '.join(BUGS)}")


def symptom(name: str, mine: Callable | None = None):
    """The bug's symptom as a figure; with ``mine``, the curve of your corrected function beside it."""
    from rlkit.jobs.plots import figure

    bug = get_bug(name)
    fig, (ax,) = figure(width=5.0)
    ax.plot(*bug.measure(bug.buggy), marker="o", markersize=3, label="as logged")
    if mine is not None:
        ax.plot(*bug.measure(mine), marker="s", markersize=3, linestyle="--", label="yours")
        ax.legend()
    ax.set(xlabel=bug.xlabel, ylabel=bug.ylabel, title=bug.title)
    low, high = ax.get_ylim()
    if high - low < 1e-6 * max(1.0, abs(high)):
        ax.set_ylim(low - 0.5, high + 0.5)
    return fig


def show_code(name: str) -> None:
    """Print the function that makes the symptom."""
    print(inspect.getsource(get_bug(name).buggy))


def check_fix(name: str, attempt: Callable) -> None:
    """Print whether your corrected function makes the symptom go away; a stub is open."""
    bug = get_bug(name)

    def guarded(*arguments):
        value = attempt(*arguments) if callable(attempt) else attempt
        if value is None or value is Ellipsis:
            raise OpenExercise
        return value

    try:
        gone = bug.is_fixed(guarded)
    except OpenExercise:
        print(f"○ {name} is open. {bug.question}")
    except Exception as error:  # whatever the reader's function does is a result to talk about
        print(f"✗ {name}: your function raised {type(error).__name__}: {error}")
    else:
        print(
            f"✓ {name}: the symptom is gone."
            if gone
            else f"✗ {name}: the symptom is still there (symptom({name!r}, mine) draws both curves)."
        )


def answer(name: str) -> None:
    """Print what the bug was, and the exercise that checks the whole component."""
    bug = get_bug(name)
    print(bug.answer + (f"\nIts exercise: check.{bug.exercise}" if bug.exercise else ""))
