"""Log-probabilities and entropies: against float64 softmax, chunked and whole, shared and plain."""

import math

import pytest
import torch
from toys import Bigram, IdsOnly, rollouts, tiny_model

import rlkit.log_probs as module
from rlkit import get_response_log_probs, tokenize_prompt_and_output
from rlkit.log_probs import score_tokens
from rlkit.samplers.shared_scoring import can_share_prefix, get_shared_prefix_log_probs
from rlkit.support.probes import output_head


def batch_of(prompts, responses):
    return tokenize_prompt_and_output(
        None, None, IdsOnly, prompt_token_ids=prompts, output_token_ids=responses
    )


def reference(model, batch, temperature=1.0):
    """log p and entropy from the model's own logits, in float64."""
    with torch.no_grad():
        log_p = (model(batch["input_ids"]).logits.double() / temperature).log_softmax(-1)
    return log_p.gather(2, batch["labels"][..., None])[..., 0], -(log_p.exp() * log_p).sum(-1)


def grads(model, result, weights):
    model.zero_grad()
    (result["log_probs"] * weights).sum().backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def assert_same_grads(got, expected):
    assert len(got) == len(expected) > 0
    scale = max(g.abs().max() for g in expected)
    for one, other in zip(got, expected):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-5 * scale)


def test_a_bigram_by_hand():
    model = Bigram(3)
    model.table.data = torch.tensor([[0.0, 0, 0], [math.log(2), 0, 0], [0, 0, math.log(4)]])
    result = get_response_log_probs(model, torch.tensor([[0, 1, 2]]), torch.tensor([[1, 0, 1]]), True)
    torch.testing.assert_close(result["log_probs"], torch.tensor([[1 / 3, 2 / 4, 1 / 6]]).log())
    expected = [
        [
            math.log(3),
            -(0.5 * math.log(0.5) + 0.5 * math.log(0.25)),
            -(2 / 3 * math.log(2 / 3) + 2 / 6 * math.log(1 / 6)),
        ]
    ]
    torch.testing.assert_close(result["token_entropy"], torch.tensor(expected))
    assert "token_entropy" not in get_response_log_probs(model, torch.tensor([[0]]), torch.tensor([[1]]))


