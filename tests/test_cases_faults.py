"""Faults that people met in public GRPO code, as small cases with right answers: those of the components.

Each test takes its input and its answer from tests/data/faults.jsonl.
"""

import copy
import json
import math

import pytest
import torch
from toys import (
    Bigram,
    grads_of_step,
    largest_difference,
    scored_rows,
    step_on_ids,
    tiny_model,
    toy_tokenizer,
)

from rlkit import (
    aggregate_loss_across_microbatch,
    compute_group_normalized_rewards,
    compute_policy_gradient_loss,
    get_response_log_probs,
    tokenize_prompt_and_output,
)
from rlkit.batch import RolloutBatch


@pytest.fixture(scope="module")
def fault(shared_cases):
    rows = {
        row["id"]: row for row in map(json.loads, (shared_cases / "faults.jsonl").read_text().splitlines())
    }
    return lambda name: (rows[name]["input"], rows[name]["expected"])


def mask_of(values):
    return torch.tensor(values, dtype=torch.bool)


def given(batch, expected):
    return {name: batch[name].int().tolist() for name in expected if name in batch}


def wanted(batch, expected):
    return {name: expected[name] for name in expected if name in batch}


def loss_and_gradient(ratios, advantages, method, cliprange, mask=None):
    log_probs = torch.tensor(ratios).log().requires_grad_()
    loss, metadata = compute_policy_gradient_loss(
        torch.tensor(advantages, dtype=torch.float),
        log_probs,
        method,
        torch.zeros_like(log_probs),
        cliprange,
        mask,
    )
    loss.sum().backward()
    return loss.detach(), log_probs.grad, metadata


# ---- tokens and masks


def test_b003_no_pad_token(fault):
    case, expected = fault("B003")
    batch = tokenize_prompt_and_output(case["prompts"], case["outputs"], toy_tokenizer(pad_token=None))
    assert batch["response_mask"].int().tolist() == expected["response_mask"]
    assert batch["input_ids"].min() >= 0 and batch["input_ids"].max() < 10
    results = []
    for filler in (0, 1, 9):
        model = tiny_model()
        padded = batch["input_ids"].clone()
        padded[1, 4:] = filler
        log_probs = get_response_log_probs(
            model, padded, batch["labels"], response_mask=batch["response_mask"]
        )
        log_probs["log_probs"].sum().backward()
        results.append([log_probs["log_probs"].detach(), *[p.grad for p in model.parameters()]])
    for other in results[1:]:
        for one, two in zip(results[0], other):
            torch.testing.assert_close(one, two, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["B004", "B006"])
def test_b004_b006_empty_output_and_empty_prompt(fault, name):
    case, expected = fault(name)
    batch = tokenize_prompt_and_output(case["prompts"], case["outputs"], toy_tokenizer())
    assert given(batch, expected) == wanted(batch, expected)
    if "token_loss" in case:
        loss = aggregate_loss_across_microbatch(torch.tensor(case["token_loss"]), batch["response_mask"])
        assert loss.item() == expected["sequence_loss_over_2_rows"]


def test_b008_no_special_tokens_at_the_joint(fault):
    case, expected = fault("B008")
    words = {5: "This", 6: "is", 8: "test"}
    batch = tokenize_prompt_and_output(
        [" ".join(words[i] for i in case["prompt_ids"])],
        [" ".join(words[i] for i in case["response_ids"])],
        toy_tokenizer(bos_and_eos=True),
    )
    assert batch["input_ids"].tolist()[0] + batch["labels"].tolist()[0][-1:] == expected["joined"]
    assert batch["labels"].tolist()[0] == expected["labels"]
    assert batch["response_mask"].int().tolist()[0] == expected["response_mask"]


# ---- log-probabilities and entropy


def test_b013_entropy_with_minus_infinity(fault):
    case, expected = fault("B013")
    model = Bigram(3)
    model.table.data = torch.tensor([[float(x) for x in case["logits"]]] * 3)
    result = get_response_log_probs(model, torch.zeros(1, 3, dtype=torch.long), torch.arange(3)[None], True)
    torch.testing.assert_close(result["token_entropy"], torch.full((1, 3), expected["entropy"]))
    torch.testing.assert_close(
        result["log_probs"][0], torch.tensor([float(x) for x in expected["log_probs"]])
    )


