"""Gradient checkpointing and float16 with a scaled loss: what is kept, the same gradients, what overflows."""

import warnings

import pytest
import torch
from tiny_model import MAKERS, save_tiny_model, share_of_lower_case

from rlkit import ALGORITHMS, Config, train
from rlkit.batch import RolloutBatch
from rlkit.grpo import optimizer_step, train_step
from rlkit.jobs.parameters import EvaluateJob
from rlkit.jobs.watch import MOVED_STEPS, Watch
from rlkit.samplers.shared_scoring import can_share_prefix
from rlkit.support.adapters import add_lora
from rlkit.support.models import choose_attention, load_model
from rlkit.support.recompute import recomputed_layers


def model_and_batch(architecture="olmo2", dropout=0.0):
    torch.manual_seed(0)
    model = MAKERS[architecture]().eval()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = dropout
    prompts, responses = torch.randint(2, 200, (2, 20)), torch.randint(2, 200, (6, 12))
    ids = torch.cat([prompts.repeat_interleave(3, 0), responses], dim=1)
    mask = (torch.arange(31) >= 19).expand(6, -1).clone()
    mask[1, 26:] = False
    batch = RolloutBatch(ids[:, :-1], ids[:, 1:], mask)
    batch.advantages = torch.tensor([1.0, -1.0, 0.5, -2.0, 0.7, 0.3])
    return model, batch


def step(model, batch, **values):
    """(gradients as they are stepped, bytes that the backward passes kept, metadata)"""
    found, kept, weights = {}, {}, {p.untyped_storage().data_ptr() for p in model.parameters()}
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.0)
    optimizer.register_step_pre_hook(
        lambda *_: found.update({n: p.grad.clone() for n, p in model.named_parameters() if p.requires_grad})
    )
    alive = []  # an address says which tensor it is only while the tensor lives

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
            alive.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        _, metadata = train_step(model, optimizer, batch, ALGORITHMS["grpo"], **values)
    return found, sum(kept.values()), metadata


# ---- gradient checkpointing


@pytest.mark.parametrize("lora", [False, True], ids=["weights", "LoRA"])
@pytest.mark.parametrize("architecture", MAKERS)
def test_layers_recomputed_keep_less_and_give_the_same_gradient(architecture, lora, monkeypatch):
    """The model stays in eval mode, dropout of 0.5 and all; without gradient nothing changes."""
    model, batch = model_and_batch(architecture, dropout=0.5)
    if lora:
        add_lora(model, 2)
        for name, p in model.named_parameters():
            p.data += 0.1 * torch.randn_like(p) * (".lora_B." in name)
    assert can_share_prefix(model)
    shared, _, _ = step(model, batch)
    monkeypatch.setattr("rlkit.samplers.shared_scoring.can_share_prefix", lambda *_: False)
    plain, all_of_it, _ = step(model, batch)
    monkeypatch.undo()
    with recomputed_layers(model):
        assert not can_share_prefix(model) and not model.training
        with torch.no_grad():
            assert can_share_prefix(model)
        found, kept, _ = step(model, batch)
    assert all("forward" not in vars(module) for module in model.modules()) and can_share_prefix(model)
    for name, gradient in plain.items():
        scale = gradient.norm() + 1e-6
        assert (found[name] - gradient).norm() <= 1e-6 * scale, name
        assert (shared[name] - gradient).norm() <= 1e-4 * scale, name
    # a layer's input and output for each of 2 layers, the last norm and the head's positions stay
    assert kept < all_of_it / 3, (kept, all_of_it)


def test_a_model_without_layers_to_recompute_is_refused():
    with pytest.raises(ValueError, match="^gradient_checkpointing: got True, but Linear has no layers"):
        with recomputed_layers(torch.nn.Linear(2, 2)):
            pass


# ---- float16 with a scaler


def scaler(scale=2.0**12):
    return torch.amp.GradScaler("cpu", init_scale=scale)


def test_a_float16_step_is_near_float32s_and_clipped_by_the_true_norm():
    model, batch = model_and_batch()
    exact, _, wanted = step(model, batch, max_grad_norm=0.1)
    half = dict(autocast_dtype=torch.float16, scaler=scaler())
    found, _, metadata = step(model, batch, max_grad_norm=0.1, **half)
    assert metadata["grad_norm"] == pytest.approx(wanted["grad_norm"], rel=0.02) and wanted["grad_norm"] > 1
    assert metadata["loss"] == pytest.approx(wanted["loss"], rel=0.02, abs=2e-3)
    length = sum(g.square().sum() for g in found.values()).sqrt().item()
    assert length == pytest.approx(0.1, rel=1e-3)
    difference = sum((g - exact[name]).square().sum() for name, g in found.items()).sqrt().item()
    assert difference < 0.03 * 0.1


def test_gradients_that_float16_would_lose():
    """With a loss of 1e-8 the gradient at the logits is below float16's least number, 6e-8, unless scaled."""
    model, batch = model_and_batch()
    batch.advantages = batch.advantages * 1e-7
    exact, _, wanted = step(model, batch)
    found, _, metadata = step(model, batch, autocast_dtype=torch.float16, scaler=scaler(2.0**24))
    lost, _, without = step(model, batch, autocast_dtype=torch.float16)
    assert metadata["grad_norm"] == pytest.approx(wanted["grad_norm"], rel=0.02)
    assert abs(without["grad_norm"] / wanted["grad_norm"] - 1) > 0.02
    assert found.keys() == exact.keys() == lost.keys()


