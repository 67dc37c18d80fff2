"""The loss: values by hand, gradients against enumeration and finite differences, hostile padding."""

import math
from itertools import product

import pytest
import torch

from rlkit import (
    aggregate_loss_across_microbatch,
    compute_group_normalized_rewards,
    compute_policy_gradient_loss,
)

INF, NAN = math.inf, math.nan


def loss_of(advantages, log_probs, method="none", old=None, cliprange=None, mask=None):
    return compute_policy_gradient_loss(
        torch.as_tensor(advantages),
        torch.as_tensor(log_probs),
        method,
        None if old is None else torch.as_tensor(old),
        cliprange,
        mask,
    )


def from_ratios(ratios, advantages, method, cliprange=None, mask=None):
    log_probs = torch.tensor(ratios).log().requires_grad_()
    loss, metadata = loss_of(advantages, log_probs, method, torch.zeros_like(log_probs), cliprange, mask)
    loss.sum().backward()
    return loss.detach(), log_probs.grad, metadata


def test_none_is_minus_advantage_times_log_prob():
    for advantages in (torch.tensor([2.0, -1]), torch.tensor([[2.0], [-1]])):
        loss, metadata = loss_of(advantages, [[-1.0, -2], [-3, -4]])
        assert loss.tolist() == [[2, 4], [-3, -4]]
        assert metadata["clip_fraction"] == 0 and "ratio_max" not in metadata


def test_token_methods_by_hand():
    ratios, advantages = [[1.5], [0.5], [1.5], [0.5], [1.1]], [1.0, 1, -1, -1, 2]
    loss, grad, metadata = from_ratios(ratios, advantages, "noclip")
    torch.testing.assert_close(loss, torch.tensor([[-1.5], [-0.5], [1.5], [0.5], [-2.2]]))
    torch.testing.assert_close(grad, loss)  # d(-A w)/d log pi = -A w
    assert metadata["clip_fraction"] == 0 and metadata["ratio_max"].item() == pytest.approx(1.5)

    loss, grad, metadata = from_ratios(ratios, advantages, "grpo", 0.2)
    torch.testing.assert_close(loss, torch.tensor([[-1.2], [-0.5], [1.5], [0.8], [-2.2]]))
    torch.testing.assert_close(grad, torch.tensor([[0], [-0.5], [1.5], [0], [-2.2]]))
    assert [metadata[f"clip_fraction{side}"].item() for side in ("", "_low", "_high")] == pytest.approx(
        [0.4, 0.2, 0.2]
    )
    assert [metadata[name].item() for name in ("n_ratios", "n_clipped_low", "n_clipped_high")] == [5, 1, 1]

    loss, grad, metadata = from_ratios(ratios, advantages, "cispo", 0.2)
    held = torch.tensor(ratios).clamp(max=1.2)
    torch.testing.assert_close(loss, -held * torch.tensor(advantages)[:, None] * torch.tensor(ratios).log())
    torch.testing.assert_close(grad, -held * torch.tensor(advantages)[:, None])
    assert metadata["clip_fraction_high"].item() == pytest.approx(0.4) and metadata["clip_fraction_low"] == 0


def test_on_policy_every_method_has_the_gradient_of_the_plain_one():
    generator = torch.Generator().manual_seed(0)
    old = -torch.rand(3, 4, generator=generator)
    mask = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1], [0, 1, 1, 0]], dtype=torch.bool)
    advantages = torch.tensor([1.5, -0.5, 2.0])
    grads = {}
    for method in ("none", "noclip", "grpo", "gspo", "cispo"):
        log_probs = old.clone().requires_grad_()
        loss, metadata = compute_policy_gradient_loss(advantages, log_probs, method, old, 0.2, mask)
        aggregate_loss_across_microbatch(loss, mask).backward()
        grads[method] = log_probs.grad
        assert metadata["ratio_min"] == metadata["ratio_max"] == 1 and metadata["clip_fraction"] == 0
    for grad in grads.values():
        torch.testing.assert_close(grad, grads["none"])


def test_gspo_is_the_geometric_mean_over_the_response():
    log_probs = torch.tensor([[-1.0, -2, -1]], requires_grad=True)
    old, mask = torch.tensor([[-1.3, -2.1, -6]]), torch.tensor([[True, True, False]])
    loss, metadata = compute_policy_gradient_loss(torch.tensor([1.0]), log_probs, "gspo", old, 10, mask)
    s = math.exp(0.2)
    torch.testing.assert_close(loss, torch.full((1, 3), -s))
    aggregate_loss_across_microbatch(loss, mask).backward()
    torch.testing.assert_close(log_probs.grad, torch.tensor([[-s / 2, -s / 2, 0]]))
    assert metadata["n_ratios"] == 1
    loss, _ = compute_policy_gradient_loss(torch.tensor([1.0]), log_probs, "gspo", old, 0.1, mask)
    torch.testing.assert_close(loss, torch.full((1, 3), -1.1))


