"""The training loop, in the order of the handout's Algorithm 1: sample, reward, advantage, update, evaluate.

Where it goes beyond the handout, or had to choose:
- Rewards are computed once per response, over the whole rollout batch; a response keeps its group's advantage
  whatever train batch it lands in.
- Off-policy: the rollout batch is shuffled (seeded) and cut into train batches; old log-probs are the
  trainer's own, scored once before the first update, so that the ratio is 1 there. On-policy the sampler's
  log-probs stand beside the trainer's only to watch the gap between the two.
- A train batch without a single non-zero advantage still takes its optimizer step, with a zero gradient, as
  the unpruned algorithm would: AdamW's momentum goes on moving the weights. (The components skip its backward
  pass.)
- Every random choice is a function of (seed, step) alone, so a resumed run needs no random state.
- The model stays in eval mode: dropout would make scoring differ from sampling.
- Problems are shuffled anew every epoch; a last partial batch of an epoch is left out, so that no prompt
  appears twice in a batch.
"""

from __future__ import annotations

import random
import time
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, fields
from zlib import crc32

import numpy as np
import torch

from rlkit.advantages import compute_group_normalized_rewards, grade_responses
from rlkit.algorithms import get_algorithm
from rlkit.grpo import grpo_train_step, response_log_probs
from rlkit.jobs.planning import check_memory, plan, prompt_lengths
from rlkit.jobs.runs import Run, open_run
from rlkit.jobs.sinks import check_sink, open_sink
from rlkit.samplers import SamplingParams, make_sampler
from rlkit.support.models import load_model
from rlkit.support.progress import progress
from rlkit.tasks.evaluation import evaluate
from rlkit.tasks.grading import extract_answer, last_boxed
from rlkit.tasks.problems import load_problems
from rlkit.tasks.prompts import load_prompt

EMPTY_STEPS = 20  # steps in a row without a mixed group before a warning
LARGE_GAP = 0.1  # mean nats between sampler and trainer; two bfloat16 computations differ by 0.002 to 0.03
GAP_STEPS = 20  # steps between two warnings about it
IDENTICAL_STEPS = 5  # steps in a row in which most groups are one text repeated before a warning
VAL_ROLLOUTS = 16  # validation responses kept per evaluation


