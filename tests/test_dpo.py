"""DPO's loss from its formula, its gradient from the paper's, and a short run that must learn."""

import copy
import json
import math

import pytest
import torch

from rlkit.laptop import model_path
from rlkit.supplement.dpo import (
    Preference,
    compute_per_instance_dpo_loss,
    dpo_loss,
    dpo_train,
    load_hh,
    preference_accuracy,
    response_log_prob,
)
from rlkit.supplement.sft import alpaca_prompt
from rlkit.support.models import load_model


@pytest.fixture(scope="module")
def laptop():
    return load_model(str(model_path()))


def test_the_formula_by_hand():
    loss = dpo_loss(*(torch.tensor(x) for x in (-10.0, -12.0, -11.0, -11.5)), beta=0.5)
    margin = 0.5 * ((-10 + 11) - (-12 + 11.5))  # 0.75
    assert loss.item() == pytest.approx(-math.log(1 / (1 + math.exp(-margin))))
    assert (
        dpo_loss(torch.tensor(-400.0), torch.tensor(0.0), torch.tensor(0.0), torch.tensor(0.0), 1.0).item()
        == 400.0
    )
    with pytest.raises(ValueError, match="beta: got 0"):
        dpo_loss(*[torch.zeros(1)] * 4, beta=0)


def test_response_log_prob_adds_the_response_and_the_end_of_text(laptop):
    model, tokenizer = laptop
    prompt = tokenizer.encode(alpaca_prompt("Add 2 and 3."), add_special_tokens=False)
    response = tokenizer.encode("It is 5.", add_special_tokens=False) + [tokenizer.eos_token_id]
    with torch.no_grad():
        log_probs = model(torch.tensor([prompt + response])).logits.double().log_softmax(-1)[0]
        by_hand = sum(log_probs[len(prompt) - 1 + i, token].item() for i, token in enumerate(response))
        ours = response_log_prob(model, tokenizer, "Add 2 and 3.", "It is 5.").item()
        assert ours == pytest.approx(by_hand, abs=1e-4)


def test_at_the_reference_the_loss_is_log_2_and_its_gradient_the_papers(laptop):
    model, tokenizer = laptop
    policy, beta = copy.deepcopy(model), 0.3
    loss = compute_per_instance_dpo_loss(
        policy, model, tokenizer, beta, "Add 2 and 3.", "It is 5.", "It is 6."
    )
    assert loss.item() == pytest.approx(math.log(2), abs=1e-5)
    weight = next(policy.parameters())
    (got,) = torch.autograd.grad(loss, weight)
    margin = response_log_prob(policy, tokenizer, "Add 2 and 3.", "It is 5.") - response_log_prob(
        policy, tokenizer, "Add 2 and 3.", "It is 6."
    )
    (expected,) = torch.autograd.grad(margin, weight)
    # float32 sums in another order: the whole gradient agrees, not every last digit of every entry
    wanted = -beta * 0.5 * expected
    assert (got - wanted).norm() < 1e-5 * wanted.norm()
    assert all(p.grad is None for p in model.parameters())


def test_a_short_run_ranks_the_pairs_right(laptop):
    model, tokenizer = laptop
    policy = copy.deepcopy(model)
    pairs = [
        Preference(f"Add {a} and {b}.", f"It is {a + b}.", f"It is {a + b + 1}.")
        for a in (2, 3)
        for b in (4, 5)
    ]
    before = copy.deepcopy(model.state_dict())
    log = dpo_train(policy, model, tokenizer, pairs, beta=0.5, lr=1e-4, batch_size=2, n_epochs=4)
    assert len(log) == 8 and log[0]["loss"] == pytest.approx(math.log(2), abs=1e-4)
    assert log[-1]["loss"] < 0.5 and preference_accuracy(policy, model, tokenizer, pairs) == 1.0
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_hh_keeps_only_single_turns(tmp_path):
    one = {"chosen": "\n\nHuman: Hi?\n\nAssistant: Hello.", "rejected": "\n\nHuman: Hi?\n\nAssistant: No."}
    two = {"chosen": one["chosen"] + "\n\nHuman: More\n\nAssistant: Yes", "rejected": one["rejected"]}
    other = {"chosen": one["chosen"], "rejected": "\n\nHuman: Ho?\n\nAssistant: No."}
    same = {"chosen": one["chosen"], "rejected": one["chosen"]}
    (tmp_path / "hh.jsonl").write_text("\n".join(json.dumps(r) for r in (one, two, other, same)))
    assert load_hh(tmp_path / "hh.jsonl") == [Preference("Hi?", "Hello.", "No.")]
