"""Any causal language model loads with a usable tokenizer; what is not there is named."""

import pytest
import torch
from tiny_model import MAKERS, save_tiny_model

from rlkit.support.models import check_device, choose_attention, load_model, model_location
from rlkit.tokenization import tokenize_prompt_and_output


@pytest.mark.parametrize(
    "architecture, pad", [("olmo2", "<pad>"), ("llama", None), ("qwen2", "<eos>"), ("gpt2", None)]
)
def test_architectures_with_and_without_a_pad_token(tmp_path, architecture, pad):
    model, tokenizer = load_model(save_tiny_model(tmp_path, architecture, pad))
    assert type(model).__name__ == type(MAKERS[architecture]()).__name__ and not model.training
    assert tokenizer.padding_side == "right" and tokenizer.pad_token_id is not None
    batch = tokenize_prompt_and_output(["ab", "c"], ["d", "efgh"], tokenizer)
    assert batch["input_ids"].shape == (2, 4)
    logits = model(batch["input_ids"]).logits
    assert logits.shape == (2, 4, 258) and bool(torch.isfinite(logits).all())
    if architecture == "llama":
        assert model.get_output_embeddings().weight is model.get_input_embeddings().weight


def test_dtype_and_eager_attention(tmp_path):
    model, _ = load_model(save_tiny_model(tmp_path), dtype="bfloat16", attn_implementation="eager")
    assert next(model.parameters()).dtype == torch.bfloat16 and model.config._attn_implementation == "eager"
    with pytest.raises(ValueError, match="^dtype: got 'int64'"):
        load_model(tmp_path, dtype="int64")


def test_flash_attention_falls_back_with_one_line(tmp_path, capsys):
    model, _ = load_model(save_tiny_model(tmp_path), device="cpu", attn_implementation="flash_attention_2")
    assert model.config._attn_implementation == "sdpa"
    assert (
        capsys.readouterr().out
        == "attention: sdpa in place of flash_attention_2 (cpu has no FlashAttention)\n"
    )
    assert choose_attention(None, torch.float32, torch.device("cpu")) == ("sdpa", "")


def test_what_is_not_there_is_named(tmp_path):
    with pytest.raises(ValueError, match="^model: no folder './nothing'"):
        load_model("./nothing")
    with pytest.raises(ValueError, match="^model: .*no config.json"):
        load_model(tmp_path)
    with pytest.raises(ValueError, match="^model: could not load 'no-such/model-here'"):
        load_model("no-such/model-here")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="^model: could not load"):
        load_model(tmp_path)
    with pytest.raises(ValueError, match="^device: got 'cuda:7'"):
        check_device("cuda:7")
    with pytest.raises(ValueError, match="^device: got 'gpu'"):
        check_device("gpu")


def test_a_run_folder_stands_for_its_final_weights(tmp_path):
    save_tiny_model(tmp_path / "model")
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "metrics.jsonl").write_text("")
    assert model_location(tmp_path) == str(tmp_path / "model")


@pytest.mark.parametrize(
    "name, message",
    [
        ("a\0b", "NUL"),
        ("x" * 5000, "5000 characters"),
        ("x" * 300, "could not load"),
        (None, "got None"),
        (7, "got 7"),
        ("", "got ''"),
        ("a/b/c", "no folder"),
    ],
)
def test_absurd_names_are_one_error(name, message):
    with pytest.raises(ValueError, match=f"(?s)^model: .*{message}") as error:
        load_model(name)
    assert len(str(error.value)) < 900


def test_a_broken_model_folder_is_one_error(tmp_path):
    save_tiny_model(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"not weights")
    with pytest.raises(ValueError, match="^model: could not load .*expected 'laptop'"):
        load_model(tmp_path)