def test_clip_fractions_count_sequences_for_gspo_and_no_padding():
    ratios, mask = (
        [[1.5, 1.5], [0.5, 9.0], [1.0, 1.0]],
        torch.tensor([[1, 1], [1, 0], [0, 0]], dtype=torch.bool),
    )
    _, _, metadata = from_ratios(ratios, [1.0, -1, 1], "gspo", 0.1, mask)
    assert [metadata[name].item() for name in ("n_ratios", "n_clipped_low", "n_clipped_high")] == [2, 1, 1]
    _, _, metadata = from_ratios(ratios, [1.0, -1, 1], "grpo", 0.1, mask)
    assert [metadata[name].item() for name in ("n_ratios", "n_clipped_low", "n_clipped_high")] == [3, 1, 2]
    assert metadata["ratio_max"].item() == pytest.approx(1.5)
    _, _, metadata = from_ratios(ratios, [0.0, 0, 0], "grpo", 0.1, mask)
    assert metadata["clip_fraction"] == 0


@pytest.mark.parametrize("method", ["none", "noclip", "grpo", "gspo", "cispo"])
@pytest.mark.parametrize("advantage", [1.0, 0.0, -1.0])
def test_whatever_stands_at_padding_reaches_neither_value_nor_gradient(method, advantage):
    mask = torch.tensor([[1, 1, 0], [0, 0, 0]], dtype=torch.bool)
    clean = torch.tensor([[-1.0, -2, -1], [-1, -1, -1]], requires_grad=True)
    old = torch.tensor([[-1.1, -1.9, -1], [-1, -1, -1]])
    loss, metadata = loss_of([advantage, advantage], clean, method, old, 0.2, mask)
    expected = aggregate_loss_across_microbatch(loss, mask)
    expected.backward()
    for here, there in product((NAN, INF, -INF, -200.0), repeat=2):
        dirty = torch.tensor([[-1.0, -2, here], [here, here, here]], requires_grad=True)
        old[0, 2] = old[1] = there
        loss, statistics = loss_of([advantage, advantage], dirty, method, old, 0.2, mask)
        value = aggregate_loss_across_microbatch(loss, mask)
        value.backward()
        assert torch.equal(value, expected) and torch.equal(dirty.grad, clean.grad)
        assert all(torch.equal(statistics[name], metadata[name]) for name in metadata)


def test_huge_ratios_stay_finite():
    log_probs = torch.tensor([[-1.0, -300.0]], requires_grad=True)
    for method in ("noclip", "grpo", "gspo", "cispo"):
        loss, metadata = loss_of([-1.0], log_probs, method, [[-300.0, -1.0]], 0.2)
        loss.sum().backward()
        assert torch.isfinite(loss).all() and torch.isfinite(log_probs.grad).all()
        assert torch.isfinite(metadata["ratio_max"])


def test_a_function_as_method():
    def half(advantages, log_probs, old_log_probs, response_mask, cliprange):
        assert advantages.shape == (2, 1) and old_log_probs is None and cliprange == 0.3
        return -0.5 * advantages * log_probs, {"mine": 7.0}

    loss, metadata = loss_of([2.0, -1], [[-1.0], [-3]], half, None, 0.3)
    assert loss.tolist() == [[1.0], [-1.5]] and metadata == {"mine": 7.0}
    loss, metadata = loss_of([2.0, -1], [[-1.0], [-3]], lambda a, lp, *rest: -a * lp)
    assert loss.tolist() == [[2.0], [-3.0]] and metadata == {}


# ---- a policy with three answers: the gradient by summing over every outcome, in float64

LOGITS = torch.tensor([0.3, -0.8, 0.5], dtype=torch.float64)
OLD_LOGITS = torch.tensor([-0.2, 0.4, 0.1], dtype=torch.float64)
REWARDS = torch.tensor([1.0, 0.0, 0.25], dtype=torch.float64)


def gradient_of_expected_reward():
    p = LOGITS.softmax(0)
    return p * (REWARDS - (p * REWARDS).sum())  # d sum_a p_a r_a / d logits


def expected_gradient(method, old_logits, group_size=1, baseline="none", cliprange=None):
    """E over all groups of answers drawn from the old policy of minus the loss's gradient."""
    theta = LOGITS.clone().requires_grad_()
    total = 0.0
    for answers in product(range(3), repeat=group_size):
        answers = torch.tensor(answers)
        chance = old_logits.log_softmax(0)[answers].sum().exp()
        advantages, _ = compute_group_normalized_rewards(REWARDS[answers], group_size, baseline, 0.0, "none")
        log_probs = theta.log_softmax(0)[answers][:, None]
        old = old_logits.log_softmax(0)[answers][:, None]
        loss, _ = compute_policy_gradient_loss(advantages, log_probs, method, old, cliprange)
        total = total - chance * aggregate_loss_across_microbatch(loss, torch.ones_like(loss))
    return torch.autograd.grad(total, theta)[0]


