"""The training loop, in the order of the handout's Algorithm 1: sample, reward, advantage, update, evaluate.

Where it goes beyond the handout, or had to choose:
- Rewards are computed once per response, over the whole rollout batch; a response keeps its group's advantage
  whatever train batch it lands in.
- Off-policy: the rollout batch is shuffled (seeded) and cut into train batches; old log-probs are the
  trainer's own, scored once before the first update, so that the ratio is 1 there. On-policy the sampler's
  log-probs stand beside the trainer's only to watch the gap between the two.
- A train batch without a single non-zero advantage still takes its optimizer step, with a zero gradient, as
  the unpruned algorithm would: AdamW's momentum goes on moving the weights.
- Only rows that teach are scored: old log-probs, ratios and gaps are theirs.
- Every random choice is a function of (seed, step) alone, so a resumed run needs no random state.
- The model stays in eval mode: dropout would make scoring differ from sampling.
- Problems are shuffled anew every epoch; a last partial batch of an epoch is left out, so that no prompt
  appears twice in a batch.
"""

import copy
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from rlkit.advantages import compute_group_normalized_rewards, rows_by_group
from rlkit.algorithms import Algorithm, get_algorithm
from rlkit.batch import RolloutBatch, rollout_batch
from rlkit.grpo import response_log_probs, rows_that_teach, train_step
from rlkit.jobs import loop, sharding
from rlkit.jobs.config import Config
from rlkit.jobs.launch import launch
from rlkit.jobs.planning import plan
from rlkit.jobs.record import inputs_of, weights_hash
from rlkit.jobs.run_writer import open_run
from rlkit.jobs.runs import Run
from rlkit.jobs.sinks import open_sink
from rlkit.jobs.watch import Watch, sample_of
from rlkit.losses import loss_none
from rlkit.samplers import make_sampler
from rlkit.support.adapters import adapter_of, add_lora, unwrapped
from rlkit.support.checks import shown
from rlkit.support.console import plain_console
from rlkit.support.files import read_jsonl
from rlkit.support.metrics import train_step_metrics
from rlkit.support.models import load_model, try_saving
from rlkit.support.progress import progress
from rlkit.support.ranks import join, launched
from rlkit.support.recompute import recomputed_layers
from rlkit.support.running import Clock, keep_random_state, limited_threads, seed_everything, stream
from rlkit.support.shapes import PerPosition
from rlkit.tasks.evaluation import evaluate
from rlkit.tasks.problems import check_problems, load_problems
from rlkit.tasks.prompts import load_prompt
from rlkit.tokenization import filler_id, opening_ids


