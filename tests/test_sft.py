"""Packing by hand, the loss against a plain loop, and the two parsers."""

import gzip
import json
import math

import pytest
import torch
from tiny_model import chat_tokenizer

from rlkit.laptop import model_path
from rlkit.supplement.sft import (
    PackedSFTDataset,
    alpaca_prompt,
    iterate_batches,
    load_instructions,
    parse_gsm8k_response,
    parse_mmlu_response,
    sft_loss,
    sft_train,
    warmup_then_cosine,
)
from rlkit.support.models import load_model

DOCUMENTS = [
    ("Add 2 and 3.", "5"),
    ("Say {instruction}.", "It is 7."),
    ("Name a fruit.", "An apple, 100% ripe."),
]


@pytest.fixture(scope="module")
def laptop():
    return load_model(str(model_path()))


def test_a_brace_in_the_instruction_stays():
    assert "### Instruction:\nSay {instruction}.\n\n### Response:\n" in alpaca_prompt("Say {instruction}.")


def test_packing_is_one_stream_cut_into_equal_chunks(laptop):
    _, tokenizer = laptop
    stream = []
    for instruction, response in DOCUMENTS:
        stream += tokenizer.encode(alpaca_prompt(instruction) + response, add_special_tokens=False)
        stream.append(tokenizer.eos_token_id)
    length = 16
    data = PackedSFTDataset(tokenizer, DOCUMENTS, length)
    assert len(data) == (len(stream) - 1) // length
    for i in range(len(data)):
        assert data[i]["input_ids"].tolist() == stream[i * length : (i + 1) * length]
        assert data[i]["labels"].tolist() == stream[i * length + 1 : (i + 1) * length + 1]
    # a stream of exactly L tokens has no next token for the last: no chunk; one more token makes one
    assert len(PackedSFTDataset(tokenizer, DOCUMENTS, len(stream))) == 0
    assert len(PackedSFTDataset(tokenizer, DOCUMENTS, len(stream) - 1)) == 1


def test_shuffling_moves_documents_and_is_seeded(laptop):
    _, tokenizer = laptop
    many = [(f"Say {i}.", str(i)) for i in range(20)]
    first, again, other = (
        PackedSFTDataset(tokenizer, many, 32, shuffle=True, seed=s).input_ids for s in (1, 1, 2)
    )
    assert torch.equal(first, again) and not torch.equal(first, other)


def test_batches_cover_everything_once():
    rows = [{"x": torch.tensor(i)} for i in range(7)]
    batches = [batch["x"].tolist() for batch in iterate_batches(rows, 3, shuffle=True, seed=5)]
    assert [len(b) for b in batches] == [3, 3, 1] and sorted(sum(batches, [])) == list(range(7))


def test_loss_is_the_mean_surprise_per_token(laptop):
    model, tokenizer = laptop
    batch = PackedSFTDataset(tokenizer, DOCUMENTS, 12)[:2]
    with torch.no_grad():
        logits = model(batch["input_ids"]).logits.double()
        surprise = [
            math.log(sum(math.exp(v) for v in row)) - row[label]
            for rows, labels in zip(logits.tolist(), batch["labels"].tolist())
            for row, label in zip(rows, labels)
        ]
        assert sft_loss(model, **batch).item() == pytest.approx(sum(surprise) / len(surprise), abs=1e-5)


def test_training_lowers_the_loss_and_microbatches_do_not_matter():
    logs = []
    for microbatch_size in (0, 3):
        model, tokenizer = load_model(str(model_path()))
        data = PackedSFTDataset(tokenizer, DOCUMENTS * 4, 48)
        logs.append(
            sft_train(model, data, lr=1e-3, n_epochs=3, batch_size=8, microbatch_size=microbatch_size)
        )
    whole, parts = logs
    assert whole[-1]["loss"] < 0.8 * whole[0]["loss"]
    assert [r["loss"] for r in whole] == pytest.approx([r["loss"] for r in parts], rel=1e-3)
    assert whole[0]["grad_norm"] == pytest.approx(parts[0]["grad_norm"], rel=1e-4)


def test_schedule_by_hand():
    factor = warmup_then_cosine(10, 0.2)  # two steps up, eight down
    assert [factor(i) for i in (0, 1, 2, 6)] == pytest.approx([0.5, 1.0, 1.0, 0.5])
    assert factor(9) == pytest.approx(0.5 * (1 + math.cos(math.pi * 7 / 8)))


@pytest.mark.parametrize(
    "response, letter",
    [
        ("The correct answer is B.", "B"),
        ("Answer: (C)", "C"),
        ("**Answer:** D", "D"),
        ("B", "B"),
        (" A. Paris", "A"),
        ("(D)", "D"),
        ("I first thought the answer is A. No: the answer is C.", "C"),
        ("\\boxed{D}", "D"),
        ("A dog is an animal.", None),
        ("I do not know.", None),
        ("", None),
        ("E", None),
        ("the answer is a mystery", None),
    ],
)
def test_mmlu_letter(response, letter):
    assert parse_mmlu_response(response) == letter


@pytest.mark.parametrize(
    "response, number",
    [
        ("She has 3 + 4 = 7 apples.", "7"),
        ("It costs $1,250.50.", "1250.50"),
        ("-3", "-3"),
        ("5-3=2", "2"),
        ("none", None),
        ("about \u221212", "-12"),
        ("$-4", "-4"),
        ("", None),
        ("10 - 20 = -10.", "-10"),
        ("#### 72\n", "72"),
        ("x2", None),
    ],
)
def test_gsm8k_number(response, number):
    assert parse_gsm8k_response(response) == number


def test_files_plain_and_compressed(tmp_path):
    row = json.dumps({"prompt": "p", "response": "r"}) + "\n"
    (tmp_path / "a.jsonl").write_text(row)
    with gzip.open(tmp_path / "b.jsonl.gz", "wt") as f:
        f.write(row + "\n" + row)
    assert load_instructions(tmp_path / "a.jsonl") == [("p", "r")]
    assert load_instructions(tmp_path / "b.jsonl.gz") == [("p", "r")] * 2
    with pytest.raises(ValueError, match="path"):
        load_instructions(tmp_path / "c.jsonl")


def test_bad_arguments_are_named(laptop):
    model, tokenizer = laptop
    with pytest.raises(ValueError, match="seq_length: got 0"):
        PackedSFTDataset(tokenizer, DOCUMENTS, 0)
    with pytest.raises(ValueError, match="dataset"):
        sft_train(model, PackedSFTDataset(tokenizer, [], 8))


def test_every_packed_document_opens_as_the_tokenizer_opens_a_text():
    tokenizer = chat_tokenizer(bos=True)
    data = PackedSFTDataset(tokenizer, DOCUMENTS, 10)
    stream = []
    for instruction, response in DOCUMENTS:
        stream += tokenizer(alpaca_prompt(instruction) + response)["input_ids"] + [tokenizer.eos_token_id]
    assert data.input_ids.flatten().tolist() == stream[: data.input_ids.numel()]
    assert stream.count(tokenizer.bos_token_id) == len(DOCUMENTS)
