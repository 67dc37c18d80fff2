"""LoRA against plain peft and torch: gradients, merging, checkpoints, what a run leaves, what is refused."""

from dataclasses import replace

import pytest
import torch
from peft import IA3Config, LoraConfig, PeftModel, PromptTuningConfig, get_peft_model
from tiny_model import MAKERS, byte_tokenizer, save_tiny_model, share_of_lower_case
from transformers import AutoModelForCausalLM

from rlkit import ALGORITHMS, Config, SamplingParams, TransformersSampler, samplers, train
from rlkit.batch import RolloutBatch
from rlkit.grpo import train_step
from rlkit.jobs import run_writer
from rlkit.jobs.runs import checkpoints
from rlkit.samplers.vllm import sampler as vllm_sampler
from rlkit.samplers.vllm.checkpoint import checkpoint_tensors, write_weights
from rlkit.support.adapters import add_lora, merged, trained_state, unwrapped
from rlkit.support.models import load_model
from rlkit.tokenization import tokenize_prompt_and_output


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return str(save_tiny_model(tmp_path_factory.mktemp("base")))


def loud(model, seed=1):
    """B starts at zero: here it is noise, so that every part of the adapter has a gradient."""
    generator = torch.Generator().manual_seed(seed)
    for name, p in model.named_parameters():
        if ".lora_B." in name:
            p.data = (torch.randn(p.shape, generator=generator) * 0.1).to(p.dtype)
    return model


def with_lora(base, dtype="float32", **values):
    model, _ = load_model(base, dtype=dtype)
    torch.manual_seed(3)
    add_lora(model, **dict(rank=4) | values)
    return loud(model)


def with_peft(base, **values):
    """The same by peft alone."""
    model = AutoModelForCausalLM.from_pretrained(base).eval()
    torch.manual_seed(3)
    return loud(get_peft_model(model, LoraConfig(**values)))


def rows():
    prompts, responses = ["what is", "what is", "and", "and"], ["abcd", "ef g", "xx", "yzuvw"]
    batch = RolloutBatch(**tokenize_prompt_and_output(prompts, responses, byte_tokenizer()))
    batch.advantages = torch.tensor([1.0, -0.5, 0.25, -2.0])
    return batch


def gradients_of_step(model, batch, **values):
    """The gradients that an optimizer step is taken from, by name without peft's prefix."""
    found, optimizer = {}, torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    optimizer.register_step_pre_hook(
        lambda *_: found.update({n: p.grad.clone() for n, p in model.named_parameters() if p.requires_grad})
    )
    train_step(model, optimizer, batch, ALGORITHMS["grpo"], gradient_accumulation_steps=2, **values)
    return found


@pytest.mark.parametrize(
    "architecture, ours, theirs",
    [
        ("olmo2", {}, dict(lora_alpha=8, target_modules="all-linear")),
        ("qwen2", dict(alpha=3.0, target_modules="q_proj, up_proj"), dict(lora_alpha=3.0)),
    ],
)
def test_gradients_are_those_of_peft_and_torch(tmp_path, architecture, ours, theirs):
    """mean over rows of mean over tokens of -A log p, in plain torch on a get_peft_model copy."""
    base, batch = save_tiny_model(tmp_path, architecture), rows()
    found = gradients_of_step(with_lora(base, **ours), batch)
    peft = with_peft(base, **dict(r=4, target_modules=["q_proj", "up_proj"], task_type="CAUSAL_LM") | theirs)
    log_p = peft(input_ids=batch.input_ids).logits.log_softmax(-1)
    log_p = log_p.gather(2, batch.labels[..., None]).squeeze(2) * batch.response_mask
    (-batch.advantages * log_p.sum(1) / batch.response_mask.sum(1)).mean().backward()
    wanted = {
        n.removeprefix("base_model.model."): p.grad for n, p in peft.named_parameters() if p.requires_grad
    }
    assert found.keys() == wanted.keys() and len(found) == (28 if architecture == "olmo2" else 8)
    for name, gradient in wanted.items():
        assert gradient.norm() > 0 and (found[name] - gradient).norm() < 1e-6 * gradient.norm(), name


