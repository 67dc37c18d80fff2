"""The train step: exact under microbatches, pruning, sorting and sharing; finite; one optimizer step."""

import copy

import pytest
import torch
from toys import (
    WORDS,
    Bigram,
    IdsOnly,
    batch_of_ids,
    by_truth,
    grads_of_step,
    largest_difference,
    rollouts,
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
    grpo_train_step,
    tokenize_prompt_and_output,
)
from rlkit.advantages import rows_by_group
from rlkit.batch import beside_labels
from rlkit.losses import loss_gspo
from rlkit.support.metrics import train_step_metrics

PROMPTS, RESPONSES = rollouts()  # 4 groups of 4
TRUTHS = [str(r) for r in [1, 0, 0, 0, 1, 1, 1, 1, 0, 1, 1, 0, 0, 0, 0, 0]]  # two of the groups are decided
BATCH = dict(prompt_token_ids=PROMPTS, response_token_ids=RESPONSES, repeated_ground_truths=TRUTHS)
MODEL = tiny_model()


def old_of(model, shift=0.0):
    """Log-probabilities of a policy near the model's: each response token's, moved by up to ``shift``."""
    generator = torch.Generator().manual_seed(5)
    return [
        row + shift * (2 * torch.rand(row.shape, generator=generator) - 1)
        for row in scored_rows(model, PROMPTS, RESPONSES)
    ]


def whole_batch(
    model,
    method="none",
    old=None,
    cliprange=None,
    baseline="mean",
    normalizer="std",
    normalization="sequence",
    constant=None,
):
    """The step written out: every row in one forward pass, nothing pruned, sorted or shared."""
    model = copy.deepcopy(model)
    batch = tokenize_prompt_and_output(
        None, None, IdsOnly, prompt_token_ids=PROMPTS, output_token_ids=RESPONSES
    )
    advantages, _ = compute_group_normalized_rewards(
        torch.tensor([float(t) for t in TRUTHS]), 4, baseline, advantage_normalizer=normalizer
    )
    scored = get_response_log_probs(model, batch["input_ids"], batch["labels"], True)
    if old is not None:
        old = torch.zeros(batch["labels"].shape).masked_scatter(batch["response_mask"], torch.cat(old))
    per_token, metadata = compute_policy_gradient_loss(
        advantages, scored["log_probs"], method, old, cliprange, batch["response_mask"]
    )
    loss = aggregate_loss_across_microbatch(per_token, batch["response_mask"], normalization, constant)
    loss.backward()
    teach = advantages != 0
    if old is not None:  # ratios are seen at the rows that teach
        part = (advantages[teach], scored["log_probs"][teach], method, old[teach], cliprange)
        ratios = compute_policy_gradient_loss(*part, batch["response_mask"][teach])[1]
        metadata |= {name: ratios[name] for name in ("ratio_min", "ratio_max")}
    used = batch["response_mask"] & teach[:, None]
    entropy = scored["token_entropy"][used].mean().item()
    return loss.item(), metadata, entropy, {name: p.grad for name, p in model.named_parameters()}


METHODS = [("none", None), ("noclip", None), ("grpo", 0.2), ("gspo", 0.05), ("cispo", 0.2)]


@pytest.mark.parametrize("method, cliprange", METHODS)
@pytest.mark.parametrize("steps", [1, 3, 16, 40])
@pytest.mark.parametrize("shared_prefix", [True, False])
def test_equal_to_the_whole_batch_at_once(method, cliprange, steps, shared_prefix):
    old = old_of(MODEL, 0.4)
    loss, expected, entropy, grads = whole_batch(MODEL, method, old, cliprange)
    got_loss, metadata, got = grads_of_step(
        MODEL,
        gradient_accumulation_steps=steps,
        importance_reweighting_method=method,
        cliprange=cliprange,
        old_log_probs=old,
        shared_prefix=shared_prefix,
        **BATCH,
    )
    assert got_loss.item() == pytest.approx(loss, abs=1e-5) and not got_loss.requires_grad
    assert largest_difference(got, grads) < 2e-5
    for name in ("clip_fraction", "clip_fraction_low", "clip_fraction_high", "ratio_min", "ratio_max"):
        assert metadata[name] == pytest.approx(expected[name].item(), abs=1e-5)
    if method not in ("none", "noclip"):
        assert metadata["clip_fraction"] > 0
    assert metadata["token_entropy"] == pytest.approx(entropy, abs=1e-4)
    assert metadata["rows_used"] == 8
    norm = torch.cat([g.flatten() for g in grads.values()]).norm().item()
    assert metadata["grad_norm"] == pytest.approx(norm, rel=1e-4)


