"""Tiny random models with a byte-level tokenizer, for tests that need a model but no skill."""

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)

SIZES = dict(
    vocab_size=258,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=2,
    intermediate_size=48,
    max_position_embeddings=1024,
    initializer_range=0.2,
)
# a run of seconds that evaluates, keeps rollouts and writes checkpoints at steps 2, 4 and 6
RUN = dict(
    prompt="question_only",
    algo="offpolicy_clip",
    n_train=16,
    n_val=4,
    n_val_final=6,
    n_steps=6,
    eval_every=2,
    rollout_batch_size=16,
    group_size=4,
    train_batch_size=8,
    max_tokens=8,
    lr=1e-3,
    rollouts_every=2,
    checkpoint_every=2,
)
MAKERS = {
    "olmo2": lambda: Olmo2ForCausalLM(
        Olmo2Config(**SIZES, pad_token_id=0, eos_token_id=1, tie_word_embeddings=False)
    ),
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, eos_token_id=1, tie_word_embeddings=True)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES | {"num_key_value_heads": 1}, eos_token_id=1)),
    "gpt2": lambda: GPT2LMHeadModel(
        GPT2Config(
            vocab_size=258,
            n_embd=32,
            n_layer=2,
            n_head=2,
            n_positions=1024,
            eos_token_id=1,
            bos_token_id=1,
            initializer_range=0.2,
        )
    ),
}


def byte_tokenizer(pad="<pad>"):
    """256 bytes and two special tokens; ``pad`` may be None or "<eos>"."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate(["<pad>", "<eos>", *alphabet])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<eos>", pad_token=pad, clean_up_tokenization_spaces=False
    )


def chat_tokenizer(bos=False):
    """The byte tokenizer with chat tokens and, if asked for, a beginning of text that it adds itself."""
    tokenizer = byte_tokenizer()
    extra = ["<|im_start|>", "<|im_end|>", "</answer>"]
    tokenizer.add_special_tokens({"additional_special_tokens": extra} | ({"bos_token": "<s>"} if bos else {}))
    if bos:
        one = ("<s>", tokenizer.bos_token_id)
        tokenizer._tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[one]
        )
    tokenizer.chat_template = (
        "{{ bos_token or '' }}{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}"
        "<|im_end|>\n{% endfor %}{{ '<|im_start|>assistant\n' }}"
    )
    return tokenizer


def save_tiny_model(folder, architecture="olmo2", pad="<pad>", seed=0):
    """A model folder; returns it."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        MAKERS[architecture]().save_pretrained(folder)
    byte_tokenizer(pad).save_pretrained(folder)
    return folder


def share_of_lower_case(response, ground_truth):
    """A reward that nearly every group of random text differs in."""
    share = sum("a" <= c <= "z" for c in response) / max(len(response), 1)
    return {"reward": share, "format_reward": float(share > 0), "answer_reward": 0.0}