def test_merged_is_the_base_model_with_other_weights_and_leaves_no_trace(base):
    model, ids = with_lora(base), torch.arange(20)[None] + 5
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    tensors, plain = dict(model.named_parameters()), AutoModelForCausalLM.from_pretrained(base)
    logits = model(ids).logits
    for _ in range(3):
        with merged(model), merged(model):
            assert [n for n, _ in model.named_parameters()] == [n for n, _ in plain.named_parameters()]
            assert (model(ids).logits - logits).abs().max() < 1e-4
    assert all(p is tensors[name] and torch.equal(p, before[name]) for name, p in model.named_parameters())
    assert torch.equal(model(ids).logits, logits)


def test_merged_weights_by_hand(base):
    model, plain = with_lora(base, alpha=6.0), AutoModelForCausalLM.from_pretrained(base)
    ours = dict(model.named_parameters())
    with merged(model):
        found = {name: p.detach().clone() for name, p in model.named_parameters()}
    for name, p in plain.named_parameters():
        stem = name.removesuffix("weight")
        a, b = (ours.get(f"{stem}lora_{which}.default.weight") for which in "AB")
        wanted = p if a is None else p + 6.0 / 4 * b @ a
        torch.testing.assert_close(found[name], wanted, rtol=1e-5, atol=1e-7)
        assert (a is None) == torch.equal(found[name], p)
    with pytest.raises(KeyError), merged(model):
        raise KeyError
    assert ours.keys() == dict(model.named_parameters()).keys()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_sampler_draws_from_the_policy_that_is_trained(base, dtype):
    """In float32 through plain linear layers; in bfloat16 a merge would round B A away, so it is not made."""
    model, classes = with_lora(base, dtype), set()
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}
    for name, p in model.named_parameters():
        if ".lora_B." in name and dtype == "bfloat16":
            p.data.mul_(1e-2)
    handle = model.model.register_forward_pre_hook(
        lambda *_: classes.add(type(model.model.layers[0].mlp.up_proj).__module__.partition(".")[0])
    )
    sampler = TransformersSampler(model, byte_tokenizer())
    groups = sampler.generate(["ab", "cde"], SamplingParams(max_tokens=12, seed=1), 3)
    handle.remove()
    assert classes == {"torch" if dtype == "float32" else "peft"}
    for c in sum(groups, []):
        ids, n = torch.tensor([c.prompt_token_ids + c.token_ids]), len(c.prompt_token_ids)
        exact = model(ids).logits.float().log_softmax(-1)[0, n - 1 : -1]
        exact = exact[torch.arange(len(c.token_ids)), torch.tensor(c.token_ids)]
        assert (exact - torch.tensor(c.log_probs)).abs().max() < (1e-4 if dtype == "float32" else 0.15)


def test_the_sampler_takes_a_peft_model_trained_or_frozen(base):
    """The same responses as from the model inside; a trained prompt, which lies nowhere in it, is refused."""
    given, params = with_peft(base, r=4, target_modules="all-linear"), SamplingParams(max_tokens=9, seed=2)
    [[wanted]] = TransformersSampler(with_lora(base, alpha=8.0), byte_tokenizer()).generate(["ab"], params)
    [[plain]] = TransformersSampler(load_model(base)[0], byte_tokenizer()).generate(["ab"], params)
    [[found]] = TransformersSampler(given.requires_grad_(False), byte_tokenizer()).generate(["ab"], params)
    assert found.token_ids == wanted.token_ids and found.log_probs != plain.log_probs
    tuned = get_peft_model(
        load_model(base)[0], PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM")
    )
    with pytest.raises(ValueError, match="^model: has an adapter of kind PROMPT_TUNING"):
        TransformersSampler(tuned, byte_tokenizer())