@pytest.mark.parametrize(
    "baseline, normalizer, normalization",
    [
        ("mean", "std", "sequence"),
        ("mean", "std", "constant"),
        ("mean", "none", "constant"),
        ("none", "none", "constant"),
        ("mean", "mean", "constant"),
        ("none", "std", "sequence"),
    ],
)
def test_every_variant_keeps_the_unpruned_divisors(baseline, normalizer, normalization):
    loss, _, _, grads = whole_batch(
        MODEL, baseline=baseline, normalizer=normalizer, normalization=normalization, constant=144
    )
    for steps in (1, 5):
        got_loss, _, got = grads_of_step(
            MODEL,
            gradient_accumulation_steps=steps,
            baseline=baseline,
            advantage_normalizer=normalizer,
            loss_normalization=normalization,
            normalization_constant=144,
            **BATCH,
        )
        assert (
            got_loss.item() == pytest.approx(loss, abs=1e-5, rel=1e-6)
            and largest_difference(got, grads) < 2e-5
        )


def rows_passed(model, **arguments):
    """[(rows, with gradient)] of the model's forward passes in one step of the plain path."""
    seen = []
    hook = model.register_forward_hook(
        lambda m, args, out: seen.append((len(args[0]), torch.is_grad_enabled()))
    )
    try:
        metadata = grads_of_step(model, shared_prefix=False, **arguments)[1]
    finally:
        hook.remove()
    return seen, metadata


def test_pruned_rows_are_not_passed_through_the_model():
    seen, metadata = rows_passed(Bigram(60), gradient_accumulation_steps=4, **BATCH)
    assert seen == [(4, True), (4, True)]  # 8 of 16 rows learn: half the microbatches
    decided = BATCH | {"repeated_ground_truths": ["1"] * 16}
    seen, metadata = rows_passed(Bigram(60), **decided)
    assert seen == [] and "token_entropy" not in metadata


def test_the_samplers_entropies_are_those_of_the_whole_batch():
    entropies = [[float(i + t) for t in range(len(row))] for i, row in enumerate(RESPONSES)]
    mean = sum(map(sum, entropies)) / sum(map(len, entropies))
    for truths in (TRUTHS, ["1"] * 16):
        arguments = BATCH | {"repeated_ground_truths": truths, "entropies": entropies}
        assert grads_of_step(MODEL, **arguments)[1]["token_entropy"] == pytest.approx(mean)


def test_only_what_is_asked_for_is_computed(monkeypatch):
    """Entropies that the sampler gave are not computed once more, nor old log-probs of other rows."""
    with monkeypatch.context() as patch:
        patch.setattr("rlkit.log_probs.token_entropy", None)  # a call would fail
        entropies = [[1.0] * len(row) for row in RESPONSES]
        assert grads_of_step(MODEL, entropies=entropies, **BATCH)[1]["token_entropy"] == 1
    rows = torch.arange(16) % 3 == 0
    scores = scored_rows(MODEL, PROMPTS, RESPONSES, rows=rows)
    assert [bool(row.all()) for row in scores] == [bool(row.any()) for row in scores] == rows.tolist()
    seen, model = [], Bigram(60)
    model.register_forward_hook(lambda m, args, out: seen.append(len(args[0])))
    scored_rows(model, PROMPTS, RESPONSES, rows=rows, microbatch_size=4)
    assert sum(seen) == 6 and max(seen) <= 4


def test_equal_rewards_that_are_not_0_or_1_are_pruned_too():
    arguments = BATCH | {"repeated_ground_truths": ["0.1"] * 16, "group_size": 8}
    loss, metadata, grads = grads_of_step(MODEL, **arguments)
    assert loss == 0 and metadata["rows_used"] == 0 and metadata["grad_norm"] == 0
    assert not any(g.any() for g in grads.values())


