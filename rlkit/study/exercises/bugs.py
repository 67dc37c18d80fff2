"""Find the bug: real mistakes of public GRPO code, each met first as a symptom in a plot.

    symptom("growing_step")                 # the picture: what one sees in the logs
    show_code("growing_step")               # the function behind it
    check_fix("growing_step", mine)         # your corrected version: does the symptom go away?
    answer("growing_step")                  # what it was

The wrong functions stand in ``buggy`` and nowhere else.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass

import torch

from rlkit.study.exercises import buggy
from rlkit.study.exercises.buggy import accumulated_loss  # noqa: F401  (for the notebooks)
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


def _table(*bugs) -> dict[str, Bug]:
    return {bug.name: bug for bug in bugs}


BUGS = _table(
    Bug(
        "questions_by_heart",
        "The model learns the questions by heart",
        "Nobody rewards the prompt. Why does the log-probability of the prompt's own tokens climb?",
        "step",
        "log-prob of prompt tokens (nats)",
        buggy.prompt_log_prob,
        buggy.response_mask,
        buggy.mask_by_position,
        "The mask is `labels != pad`: it leaves out padding, and keeps the prompt. It also drops a "
        "response's own end-of-text where pad and end-of-text share an id. Masks come from positions, never "
        "from ids.",
        "03",
        "tokenize_prompt_and_output",
    ),
    Bug(
        "gradient_depends_on_memory",
        "The batch learns something else when memory is short",
        "Same batch, same weights. Why does the gradient depend on the number of microbatches?",
        "microbatches",
        "distance from one microbatch's gradient",
        buggy.gradient_error,
        buggy.accumulated_loss,
        buggy.microbatch_sequence_mean,
        "Each microbatch takes its own mean over tokens. A token in a microbatch of short rows weighs more "
        "than one in a microbatch of long rows. Sum first and divide by the whole batch's count, or average "
        "per sequence.",
        "03",
        "microbatch_losses",
    ),
    Bug(
        "growing_step",
        "The fewer rows are left, the larger the step",
        "Pruning rows without a gradient should change nothing. Why does a row's gradient grow with it?",
        "share of rows pruned",
        "gradient of one row (times B)",
        buggy.step_against_pruning,
        buggy.pruned_loss,
        buggy.pruned_by_batch,
        "The mean runs over the kept rows only, so the divisor shrinks with them: at 94 % pruned the step is "
        "16 times as large. The pruned rows have loss 0; they still count in B.",
        "05",
        "pruned_loss",
    ),
    Bug(
        "long_answers_get_away",
        "Long wrong answers get away",
        "Dr. GRPO is meant to be blind to length. Why is a token of a long wrong answer pushed less?",
        "length of the wrong response (tokens)",
        "push per token",
        buggy.push_against_length,
        buggy.drgrpo_loss,
        buggy.drgrpo_constant,
        "A mean over each sequence was left in before the division by the constant: every token of a "
        "response of length L weighs 1/L. That is the length bias Dr. GRPO set out to remove.",
        "05",
        "aggregate_constant",
    ),
    Bug(
        "penalty_without_pull",
        "A penalty that does not pull",
        "Only the KL penalty is minimised here. Why does the policy not come back to the reference?",
        "step",
        "KL(policy, reference) (nats)",
        buggy.kl_over_steps,
        buggy.kl_penalty,
        buggy.kl_k3_in_loss,
        "k1 = log pi - log ref is a fine estimate of the KL, but its gradient is the score alone, whose mean "
        "is zero: in expectation nothing is pulled. Differentiate k2 or k3, or put k1 into the reward.",
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
        buggy.new_answers,
        buggy.request_seeds,
        buggy.seed_per_request,
        "Every request carries the same seed, and prompts are repeated: a sampler that is deterministic in "
        "(prompt, seed) gives eight identical responses, and every advantage is zero for ever. One seed per "
        "prompt, copy and step.",
        "04",
        accept=lambda seen, wanted: min(seen) == 8,
    ),
    Bug(
        "off_policy_at_step_zero",
        "Off-policy before the first update",
        "No update has been made. Why do trainer and sampler disagree, except at temperature 1?",
        "sampler's temperature",
        "mean |log ratio| (nats)",
        buggy.ratio_against_temperature,
        buggy.token_log_probs,
        buggy.right_temperature,
        "The sampler draws from softmax(logits / T) and the trainer scores softmax(logits). Ratios are not "
        "1, clipping bites at random, and the gradient is that of another distribution.",
        "06",
        "log_prob_at_temperature",
    ),
    Bug(
        "clip_that_never_clips",
        "A clip that never clips",
        "32 updates on one batch, and not one sequence is clipped. Is the policy not moving?",
        "update on the same rollout batch",
        "clip fraction (sequences)",
        buggy.gspo_clip_fraction,
        buggy.cliprange_of,
        buggy.gspo_cliprange_of_the_paper,
        "0.2 is PPO's range for single-token ratios. GSPO's ratio is a geometric mean over the response, "
        "which stays within a fraction of a per cent of 1: its range is 3e-4.",
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