def train(
    config,
    *,
    algorithm=None,
    reward_fn=None,
    sampler=None,
    model=None,
    tokenizer=None,
    problems=None,
    val_problems=None,
    val_reward_fn=None,
) -> Run | None:
    """Train a model as ``config`` says; returns the run's folder, read back (None for a dry run).

    Args:
        config: a ``Config``.
        algorithm: an ``Algorithm`` of your own; None is the one named ``config.algo``.
        reward_fn: ``f(response, ground_truth) -> dict`` with "reward", or ``f(response, problem)`` to see
            the whole ``Problem``; None is the prompt's. Further numbers in it are logged as "reward_<name>".
        val_reward_fn: the same for validation; None is the prompt's, so that a reward of your own is judged
            by what it is meant to improve.
        problems, val_problems: lists of ``Problem`` in place of the dataset's (its first n_train, n_val).
        sampler: anything with the ``Sampler`` protocol, left open; None makes ``config.sampler``.
        model, tokenizer: to train this model, in place, rather than load ``config.model``. One with a LoRA
            (a ``PeftModel``, or after ``add_adapter``) is trained in that adapter alone.

    With ``config.resume`` a killed run goes on from its last checkpoint and ends with the same numbers; one
    that is finished comes back at once. Raises ValueError for what does not fit, before anything is loaded;
    later only for what a sampler gives.
    """
    plain_console()
    check_given(config, reward_fn, val_reward_fn, sampler)
    own_algorithm = isinstance(algorithm, Algorithm)
    algorithm = get_algorithm(config.algo if algorithm is None else algorithm)
    config = config.resolved(algorithm)
    model = model if model is None else unwrapped(model)
    if (model is None) != (tokenizer is None):
        raise ValueError("model, tokenizer: got one of them, expected both or none")
    ranks, device = join(config.device)
    config = replace(config, n_gpus=ranks.size) if ranks.size > 1 else config
    algorithm = config.settle(algorithm)
    own_problems = check_problems(config, problems, val_problems)
    outlook = plan(
        config,
        algorithm=algorithm,
        model=model,
        tokenizer=tokenizer,
        own_sampler=sampler is None,
        problems=own_problems,
    )
    if config.dry_run:
        return print(outlook["text"], flush=True) if ranks.first else None
    if outlook["errors"]:
        raise ValueError("\n".join(outlook["errors"]))
    if config.n_gpus > 1 and not launched():
        own = {"algorithm": own_algorithm or None, "reward_fn": reward_fn, "val_reward_fn": val_reward_fn}
        own |= {"problems": problems, "sampler": sampler, "model": model}
        return launch(config, [name for name, value in own.items() if value is not None])
    prompt = load_prompt(config.prompt)
    reward_fn = prompt.reward_fn if reward_fn is None else reward_fn
    if own_problems is None:
        columns = {"question_column": config.question_column, "answer_column": config.answer_column}
        problems = load_problems(config.dataset, "train", config.n_train, **columns)
        n_val = max(config.n_val, config.n_val_final)
        val_problems = load_problems(config.dataset, "validation", n_val, **columns)
    train_problems, val_problems = problems or [], val_problems or []
    inputs = inputs_of(prompt, reward_fn, val_reward_fn or prompt.reward_fn, train_problems, val_problems)
    folder = open_run(config, algorithm, ranks, inputs)
    if folder.finished:
        folder.close()
        return Run(folder.path)

    with ExitStack() as at_the_end:
        at_the_end.callback(folder.close)
        at_the_end.enter_context(limited_threads(config.threads))
        at_the_end.enter_context(keep_random_state())
        if model is None:
            where = (config.dtype, device, config.attn_implementation, loop.autocast_dtype(config))
            model, tokenizer = load_model(config.model, *where, on_host=ranks.size > 1)
        base = [p for p in model.parameters() if not (p.requires_grad and adapter_of(model))]
        folder.note_weights(weights_hash(sample_of(base)), config.allow_changes)
        if config.lora_rank:
            seed_everything(stream(config.seed, 0, "lora"))
            add_lora(model, config.lora_rank, config.lora_alpha, config.lora_target_modules)
        model.eval()
        if ranks.first:
            try_saving(model, tokenizer, folder.path)
        prompt = prompt.for_tokenizer(tokenizer)
        folder.note(prompts_open_with=opening_ids(tokenizer))
        reference = copy.deepcopy(model).requires_grad_(False) if config.kl_coef else None
        whole, model = sharding.spread(model, ranks, device, config.sampler)
        if reference is not None and ranks.size > 1:
            reference = sharding.shard(reference, ranks.size, device)
        if config.gradient_checkpointing:
            at_the_end.enter_context(recomputed_layers(model))
        trained = [p for p in model.parameters() if p.requires_grad]
        scaled = loop.autocast_dtype(config) == torch.float16
        scaler = torch.amp.GradScaler(next(model.parameters()).device.type, enabled=scaled)
        betas, decay = (config.adam_beta1, config.adam_beta2), config.weight_decay
        optimizer = torch.optim.AdamW(trained, lr=config.lr, betas=betas, weight_decay=decay)
        done = folder.restore(model, optimizer, scaler, config.allow_changes)  # -1: not even step 0
        if sampler is None and ranks.first:
            options = loop.sampler_options(config, tokenizer, train_problems + val_problems, prompt)
            sampler = make_sampler(config.sampler, whole, tokenizer, **options)
            at_the_end.callback(sampler.close)
        sink = open_sink(config.sink if ranks.first else "none", folder, done + 1)
        at_the_end.callback(sink.close)
        history = read_jsonl(folder.path / "metrics.jsonl", growing=True) if ranks.first else ()
        watch = Watch(weights=trained if done < 1 and config.lr else (), history=history)
        bar = None if ranks.first else True
        steps = progress(range(done + 1, config.n_steps + 1), desc="train", disable=bar)
        asking = dict(temperature=config.temperature, max_tokens=config.max_tokens)
        in_sync = False  # has the sampler the model's weights?

        for step in steps:
            clock, row, answers = Clock(), {"step": step}, []
            seed_everything(stream(config.seed, step, "update"))

            if step > 0:
                for group in optimizer.param_groups:
                    group["lr"] = loop.learning_rate(config, step)
                if not in_sync:
                    with clock("sync"):
                        sharding.sync(ranks, sampler, model, whole, step)
                problems = loop.prompts_of_step(train_problems, config.n_prompts, step, config.seed)
                others = loop.other_prompts(train_problems, problems, step, config.seed)
                with clock("sample"), loop.autocast(config, model):
                    ask = partial(loop.rollouts, sampler, problems, others, prompt, reward_fn, config, step)
                    problems, groups, rewards, asked = ranks.from_first(ask)
                with clock("train"):
                    batch = rollout_batch(groups, filler_id(tokenizer))
                    row |= loop.rollout_metrics(groups, rewards, prompt) | asked
                    row |= advantages_of(batch, rewards["reward"], algorithm, config.advantage_eps)
                    generated = int(batch.response_mask.sum())
                    if config.mask_truncated:
                        batch.response_mask &= ~loop.truncated_rows(groups)[:, None]
                    scored = score_rollouts(batch, model, reference, algorithm, config)
                    row |= update(batch, model, optimizer, algorithm, config, step, scaler) | scored
                in_sync = False
                row["lr"] = optimizer.param_groups[0]["lr"]
                row["tokens_per_second"] = generated / clock.seconds["time_sample"]
                if ranks.first:
                    watch(step, row, config.n_prompts)
                if loop.rollouts_due(config, step):
                    texts = [prompt.fill(problem.question) for problem in problems]
                    folder.add_rollouts(loop.training_rows(step, batch, groups, texts, problems, rewards))

            if loop.evaluation_due(config, step):
                with clock("sync"):
                    sharding.sync(ranks, sampler, model, whole, step)
                in_sync = True
                with clock("eval"), loop.autocast(config, model):
                    n = config.n_val_final if step == config.n_steps else config.n_val
                    seed = stream(config.seed, step, "evaluation")
                    asking_now = asking | {"seed": seed, "reward_fn": val_reward_fn}
                    ask = partial(evaluate, sampler, val_problems[:n], prompt, **asking_now)
                    found = ranks.from_first(ask)
                row |= loop.validation_metrics(found)
                answers = loop.validation_rows(found, step)
                folder.add_rollouts(answers)

            if len(row) > 1:  # step 0 without an evaluation has nothing to say
                row |= clock.seconds | {"time_cpu": clock.cpu_seconds()}
                folder.log(row)
                sink.log(row, step, answers)
                shown = {k: f"{row[k]:.3f}" for k in ("reward", "val_reward") if k in row}
                steps.set_postfix(shown, refresh=False)
            if loop.checkpoint_due(config, step):
                folder.save_checkpoint(step, model, optimizer, scaler)
        if ranks.size > 1:
            sharding.gather_into(whole, model)
        folder.finish(config.n_steps, whole, tokenizer)
    return Run(folder.path)


