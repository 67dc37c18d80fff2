"""Rewards and advantages: values by hand, exact zeros, clear refusals."""

import math
from itertools import combinations

import pytest
import torch
from toys import by_truth

from rlkit import compute_group_normalized_rewards, compute_rollout_rewards
from rlkit.tasks.rewards import grade_responses

EPS = 1e-6


def advantages(rewards, group_size, **options):
    return compute_group_normalized_rewards(torch.as_tensor(rewards), group_size, **options)[0]


def test_rewards_and_their_means():
    def reward_fn(response, truth):
        return {"reward": response == truth, "format_reward": 1, "answer_reward": float(response == truth)}

    raw, metadata = compute_rollout_rewards(reward_fn, ["1", "2", "3", "4"], ["1", "2", "3", "5"])
    assert raw.dtype == torch.float32 and raw.tolist() == [1, 1, 1, 0]
    assert metadata == {"reward": 0.75, "format_reward": 1.0, "answer_reward": 0.75}
    rows = grade_responses(reward_fn, ["1", "2"], ["1", "1"])
    assert {name: values.tolist() for name, values in rows.items()} == {
        "reward": [1, 0],
        "format_reward": [1, 1],
        "answer_reward": [1, 0],
    }


@pytest.mark.parametrize(
    "reward_fn, named",
    [
        (lambda r, t: {"reward": math.nan}, "nan"),
        (lambda r, t: {"reward": math.inf}, "inf"),
        (lambda r, t: 1.0, "'reward'"),
        (lambda r, t: {"score": 1}, "'reward'"),
    ],
)
def test_a_broken_reward_function_is_named(reward_fn, named):
    with pytest.raises(ValueError, match=named):
        compute_rollout_rewards(reward_fn, ["a"], ["a"])


def test_rewards_need_one_truth_per_response():
    with pytest.raises(ValueError, match="2 responses and 1 ground truths"):
        compute_rollout_rewards(by_truth, ["a", "b"], ["1"])


def test_every_baseline_and_normaliser_by_hand():
    rewards, half = [1.0, 0, 0, 0, 1, 1, 0, 0], math.sqrt(1 / 3)
    expected = {
        ("mean", "std"): [0.75 / (0.5 + EPS)]
        + 3 * [-0.25 / (0.5 + EPS)]
        + [0.5 / (half + EPS)] * 2
        + [-0.5 / (half + EPS)] * 2,
        ("mean", "none"): [0.75, -0.25, -0.25, -0.25, 0.5, 0.5, -0.5, -0.5],
        ("mean", "mean"): [0.75 / (0.25 + EPS)]
        + 3 * [-0.25 / (0.25 + EPS)]
        + [0.5 / (0.5 + EPS)] * 2
        + [-0.5 / (0.5 + EPS)] * 2,
        ("none", "none"): rewards,
        ("none", "std"): [1 / (0.5 + EPS), 0, 0, 0, 1 / (half + EPS), 1 / (half + EPS), 0, 0],
        ("none", "mean"): [1 / (0.25 + EPS), 0, 0, 0, 1 / (0.5 + EPS), 1 / (0.5 + EPS), 0, 0],
    }
    for (baseline, normalizer), values in expected.items():
        got = advantages(rewards, 4, baseline=baseline, advantage_normalizer=normalizer)
        torch.testing.assert_close(got, torch.tensor(values), rtol=1e-6, atol=1e-7)


def test_input_types_and_that_the_input_is_not_modified():
    expected = advantages([1.0, 0, 0, 0], 4)
    for raw in ([True, False, False, False], [1, 0, 0, 0], torch.tensor([1, 0, 0, 0], dtype=torch.bfloat16)):
        raw = torch.as_tensor(raw)
        copy = raw.clone()
        got = advantages(raw, 4)
        assert got.dtype == torch.float32 and torch.equal(got, expected) and torch.equal(raw, copy)
    assert advantages(torch.tensor([1.0, 0], dtype=torch.float64), 2).dtype == torch.float64


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("value, size", [(0.1, 8), (0.1, 3), (0.7, 7), (1 / 3, 6), (1e-12, 5)])
def test_equal_rewards_have_advantage_exactly_zero(value, size, dtype):
    for normalizer in ("std", "mean", "none"):
        assert not advantages(
            torch.full((size,), value, dtype=dtype), size, advantage_normalizer=normalizer
        ).any()


def test_groups_do_not_see_each_other():
    one, other = advantages([1.0, 0, 1], 3), advantages([0.0, 0, 1], 3)
    assert torch.equal(advantages([1.0, 0, 1, 0, 0, 1], 3), torch.cat([one, other]))


def test_functions_as_baseline_and_normaliser():
    def leave_one_out(rewards):
        return (rewards.sum(dim=1, keepdim=True) - rewards) / (rewards.shape[1] - 1)

    got = advantages([1.0, 0, 0, 1], 4, baseline=leave_one_out, advantage_normalizer="none")
    torch.testing.assert_close(got, torch.tensor([2 / 3, -2 / 3, -2 / 3, 2 / 3]))
    got = advantages(
        [2.0, 0, 4, 0],
        2,
        baseline="none",
        advantage_eps=0.0,
        advantage_normalizer=lambda rewards: rewards.amax(dim=1, keepdim=True),
    )
    assert got.tolist() == [1, 0, 1, 0]
    with pytest.raises(ValueError, match="expected results"):
        advantages(
            [1.0, 0, 0, 1], 4, baseline=lambda rewards: torch.zeros(3, 1, 4), advantage_normalizer="none"
        )
    with pytest.raises(ValueError, match="finite"):
        advantages([1.0, 0], 2, advantage_eps=0.0, advantage_normalizer=torch.zeros_like)