def test_an_overflow_is_skipped_and_halves_the_scale():
    model, batch = model_and_batch()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    large = scaler(2.0**30)
    half = dict(autocast_dtype=torch.float16, scaler=large)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _, metadata = train_step(model, optimizer, batch, ALGORITHMS["grpo"], **half)
    assert "grad_norm" not in metadata and large.get_scale() == 2.0**29 and not optimizer.state
    assert all(torch.equal(p, before[name]) and p.grad is None for name, p in model.named_parameters())
    while large.get_scale() > 2.0**12 and not optimizer.state:
        _, metadata = train_step(model, optimizer, batch, ALGORITHMS["grpo"], **half)
    assert optimizer.state and metadata["grad_norm"] > 0
    assert not any(torch.equal(p, before[name]) for name, p in model.named_parameters() if "norm" in name)


def test_a_first_batch_with_nothing_to_learn_from_steps_in_float16_too():
    """No loss has been scaled yet; the step is float32's, and the next is an ordinary one."""
    moved = {}
    for values in ({}, dict(autocast_dtype=torch.float16, scaler=scaler())):
        model, batch = model_and_batch()
        advantages, batch.advantages = batch.advantages, torch.zeros(6)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
        train_step(model, optimizer, batch, ALGORITHMS["grpo"], **values)
        moved[len(values)] = [p.detach().clone() for p in model.parameters()]
        batch.advantages = advantages
        _, metadata = train_step(model, optimizer, batch, ALGORITHMS["grpo"], **values)
        assert metadata["grad_norm"] > 0
    assert all(torch.equal(a, b) for a, b in zip(moved[0], moved[2]))


def test_a_scaler_that_is_off_changes_no_bit():
    weights = []
    for values in ({}, dict(scaler=torch.amp.GradScaler("cpu", enabled=False))):
        model, batch = model_and_batch()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        train_step(model, optimizer, batch, ALGORITHMS["grpo"], max_grad_norm=1.0, **values)
        weights.append([p.detach().clone() for p in model.parameters()])
    assert all(map(torch.equal, *weights))
    for p in model.parameters():
        p.grad = torch.full_like(p, torch.nan)
    with pytest.warns(UserWarning, match="this optimizer step is skipped"):
        optimizer_step(model, optimizer, 1.0, torch.amp.GradScaler("cpu", enabled=False))


# ---- weights that do not move


def test_the_watch_counts_changed_weights_after_four_steps_that_teach():
    row = {"rows_used": 1, "groups_identical": 0, "lr": 1e-5}
    for changed, warns in ((9, True), (10, False)):
        said, weights = [], [torch.ones(60), torch.ones(4, 10, dtype=torch.bfloat16)]
        watch = Watch(said.append, weights)
        weights[0][:4] += 2**-23  # the last bit
        weights[1].view(-1)[: changed - 4] *= 2
        for step, used in enumerate([1, 0, 1, 0, 1]):
            watch(step, row | {"rows_used": used}, 9)
        assert said == []
        for step in range(5, 12):
            watch(step, row, 9)
        assert said == warns * [
            "warning: step 5: only 9.0% of the trained weights have changed in 4 steps at lr 1e-05: bfloat16 "
            "and float32 rounds the other updates away; try dtype=float32 with autocast=True, or a larger lr"
        ]


@pytest.mark.parametrize("lora", [0, 4])
@pytest.mark.parametrize("change", [dict(dtype="bfloat16"), dict(autocast=True)], ids=["bfloat16", "masters"])
def test_a_run_in_plain_bfloat16_is_warned_and_one_with_masters_or_a_lora_is_not(
    tmp_path, capsys, change, lora
):
    small = dict(n_train=16, n_val=0, n_steps=MOVED_STEPS, max_tokens=8, lr=1e-5, device="cpu")
    small |= dict(rollout_batch_size=16, group_size=4, prompt="question_only", lora_rank=lora)
    base = str(save_tiny_model(tmp_path / "base"))
    config = Config(model=base, run_dir=str(tmp_path / "run"), **small | change)
    train(config, reward_fn=share_of_lower_case)
    warned = "weights have changed in 4 steps at lr 1e-05: bfloat16 rounds" in capsys.readouterr().out
    assert warned == (change == dict(dtype="bfloat16") and not lora)


def test_the_preset_olmo_has_masters_and_plain_bfloat16_is_one_parameter_away():
    olmo, plain = Config.preset("olmo"), Config.preset("olmo", dtype="bfloat16")
    assert (olmo.dtype, olmo.autocast, plain.dtype, plain.autocast) == ("float32", True, "bfloat16", False)
    given = Config.from_parameters({"preset": "olmo", "dtype": "bfloat16"})
    assert given == plain
    with pytest.raises(ValueError, match="^autocast_dtype: got float16 with autocast False"):
        Config(autocast_dtype="float16")
    job = EvaluateJob.from_parameters({"preset": "olmo", "model": "laptop"})  # needs no masters
    assert (job.config.dtype, job.config.autocast) == ("bfloat16", False)


def test_flash_attention_looks_at_the_type_that_is_computed_in(monkeypatch):
    monkeypatch.setattr("rlkit.support.models.find_spec", lambda name: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    cuda, asked = torch.device("cuda"), []
    assert choose_attention("flash_attention_2", torch.float32, cuda)[0] == "sdpa"
    assert choose_attention("flash_attention_2", torch.bfloat16, cuda)[0] == "flash_attention_2"
    monkeypatch.setattr(
        "rlkit.support.models.choose_attention", lambda *a: (asked.append(a), ("sdpa", ""))[1]
    )
    load_model("laptop", "float32", "cpu", "flash_attention_2", torch.bfloat16)
    load_model("laptop", "float32", "cpu", "flash_attention_2")
    assert [dtype for _, dtype, _ in asked] == [torch.bfloat16, torch.float32]