def check_given(config, reward_fn, val_reward_fn, sampler) -> None:
    """ValueError for what is not of the kind that ``train`` takes."""
    if not isinstance(config, Config):
        raise ValueError(f"config: got {shown(config)}, expected a Config")
    for name, function in (("reward_fn", reward_fn), ("val_reward_fn", val_reward_fn)):
        if function is not None and not callable(function):
            raise ValueError(f"{name}: got {shown(function)}, expected a function(response, ground_truth)")
    if sampler is not None and not callable(getattr(sampler, "generate", None)):
        expected = "expected an object with generate and sync_weights (a name belongs into the Config)"
        raise ValueError(f"sampler: got {shown(sampler)}, {expected}")


# ---- one rollout batch, step by step


def advantages_of(batch: RolloutBatch, rewards: PerPosition, algorithm, advantage_eps: float) -> dict:
    """Gives each row its advantage, from the whole of its group; returns the groups' metrics."""
    assert batch.groups is not None
    rows = rows_by_group(batch.groups)
    flat, normalizer = rows.flatten(), algorithm.advantage_normalizer
    advantages, metrics = compute_group_normalized_rewards(
        rewards[flat], rows.shape[1], algorithm.baseline, advantage_eps, normalizer
    )
    batch.advantages = torch.zeros_like(advantages).index_copy(0, flat, advantages)
    counts = {name: metrics[name] for name in ("groups_all_right", "groups_all_wrong", "groups_mixed")}
    return {"pass_at_k": metrics["pass_at_k"][-1], **counts}