def test_a_batch_without_signal_steps_with_zero_gradients_as_it_would_unpruned():
    model = Bigram(60)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)

    def step(truths):
        options = dict(gradient_accumulation_steps=2, max_grad_norm=1.0)
        return step_on_ids(model, optimizer, **BATCH | {"repeated_ground_truths": truths}, **options)

    step(TRUTHS)
    reference, state = copy.deepcopy(model), copy.deepcopy(optimizer.state_dict())
    loss, metadata = step(["0"] * 16)
    assert loss == 0 and metadata["loss"] == 0
    other = torch.optim.Adam(reference.parameters(), lr=0.1)
    other.load_state_dict(state)
    reference.table.grad = torch.zeros_like(reference.table)
    other.step()
    assert torch.equal(model.table, reference.table)  # momentum moved both


def test_from_text_with_every_argument_by_position():
    """A two-word batch on a bigram policy, by hand: sum of A (onehot - p) over row tokens / lengths / B."""
    model = Bigram(10)
    table = model.table.detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    loss, metadata = grpo_train_step(
        model,
        toy_tokenizer(),
        optimizer,
        2,
        None,
        lambda response, truth: {
            "reward": response == truth,
            "format_reward": 1.0,
            "answer_reward": response == truth,
        },
        ["Hello", "Hello"],
        ["a test", "world"],
        ["a test", "a test"],
        2,
        "mean",
        1e-6,
        "std",
        "none",
        None,
        None,
        "sequence",
        None,
    )
    advantage = 0.5 / (0.5**0.5 + 1e-6)
    log_p, expected = table.log_softmax(-1), torch.zeros_like(table)
    for a, row in ((advantage, [(3, 7), (7, 8)]), (-advantage, [(3, 4)])):
        for before, after in row:
            expected[before] += a / len(row) / 2 * (torch.eye(10)[after] - log_p[before].exp())
    torch.testing.assert_close(model.table.detach() - table, expected)
    by_hand = -advantage * ((log_p[3, 7] + log_p[7, 8]) / 2 - log_p[3, 4]) / 2
    torch.testing.assert_close(loss, by_hand)
    assert metadata["reward"] == 0.5 and metadata["format_reward"] == 1 and metadata["response_length"] == 1.5
    assert metadata["pass_at_k"] == [0.5, 1.0] and metadata["groups_mixed"] == 1


def test_every_argument_of_the_handouts_step_reaches_the_step():
    """Odd values from text, and the same from ids through ``train_step`` itself."""
    prompts, responses = ["Hello", "Hello", "This is", "This is"], ["a test", "world", "a", "another test a"]
    truths = ["1", "0", "0.5", "0.25"]
    encoded = [[[WORDS[word] for word in text.split()] for text in texts] for texts in (prompts, responses)]
    old = [row - 0.4 + 0.3 * i for i, row in enumerate(scored_rows(Bigram(10), *encoded))]
    shared = dict(
        gradient_accumulation_steps=2,
        max_grad_norm=0.02,
        group_size=2,
        baseline="none",
        advantage_eps=0.3,
        advantage_normalizer="mean",
        importance_reweighting_method="grpo",
        old_log_probs=old,
        cliprange=0.15,
        loss_normalization="constant",
        normalization_constant=7.0,
    )
    model = Bigram(10)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    loss, metadata = grpo_train_step(
        model=model,
        tokenizer=toy_tokenizer(),
        optimizer=optimizer,
        reward_fn=by_truth,
        repeated_prompts=prompts,
        rollout_responses=responses,
        repeated_ground_truths=truths,
        **shared,
    )
    expected, expected_metadata, grads = grads_of_step(
        Bigram(10),
        prompt_token_ids=encoded[0],
        response_token_ids=encoded[1],
        repeated_ground_truths=truths,
        **shared,
    )
    assert loss == expected and metadata == expected_metadata
    assert torch.equal(Bigram(10).table - model.table, grads["table"])
    assert metadata["grad_norm"] > 0.02 and 0 < metadata["clip_fraction"] < 1
    ratio = (torch.tensor([0.4, 0.1, -0.2, -0.5])).exp()  # by hand: the wrong one has advantage 0
    a = torch.tensor([1 / 0.8, 0, 0.5 / 0.675, 0.25 / 0.675])
    clipped = torch.minimum(a * ratio, a * ratio.clamp(0.85, 1.15))
    by_hand = -(clipped * torch.tensor([2, 1, 1, 3])).sum() / 7
    torch.testing.assert_close(loss, by_hand)