@pytest.mark.parametrize("steps", [1, 2])
def test_b015_entropy_is_the_mean_over_response_tokens(fault, steps, monkeypatch):
    case, expected = fault("B015")
    entropies, mask = torch.tensor(case["token_entropy"]), mask_of(case["response_mask"])
    # the case's own entropies, fed through the train step: row i starts with token 2 + i
    monkeypatch.setattr(
        "rlkit.grpo.get_shared_prefix_log_probs",
        lambda model, ids, labels, *rest, **options: {
            "log_probs": model.table[ids, labels],
            "token_entropy": (entropies[ids[:, 0] - 2][:, : ids.shape[1]] * options["response_mask"]),
        },
    )
    responses = [[5] * int(row.sum()) for row in mask]
    sampled = [row[m].tolist() for row, m in zip(entropies, mask)]
    for truths, given in ((["1", "0"], None), (["1", "1"], sampled)):  # the second batch is pruned altogether
        _, metadata, _ = grads_of_step(
            Bigram(10),
            prompt_token_ids=[[2], [3]],
            response_token_ids=responses,
            repeated_ground_truths=truths,
            group_size=2,
            gradient_accumulation_steps=steps,
            entropies=given,
        )
        assert metadata["token_entropy"] == pytest.approx(expected["token_weighted_mean"])


def test_b016_b017_temperature_and_the_full_softmax(fault):
    case, expected = fault("B016")
    model, zero = Bigram(2), torch.zeros(1, 1, dtype=torch.long)
    model.table.data[0] = torch.tensor(case["logits"])
    for temperature, value in ((case["temperature"], "log_prob_at_T"), (1.0, "log_prob_raw")):
        scored = get_response_log_probs(model, zero, zero + case["token"], temperature=temperature)
        assert scored["log_probs"].item() == pytest.approx(expected[value], abs=1e-6)
    case, expected = fault("B017")
    model = Bigram(3)
    model.table.data[0] = torch.tensor(case["probs"]).log()
    assert get_response_log_probs(model, zero, zero)["log_probs"].item() == pytest.approx(
        expected["log_prob_of_token0_full"]
    )


# ---- advantages


@pytest.mark.parametrize("name", ["B019", "B021", "B028"])
def test_b019_b021_b028_advantages(fault, name):
    case, expected = fault(name)
    got, _ = compute_group_normalized_rewards(torch.tensor(case["raw_rewards"]), case["group_size"])
    assert got.is_floating_point() and got.tolist() == pytest.approx(expected["advantages"], abs=1e-6)
    if "group_sums" in expected:
        assert got.reshape(-1, case["group_size"]).sum(1).tolist() == pytest.approx(
            expected["group_sums"], abs=1e-6
        )


@pytest.mark.parametrize(
    "name, named", [("B018", "group_size: got 1"), ("B023", "got 4 for 7"), ("B026", "raw_rewards: got -1")]
)
def test_b018_b023_b026_refused_by_name(fault, name, named):
    case, _ = fault(name)
    with pytest.raises(ValueError, match=named):
        compute_group_normalized_rewards(
            torch.tensor(case["raw_rewards"]),
            case["group_size"],
            advantage_normalizer=case.get("advantage_normalizer", "std"),
        )


def test_b029_identical_responses_give_no_signal_and_it_shows(fault):
    case, expected = fault("B029")
    got, metadata = compute_group_normalized_rewards(torch.ones(len(case["prompts"])), len(case["prompts"]))
    assert got.tolist() == expected["advantages_if_identical"] and metadata["groups_mixed"] == 0


def test_b061_advantages_come_from_the_whole_group(fault):
    case, expected = fault("B061")
    whole, _ = compute_group_normalized_rewards(torch.tensor(case["raw_rewards"]), case["group_size"])
    rows = case["train_rows"]
    assert whole[rows].tolist() == pytest.approx(expected["advantages"], abs=1e-6)
    model, tokens = Bigram(10), dict(prompt_token_ids=[[2]] * 2, response_token_ids=[[3], [4]])
    got = grads_of_step(model, advantages=whole[rows], group_size=case["group_size"], **tokens)[2]["table"]
    p = model.table.detach()[2].softmax(0)
    by_hand = -sum(a * (torch.eye(10)[token] - p) for a, token in zip(whole[rows], (3, 4))) / 2
    torch.testing.assert_close(got[2], by_hand)


