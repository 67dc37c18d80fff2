"""The table of algorithms against the handout's settings, and a reader's own row."""

from dataclasses import replace

import pytest

from rlkit import ALGORITHMS, Algorithm, get_algorithm
from rlkit.losses import REWEIGHTINGS


def settings(name):
    a = ALGORITHMS[name]
    return (
        a.baseline,
        a.advantage_normalizer,
        a.loss_normalization,
        a.importance_reweighting_method,
        a.cliprange,
        a.off_policy,
    )


def test_the_table_is_the_handouts():
    assert {name: settings(name) for name in ALGORITHMS} == {
        "grpo": ("mean", "std", "sequence", "none", None, False),
        "grpo_constant": ("mean", "std", "constant", "none", None, False),
        "drgrpo": ("mean", "none", "constant", "none", None, False),
        "rft": ("none", "none", "constant", "none", None, False),
        "maxrl": ("mean", "mean", "constant", "none", None, False),
        "offpolicy_naive": ("mean", "std", "sequence", "none", None, True),
        "offpolicy_noclip": ("mean", "std", "sequence", "noclip", None, True),
        "offpolicy_clip": ("mean", "std", "sequence", "grpo", 0.2, True),
        "offpolicy_gspo": ("mean", "std", "sequence", "gspo", 3e-4, True),
        "cispo": ("mean", "std", "sequence", "cispo", 0.2, True),
        "dapo": ("mean", "std", "token", "grpo", (0.2, 0.28), True),
    }
    assert all(name == row.name and row.summary for name, row in ALGORITHMS.items())
    assert {row.importance_reweighting_method for row in ALGORITHMS.values()} == set(REWEIGHTINGS)


def test_by_name_and_your_own():
    assert get_algorithm("drgrpo") is ALGORITHMS["drgrpo"]
    mine = replace(
        ALGORITHMS["drgrpo"], name="mine", advantage_normalizer=lambda rewards: rewards.amax(1, True)
    )
    assert get_algorithm(mine) is mine and isinstance(mine, Algorithm) and "mine" not in ALGORITHMS
    with pytest.raises(ValueError, match="algo: got 'dr_grpo'.*did you mean 'drgrpo'"):
        get_algorithm("dr_grpo")
    with pytest.raises(ValueError, match="algo: got 'xyzzy'"):
        get_algorithm("xyzzy")