def train(config, *, algorithm=None, reward_fn=None, sampler=None, model=None, tokenizer=None) -> Run | None:
    """Train a model as ``config`` says; returns the run's folder, read back (None for a dry run).

    Args:
        config: a ``Config``.
        algorithm: an ``Algorithm`` of your own; None is the one named ``config.algo``.
        reward_fn: ``f(response, ground_truth) -> dict`` with "reward"; None is the prompt's. Validation
            always uses the prompt's, so that a reward of your own is judged by what it is meant to improve.
        sampler: anything with the ``Sampler`` protocol; None makes ``config.sampler``. Given ones are not
            closed.
        model, tokenizer: to train this model, in place, rather than load ``config.model``.

    With ``config.resume`` a killed run goes on from its last checkpoint and ends with the same numbers; one
    that is finished comes back at once. Raises ValueError for whatever does not fit, before anything is
    loaded.
    """
    algorithm = get_algorithm(config.algo if algorithm is None else algorithm)
    config = config.resolved(algorithm)
    prompt = load_prompt(config.prompt)
    reward_fn = prompt.reward_fn if reward_fn is None else reward_fn
    check_sink(config.sink)
    if (model is None) != (tokenizer is None):
        raise ValueError("model, tokenizer: got one of them, expected both or none")
    if config.dry_run:
        print(plan(config, algorithm=algorithm)["text"], flush=True)
        return None
    folder = open_run(config, algorithm)
    if Run(folder.path).finished:
        folder.close()
        return Run(folder.path)
    own_sampler, sink = sampler is None, None

    with limited_threads(config.threads), keep_random_state():
        try:
            train_problems = load_problems(config.dataset, "train", config.n_train, seed=0)
            val_problems = load_problems(
                config.dataset, "validation", max(config.n_val, config.n_val_final), seed=0
            )
            if model is None:
                if config.check_memory:
                    check_memory(config, train_problems, prompt)
                model, tokenizer = load_model(
                    config.model, config.dtype, config.device, config.attn_implementation
                )
            model.eval()
            optimizer = torch.optim.AdamW(
                model.parameters(),
                lr=config.lr,
                weight_decay=config.weight_decay,
                betas=(config.adam_beta1, config.adam_beta2),
            )
            done = folder.restore(model, optimizer)  # -1: nothing yet, not even step 0
            if own_sampler:
                sampler = make_sampler(
                    config.sampler,
                    model,
                    tokenizer,
                    **sampler_options(config, tokenizer, train_problems + val_problems, prompt),
                )
            sink = open_sink(config.sink, folder.path, Run(folder.path).config)
            watch = Watch(print_line)
            steps = progress(range(done + 1, config.n_steps + 1), desc="train")
            in_sync = False  # has the sampler the model's weights?

            for step in steps:
                clock, row = Clock(), {"step": step}
                seed_everything(stream(config.seed, step, "update"))

                if step > 0:
                    if not in_sync:
                        with clock("sync"):
                            sampler.sync_weights(model, step)
                    problems = prompts_of_step(train_problems, config.n_prompts, step, config.seed)
                    with clock("sample"), autocast(config, model):
                        batch = sample_rollouts(sampler, problems, prompt, config, step)
                    with clock("train"):
                        row |= reward_rollouts(batch, reward_fn, config, algorithm, prompt)
                        row |= score_rollouts(batch, model, tokenizer, config, algorithm)
                        row |= update(batch, model, tokenizer, optimizer, reward_fn, config, algorithm, step)
                    in_sync = False
                    row["tokens_per_second"] = sum(map(len, batch.token_ids)) / clock.seconds["time_sample"]
                    watch(step, row, config.n_prompts)
                    if rollouts_due(config, step):
                        folder.add_rollouts(batch.as_rows(step))

                if evaluation_due(config, step):
                    with clock("sync"):
                        sampler.sync_weights(model, step)
                    in_sync = True
                    with clock("eval"), autocast(config, model):
                        n = config.n_val_final if step == config.n_steps else config.n_val
                        found = evaluate(
                            sampler,
                            val_problems[:n],
                            prompt,
                            **sampling(config),
                            seed=stream(config.seed, step, "evaluation"),
                        )
                    row |= {
                        "val_reward": found.accuracy,
                        "val_reward_se": found.accuracy_se,
                        "val_format_reward": found.format_rate,
                        "val_response_length": found.response_length,
                        "val_truncated_share": found.truncated_share,
                        "val_n": found.n_problems,
                    }
                    folder.add_rollouts(validation_rows(found, step))

                if len(row) > 1:  # step 0 without an evaluation says nothing
                    row |= clock.seconds | {"time_cpu": clock.cpu_seconds()}
                    folder.log(row)
                    sink.log(row, step)
                    steps.set_postfix(
                        {k: f"{row[k]:.3f}" for k in ("reward", "val_reward") if k in row}, refresh=False
                    )
                if step > 0 and (
                    step == config.n_steps or config.checkpoint_every and step % config.checkpoint_every == 0
                ):
                    folder.save_checkpoint(step, model, optimizer)
            folder.finish(config.n_steps, model, tokenizer)
        finally:
            if own_sampler and sampler is not None:
                sampler.close()
            if sink is not None:
                sink.close()
            folder.close()
    return Run(folder.path)


# ---- one rollout batch, step by step


@dataclass
class RolloutBatch:
    """N = n_prompts x group_size responses, the rows of a group together. ``take`` moves every field alike."""

    groups: list[int]  # which prompt of the batch
    prompts: list[str]
    responses: list[str]
    ground_truths: list[str]
    token_ids: list[list[int]]
    prompt_token_ids: list[list[int]]
    sampler_log_probs: list[torch.Tensor] | None  # one (response tokens,) tensor a row
    truncated: list[bool]
    rewards: dict[str, list[float]] | None = None
    advantages: list[float] | None = None
    old_log_probs: list[torch.Tensor] | None = None
    tis_weights: list[torch.Tensor] | None = None

    def take(self, rows) -> RolloutBatch:
        """The same fields of these rows, in this order."""

        def pick(value):
            return (
                {name: pick(v) for name, v in value.items()}
                if isinstance(value, dict)
                else None
                if value is None
                else [value[i] for i in rows]
            )

        return RolloutBatch(**{f.name: pick(getattr(self, f.name)) for f in fields(self)})

    def as_rows(self, step: int) -> list[dict]:
        """For rollouts.jsonl."""
        return [
            {
                "step": step,
                "split": "train",
                "group": self.groups[i],
                "prompt": self.prompts[i],
                "response": self.responses[i],
                "gold": self.ground_truths[i],
                **{name: values[i] for name, values in self.rewards.items()},
                "advantage": self.advantages[i],
                "length": len(self.token_ids[i]),
                "finish_reason": "length" if self.truncated[i] else "stop",
            }
            for i in range(len(self.groups))
        ]


