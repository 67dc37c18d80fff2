"""Any causal language model loads with a usable tokenizer; what is not there is named."""

import pytest
import torch
from tiny_model import MAKERS, byte_tokenizer, save_tiny_model
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BertConfig,
    BertLMHeadModel,
    GenerationConfig,
    GPTJConfig,
    GPTJForCausalLM,
)

from rlkit.support.models import (
    check_device,
    choose_attention,
    load_model,
    model_location,
    revision_of,
    save_model,
    try_saving,
)
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
    assert choose_attention(None, torch.float32, torch.device("cpu")) == (None, "")


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


def test_attention_is_left_to_transformers_and_the_way_out_is_named(tmp_path, capsys):
    """GPT-J has no SDPA: unasked it loads, asked for SDPA it says what to type."""
    config = GPTJConfig(vocab_size=258, n_embd=32, n_layer=1, n_head=2, rotary_dim=4, n_positions=64)
    GPTJForCausalLM._from_config(config, attn_implementation="eager").save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    assert load_model(tmp_path)[0].config._attn_implementation == "eager"
    with pytest.raises(ValueError, match="^model: could not load .* try -p attn_implementation eager$"):
        load_model(tmp_path, attn_implementation="sdpa")


def test_an_encoder_is_refused_where_it_loads(tmp_path):
    config = BertConfig(
        vocab_size=258, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, initializer_range=0.2
    )
    BertLMHeadModel(config).save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="^model: got BertLMHeadModel, in which later tokens"):
        load_model(tmp_path)


def test_what_cannot_be_saved_is_found_at_the_start(tmp_path, capsys):
    model, tokenizer = load_model(save_tiny_model(tmp_path / "model"))
    model.generation_config = GenerationConfig(eos_token_id=1, temperature=0.7)  # no do_sample: not savable
    with pytest.raises(ValueError, match="GenerationConfig is invalid"):
        model.save_pretrained(tmp_path / "broken")
    try_saving(model, tokenizer, tmp_path)
    assert "its generation_config is left out" in capsys.readouterr().out
    assert [path.name for path in tmp_path.glob(".try-*")] == []
    save_model(model, tokenizer, tmp_path / "again")
    assert load_model(tmp_path / "again")[0].generation_config.eos_token_id == 1

    class Unsavable:
        def save_pretrained(self, folder):
            raise TypeError("cannot pickle")

    with pytest.raises(ValueError, match=r"^model: it cannot be saved \(cannot pickle\)"):
        try_saving(model, Unsavable(), tmp_path)


def test_a_hub_id_may_name_a_revision_and_a_folder_may_hold_an_at(tmp_path, monkeypatch):
    save_tiny_model(tmp_path / "my@model")
    assert load_model(tmp_path / "my@model")[0].config.model_type == "olmo2"
    data = {"trust_remote_code": False}
    assert revision_of(str(tmp_path / "my@model")) == data | {
        "pretrained_model_name_or_path": str(tmp_path / "my@model")
    }
    asked = []
    for reader in (AutoTokenizer, AutoModelForCausalLM):
        monkeypatch.setattr(reader, "from_pretrained", lambda **options: asked.append(options) or 1 / 0)
    with pytest.raises(ValueError, match="could not load 'owner/name@refs/pr/1'"):
        load_model("owner/name@refs/pr/1")
    assert asked == [data | {"pretrained_model_name_or_path": "owner/name", "revision": "refs/pr/1"}]