def test_what_the_metadata_holds():
    _, metadata, _ = grads_of_step(MODEL, **BATCH)
    wanted = {
        "loss",
        "grad_norm",
        "token_entropy",
        "reward",
        "format_reward",
        "answer_reward",
        "clip_fraction",
        "clip_fraction_low",
        "clip_fraction_high",
        "response_length",
        "pass_at_k",
        "groups_all_right",
        "groups_all_wrong",
        "groups_mixed",
        "rows_used",
        "lr",
    }
    assert wanted <= set(metadata) and "ratio_min" not in metadata
    assert all(isinstance(value, (int, float, list)) for value in metadata.values())
    assert metadata["response_length"] == sum(map(len, RESPONSES)) / 16
    assert metadata["groups_all_right"] == metadata["groups_all_wrong"] == 1


def test_first_off_policy_step_has_ratio_one():
    for method, cliprange in METHODS[1:]:
        _, metadata, grads = grads_of_step(
            MODEL,
            importance_reweighting_method=method,
            cliprange=cliprange,
            old_log_probs=old_of(MODEL),
            gradient_accumulation_steps=3,
            **BATCH,
        )
        assert metadata["ratio_min"] == pytest.approx(1, abs=1e-4) == metadata["ratio_max"]
        assert metadata["clip_fraction"] == 0
        assert largest_difference(grads, grads_of_step(MODEL, **BATCH)[2]) < 1e-4


def test_learning_rate_zero_leaves_the_model_and_the_gap_to_the_sampler():
    model = copy.deepcopy(MODEL)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0)
    gaps = []
    for _ in range(3):
        sampled = [(row + 0.25).tolist() for row in old_of(MODEL)]
        _, metadata = step_on_ids(model, optimizer, **BATCH, sampler_log_probs=sampled)
        gaps.append((metadata["logprob_gap_mean"], metadata["logprob_gap_max"]))
    assert gaps[0] == gaps[1] == gaps[2] == pytest.approx((0.25, 0.25), abs=1e-4)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), MODEL.parameters()))


def test_rows_stay_aligned_whatever_their_order():
    """One permutation of all rows (advantages from the whole groups) gives the same gradient and metadata."""
    old = old_of(MODEL, 0.4)
    advantages, _ = compute_group_normalized_rewards(torch.tensor([float(t) for t in TRUTHS]), 4)
    weights = [torch.full((len(row),), 0.5 + i / 10) for i, row in enumerate(RESPONSES)]
    order = torch.randperm(16, generator=torch.Generator().manual_seed(2)).tolist()

    def run(rows, steps):
        return grads_of_step(
            MODEL,
            gradient_accumulation_steps=steps,
            importance_reweighting_method="grpo",
            cliprange=0.2,
            old_log_probs=[old[i] for i in rows],
            advantages=advantages[rows],
            tis_weights=[weights[i] for i in rows],
            prompt_token_ids=[PROMPTS[i] for i in rows],
            response_token_ids=[RESPONSES[i] for i in rows],
        )

    loss, metadata, grads = run(list(range(16)), 1)
    other_loss, other_metadata, other = run(order, 5)
    assert largest_difference(other, grads) < 2e-5
    assert {k: pytest.approx(v, abs=1e-4) for k, v in metadata.items()} == other_metadata
    plain = grads_of_step(
        MODEL, importance_reweighting_method="grpo", cliprange=0.2, old_log_probs=old, **BATCH
    )[2]
    assert largest_difference(plain, grads) > 0.01  # the weights do count