def score_rollouts(batch: RolloutBatch, model, reference, algorithm, config) -> dict:
    """Reference and old log-probs where something needs them; with these the gap to the sampler and truncated
    weights."""
    scoring: dict[str, Any] = dict(
        temperature=config.temperature,
        microbatch_size=-(-config.train_batch_size // config.gradient_accumulation_steps),
        autocast_dtype=loop.autocast_dtype(config),
    )
    if reference is not None:
        batch.ref_log_probs = response_log_probs(reference, batch, **scoring).cpu()
    if algorithm.importance_reweighting_method in ("none", loss_none) and config.tis_cap is None:
        return {}
    if batch.sampler_log_probs is None and config.tis_cap is not None:
        raise ValueError("tis_cap: the sampler gives no log-probs to correct for; expected None")
    learn = rows_that_teach(batch, algorithm)
    batch.old_log_probs = response_log_probs(model, batch, **scoring, rows=learn).cpu()
    tokens = batch.response_mask & learn[:, None]
    if batch.sampler_log_probs is None or not tokens.any():
        return {}
    log_ratio = batch.old_log_probs - batch.sampler_log_probs  # trainer / sampler
    gap = log_ratio.abs()[tokens]
    row = {"logprob_gap_mean": gap.mean().item(), "logprob_gap_max": gap.max().item()}
    if config.tis_cap is not None:
        batch.tis_weights = log_ratio.exp().clamp(max=config.tis_cap)
        row["tis_share"] = (log_ratio.exp() > config.tis_cap)[tokens].float().mean().item()
    return row


def update(batch: RolloutBatch, model, optimizer, algorithm, config, step: int, scaler=None) -> dict:
    """One optimizer step per train batch; returns their metrics."""
    reports = []
    for rows in loop.train_batches(len(batch), config.train_batch_size, stream(config.seed, step, "shuffle")):
        _, report = train_step(
            model,
            optimizer,
            batch.select(torch.tensor(rows)),
            algorithm,
            gradient_accumulation_steps=config.gradient_accumulation_steps,
            max_grad_norm=config.max_grad_norm,
            temperature=config.temperature,
            normalization_constant=config.normalization_constant,
            autocast_dtype=loop.autocast_dtype(config),
            scaler=scaler,
        )
        reports.append(report)
    return train_step_metrics(reports, batch.entropies is not None)