def test_the_estimator_is_unbiased_on_policy_and_off_policy_with_weights():
    exact = gradient_of_expected_reward()
    torch.testing.assert_close(expected_gradient("none", LOGITS), exact)
    torch.testing.assert_close(expected_gradient("noclip", OLD_LOGITS), exact)
    torch.testing.assert_close(
        expected_gradient("cispo", OLD_LOGITS, cliprange=100.0), exact
    )  # a weight never held
    assert (expected_gradient("none", OLD_LOGITS) - exact).abs().max() > 0.05


def test_the_group_mean_scales_the_gradient_by_g_minus_1_over_g():
    for group_size in (2, 3, 4):
        torch.testing.assert_close(
            expected_gradient("none", LOGITS, group_size, "mean"),
            gradient_of_expected_reward() * (group_size - 1) / group_size,
        )


@pytest.mark.parametrize("method", ["noclip", "grpo", "gspo"])
def test_gradients_against_finite_differences(method):
    generator = torch.Generator().manual_seed(3)
    log_probs, old = (-2 * torch.rand(4, 5, generator=generator, dtype=torch.float64) for _ in range(2))
    mask = torch.rand(4, 5, generator=generator) < 0.7
    advantages = torch.tensor([1.0, -2.0, 0.5, -0.3], dtype=torch.float64)

    def objective(log_probs):
        loss, _ = compute_policy_gradient_loss(advantages, log_probs, method, old, 0.2, mask)
        return aggregate_loss_across_microbatch(loss, mask)

    assert torch.autograd.gradcheck(objective, log_probs.requires_grad_())


# ---- aggregation


def test_aggregation_by_hand():
    loss = torch.tensor([[1.0, 2, 9], [4, NAN, INF], [5, 5, 5]], requires_grad=True)
    mask = torch.tensor([[1, 1, 0], [1, 0, 0], [0, 0, 0]])
    value = aggregate_loss_across_microbatch(loss, mask)
    assert value.item() == pytest.approx((1.5 + 4 + 0) / 3)
    value.backward()
    torch.testing.assert_close(loss.grad, torch.tensor([[1 / 6, 1 / 6, 0], [1 / 3, 0, 0], [0, 0, 0]]))
    assert aggregate_loss_across_microbatch(loss, mask.bool(), "constant", 14).item() == pytest.approx(7 / 14)
    assert aggregate_loss_across_microbatch(torch.zeros(0, 3), torch.zeros(0, 3)).item() == 0


@pytest.mark.parametrize(
    "arguments, named",
    [
        (([1.0], [[-1.0]], "ppo"), "importance_reweighting_method: got 'ppo'"),
        (([1.0], [[-1.0]], "noclip"), "old_log_probs: got None"),
        (([1.0], [[-1.0]], "grpo", [[-1.0]]), "cliprange: got None"),
        (([1.0], [[-1.0]], "gspo", [[-1.0]], -0.1), "cliprange: got -0.1"),
        (([1.0, 2], [[-1.0]]), "raw_rewards_or_advantages: got shape"),
        (([1.0], [-1.0]), "policy_log_probs: got shape"),
        (([1.0], [[-1.0]], "noclip", [[-1.0, 2]]), "old_log_probs: got shape"),
        (([1.0], [[-1.0]], "none", None, None, torch.ones(2, 1)), "response_mask: got shape"),
    ],
)
def test_bad_input_is_named(arguments, named):
    with pytest.raises(ValueError, match=named):
        loss_of(*arguments)


@pytest.mark.parametrize(
    "arguments, named",
    [
        ((torch.ones(2, 3), "tokens"), "loss_normalization: got 'tokens'"),
        ((torch.ones(3, 2),), "mask: got shape"),
        ((torch.ones(2, 3), "constant"), "normalization_constant: got None"),
        ((torch.ones(2, 3), "constant", 0), "normalization_constant: got 0"),
    ],
)
def test_bad_aggregation_is_named(arguments, named):
    with pytest.raises(ValueError, match=named):
        aggregate_loss_across_microbatch(torch.ones(2, 3), *arguments)


def test_bool_rewards_and_lists_are_numbers():
    log_probs = torch.tensor([[-1.0], [-2.0]])
    for rewards in (torch.tensor([True, False]), [1, 0]):
        assert compute_policy_gradient_loss(rewards, log_probs)[0].flatten().tolist() == [1.0, 0.0]