def sample_rollouts(sampler, problems, prompt, config, step) -> RolloutBatch:
    """group_size responses to each problem; the seed changes with the step."""
    params = SamplingParams(
        **sampling(config), stop=tuple(prompt.stop), seed=stream(config.seed, step, "rollout")
    )
    texts = [prompt.fill(problem.question) for problem in problems]
    completions = sampler.generate(texts, params, config.group_size)
    rows = [
        (i, problem, text, c)
        for i, (problem, text, group) in enumerate(zip(problems, texts, completions))
        for c in group
    ]
    if len(rows) != config.rollout_batch_size:
        raise ValueError(f"sampler: gave {len(rows)} responses, expected {config.rollout_batch_size}")
    with_log_probs = all(len(c.log_probs) == len(c.token_ids) for *_, c in rows)
    return RolloutBatch(
        groups=[i for i, *_ in rows],
        prompts=[text for _, _, text, _ in rows],
        responses=[c.text for *_, c in rows],
        ground_truths=[problem.answer for _, problem, *_ in rows],
        token_ids=[list(c.token_ids) for *_, c in rows],
        prompt_token_ids=[list(c.prompt_token_ids) for *_, c in rows],
        sampler_log_probs=[torch.tensor(c.log_probs) for *_, c in rows] if with_log_probs else None,
        truncated=[c.finish_reason == "length" for *_, c in rows],
    )


def reward_rollouts(batch, reward_fn, config, algorithm, prompt) -> dict:
    """Fills in rewards and advantages, each row's from its whole group; returns the rollout batch's metrics."""
    graded = grade_responses(reward_fn, batch.responses, batch.ground_truths)
    advantages, groups = compute_group_normalized_rewards(
        graded["reward"],
        config.group_size,
        algorithm.baseline,
        config.advantage_eps,
        algorithm.advantage_normalizer,
    )
    batch.rewards = {name: values.tolist() for name, values in graded.items()}
    batch.advantages = advantages.tolist()
    answer_of = extract_answer if prompt.reward == "r1_zero" else last_boxed
    answers = [(answer_of(response) or "").strip() for response in batch.responses]
    size = config.group_size
    return {
        **{name: values.mean().item() for name, values in graded.items()},
        "pass_at_k": groups["pass_at_k"][-1],
        **{name: groups[name] for name in ("groups_all_right", "groups_all_wrong", "groups_mixed")},
        "groups_identical": sum(size > 1 and len(set(g)) == 1 for g in chunks(batch.responses, size)),
        "distinct_answers": float(np.mean([len(set(g)) for g in chunks(answers, size)])),
        "response_length": float(np.mean([len(ids) for ids in batch.token_ids])),
        "truncated_share": float(np.mean(batch.truncated)),
        "rows_used": sum(a != 0 for a in batch.advantages),
    }


def score_rollouts(batch, model, tokenizer, config, algorithm) -> dict:
    """Old log-probs where something needs them, and with them the gap to the sampler and its truncated weights."""
    if algorithm.importance_reweighting_method == "none" and config.tis_cap is None:
        return {}
    batch.old_log_probs = response_log_probs(
        model,
        tokenizer,
        batch.prompts,
        batch.responses,
        response_token_ids=batch.token_ids,
        prompt_token_ids=batch.prompt_token_ids,
        temperature=config.temperature,
        microbatch_size=config.train_batch_size // config.gradient_accumulation_steps,
        autocast_dtype=autocast_dtype(config),
    )
    if batch.sampler_log_probs is None:
        if config.tis_cap is not None:
            raise ValueError("tis_cap: the sampler gives no log-probs to correct for; expected None")
        return {}
    differences = [old - sampled for old, sampled in zip(batch.old_log_probs, batch.sampler_log_probs)]
    log_ratios = torch.cat(differences)
    row = {}
    if log_ratios.numel():
        row = {
            "logprob_gap_mean": log_ratios.abs().mean().item(),
            "logprob_gap_max": log_ratios.abs().max().item(),
        }
    if config.tis_cap is not None:
        batch.tis_weights = [difference.exp().clamp(max=config.tis_cap) for difference in differences]
        if log_ratios.numel():
            row["tis_share"] = (log_ratios.exp() > config.tis_cap).float().mean().item()
    return row