@pytest.mark.parametrize("kind", ["olmo2", "llama", "gpt2", "gemma2", "cohere", "granite"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_equal_to_the_models_own_logits(kind, temperature):
    changes = {"granite": {"logits_scaling": 3.0}, "gemma2": {"final_logit_softcapping": 2.0}}.get(kind, {})
    model, batch = tiny_model(kind, **changes), batch_of(*rollouts())
    assert (output_head(model) is None) == (
        kind in ("gemma2", "cohere", "granite")
    )  # these cap or scale their logits
    log_probs, entropy = reference(model, batch, temperature)
    result = get_response_log_probs(model, batch["input_ids"], batch["labels"], True, temperature=temperature)
    torch.testing.assert_close(result["log_probs"], log_probs.float(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(result["token_entropy"], entropy.float(), rtol=1e-5, atol=2e-5)
    masked = get_response_log_probs(
        model,
        batch["input_ids"],
        batch["labels"],
        True,
        temperature=temperature,
        response_mask=batch["response_mask"],
    )
    for name in result:
        torch.testing.assert_close(masked[name], result[name] * batch["response_mask"], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("model", [tiny_model(), Bigram(60)], ids=["head", "logits"])
def test_chunks_change_neither_values_nor_gradients(model, monkeypatch):
    batch = batch_of(*rollouts())
    weights = torch.randn(batch["labels"].shape, generator=torch.Generator().manual_seed(0))
    whole = get_response_log_probs(model, batch["input_ids"], batch["labels"], True)
    expected = grads(model, whole, weights)
    monkeypatch.setattr(module, "CHUNK_ELEMENTS", 7 * 60)  # seven positions at a time
    chunked = get_response_log_probs(model, batch["input_ids"], batch["labels"], True)
    torch.testing.assert_close(chunked, whole)
    assert_same_grads(grads(model, chunked, weights), expected)


def test_no_float32_copy_of_all_logits_is_ever_made(monkeypatch):
    monkeypatch.setattr(module, "CHUNK_ELEMENTS", 1000)
    sizes = []
    real = torch.Tensor.log_softmax
    monkeypatch.setattr(
        torch.Tensor, "log_softmax", lambda t, *a, **k: (sizes.append(t.numel()), real(t, *a, **k))[1]
    )
    features, head = torch.randn(50, 8, requires_grad=True), torch.nn.Linear(8, 100, bias=False)
    log_probs, _ = score_tokens(features, torch.zeros(50, dtype=torch.long), head)
    log_probs.sum().backward()
    assert max(sizes) <= 1000 and sum(sizes) == 2 * 50 * 100  # once forward, once more in the backward pass


def test_float32_from_a_bfloat16_model_and_under_autocast():
    batch = batch_of(*rollouts(2, 2))
    half = tiny_model().bfloat16()
    result = get_response_log_probs(half, batch["input_ids"], batch["labels"], True)
    assert {tensor.dtype for tensor in result.values()} == {torch.float32}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        result = get_response_log_probs(tiny_model(), batch["input_ids"], batch["labels"], True)
    assert {tensor.dtype for tensor in result.values()} == {torch.float32}
    torch.testing.assert_close(
        result["log_probs"].double(), reference(tiny_model(), batch)[0], rtol=0.05, atol=0.2
    )


def test_logits_of_minus_infinity():
    model = Bigram(3)
    model.table.data = torch.tensor([[0.0, 0, -math.inf]] * 3)
    result = get_response_log_probs(model, torch.tensor([[0, 0]]), torch.tensor([[0, 1]]), True)
    torch.testing.assert_close(result["token_entropy"], torch.full((1, 2), math.log(2)))
    result["log_probs"].sum().backward()
    assert torch.isfinite(model.table.grad).all() and not result["token_entropy"].requires_grad


def test_the_filler_id_changes_nothing():
    model, (prompts, responses) = tiny_model(), rollouts(2, 2)
    batch = batch_of(prompts, responses)
    other = dict(batch, input_ids=batch["input_ids"].masked_fill(batch["input_ids"] == 0, 7))
    for score in (get_response_log_probs, get_shared_prefix_log_probs):
        one, two = (
            score(model, b["input_ids"], b["labels"], response_mask=b["response_mask"])["log_probs"]
            for b in (batch, other)
        )
        torch.testing.assert_close(one, two, rtol=0, atol=2e-6)


PROMPTS = {
    "a common start": rollouts()[0],
    "no common start": [[2 + i // 4] * (3 + i // 4) for i in range(16)],
    "one prompt": [[2, 3, 4]] * 16,
    "each the start of the next": [[2, 3, 4, 5, 6][: 2 + i // 4] for i in range(16)],
    "all different": [[2, 3, i + 4, i + 5] for i in range(16)],
    "one token": [[2]] * 16,
    "an empty one": [[]] + [[2, 3]] * 15,
}


@pytest.mark.parametrize("kind", ["olmo2", "llama", "qwen2", "qwen3", "gpt2"])
@pytest.mark.parametrize("prompts", PROMPTS.values(), ids=PROMPTS)
def test_shared_prefix_equals_plain(kind, prompts):
    model, batch = tiny_model(kind), batch_of(prompts, rollouts()[1])
    assert can_share_prefix(model, batch["labels"])
    weights = (
        torch.randn(batch["labels"].shape, generator=torch.Generator().manual_seed(0))
        * batch["response_mask"]
    )
    plain, shared = (
        score(
            model,
            batch["input_ids"],
            batch["labels"],
            True,
            response_mask=batch["response_mask"],
            temperature=0.9,
        )
        for score in (get_response_log_probs, get_shared_prefix_log_probs)
    )
    for name in plain:
        torch.testing.assert_close(shared[name], plain[name], rtol=1e-5, atol=1e-5)
    assert_same_grads(grads(model, shared, weights), grads(model, plain, weights))


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_shared_prefix_at_the_laptop_models_scale_is_equal_to_1e_6(attention):
    model = tiny_model(std=0.02, attn_implementation=attention)
    batch = batch_of(*rollouts())
    plain, shared = (
        score(model, batch["input_ids"], batch["labels"], response_mask=batch["response_mask"])
        for score in (get_response_log_probs, get_shared_prefix_log_probs)
    )
    assert (plain["log_probs"] - shared["log_probs"]).abs().max() < 1e-6


def test_shared_prefix_does_less_work():
    model, batch = tiny_model(), batch_of(*rollouts(2, 8, common=20))
    tokens = []
    hook = model.model.layers[0].register_forward_hook(
        lambda m, args, out: tokens.append(args[0].shape[:2].numel())
    )
    assert can_share_prefix(model)
    tokens.clear()
    get_shared_prefix_log_probs(
        model, batch["input_ids"], batch["labels"], response_mask=batch["response_mask"]
    )
    hook.remove()
    assert len(tokens) == 3 and tokens[0] == 20 and sum(tokens) < batch["labels"].numel() / 2


@pytest.mark.parametrize(
    "model, why",
    [
        (Bigram(60), "only logits"),
        (tiny_model("gemma2"), "capped logits"),
        (tiny_model("mistral", sliding_window=8), "a window shorter than the rows"),
        (tiny_model("gpt2", resid_pdrop=0.5).train(), "dropout"),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_models_that_cannot_share_take_the_plain_way(model, why):
    batch = batch_of(*rollouts())
    assert not can_share_prefix(model, batch["labels"])
    torch.manual_seed(0)
    plain = get_response_log_probs(
        model, batch["input_ids"], batch["labels"], response_mask=batch["response_mask"]
    )
    torch.manual_seed(0)
    shared = get_shared_prefix_log_probs(
        model, batch["input_ids"], batch["labels"], response_mask=batch["response_mask"]
    )
    torch.testing.assert_close(shared, plain)


def test_gradient_checkpointing_takes_the_plain_way():
    model = tiny_model().train()
    assert can_share_prefix(model)
    model.gradient_checkpointing_enable()
    assert not can_share_prefix(model)
    assert can_share_prefix(model.eval())


def test_nothing_to_score():
    model, batch = tiny_model(), batch_of([[2, 3], [2, 3]], [[], []])
    for score in (get_response_log_probs, get_shared_prefix_log_probs):
        result = score(model, batch["input_ids"], batch["labels"], True, response_mask=batch["response_mask"])
        assert not result["log_probs"].any() and not result["token_entropy"].any()


def test_bad_input_is_named():
    ids = torch.zeros(2, 3, dtype=torch.long)
    for arguments, named in (
        ((ids, ids[:, :2]), "labels: got shape"),
        ((ids, ids, False), "temperature: got 0"),
    ):
        with pytest.raises(ValueError, match=named):
            get_response_log_probs(Bigram(), *arguments, temperature=0)
    with pytest.raises(ValueError, match="response_mask"):
        get_response_log_probs(Bigram(), ids, ids, response_mask=torch.ones(2, 2, dtype=torch.bool))


def test_width_0_has_no_log_probs():
    for score in (get_response_log_probs, get_shared_prefix_log_probs):
        ids = torch.zeros(2, 0, dtype=torch.long)
        result = score(tiny_model(), ids, ids, True, response_mask=ids.bool())
        assert result["log_probs"].shape == result["token_entropy"].shape == (2, 0)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"temperature": "1"}, "temperature: got '1', expected a positive number"),
        ({"temperature": None}, "temperature: got None"),
        ({"temperature": math.inf}, "temperature: got inf"),
        ({"temperature": True}, "temperature: got True"),
        ({"input_ids": [[1, 2]]}, r"input_ids: got \[\[1, 2\]\], expected a tensor"),
        ({"input_ids": torch.zeros(3, dtype=torch.long)}, r"input_ids: got shape \(3,\)"),
        ({"labels": [[1]]}, "labels: got"),
    ],
)
def test_what_cannot_be_scored_is_one_error(changes, message):
    ids = torch.zeros(1, 2, dtype=torch.long)
    with pytest.raises(ValueError, match=f"^{message}"):
        get_response_log_probs(tiny_model(), **{"input_ids": ids, "labels": ids} | changes)