@pytest.mark.parametrize(
    "value", ["0.2", b"1", True, None, float("nan"), -1, [0.2], [0.2, -1], 10**400, "x" * 5000]
)
def test_what_is_no_number_is_one_error(value):
    with pytest.raises(ValueError, match="^cliprange: got .*expected a number >= 0") as error:
        loss_of([1.0], [[-1.0]], "grpo", [[-1.0]], value)
    assert len(str(error.value)) < 300
    with pytest.raises(ValueError, match="^normalization_constant: got .*expected a positive number"):
        aggregate_loss_across_microbatch(torch.ones(1, 1), torch.ones(1, 1), "constant", value)


def test_numbers_of_other_libraries_are_numbers():
    import numpy as np

    for value in (np.float32(2), np.int64(2), torch.tensor(2.0)):
        assert aggregate_loss_across_microbatch(torch.ones(1, 4), torch.ones(1, 4), "constant", value) == 2
        assert loss_of([1.0], [[0.0]], "grpo", [[0.0]], value)[0].item() == -1


@pytest.mark.parametrize("method", ["none", "noclip", "grpo", "gspo", "cispo"])
def test_width_0_is_a_loss_of_0(method):
    empty = torch.zeros(2, 0)
    loss, metadata = compute_policy_gradient_loss(torch.ones(2), empty, method, empty, 0.2, empty.bool())
    assert loss.shape == (2, 0) and metadata["clip_fraction"] == 0
    assert aggregate_loss_across_microbatch(loss, empty.bool()) == 0
    assert aggregate_loss_across_microbatch(loss, empty.bool(), "constant", 8) == 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_does_not_overflow(dtype):
    # 4096 x 32 = 131072 is beyond float16's 65504; its mean is 32
    loss = torch.full((1, 4096), 32.0, dtype=dtype)
    assert aggregate_loss_across_microbatch(loss, torch.ones_like(loss)).item() == 32
    assert aggregate_loss_across_microbatch(loss, torch.ones_like(loss), "constant", 2.0).item() == 65536
    # a ratio of exp(20) = 4.9e8, held at 1.2 where it is clipped; none of it is inf or NaN
    log_probs = torch.tensor([[-1.0, -1.0]], dtype=dtype, requires_grad=True)
    for method, wanted in (("grpo", -1.2), ("noclip", -math.exp(20))):
        loss, _ = compute_policy_gradient_loss(
            torch.tensor([1.0], dtype=dtype), log_probs, method, torch.tensor([[-21.0, -1]], dtype=dtype), 0.2
        )
        assert loss[0].tolist() == pytest.approx([wanted, -1.0], rel=1e-6)
        loss[0, 1].backward()
        assert bool(torch.isfinite(log_probs.grad).all())


@pytest.mark.parametrize("result", [None, 3.0, torch.ones(2, 1), (torch.ones(3), {})])
def test_a_function_that_gives_no_loss_per_token_is_named(result):
    with pytest.raises(ValueError, match=r"^importance_reweighting_method: the function: got .*\(2, 3\)"):
        compute_policy_gradient_loss(torch.ones(2), torch.zeros(2, 3), lambda *arguments: result)


def test_what_is_no_tensor_is_named():
    for name, arguments in (
        ("policy_log_probs", ([1.0], [[0.0]])),
        ("old_log_probs", ([1.0], torch.zeros(1, 1), "noclip", [[0.0]])),
        ("raw_rewards_or_advantages", ("one", torch.zeros(1, 1))),
    ):
        with pytest.raises(ValueError, match=f"^{name}: got "):
            compute_policy_gradient_loss(*arguments)
    with pytest.raises(ValueError, match="^mask: got "):
        aggregate_loss_across_microbatch(torch.zeros(1, 1), [[1]])


@pytest.mark.parametrize(
    "result", [(1, 2, 3), (torch.zeros(2, 3), None), (torch.zeros(2, 3), {"x": "y"}), {"loss": 1}, None, "x"]
)
def test_a_reweighting_of_ones_own_that_gives_something_else_is_refused_by_name(result):
    log_probs = torch.zeros(2, 3)
    with pytest.raises(ValueError, match="^importance_reweighting_method: the function"):
        compute_policy_gradient_loss([1.0, 2.0], log_probs, lambda *a: result)


def test_a_reweighting_of_ones_own_may_count_what_is_not_finite():
    found = {"a": float("nan"), "b": torch.tensor(1.0), "c": 2}
    own = lambda advantages, log_probs, *rest: (-advantages * log_probs, found)
    assert compute_policy_gradient_loss([1.0, 2.0], torch.zeros(2, 3), own)[1] is found