def update(batch, model, tokenizer, optimizer, reward_fn, config, algorithm, step) -> dict:
    """One optimizer step per train batch; metrics are means (over tokens where they count tokens) or extremes."""
    old = batch.old_log_probs
    if old is None:  # then the method is "none": not in the loss, only to see the ratio
        old = batch.sampler_log_probs
    reports = []
    for rows in train_batches(
        len(batch.groups), config.train_batch_size, stream(config.seed, step, "shuffle")
    ):
        part = batch.take(rows)
        # the gap to the sampler, where score_rollouts has not measured it: its weights are ours until the
        # first update
        watched = part.sampler_log_probs if batch.old_log_probs is None and not reports else None
        _, report = grpo_train_step(
            model,
            tokenizer,
            optimizer,
            config.gradient_accumulation_steps,
            config.max_grad_norm,
            reward_fn,
            part.prompts,
            part.responses,
            part.ground_truths,
            config.group_size,
            algorithm.baseline,
            config.advantage_eps,
            algorithm.advantage_normalizer,
            algorithm.importance_reweighting_method,
            old and [old[i] for i in rows],
            config.cliprange,
            algorithm.loss_normalization,
            config.normalization_constant,
            response_token_ids=part.token_ids,
            prompt_token_ids=part.prompt_token_ids,
            temperature=config.temperature,
            advantages=torch.tensor(part.advantages),
            autocast_dtype=autocast_dtype(config),
            tis_weights=part.tis_weights,
            sampler_log_probs=watched,
        )
        reports.append(report)
    # a mean over tokens is weighted by the tokens of each train batch; a share of sequences (gspo) is not
    weights = [report["response_length"] for report in reports]
    by_tokens = (
        {"token_entropy"}
        if algorithm.importance_reweighting_method == "gspo"
        else {"token_entropy", "clip_fraction", "clip_fraction_low", "clip_fraction_high"}
    )
    combine = {"ratio_min": min, "ratio_max": max, "logprob_gap_max": max}
    row = {"lr": config.lr, "optimizer_steps": len(reports)}
    for name in dict.fromkeys(name for report in reports for name in report):
        values = [float(report[name]) for report in reports if name in report]
        if name not in ("lr", "rows_used", "response_length"):  # the whole rollout batch's are known
            row[name] = float(combine.get(name, np.mean)(values))
            if name in by_tokens and len(values) == len(weights) and sum(weights):
                row[name] = float(np.average(values, weights=weights))
    return row


# ---- order and randomness: functions of (seed, step)


def stream(seed: int, step: int, purpose: str) -> int:
    """A 31-bit seed of its own for every step and purpose of a run."""
    sequence = np.random.SeedSequence([seed, step, crc32(purpose.encode())])
    return int(sequence.generate_state(1)[0] >> 1)


def prompts_of_step(problems: list, n_prompts: int, step: int, seed: int) -> list:
    """The problems of step 1, 2, ...: epoch after epoch, each shuffled by itself, whole batches only."""
    epoch, place = divmod(step - 1, len(problems) // n_prompts)
    order = np.random.default_rng(stream(seed, epoch, "epoch")).permutation(len(problems))
    return [problems[i] for i in order[place * n_prompts : (place + 1) * n_prompts]]


def train_batches(n_rows: int, size: int, seed: int) -> list[list[int]]:
    """The rows of each train batch: all in order if there is one, else shuffled and cut."""
    if size == n_rows:
        return [list(range(n_rows))]
    return chunks(np.random.default_rng(seed).permutation(n_rows).tolist(), size)


def seed_everything(seed: int) -> None:
    """For whatever else draws numbers: dropout, a reader's own reward function."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


@contextmanager
def keep_random_state():
    """Leave the caller's random states as they were."""
    states = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        try:
            yield
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])


@contextmanager
def limited_threads(n: int):
    """``n`` CPU threads inside, the former number after."""
    before = torch.get_num_threads()
    torch.set_num_threads(n)
    try:
        yield
    finally:
        torch.set_num_threads(before)


# ---- small things


