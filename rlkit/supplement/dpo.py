"""Supplement: Direct Preference Optimization (Rafailov et al., 2023, 2305.18290), one pair at a time."""

import math
import random
import re
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from rlkit.log_probs import get_response_log_probs
from rlkit.supplement.sft import alpaca_prompt
from rlkit.support.files import read_jsonl
from rlkit.support.progress import progress
from rlkit.tokenization import tokenize_prompt_and_output


@dataclass(frozen=True)
class Preference:
    """One comparison: the instruction, the answer people preferred and the one they did not."""

    instruction: str
    chosen: str
    rejected: str


def load_hh(path) -> list[Preference]:
    """Single-turn comparisons from a file of Anthropic's HH data (.jsonl, .jsonl.gz: "chosen", "rejected").

    Dialogues with more than one human turn, or whose first turns differ, are left out: there the two answers
    do not reply to the same instruction.
    """
    pairs = []
    for row in read_jsonl(path):
        chosen, rejected = single_turn(row["chosen"]), single_turn(row["rejected"])
        if chosen and rejected and chosen[0] == rejected[0] and chosen[1] != rejected[1]:
            pairs.append(Preference(chosen[0], chosen[1], rejected[1]))
    return pairs


def single_turn(dialogue: str) -> tuple[str, str] | None:
    """(instruction, answer) of a dialogue of one human and one assistant turn; None if it has others."""
    if [dialogue.count(f"\n\n{who}: ") for who in ("Human", "Assistant")] != [1, 1]:
        return None
    turns = re.fullmatch(r"\n\nHuman: (.*)\n\nAssistant: (.*)", dialogue, re.DOTALL)
    return (turns[1].strip(), turns[2].strip()) if turns else None


def response_log_prob(model, tokenizer, instruction: str, response: str) -> torch.Tensor:
    """log pi(response + end of text | Alpaca prompt): a float32 scalar, the sum over its tokens, in nats."""
    ids = tokenizer(response, add_special_tokens=False, verbose=False)["input_ids"] + [tokenizer.eos_token_id]
    prompts = [alpaca_prompt(instruction)]
    batch = tokenize_prompt_and_output(prompts, [response], tokenizer, output_token_ids=[ids])
    device = next(model.parameters()).device
    inputs, labels, mask = (batch[name].to(device) for name in ("input_ids", "labels", "response_mask"))
    return get_response_log_probs(model, inputs, labels)["log_probs"][mask].sum()


def dpo_loss(policy_chosen, policy_rejected, ref_chosen, ref_rejected, beta: float) -> torch.Tensor:
    """-log sigmoid(beta [(log pi(yw) - log pi_ref(yw)) - (log pi(yl) - log pi_ref(yl))]), elementwise.

    The four arguments are log-probabilities of whole responses, in nats, of one shape. It is log 2 where the
    policy is the reference. Source: equation 7 of the paper.
    """
    if not beta > 0:
        raise ValueError(f"beta: got {beta}, expected a positive number")
    return -F.logsigmoid(beta * ((policy_chosen - ref_chosen) - (policy_rejected - ref_rejected)))


def compute_per_instance_dpo_loss(
    lm, lm_ref, tokenizer, beta: float, prompt: str, response_chosen: str, response_rejected: str
) -> torch.Tensor:
    """DPO's loss, a float32 scalar, on one comparison: Alpaca prompt, responses with the end-of-text token.

    No gradient reaches ``lm_ref``; the result lies on ``lm``'s device.
    """
    responses = (response_chosen, response_rejected)
    with torch.no_grad():
        ref = [response_log_prob(lm_ref, tokenizer, prompt, y) for y in responses]
    policy = [response_log_prob(lm, tokenizer, prompt, y) for y in responses]
    chosen, rejected = (value.to(policy[0].device) for value in ref)
    return dpo_loss(policy[0], policy[1], chosen, rejected, beta)


@torch.no_grad()
def preference_accuracy(lm, lm_ref, tokenizer, pairs) -> float:
    """Share of pairs whose implicit reward, log pi - log pi_ref, is higher for the chosen answer."""

    def reward(pair, response):
        policy, ref = (response_log_prob(m, tokenizer, pair.instruction, response) for m in (lm, lm_ref))
        return (policy - ref.to(policy.device)).item()

    return sum(reward(p, p.chosen) > reward(p, p.rejected) for p in pairs) / len(pairs)


def dpo_train(
    lm,
    lm_ref,
    tokenizer,
    pairs,
    *,
    beta: float = 0.1,
    lr: float = 1e-6,
    batch_size: int = 64,
    n_epochs: int = 1,
    max_grad_norm: float = 1.0,
    seed: int = 0,
) -> list[dict[str, float]]:
    """Fit ``lm`` to the pairs with RMSprop, one pair at a time, ``batch_size`` pairs per optimizer step.

    ``lm_ref`` stays as it is. Returns one dict per step: step, loss, accuracy (share of the batch's pairs
    already ranked right by the implicit reward, before the step) and grad_norm (before clipping).
    """
    pairs = list(pairs)
    if not pairs:
        raise ValueError("pairs: got none, expected at least one comparison")
    optimizer = torch.optim.RMSprop(lm.parameters(), lr=lr)
    lm_ref.eval()
    log = []
    with progress(total=n_epochs * -(-len(pairs) // batch_size), desc="DPO") as bar:
        for epoch in range(n_epochs):
            order = random.Random(seed + epoch).sample(pairs, len(pairs))
            for start in range(0, len(order), batch_size):
                batch, losses = order[start : start + batch_size], []
                for pair in batch:
                    compared = (pair.instruction, pair.chosen, pair.rejected)
                    loss = compute_per_instance_dpo_loss(lm, lm_ref, tokenizer, beta, *compared)
                    (loss / len(batch)).backward()
                    losses.append(loss.item())
                norm = torch.nn.utils.clip_grad_norm_(lm.parameters(), max_grad_norm).item()
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
                accuracy = sum(x < math.log(2) for x in losses) / len(losses)  # log 2: no preference
                row = {"step": len(log) + 1, "loss": sum(losses) / len(losses)}
                log.append(row | {"accuracy": accuracy, "grad_norm": norm})
                bar.update(1)
    return log