# ---- the loss


def test_b032_sign(fault):
    case, expected = fault("B032")
    loss, _ = compute_policy_gradient_loss(
        torch.tensor(case["advantages"]), torch.tensor(case["policy_log_probs"])
    )
    assert loss.tolist() == expected["per_token_loss"]


def test_b034_b035_clipping_binds_on_the_pessimistic_side_only(fault):
    case, expected = fault("B034")
    loss, grad, _ = loss_and_gradient(
        [[r] for r in case["ratios"]], case["advantages"], "grpo", case["cliprange"]
    )
    assert loss.flatten().tolist() == pytest.approx(expected["per_token_loss"])
    assert (grad != 0).flatten().tolist() == expected["gradient_flows"]
    case, expected = fault("B035")
    _, _, metadata = loss_and_gradient(
        [[r] for r in case["ratios"]], case["advantages"], "grpo", case["cliprange"]
    )
    assert metadata["clip_fraction"].item() == expected["clip_fraction_binding"]
    _, _, metadata = loss_and_gradient([[1.0]] * 4, case["advantages"], "grpo", case["cliprange"])
    assert metadata["clip_fraction"].item() == expected["first_inner_step_on_policy"]


@pytest.mark.parametrize("steps", [1, 2])
def test_b036_clip_fraction_over_the_batchs_response_tokens(fault, steps):
    case, expected = fault("B036")
    rows = [[r for r, m in zip(part["ratios"][0], part["mask"][0]) if m] for part in case["microbatches"]]
    model = Bigram(10)
    tokens = dict(
        prompt_token_ids=[[2], [3]], response_token_ids=[[4 + i % 3 for i in range(len(r))] for r in rows]
    )
    now = scored_rows(model, *tokens.values())
    old = [row - torch.tensor(ratios).log() for row, ratios in zip(now, rows)]
    _, metadata, _ = grads_of_step(
        model,
        gradient_accumulation_steps=steps,
        advantages=[case["advantage"]] * 2,
        importance_reweighting_method="grpo",
        cliprange=case["cliprange"],
        old_log_probs=old,
        **tokens,
    )
    assert metadata["clip_fraction"] == metadata["clip_fraction_high"] == expected["clip_fraction"]
    assert metadata["ratio_max"] == pytest.approx(1.5)


def test_b037_nan_at_padding(fault):
    case, expected = fault("B037")
    for normalization, constant, name in (("sequence", None, "sequence"), ("constant", 4, "constant_Z4")):
        loss = torch.tensor([[float(x) for x in row] for row in case["per_token_loss"]], requires_grad=True)
        value = aggregate_loss_across_microbatch(loss, mask_of(case["mask"]), normalization, constant)
        value.backward()
        assert value.item() == expected[name] and torch.isfinite(loss.grad).all()


def test_b038_overflow_at_a_masked_position(fault):
    case, expected = fault("B038")
    log_probs, mask = torch.tensor(case["policy_log_probs"], requires_grad=True), mask_of(case["mask"])
    loss, _ = compute_policy_gradient_loss(
        torch.tensor([case["advantage"]]),
        log_probs,
        case["method"],
        torch.tensor(case["old_log_probs"]),
        None,
        mask,
    )
    value = aggregate_loss_across_microbatch(loss, mask)
    value.backward()
    assert value.item() == expected["loss_sequence"] and torch.isfinite(log_probs.grad).all()


def test_b039_zero_advantage_and_minus_infinity(fault):
    case, expected = fault("B039")
    log_probs = torch.tensor(
        [[float(x) for x in row] for row in case["policy_log_probs"]], requires_grad=True
    )
    mask = mask_of(case["mask"])
    loss, _ = compute_policy_gradient_loss(
        torch.tensor(case["advantages"]), log_probs, case["method"], None, None, mask
    )
    value = aggregate_loss_across_microbatch(loss, mask)
    value.backward()
    assert value.item() == expected["loss"] and torch.isfinite(log_probs.grad).all()