def sampler_options(config, tokenizer, problems, prompt) -> dict:
    """What ``make_sampler`` is told beyond the model: for vLLM, how weights travel, in which type to compute,
    and the length to make room for, without which it reserves memory for the longest sequence the model could
    hold."""
    if config.sampler != "vllm":
        return {}
    return {
        "weight_sync": config.weight_sync,
        "dtype": "bfloat16" if config.autocast else None,
        "max_model_len": prompt_lengths(tokenizer, problems, prompt)["longest"] + config.max_tokens,
    }


def autocast_dtype(config) -> torch.dtype | None:
    return torch.bfloat16 if config.autocast else None


def autocast(config, model):
    """The precision that rollouts are computed in: the same as the train step's."""
    device_type = next(model.parameters()).device.type
    return torch.autocast(device_type, dtype=torch.bfloat16) if config.autocast else nullcontext()


def sampling(config) -> dict:
    """The config's fields that are ``SamplingParams``'."""
    return {
        name: getattr(config, name)
        for name in ("max_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    }


def evaluation_due(config, step: int) -> bool:
    if not config.n_val or (step == 0 and not config.eval_at_start):
        return False
    return step in (0, config.n_steps) or bool(config.eval_every and step % config.eval_every == 0)


def rollouts_due(config, step: int) -> bool:
    """The first and the last step, and every ``rollouts_every``-th."""
    return bool(config.rollouts_every) and (step in (1, config.n_steps) or step % config.rollouts_every == 0)


def validation_rows(found, step: int) -> list[dict]:
    """The first responses of an evaluation, for rollouts.jsonl."""
    names = [
        "prompt",
        "response",
        "gold",
        "reward",
        "format_reward",
        "answer_reward",
        "length",
        "finish_reason",
    ]
    return [
        {
            "step": step,
            "split": "validation",
            "group": int(row["problem"]),
            **{name: row[name] for name in names},
        }
        for row in found.rows.head(VAL_ROLLOUTS).to_dict("records")
    ]


def chunks(items: list, size: int) -> list[list]:
    return [items[i : i + size] for i in range(0, len(items), size)]


class Clock:
    """``with clock("train"): ...`` adds the seconds to ``seconds["time_train"]``."""

    def __init__(self):
        self.seconds, self.cpu_start = {}, time.process_time()

    def cpu_seconds(self) -> float:
        return time.process_time() - self.cpu_start

    @contextmanager
    def __call__(self, phase: str):
        start = time.perf_counter()
        yield
        self.seconds[f"time_{phase}"] = self.seconds.get(f"time_{phase}", 0.0) + time.perf_counter() - start


class Watch:
    """Says so when something looks like a bug, and sometimes is one: nothing learned for long, a sampler that
    is off.

    With a success rate of 1 in 1,000, most batches of 256 hold no right answer, so this warns and never stops
    a run.
    """

    def __init__(self, say):
        self.say, self.empty, self.identical, self.gaps = say, 0, 0, 0

    def __call__(self, step: int, row: dict, n_prompts: int) -> None:
        self.empty = 0 if row["rows_used"] else self.empty + 1
        self.identical = self.identical + 1 if 2 * row["groups_identical"] > n_prompts else 0
        if self.empty and self.empty % EMPTY_STEPS == 0:
            rewards = (
                "every reward was 1"
                if row["groups_all_right"] == n_prompts
                else f"mean reward {row['reward']:.3f}, well-formed {row.get('format_reward', 0.0):.3f}"
            )
            self.say(
                f"warning: step {step}: no group with a learning signal for {self.empty} steps ({rewards}); "
                f"is "
                "the prompt's format or the problems' difficulty out of the model's reach?"
            )
        if self.identical and self.identical % IDENTICAL_STEPS == 0:
            self.say(
                f"warning: step {step}: in most groups all responses are the same text, for {self.identical} "
                f"steps ({row['groups_identical']} of {n_prompts} now): a fixed seed or a collapsed policy?"
            )
        if row.get("logprob_gap_mean", 0.0) > LARGE_GAP:
            if self.gaps % GAP_STEPS == 0:
                self.say(
                    f"warning: step {step}: the sampler's log-probabilities and the trainer's differ by "
                    f"{row['logprob_gap_mean']:.2f} nats a token: has the sampler the weights and the "
                    f"temperature "
                    "that the trainer has?"
                )
            self.gaps += 1


def print_line(text: str) -> None:
    print(text, flush=True)
