"""tokenize_prompt_and_output: every cell of small batches, written out by hand."""

import pickle

import pytest
import torch
from tiny_model import chat_tokenizer
from toys import IdsOnly, toy_tokenizer

from rlkit import tokenize_prompt_and_output
from rlkit.samplers.base import prompt_ids
from rlkit.tasks.prompts import Prompt
from rlkit.tokenization import cut_at_stop, decode, encode_prompts, hidden_ids, opening_ids


def as_lists(batch):
    return {name: tensor.int().tolist() for name, tensor in batch.items()}


def test_two_rows_by_hand():
    batch = tokenize_prompt_and_output(["This is a", "Hello"], ["test world", "world"], toy_tokenizer())
    assert as_lists(batch) == {
        "input_ids": [[5, 6, 7, 8], [3, 4, 0, 0]],
        "labels": [[6, 7, 8, 4], [4, 0, 0, 0]],
        "response_mask": [[0, 0, 1, 1], [1, 0, 0, 0]],
    }
    assert batch["input_ids"].dtype == batch["labels"].dtype == torch.int64
    assert batch["response_mask"].dtype == torch.bool


def test_pad_token_equal_to_eos_or_missing():
    for pad_token, filler in (("<eos>", 1), (None, 1)):
        batch = tokenize_prompt_and_output(["Hello", "Hello world"], ["a", "test"], toy_tokenizer(pad_token))
        assert as_lists(batch) == {
            "input_ids": [[3, 7], [3, 4]],
            "labels": [[7, filler], [4, 8]],
            "response_mask": [[1, 0], [0, 1]],
        }


def test_an_end_of_text_token_inside_the_output_stays_scored_when_it_is_the_filler_too():
    batch = tokenize_prompt_and_output(
        None,
        None,
        toy_tokenizer("<eos>"),
        prompt_token_ids=[[5], [5, 6]],
        output_token_ids=[[8, 1], [8, 9, 1]],
    )
    assert as_lists(batch)["response_mask"] == [[1, 1, 0, 0], [0, 1, 1, 1]]


def test_no_special_tokens_between_prompt_and_output():
    batch = tokenize_prompt_and_output(["This is"], ["test"], toy_tokenizer(bos_and_eos=True))
    assert as_lists(batch) == {"input_ids": [[5, 6]], "labels": [[6, 8]], "response_mask": [[0, 1]]}


def test_empty_output_empty_prompt_and_both():
    batch = tokenize_prompt_and_output(["This is", "", ""], ["", "world test", ""], toy_tokenizer())
    assert as_lists(batch) == {
        "input_ids": [[5], [4], [0]],
        "labels": [[6], [8], [0]],
        "response_mask": [[0], [1], [0]],
    }
    nothing = tokenize_prompt_and_output([""], [""], toy_tokenizer())
    assert nothing["input_ids"].shape == nothing["response_mask"].shape == (1, 0)


def test_given_ids_are_used_as_they_are():
    # 8 then 8: no text of the toy tokenizer is consulted, and the strings beside the ids may disagree
    batch = tokenize_prompt_and_output(
        ["Hello", "Hello"], ["a", "b"], toy_tokenizer(), output_token_ids=[[8, 8], [9]]
    )
    assert as_lists(batch)["labels"] == [[8, 8], [9, 0]]
    batch = tokenize_prompt_and_output(
        None, None, IdsOnly, prompt_token_ids=[[2], [2, 3]], output_token_ids=[[4], [5]]
    )
    assert as_lists(batch) == {
        "input_ids": [[2, 4], [2, 3]],
        "labels": [[4, 0], [3, 5]],
        "response_mask": [[1, 0], [0, 1]],
    }


@pytest.mark.parametrize(
    "arguments, named",
    [
        ((["a"], ["a", "b"]), "1 prompts and 2 outputs"),
        (([], []), "0 prompts"),
        (("a", ["b"]), "prompt_strs"),
        ((["a"], None), "output_strs"),
    ],
)
def test_bad_input_is_named(arguments, named):
    with pytest.raises(ValueError, match=named):
        tokenize_prompt_and_output(*arguments, toy_tokenizer())
    with pytest.raises(ValueError, match="output_token_ids"):
        tokenize_prompt_and_output(["a", "b"], ["a", "b"], toy_tokenizer(), output_token_ids=[[1]])


def test_a_beginning_of_text_comes_once_and_only_where_the_tokenizer_adds_it():
    without, with_bos = chat_tokenizer(), chat_tokenizer(bos=True)
    bos = with_bos.bos_token_id
    plain = without("ab")["input_ids"]
    assert opening_ids(without) == [] and opening_ids(with_bos) == [bos]
    assert encode_prompts(["ab"], without) == [plain] and encode_prompts([], with_bos) == []
    assert encode_prompts(["ab", "<s>ab"], with_bos) == [[bos, *plain], [bos, *plain]]
    batch = tokenize_prompt_and_output(["ab"], ["ab"], with_bos)
    assert batch["input_ids"].tolist() == [[bos, *plain, plain[0]]]
    assert batch["response_mask"].tolist() == [[False, False, True, True]]
    assert prompt_ids(with_bos, ["ab"], 5, None) == [[bos, *plain]]


def test_a_question_cannot_hold_control_tokens_but_the_template_can():
    tokenizer = chat_tokenizer(bos=True)
    prompt = Prompt("t", "<|im_start|>user\n{question}<|im_end|>\n", "r1_zero")
    bos, start, end = (tokenizer.convert_tokens_to_ids(t) for t in ("<s>", "<|im_start|>", "<|im_end|>"))
    (ids,) = encode_prompts([prompt.fill("1<|im_end|>2<s>")], tokenizer)
    assert [ids.count(token) for token in (bos, start, end)] == [1, 1, 1] and ids[:2] == [bos, start]
    assert tokenizer.decode(ids) == "<s><|im_start|>user\n1<|im_end|>2<s><|im_end|>\n"
    assert ids[-2] == end
    (ids,) = encode_prompts([prompt.fill("1 + 2?")], tokenizer)
    assert ids == tokenizer("<|im_start|>user\n1 + 2?<|im_end|>\n")["input_ids"]
    assert pickle.loads(pickle.dumps(prompt.fill("1<s>"))).question == "1<s>"


def test_special_tokens_are_text_but_for_those_that_frame_one():
    tokenizer = chat_tokenizer(bos=True)
    answer, end = tokenizer.convert_tokens_to_ids(["</answer>", "<|im_end|>"])
    ids = tokenizer("4 ")["input_ids"] + [answer, end, tokenizer.eos_token_id, 0]
    assert decode(tokenizer, ids, hidden_ids(tokenizer)) == "4 </answer><|im_end|>"
    assert decode(tokenizer, ids, hidden_ids(tokenizer, ends=[end])) == "4 </answer>"
    stop = ("<|im_end|>",)  # asked for, so it stays, as every stop string does
    assert decode(tokenizer, ids, hidden_ids(tokenizer, [end], stop)) == "4 </answer><|im_end|>"
    assert cut_at_stop(tokenizer, ids, ("</answer>",), hidden_ids(tokenizer)) == ("4 </answer>", 4)
