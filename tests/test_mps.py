"""Apple's GPU, played by mocks: its line in the plan, its memory, and that float64 is not asked of it."""

import pytest
import torch
from test_precision import model_and_batch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rlkit import ALGORITHMS, Config
from rlkit.grpo import response_log_probs, train_step
from rlkit.jobs import planning


@pytest.fixture
def mps(monkeypatch):
    """mps(limit, used, machine, version): a Mac with so many bytes."""

    def make(limit=12e9, used=1e9, free=9e9, version=15):
        monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
        monkeypatch.setattr(torch.backends.mps, "is_macos_or_newer", lambda major, minor: version >= major)
        monkeypatch.setattr(torch.mps, "recommended_max_memory", lambda: int(limit))
        monkeypatch.setattr(torch.mps, "driver_allocated_memory", lambda: int(used))
        monkeypatch.setattr(planning.machine, "memory", lambda: (16 * 10**9, int(free)))

    return make


SMALL = dict(device="mps", n_train=32, n_val=4, n_val_final=4, n_steps=2)


def test_the_plan_says_how_much_memory_the_gpu_may_take(mps):
    mps()
    outlook = planning.plan(Config(**SMALL))
    assert outlook["ok"] and outlook["device"] == "mps"
    assert "device mps (a part of the machine's memory: 12 GB at most), float32" in outlook["text"]
    assert outlook["memory_free"] == 9e9  # what is free in the machine: less than 12 - 1
    mps(free=14e9)
    assert planning.plan(Config(**SMALL))["memory_free"] == 11e9  # what Metal allows
    mps(limit=1e9 + 1e6)
    refused = planning.plan(Config(**SMALL))["errors"]
    assert (
        len(refused) == 1
        and refused[0].startswith("memory: needs about ")
        and " on mps, 1 MB free" in refused[0]
    )


def test_bfloat16_needs_a_new_macos(mps):
    mps(version=13)
    assert planning.plan(Config(**SMALL))["ok"]
    for values, name in (({"dtype": "bfloat16"}, "dtype"), ({"autocast": True}, "autocast_dtype")):
        [line] = planning.plan(Config(**SMALL, **values))["errors"]
        assert line.startswith(f"{name}: got 'bfloat16', which MPS has from macOS 14 on")
    mps(version=14)
    assert planning.plan(Config(**SMALL, dtype="bfloat16"))["ok"]


def test_a_batch_in_float64_goes_there_in_float32(monkeypatch):
    _, batch = model_and_batch()
    batch.advantages, moved = batch.advantages.double(), []
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "to", lambda self, *how: moved.append((self.dtype, *how)) or self)
        batch.to("mps")
        batch.to("cpu")
    kinds = [(a, c) for a, b, c in moved]
    assert (torch.float64, torch.float32) in kinds[:4] and (torch.int64, torch.int64) in kinds[:4]
    assert kinds[4:] == [(a, a) for a, _ in kinds[4:]]


class NoFloat64(TorchDispatchMode):
    """Every operation fails that gives float64, as on MPS."""

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        result = function(*arguments, **keywords or {})
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.dtype == torch.float64 and tensor.numel() > 1:
                raise TypeError(f"Cannot convert a MPS Tensor to float64 dtype: {function}")
        return result


@pytest.mark.parametrize("algo", ["grpo", "offpolicy_clip", "offpolicy_gspo", "cispo", "dapo"])
def test_a_step_on_the_device_asks_for_no_float64(algo):
    model, batch = model_and_batch()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with NoFloat64():
        batch.old_log_probs = response_log_probs(model, batch)
        batch.ref_log_probs = batch.old_log_probs - 0.1
        train_step(model, optimizer, batch, ALGORITHMS[algo], gradient_accumulation_steps=2)