def test_group_statistics_and_pass_at_k_by_enumeration():
    rewards = torch.tensor([1.0, 1, 1, 0, 0, 0, 1, 0, 0])
    metadata = compute_group_normalized_rewards(rewards, 3)[1]
    assert (metadata["groups_all_right"], metadata["groups_all_wrong"], metadata["groups_mixed"]) == (1, 1, 1)
    assert metadata["reward_mean"] == pytest.approx(4 / 9) and metadata[
        "zero_advantage_share"
    ] == pytest.approx(6 / 9)
    assert (metadata["reward_min"], metadata["reward_max"]) == (0, 1)
    assert metadata["reward_std"] == pytest.approx(math.sqrt((4 * 25 + 5 * 16) / 81 / 8))
    counts = ("groups_all_right", "groups_all_wrong", "groups_mixed")
    halves = compute_group_normalized_rewards([0.5, 0.5, 0.5, 0.2, 1.5, 1.0], 2)[1]  # graded: what differs
    assert [halves[name] for name in counts] == [1, 0, 2]
    for k in (1, 2, 3):  # the share of the k-subsets of each group that hold a right response
        shares = [
            sum(any(subset) for subset in subsets) / len(subsets)
            for subsets in (list(combinations(group, k)) for group in rewards.reshape(3, 3).tolist())
        ]
        assert metadata["pass_at_k"][k - 1] == pytest.approx(sum(shares) / 3)


@pytest.mark.parametrize(
    "rewards, size, options, named",
    [
        ([1.0, 0, 0], 2, {}, "group_size: got 2 for 3"),
        ([1.0, 0], 0, {}, "group_size: got 0"),
        ([1.0, 0], 1, {}, "group_size: got 1"),
        ([1.0, math.nan], 2, {}, "row 1 is nan"),
        ([-1.0, 0], 2, {"advantage_normalizer": "mean"}, "raw_rewards: got -1.0"),
        ([1.0, 0], 2, {"baseline": "median"}, "baseline: got 'median'"),
        ([1.0, 0], 2, {"advantage_normalizer": "max"}, "advantage_normalizer: got 'max'"),
        ([[1.0, 0]], 2, {}, r"raw_rewards: got shape \(1, 2\)"),
        ([], 2, {}, "at least one"),
    ],
)
def test_bad_input_is_named(rewards, size, options, named):
    with pytest.raises(ValueError, match=named):
        advantages(rewards, size, **options)


def test_one_response_per_group_is_fine_without_a_deviation():
    assert advantages([1.0, 0], 1, baseline="none", advantage_normalizer="none").tolist() == [1, 0]
    assert advantages([1.0, 0], 1, advantage_normalizer="none").tolist() == [0, 0]


def test_without_an_eps_equal_groups_are_zero_and_a_negative_eps_is_refused():
    advantages, _ = compute_group_normalized_rewards([1, 1, 0, 1], 2, advantage_eps=0)
    assert advantages[:2].tolist() == [0.0, 0.0] and advantages[2:].tolist() == pytest.approx(
        [-(0.5**0.5), 0.5**0.5]
    )
    with pytest.raises(ValueError, match="advantage_eps: got -1"):
        compute_group_normalized_rewards([1, 0], 2, advantage_eps=-1)


@pytest.mark.parametrize(
    "value, named",
    [("1", "'1'"), (None, "None"), (float("nan"), "nan"), (float("inf"), "inf"), ([1], r"\[1\]")],
)
def test_a_reward_that_is_no_number_is_named(value, named):
    with pytest.raises(
        ValueError, match=f"^reward_fn: 'reward' of a response is {named}, expected finite numbers"
    ):
        compute_rollout_rewards(lambda response, truth: {"reward": value}, ["a"], ["b"])


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"raw_rewards": ["a", "b"]}, "raw_rewards: got"),
        ({"raw_rewards": None}, "raw_rewards: got None"),
        ({"advantage_eps": "1e-6"}, "advantage_eps: got '1e-6'"),
        ({"advantage_eps": float("inf")}, "advantage_eps: got inf"),
        ({"group_size": True}, "group_size: got True"),
        ({"group_size": "2"}, "group_size: got '2'"),
        ({"baseline": lambda rewards: None}, "baseline: the function: got None"),
        (
            {"baseline": lambda rewards: rewards.mean(dim=1)},
            r"baseline: the function turns \(2, 2\) .* shape \(2,\)",
        ),
        ({"advantage_normalizer": lambda rewards: "std"}, "advantage_normalizer: the function: got 'std'"),
    ],
)
def test_arguments_that_make_no_sense_are_one_error(changes, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        compute_group_normalized_rewards(**{"raw_rewards": [1.0, 0, 1, 0], "group_size": 2} | changes)