def test_old_log_probs_as_a_tensor_wider_than_the_train_batch():
    old = old_of(MODEL, 0.4)
    batch = tokenize_prompt_and_output(
        None, None, IdsOnly, prompt_token_ids=PROMPTS, output_token_ids=RESPONSES
    )
    wide = torch.full((16, batch["labels"].shape[1] + 5), float("nan"))
    wide[:, :-5] = torch.zeros(batch["labels"].shape).masked_scatter(batch["response_mask"], torch.cat(old))
    arguments = BATCH | dict(importance_reweighting_method="noclip")
    one, two = (grads_of_step(MODEL, old_log_probs=o, **arguments)[2] for o in (old, wide))
    assert largest_difference(one, two) == 0


def test_old_log_probs_come_back_in_row_order_whatever_the_microbatches():
    batch = tokenize_prompt_and_output(
        None, None, IdsOnly, prompt_token_ids=PROMPTS, output_token_ids=RESPONSES
    )
    with torch.no_grad():
        expected = get_response_log_probs(MODEL, batch["input_ids"], batch["labels"], temperature=0.8)[
            "log_probs"
        ]
    for size in (3, 16, 5):
        rows = scored_rows(MODEL, PROMPTS, RESPONSES, temperature=0.8, microbatch_size=size)
        assert [len(row) for row in rows] == [len(response) for response in RESPONSES]
        torch.testing.assert_close(torch.cat(rows), expected[batch["response_mask"]], rtol=1e-5, atol=1e-5)


def test_a_function_as_method_sees_every_row():
    def push_up(advantages, log_probs, old_log_probs, response_mask, cliprange):
        return -(advantages + 1.0) * log_probs, {"mean_shift": 1.0}

    loss, metadata, grads = grads_of_step(
        MODEL, importance_reweighting_method=push_up, gradient_accumulation_steps=3, **BATCH
    )
    assert metadata["rows_used"] == 16 and metadata["mean_shift"] == pytest.approx(1)
    one = grads_of_step(MODEL, importance_reweighting_method=push_up, **BATCH)[2]
    assert largest_difference(grads, one) < 2e-5


def test_empty_responses_count_in_the_divisor_and_are_not_scored():
    prompts, responses = [[2, 3]] * 4, [[4, 5], [], [6], []]
    arguments = dict(prompt_token_ids=prompts, response_token_ids=responses)
    _, metadata, grads = grads_of_step(Bigram(10), repeated_ground_truths=["1", "1", "0", "0"], **arguments)
    assert metadata["rows_used"] == 2 and metadata["response_length"] == 0.75
    halves = grads_of_step(
        Bigram(10),
        advantages=torch.tensor([1.0, -1.0]) * 0.5 / (3**-0.5 + 1e-6),
        prompt_token_ids=prompts[:2],
        response_token_ids=[[4, 5], [6]],
    )[2]
    torch.testing.assert_close(grads["table"], halves["table"] / 2)
    loss, metadata, grads = grads_of_step(
        Bigram(10),
        repeated_ground_truths=["1", "0", "0", "0"],
        prompt_token_ids=prompts,
        response_token_ids=[[]] * 4,
    )
    assert loss == 0 and not grads["table"].any() and "token_entropy" not in metadata
    loss, _, _ = grads_of_step(
        Bigram(10),
        repeated_ground_truths=["1", "0", "0", "0"],
        prompt_token_ids=[[]] * 4,
        response_token_ids=[[2], [], [3], []],
    )
    assert loss == 0  # a first token without anything before it cannot be scored


def test_gradient_clipping_reports_the_norm_before_it():
    _, metadata, grads = grads_of_step(MODEL, max_grad_norm=1e-3, **BATCH)
    assert torch.cat([g.flatten() for g in grads.values()]).norm().item() == pytest.approx(1e-3, rel=1e-2)
    assert metadata["grad_norm"] == pytest.approx(grads_of_step(MODEL, **BATCH)[1]["grad_norm"])


def test_a_gradient_that_is_not_finite_is_not_applied():
    model = Bigram(60)
    model.table.data[RESPONSES[0][0], :] = float("nan")
    with pytest.warns(UserWarning, match="step is skipped"):
        _, metadata, grads = grads_of_step(model, **BATCH)
    assert torch.equal(torch.nan_to_num(grads["table"]), torch.zeros(60, 60))
    assert "grad_norm" not in metadata and "loss" not in metadata