def test_b040_b042_gspo_ratio(fault):
    case, expected = fault("B040")
    mask = mask_of(case["mask"])
    ratios = torch.tensor(case["log_ratios"]).exp().tolist()
    for advantage, name in ((1, "loss_A=+1"), (-1, "loss_A=-1")):
        loss, _, metadata = loss_and_gradient(ratios, [advantage], "gspo", case["cliprange"], mask)
        assert loss[0].tolist() == pytest.approx([expected[name]] * 3)
        assert metadata["ratio_max"].item() == pytest.approx(expected["s"])
    case, expected = fault("B042")
    log_probs = torch.tensor(case["log_ratios"], requires_grad=True)
    mask = mask_of(case["mask"])
    loss, _ = compute_policy_gradient_loss(
        torch.tensor([case["advantage"]]), log_probs, "gspo", torch.zeros_like(log_probs), 0.2, mask
    )
    value = aggregate_loss_across_microbatch(loss, mask)
    value.backward()
    assert loss[0].tolist() == [-expected["s"]] * 2 and value.item() == expected["contribution"]
    assert torch.isfinite(log_probs.grad).all()


def test_b041_gspo_gradient(fault):
    case, expected = fault("B041")
    log_probs, mask = torch.tensor(case["policy_log_probs"], requires_grad=True), mask_of(case["mask"])
    loss, _ = compute_policy_gradient_loss(
        torch.tensor([case["advantage"]]),
        log_probs,
        "gspo",
        torch.tensor(case["old_log_probs"]),
        case["cliprange"],
        mask,
    )
    value = aggregate_loss_across_microbatch(loss, mask, case["loss_normalization"])
    value.backward()
    assert value.item() == pytest.approx(expected["loss"])
    assert log_probs.grad[0].tolist() == pytest.approx(expected["d_loss_d_logprob"])


# ---- the train step

TOKENS = dict(prompt_token_ids=[[2, 3]] * 4, response_token_ids=[[4, 5, 6], [7], [8, 9], [5, 5]])


@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("method", ["noclip", "grpo", "gspo", "cispo"])
def test_b044_ratio_one_at_the_first_inner_step(fault, mode, method):
    _, expected = fault("B044")
    model = getattr(tiny_model(std=0.02), mode)()
    old = scored_rows(model, *TOKENS.values())
    _, metadata, grads = grads_of_step(
        model,
        advantages=[1.0, -1.0, 0.5, -0.5],
        old_log_probs=old,
        importance_reweighting_method=method,
        cliprange=0.2,
        **TOKENS,
    )
    assert metadata["ratio_min"] == pytest.approx(expected["ratio"], abs=1e-5) == metadata["ratio_max"]
    assert metadata["clip_fraction"] == expected["clip_fraction"]
    plain = grads_of_step(model, advantages=[1.0, -1.0, 0.5, -0.5], **TOKENS)[2]
    assert max((plain[name] - grads[name]).abs().max() for name in plain) < 1e-6


def rows_with_losses(losses, advantages):
    """A bigram policy and rows of one token such that -A log p of row i is losses[i] (0 where A is 0)."""
    model = Bigram(32)
    tokens = {
        "prompt_token_ids": [[2 + i] for i in range(len(losses))],
        "response_token_ids": [[20]] * len(losses),
    }
    for i, (loss, advantage) in enumerate(zip(losses, advantages)):
        log_p = -loss / advantage if advantage else -1.0
        model.table.data[2 + i] = math.log((1 - math.exp(log_p)) / 31)
        model.table.data[2 + i, 20] = log_p
    return model, tokens


def test_b048_more_accumulation_steps_than_rows(fault):
    case, expected = fault("B048")
    model, tokens = rows_with_losses(case["row_losses"], [1.0, 1.0])
    loss, _, grads = grads_of_step(
        model,
        advantages=[1.0, 1.0],
        gradient_accumulation_steps=case["gradient_accumulation_steps"],
        **tokens,
    )
    assert loss.item() == pytest.approx(expected["loss"])
    assert largest_difference(grads, grads_of_step(model, advantages=[1.0, 1.0], **tokens)[2]) < 1e-6


def test_b050_the_constant_covers_the_batch(fault):
    case, expected = fault("B050")
    model, tokens = rows_with_losses([3.0, 5.0], [1.0, 1.0])
    loss, _, _ = grads_of_step(
        model,
        advantages=[1.0, 1.0],
        loss_normalization="constant",
        normalization_constant=case["Z"],
        gradient_accumulation_steps=case["gradient_accumulation_steps"],
        **tokens,
    )
    assert case["token_loss_total"] == 8 and loss.item() == pytest.approx(expected["loss"])