def test_a_server_gets_merged_weights_under_the_base_models_names(base, tmp_path, monkeypatch):
    seen = []

    class Recorder:
        def __init__(self, model, tokenizer, **options):
            write_weights(model, tmp_path, tokenizer)
            seen.append({name: tensor.clone() for name, tensor in checkpoint_tensors(model).items()})

    monkeypatch.setattr(vllm_sampler, "VLLMSampler", Recorder)
    model = with_lora(base)
    samplers.make_sampler("vllm", model, byte_tokenizer())
    plain, ids = AutoModelForCausalLM.from_pretrained(tmp_path), torch.arange(9)[None] + 5
    assert (plain(ids).logits - model(ids).logits).abs().max() < 1e-4
    assert seen[0].keys() == dict(plain.named_parameters()).keys()
    assert all(torch.equal(p, seen[0][name]) for name, p in plain.named_parameters())


# ---- whole runs


def config_in(folder, base, **values):
    small = dict(n_train=16, n_val=4, n_val_final=4, n_steps=4, eval_every=2, max_tokens=8, lr=1e-2)
    small |= dict(rollout_batch_size=16, group_size=4, checkpoint_every=2, lora_rank=4, device="cpu")
    return Config(**small | dict(model=base, prompt="question_only", run_dir=str(folder)) | values)


@pytest.fixture(scope="module")
def whole(tmp_path_factory, base):
    return train(config_in(tmp_path_factory.mktemp("runs") / "whole", base), reward_fn=share_of_lower_case)


def weights(folder):
    return dict(AutoModelForCausalLM.from_pretrained(folder).named_parameters())


def test_what_a_run_leaves(whole, base):
    """model/ for anybody, adapter/ for peft; a checkpoint of the adapter alone; the base nowhere changed."""
    model, _ = load_model(whole.path)
    plain, ids = AutoModelForCausalLM.from_pretrained(base), torch.arange(30)[None] + 5
    onto = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), whole.path / "adapter")
    assert (model(ids).logits - onto(ids).logits).abs().max() < 1e-4
    assert (model(ids).logits - plain(ids).logits).abs().max() > 0.1
    [folder] = checkpoints(whole.path)
    state = torch.load(folder / "state.pt", weights_only=True)
    trained = {name: p for name, p in onto.get_base_model().named_parameters() if ".lora_" in name}
    assert state["model"].keys() == trained.keys() and len(trained) == 2 * 2 * 7
    assert all(torch.equal(state["model"][name], p) for name, p in trained.items())
    assert len(state["optimizer"]["state"]) == len(trained)


@pytest.mark.parametrize("scaled", [False, True])
def test_a_run_that_went_on_is_the_one_that_did_not_stop(base, whole, tmp_path, monkeypatch, scaled):
    """Bit for bit, the scaler of float16 included: it has halved its scale before the stop."""
    more = dict(autocast=True, autocast_dtype="float16") if scaled else {}
    real_scaler = torch.amp.GradScaler
    monkeypatch.setattr(torch.amp, "GradScaler", lambda *a, **k: real_scaler(*a, **k, growth_interval=3))
    if scaled:
        whole = train(config_in(tmp_path / "whole", base, **more), reward_fn=share_of_lower_case)
    real = run_writer.RunWriter.save_checkpoint

    def stopping(self, step, *rest):
        real(self, step, *rest)
        if step == 2:
            raise SystemExit

    config = config_in(tmp_path / "run", base, **more)
    with monkeypatch.context() as m, pytest.raises(SystemExit):
        m.setattr(run_writer.RunWriter, "save_checkpoint", stopping)
        train(config, reward_fn=share_of_lower_case)
    run = train(replace(config, resume=True), reward_fn=share_of_lower_case)
    assert run.metrics.loss.tolist()[1:] == whole.metrics.loss.tolist()[1:]
    ours, theirs = weights(run.model_path), weights(whole.model_path)
    assert all(torch.equal(p, theirs[name]) for name, p in ours.items())
    a, b = (torch.load(checkpoints(r.path)[0] / "state.pt", weights_only=True) for r in (run, whole))
    assert a["scaler"] == b["scaler"] and a["scaler"].get("scale") == (32768 if scaled else None)