def test_stale_gradients_are_not_counted():
    model = copy.deepcopy(MODEL)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    _, metadata = step_on_ids(model, optimizer, **BATCH)
    assert metadata["grad_norm"] == pytest.approx(grads_of_step(MODEL, **BATCH)[1]["grad_norm"])


def test_autocast_and_dropout_models_run():
    _, metadata, grads = grads_of_step(MODEL, autocast_dtype=torch.bfloat16, **BATCH)
    assert largest_difference(grads, grads_of_step(MODEL, **BATCH)[2]) < 0.2
    assert {g.dtype for g in grads.values()} == {torch.float32}
    dropping = tiny_model("gpt2", resid_pdrop=0.1).train()
    assert grads_of_step(dropping, **BATCH)[1]["grad_norm"] > 0


def test_it_learns_which_word_is_right():
    model, tokenizer = Bigram(10), toy_tokenizer()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.2)
    generator = torch.Generator().manual_seed(0)
    rewards = []
    for _ in range(30):
        sampled = torch.multinomial(
            model.table[3].detach().softmax(0), 16, True, generator=generator
        ).tolist()
        words = [next(word for word, i in WORDS.items() if i == token) for token in sampled]
        truths = [str(int(token == 8)) for token in sampled]
        step = (model, tokenizer, optimizer, 2, 1.0, by_truth, ["Hello"] * 16, words, truths, 8)
        _, metadata = grpo_train_step(*step)
        rewards.append(metadata["reward"])
    assert sum(rewards[:3]) / 3 < 0.5 and sum(rewards[-3:]) / 3 > 0.9


@pytest.mark.parametrize(
    "changes, named",
    [
        (dict(group_size=3), "group_size: got 3"),
        (dict(group_size=1), "group_size: got 1"),
        (dict(importance_reweighting_method="grpo"), "old_log_probs"),
        (
            dict(importance_reweighting_method="grpo", old_log_probs=torch.zeros(16, 30)),
            "cliprange: got None",
        ),
        (
            dict(importance_reweighting_method="noclip", old_log_probs=[[0.0]] * 3),
            "old_log_probs: got 3 rows",
        ),
        (
            dict(importance_reweighting_method="noclip", old_log_probs=[[0.0] * 99] * 16),
            r"old_log_probs.*in row 0",
        ),
        (
            dict(importance_reweighting_method="noclip", old_log_probs=torch.zeros(16, 2)),
            "old_log_probs: got shape",
        ),
        (dict(loss_normalization="constant"), "normalization_constant"),
        (dict(baseline="min"), "baseline"),
        (dict(advantages=[1.0, 2.0]), "advantages: got shape"),
        (dict(advantages=[float("nan")] * 16), "advantages"),
        (dict(gradient_accumulation_steps=0), "gradient_accumulation_steps: got 0"),
        (dict(max_grad_norm=0.0), "max_grad_norm: got 0.0"),
        (dict(repeated_ground_truths=["1"]), "16 responses and 1 ground truths"),
        (dict(reward_fn=lambda r, t: {"reward": float("nan")}), "nan"),
        (dict(temperature=0.0), "temperature: got 0"),
        (dict(gradient_accumulation_steps=True), "gradient_accumulation_steps: got True"),
        (dict(max_grad_norm="1"), "max_grad_norm: got '1'"),
        (dict(temperature="1"), "temperature: got '1'"),
        (dict(advantages=["a"] * 16), "advantages: got .*expected numbers"),
        (dict(tis_weights=1.0), "tis_weights: got 1.0"),
        (dict(loss_normalization="constant", normalization_constant="8"), "normalization_constant: got '8'"),
        (
            dict(importance_reweighting_method="noclip", old_log_probs=[["x"]] * 16),
            "old_log_probs: got .*numbers",
        ),
    ],
)
def test_bad_input_is_named_before_the_model_is_touched(changes, named):
    model = Bigram(60)
    model.register_forward_hook(lambda *args: pytest.fail("the model was called"))
    with pytest.raises(ValueError, match=named):
        grads_of_step(model, **(BATCH | changes))