def test_b051_pruned_rows_stay_in_the_divisor(fault):
    case, expected = fault("B051")
    # the last row's loss is positive with A = -1 in the case; a log-probability is negative, so both signs
    # turn
    advantages = [abs(a) for a in case["advantages"]]
    model, tokens = rows_with_losses(case["row_losses"], advantages)
    loss, metadata, grads = grads_of_step(model, advantages=advantages, **tokens)
    assert loss.item() == pytest.approx(expected["loss"]) and metadata["rows_used"] == 2
    unpruned = grads_of_step(
        model, advantages=advantages, importance_reweighting_method=lambda a, lp, *_: -a * lp, **tokens
    )[2]
    assert largest_difference(grads, unpruned) < 1e-6


def test_b053_no_decay_without_gradient(fault):
    case, expected = fault("B053")
    p = torch.nn.Parameter(torch.tensor(case["p"]))
    from rlkit.grpo import optimizer_step

    model = torch.nn.ParameterList([p])
    optimizer_step(model, torch.optim.AdamW([p], lr=case["lr"], weight_decay=0.0))
    assert p.item() == expected["p_after"]


def test_b057_gradients_are_none_afterwards(fault):
    _, expected = fault("B057")
    model = copy.deepcopy(tiny_model())
    frozen = next(model.parameters())
    frozen.grad = torch.ones_like(frozen)
    optimizer = torch.optim.SGD(list(model.parameters())[1:], lr=0.1)
    step_on_ids(model, optimizer, advantages=[1.0, 0.0, -1.0, 0.0], **TOKENS)
    assert all(p.grad is expected["param.grad"] for p in model.parameters())


def test_b058_old_log_probs_stay_with_their_rows_under_pruning(fault):
    case, expected = fault("B058")
    model, tokens = rows_with_losses([-x[0] for x in case["policy_log_probs"]], [1.0] * 4)
    _, metadata, _ = grads_of_step(
        model,
        advantages=case["advantages"],
        group_size=2,
        importance_reweighting_method="noclip",
        gradient_accumulation_steps=4,
        old_log_probs=torch.tensor(case["old_log_probs"], dtype=torch.float),
        **tokens,
    )
    assert [metadata["ratio_min"], metadata["ratio_max"]] == pytest.approx(
        expected["ratios_of_kept"], abs=1e-5
    )


def test_b059_one_permutation_for_everything(fault):
    case, expected = fault("B059")
    n = len(case["order"])
    ids = torch.arange(n)[:, None].expand(n, 3)
    batch = RolloutBatch(ids, ids, torch.ones(n, 3, dtype=torch.bool))
    batch.advantages = torch.tensor(case["advantages"])
    batch.old_log_probs = torch.arange(n)[:, None] * torch.ones(3)
    part = batch.select(torch.tensor(case["order"]))
    assert part.advantages.tolist() == expected["advantages_after"]
    assert part.old_log_probs[:, 0].tolist() == part.input_ids[:, 0].tolist() == case["order"]
    batch.response_mask = torch.arange(3) < torch.tensor([[3], [1], [2], [1]])
    pieces = batch.split(torch.ones(n, dtype=torch.bool), 3)
    assert [piece.tolist() for piece in pieces] == [[1, 3, 2], [0]]


def test_b060_old_log_probs_of_a_wider_rollout_batch(fault):
    case, expected = fault("B060")
    model = Bigram(10)
    rows = [list(range(2, 2 + n)) for n in case["rollout_lengths"]]
    tokens = dict(prompt_token_ids=[row[:1] for row in rows], response_token_ids=[row[1:] for row in rows])
    per_row = scored_rows(model, *tokens.values())
    wide = torch.nn.utils.rnn.pad_sequence(per_row, batch_first=True)
    assert wide.shape[1] == case["old_width"]
    part = case["train_slice"]
    for old in (wide[part], [per_row[i] for i in part]):
        _, metadata, _ = grads_of_step(
            model,
            advantages=[1.0, -1.0],
            importance_reweighting_method="noclip",
            old_log_probs=old,
            group_size=3,
            **{name: [ids[i] for i in part] for name, ids in tokens.items()},
        )
        assert metadata["ratio_min"] == pytest.approx(1, abs=1e-6) == metadata["ratio_max"]
    assert expected["ratio"].startswith("1 ")
