"""Warnings while a run trains: no learning signal, identical responses, sampler and trainer that disagree,
weights that do not move, a collapse; and the end of a run whose gradient is never finite."""

from collections.abc import Callable

import torch

from rlkit.jobs.collapse import WINDOW, collapse

EMPTY_STEPS = 20  # steps in a row without a mixed group before a warning
LARGE_GAP = 0.1  # mean nats between sampler and trainer; two bfloat16 computations differ by 0.002 to 0.03
LARGEST_GAP = 2.0  # the same for the largest of a step; few positions may be wrong, as beyond a window
GAP_STEPS = 20  # steps between two warnings about it
IDENTICAL_STEPS = 5  # steps in a row in which most groups are one text repeated before a warning
MOVED_STEPS = 4  # steps with a learning signal before the weights are looked at
MOVED_SHARE = 0.1  # fewer changed weights than this share are worth a warning
SKIPPED_STEPS = 20  # optimizer steps in a row that are left out before the run stops
SAMPLED = 1000  # weights looked at of each tensor


class Watch:
    """``watch(step, row, n_prompts)``: a line to ``say`` where a step's metrics look wrong.

    weights: the trained parameters as they are at the start, or none: to see how many change at all.
    history: the metrics of the steps before.

    With a success rate of 1 in 1,000, most batches of 256 hold no right answer, so this warns. It stops a run
    (RuntimeError) only after SKIPPED_STEPS optimizer steps in a row that could not be taken.
    """

    def __init__(
        self, say: Callable[[str], None] = lambda text: print(text, flush=True), weights=(), history=()
    ):
        self.say, self.empty, self.identical, self.gaps, self.skipped = say, 0, 0, 0, 0
        self.history, self.collapses = list(history), 0
        self.weights, self.taught, self.start = list(weights), 0, sample_of(weights)

    def __call__(self, step: int, row: dict, n_prompts: int) -> None:
        self.empty = 0 if row["rows_used"] else self.empty + 1
        self.identical = self.identical + 1 if 2 * row["groups_identical"] > n_prompts else 0
        if self.empty and self.empty % EMPTY_STEPS == 0:
            rewards = f"mean reward {row['reward']:.3f}, well-formed {row.get('format_reward', 0.0):.3f}"
            if row["groups_all_right"] == n_prompts:
                rewards = "every reward was 1"
            self.say(
                f"warning: step {step}: no group with a learning signal for {self.empty} steps ({rewards}); "
                "is the prompt's format or the problems' difficulty out of the model's reach?"
            )
        if self.identical and self.identical % IDENTICAL_STEPS == 0:
            self.say(
                f"warning: step {step}: in most groups all responses are the same text, for {self.identical} "
                f"steps ({row['groups_identical']} of {n_prompts} now): a fixed seed or a collapsed policy?"
            )
        self.skips(step, row)
        self.history.append(row | {"step": step})
        if why := collapse(self.history):
            row["collapsed"] = 1.0
            if self.collapses % WINDOW == 0:
                self.say(
                    f"warning: step {step}: collapse: {why}; try a smaller lr, or fewer updates per batch"
                )
            self.collapses += 1
        self.taught += bool(row["rows_used"])
        if self.weights and self.taught == MOVED_STEPS:
            share = share_changed(self.start, sample_of(self.weights))
            if share < MOVED_SHARE:
                kinds = sorted({str(p.dtype).removeprefix("torch.") for p in self.weights})
                self.say(
                    f"warning: step {step}: only {share:.1%} of the trained weights have changed in "
                    f"{MOVED_STEPS} steps at lr {row['lr']:g}: {' and '.join(kinds)} rounds the other "
                    "updates away; try dtype=float32 with autocast=True, or a larger lr"
                )
            self.weights = []
        mean, largest = row.get("logprob_gap_mean", 0.0), row.get("logprob_gap_max", 0.0)
        if mean > LARGE_GAP or largest > LARGEST_GAP:
            if self.gaps % GAP_STEPS == 0:
                self.say(
                    f"warning: step {step}: the sampler's log-probabilities and the trainer's differ by "
                    f"{mean:.2f} nats a token, {largest:.2f} at most. Likely causes: the sampler has old "
                    "weights, another temperature or truncation (top_p, top_k), another dtype, or decodes "
                    "this architecture wrongly"
                )
            self.gaps += 1

    def skips(self, step: int, row: dict) -> None:
        """Tell the first skipped steps in a row, and stop after too many."""
        skipped = row.get("skipped_steps", 0)
        if skipped and not self.skipped:
            steps = f"{skipped} of {row['optimizer_steps']} optimizer steps"
            self.say(f"warning: step {step}: {steps} left out, the gradient was not finite")
        self.skipped = self.skipped + skipped if skipped == row.get("optimizer_steps") else 0
        if self.skipped >= SKIPPED_STEPS:
            raise RuntimeError(
                f"step {step}: the gradient was not finite in the last {self.skipped} optimizer steps, and "
                "none of them was taken. A loss divided by a tiny constant, an overflow in half precision or "
                "diverged weights do this: try a smaller lr, another normalization_constant, or bfloat16"
            )


def sample_of(parameters) -> torch.Tensor:
    """Up to SAMPLED numbers of each tensor, evenly spread, copied to the CPU in float32 (which is exact)."""
    local = [(p.to_local() if hasattr(p, "to_local") else p).detach().flatten() for p in parameters]
    picked = [p[:: 1 + len(p) // SAMPLED].float().cpu() for p in local]
    return torch.cat([torch.zeros(0), *picked])


def share_changed(before: torch.Tensor, after: torch.Tensor) -> float:
    """The share of weights with another value than before."""
    return (before != after).float().mean().item()