# ---- groups


def test_the_rows_of_a_group_may_stand_anywhere():
    assert rows_by_group(torch.tensor([1, 0, 1, 0])).tolist() == [[1, 3], [0, 2]]
    with pytest.raises(ValueError, match="groups: got 1 to 3 responses per prompt"):
        rows_by_group(torch.tensor([0, 0, 1, 0]))


def test_prompts_that_alternate_are_refused():
    step = (Bigram(10), toy_tokenizer(), None, 1, None, by_truth)
    with pytest.raises(ValueError, match="repeated_prompts: rows 0 to 1 are one group"):
        grpo_train_step(*step, ["Hello", "world"] * 2, ["a", "test"] * 2, ["1", "0"] * 2, 2)


def test_what_ones_own_reweighting_counts_is_kept():
    def mine(advantages, log_probs, old_log_probs, mask, cliprange):
        assert mask.dtype == torch.bool
        return -advantages * log_probs, {"clip_fraction": 0.75}

    assert grads_of_step(MODEL, importance_reweighting_method=mine, **BATCH)[1]["clip_fraction"] == 0.75


def test_a_built_in_function_takes_the_path_of_its_name():
    arguments = BATCH | dict(old_log_probs=old_of(MODEL, 0.4), cliprange=0.05)
    by_name = grads_of_step(MODEL, importance_reweighting_method="gspo", **arguments)[1]
    assert by_name == grads_of_step(MODEL, importance_reweighting_method=loss_gspo, **arguments)[1]


def test_a_sum_over_rows_as_loss_normalization_does_not_depend_on_the_microbatches():
    def token_sum(loss, mask, constant):
        return (loss * mask).sum() / 70

    one, four = (
        grads_of_step(MODEL, loss_normalization=token_sum, gradient_accumulation_steps=k, **BATCH)[2]
        for k in (1, 4)
    )
    assert largest_difference(four, one) < 2e-5
    same = dict(loss_normalization="constant", normalization_constant=70)
    assert largest_difference(one, grads_of_step(MODEL, **same, **BATCH)[2]) < 2e-5


def test_the_gap_is_that_before_the_first_update():
    first, second = (
        {"n_tokens": 0, "n_ratios": 4, "rows_used": 0},
        {"n_tokens": 5, "n_ratios": 4, "rows_used": 2},
    )
    reports = [first | {"response_length": 1.0}, second | {"response_length": 1.0, "logprob_gap_mean": 0.5}]
    row = train_step_metrics(reports, True)
    assert "logprob_gap_mean" not in row and row["rows_used"] == 2 and row["optimizer_steps"] == 2
    assert train_step_metrics(reports[1:], True)["logprob_gap_mean"] == 0.5


@pytest.mark.parametrize("result", [None, 1.0, torch.ones(16), (1, 2)])
def test_a_loss_normalization_that_gives_no_number_is_named(result):
    with pytest.raises(ValueError, match="loss_normalization: the function: got"):
        grads_of_step(MODEL, loss_normalization=lambda loss, mask, constant: result, **BATCH)


def test_functions_that_work_in_place_change_nothing():
    rewards = torch.tensor([1.0, 0, 0, 1], dtype=torch.float64)
    found = compute_group_normalized_rewards(rewards, 2, lambda r: r.zero_(), 1e-6, lambda r: r.fill_(1))[0]
    assert rewards.tolist() == [1, 0, 0, 1] and found.tolist() == pytest.approx([1, 0, 0, 1], abs=1e-5)


def test_old_log_probs_from_numpy():
    batch = batch_of_ids(PROMPTS, RESPONSES)
    values = torch.rand(batch.labels.shape)
    given = beside_labels("old_log_probs", values.numpy(), batch.response_mask)
    assert torch.equal(given, values * batch.response_mask)


def test_an_infinite_norm_measures_and_does_not_scale():
    _, metadata, grads = grads_of_step(MODEL, max_grad_norm=float("inf"), **BATCH)
    plain = grads_of_step(MODEL, **BATCH)
    assert metadata["grad_norm"] == plain[1]["grad_norm"] and largest_difference(grads, plain[2]) == 0