@pytest.mark.parametrize("how", ["PeftModel", "add_adapter"])
def test_a_model_that_has_a_lora_is_trained_in_it(base, tmp_path, how):
    model, tokenizer = load_model(base)
    lora = LoraConfig(r=2, lora_alpha=2, target_modules=["v_proj"], lora_dropout=0.5, task_type="CAUSAL_LM")
    torch.manual_seed(0)
    given = get_peft_model(model, lora) if how == "PeftModel" else model
    given if how == "PeftModel" else model.add_adapter(lora)
    config = config_in(tmp_path / "run", base, lora_rank=0, n_steps=2)
    run = train(config, model=given, tokenizer=tokenizer, reward_fn=share_of_lower_case)
    onto = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), run.path / "adapter")
    ids = torch.arange(30)[None] + 5
    final, _ = load_model(run.path)
    assert (given(ids).logits - onto(ids).logits).abs().max() < 1e-6
    assert (given(ids).logits - final(ids).logits).abs().max() < 1e-4
    changed = [n for n, p in weights(base).items() if not torch.equal(p, weights(run.model_path)[n])]
    assert changed == ["model.layers.0.self_attn.v_proj.weight", "model.layers.1.self_attn.v_proj.weight"]


def frozen(model):
    given = get_peft_model(model, LoraConfig(r=2, target_modules=["v_proj"]))
    return given.requires_grad_(False)


def loose(model):
    given = get_peft_model(model, LoraConfig(r=2, target_modules=["v_proj"]))
    model.model.norm.weight.requires_grad_(True)
    return given


def two(model):
    given = get_peft_model(model, LoraConfig(r=2, target_modules=["v_proj"]))
    given.add_adapter("other", LoraConfig(r=2, target_modules=["v_proj"]))
    return given


REFUSED = {
    "kind IA3": lambda m: get_peft_model(
        m, IA3Config(target_modules=["v_proj"], feedforward_modules=[], task_type="CAUSAL_LM")
    ),
    "kind PROMPT_TUNING": lambda m: get_peft_model(
        m, PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM")
    ),
    "modules_to_save": lambda m: get_peft_model(
        m, LoraConfig(target_modules=["v_proj"], modules_to_save=["lm_head"])
    ),
    "is frozen": frozen,
    "to train beside its adapter": loose,
    "2 adapters": two,
}


@pytest.mark.parametrize("message", REFUSED)
def test_other_adapters_are_refused(base, tmp_path, message):
    model, tokenizer = load_model(base)
    config = config_in(tmp_path / "run", base, lora_rank=0)
    with pytest.raises(ValueError, match=f"^model: has .*{message}"):
        train(config, model=REFUSED[message](model), tokenizer=tokenizer)
    assert not (tmp_path / "run").exists()


def test_a_head_tied_to_the_embedding_and_names_that_are_not_there(tmp_path, base):
    model = MAKERS["llama"]()
    with pytest.raises(ValueError, match="^model: has an adapter on an output head that is tied"):
        add_lora(model, 2, target_modules="lm_head,q_proj")
    assert unwrapped(MAKERS["llama"]()) is not None
    for name, values in {"lora_target_modules": dict(lora_target_modules="q_prj")}.items():
        with pytest.raises(ValueError, match=f"^{name}: got 'q_prj', expected all-linear, or names"):
            train(config_in(tmp_path / "run", base, **values))
    with pytest.raises(ValueError, match="^lora_rank: got 4, but the model has an adapter already"):
        train(config_in(tmp_path / "run", base), model=with_lora(base), tokenizer=byte_tokenizer())
    assert not (tmp_path / "run").exists()
    with pytest.raises(ValueError, match="^lora_alpha: got 3.0 with lora_rank 0"):
        Config(lora_alpha=3.0)


def test_a_checkpoint_without_the_adapter_is_not_taken(base):
    from rlkit.support.adapters import load_trained_state

    model = with_lora(base)
    state = {name: tensor + 1 for name, tensor in trained_state(model).items()}
    load_trained_state(model, state)
    assert all(torch.equal(p, state[n]) for n, p in model.named_parameters() if ".lora_" in n)
    with pytest.raises(RuntimeError, match="Missing key"):
        load_trained_state(model, {})
