"""RolloutBatch: every field of a row stays with the row, at its own place."""

from dataclasses import fields

import pytest
import torch

from rlkit import Completion
from rlkit.batch import RolloutBatch, beside_labels, rollout_batch

PROMPTS, RESPONSES = [[2, 3, 4], [5]], [[[6], [7, 8]], [[], [9]]]  # two prompts with two responses each


def batch_of(responses=RESPONSES, prompts=PROMPTS, log_probs=True, entropies=True):
    """Log-probs are -id / 10 and entropies id / 100, so that each value tells its token."""
    return rollout_batch(
        [
            [
                Completion(
                    "",
                    ids,
                    "stop",
                    [-i / 10 for i in ids] if log_probs else [],
                    prompt,
                    [i / 100 for i in ids] if entropies else [],
                )
                for ids in group
            ]
            for prompt, group in zip(prompts, responses)
        ],
        filler=1,
    )


def test_every_cell_of_a_rollout_batch_by_hand():
    batch = batch_of()
    assert batch.input_ids.tolist() == [[2, 3, 4, 6], [2, 3, 4, 7], [5, 1, 1, 1], [5, 9, 1, 1]]
    assert batch.labels.tolist() == [[3, 4, 6, 1], [3, 4, 7, 8], [1, 1, 1, 1], [9, 1, 1, 1]]
    at = torch.tensor([[0, 0, 6, 0], [0, 0, 7, 8], [0, 0, 0, 0], [9, 0, 0, 0]])
    assert torch.equal(batch.response_mask, at > 0)
    torch.testing.assert_close(batch.sampler_log_probs, -at / 10)
    torch.testing.assert_close(batch.entropies, at / 100)
    assert batch.groups.tolist() == [0, 0, 1, 1]
    assert batch.row_ends().tolist() == [3, 4, 0, 1] and batch.response_lengths().tolist() == [1, 2, 0, 1]


def test_what_a_sampler_does_not_know_is_none():
    batch = batch_of(entropies=False)
    assert batch.entropies is None and batch.sampler_log_probs is not None
    batch = batch_of(log_probs=False)
    assert batch.sampler_log_probs is None and batch.entropies is not None


def test_groups_of_several_sizes_keep_their_numbers():
    assert batch_of([[[6]], [[7], [8], [9]]]).groups.tolist() == [0, 1, 1, 1]


@pytest.mark.parametrize("name", [field.name for field in fields(RolloutBatch)])
@pytest.mark.parametrize("rows", [[3, 0], [1, 0, 2, 3], [2]])
def test_rows_are_selected_in_every_field_in_their_order(name, rows):
    batch = batch_of()
    per_token = torch.arange(16.0).view(4, 4)
    batch.advantages, batch.old_log_probs, batch.tis_weights = torch.arange(4.0), per_token, per_token + 16
    batch.ref_log_probs = per_token + 32
    width = max(int(batch.row_ends()[i]) for i in rows)
    whole, part = getattr(batch, name), getattr(batch.select(torch.tensor(rows)), name)
    expected = [whole[i] if whole.ndim == 1 else whole[i, :width] for i in rows]
    assert torch.equal(part, torch.stack(expected))


def test_chosen_rows_are_split_by_length():
    batch = batch_of([[[6, 7, 8], [9]], [[6, 7], []]])
    pieces = batch.split(torch.tensor([True, True, True, False]), 2)
    assert [piece.tolist() for piece in pieces] == [[1, 2], [0]]
    assert batch.split(torch.zeros(4, dtype=torch.bool), 2) == ()


def test_values_beside_the_labels_are_cut_on_the_right_and_carry_no_gradient():
    wide = torch.arange(24.0).view(4, 6).requires_grad_()
    mask = batch_of().response_mask
    values = beside_labels("old_log_probs", wide, mask)
    assert torch.equal(values, wide[:, :4] * mask) and not values.requires_grad


def test_a_completion_with_too_few_log_probs_is_refused():
    whole, short = (
        Completion("a", [3, 4], "stop", [-1.0, -2.0], [5]),
        Completion("b", [3, 4], "stop", [-1.0], [5]),
    )
    with pytest.raises(ValueError, match=r"sampler_log_probs: got shape \(1,\) in row 1, expected \(2,\)"):
        rollout_batch([[whole, short]])
    with pytest.raises(ValueError, match="completion 0 has no prompt_token_ids"):
        rollout_batch([[Completion("a", [3], "stop", [-1.0])]])


@pytest.mark.parametrize("as_rows", [True, False])
def test_values_that_are_not_finite_are_refused_at_response_tokens_only(as_rows):
    mask = torch.tensor([[True, True, False], [True, False, False]])
    values = torch.tensor([[1.0, 2.0, float("nan")], [3.0, float("inf"), 0.0]])
    rows = [row[m] for row, m in zip(values, mask)] if as_rows else values
    assert beside_labels("old_log_probs", rows, mask).tolist() == [[1, 2, 0], [3, 0, 0]]
    values[0, 1] = float("nan")
    rows = [row[m] for row, m in zip(values, mask)] if as_rows else values
    with pytest.raises(ValueError, match="old_log_probs: .*in row 0, .*one finite value"):
        beside_labels("old_log_probs", rows, mask)
