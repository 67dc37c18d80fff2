"""The shipped base models: their files, recipes, held-out questions, accuracy."""

import hashlib
import json
import re
from itertools import islice

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlkit import Config, train
from rlkit.laptop import model_path
from rlkit.laptop.corpus import KINDS, THINK_ENDINGS, Rng, documents, draw_train_story, solve
from rlkit.laptop.pretrain import RECIPE, RECIPES, orthogonalize, pretrain
from rlkit.laptop.problems import TASKS, generate_problems, split_of
from rlkit.samplers import make_sampler
from rlkit.tasks.evaluation import evaluate
from rlkit.tasks.prompts import load_prompt, prompt_names


@pytest.fixture(scope="module", params=TASKS)
def task(request):
    return request.param


@pytest.fixture(scope="module")
def tokenizer(task):
    return AutoTokenizer.from_pretrained(model_path(task))


@pytest.fixture(scope="module")
def model(task):
    return AutoModelForCausalLM.from_pretrained(model_path(task), dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def provenance(task):
    return json.loads((model_path(task) / "provenance.json").read_text())


# ---- what ships


def test_weights_are_those_the_provenance_tells_of(task, provenance):
    path = model_path(task) / "model.safetensors"
    assert hashlib.sha256(path.read_bytes()).hexdigest() == provenance["sha256"]
    assert path.stat().st_size <= 8e6
    tensors = load_file(path)
    assert sum(t.numel() for t in tensors.values()) == provenance["parameters"]
    assert all(t.dtype == torch.float32 and t.isfinite().all() for t in tensors.values())


def test_provenance_is_complete(provenance):
    for key in ("recipe", "corpus", "tokens", "losses", "machine", "torch", "commit", "cpu_seconds", "base"):
        assert provenance[key], key
    assert provenance["recipe"]["version"] and "seed" in provenance["recipe"]
    for figures in provenance["base"].values():
        p, n = figures["accuracy"], figures["n"]
        assert figures["accuracy_se"] == pytest.approx((p * (1 - p) / n) ** 0.5, rel=0.02)


def test_architecture(model):
    config = model.config
    assert config.model_type == "olmo2" and not config.tie_word_embeddings
    assert model.lm_head.weight.data_ptr() != model.model.embed_tokens.weight.data_ptr()
    assert config.hidden_size // config.num_attention_heads in (32, 64)
    assert 0.9e6 <= sum(p.numel() for p in model.parameters()) <= 2e6
    assert (config.pad_token_id, config.eos_token_id, config.bos_token_id) == (0, 1, None)


def test_generation_config_truncates_nothing(model):
    config = model.generation_config
    assert (config.pad_token_id, config.eos_token_id) == (0, 1)
    assert config.top_k is None and config.top_p is None and config.temperature is None


# ---- tokenizer


def test_special_tokens(tokenizer, model):
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.bos_token_id) == (0, 1, None)
    assert 600 <= len(tokenizer) <= 1000 and len(tokenizer) == model.config.vocab_size
    text = "Tom has 15 plums."
    assert tokenizer(text)["input_ids"] == tokenizer(text, add_special_tokens=False)["input_ids"]


def test_digits_stand_alone(tokenizer):
    for text in ("1234567890", "7 + 85 = 92.", "#### 1234", "x99y"):
        pieces = tokenizer.convert_ids_to_tokens(tokenizer(text)["input_ids"])
        assert all(sum(c.isdigit() for c in piece) <= 1 for piece in pieces), pieces


def test_tags_are_several_tokens(tokenizer):
    for tag in ("<think>", "</think>", "<answer>", "</answer>"):
        assert len(tokenizer(" " + tag)["input_ids"]) > 1


@pytest.mark.parametrize(
    "text",
    [
        "Ana owns 9 nuts.\n\n#### 12",
        " two  spaces\t",
        "naïve 漢字 🙂 \\boxed{3}",
        "",
        "a\n\n\nb",
        load_prompt("r1_zero_three_shot").template,
    ],
)
def test_round_trip(tokenizer, text):
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_longest_prompt_and_answer_fit_the_positions_seen_in_training(task, tokenizer, provenance):
    prompt, problems = load_prompt("r1_zero_three_shot"), generate_problems(512, "validation", task=task)
    lengths = [len(tokenizer(prompt.fill(p.question))["input_ids"]) for p in problems]
    assert (
        max(lengths) + Config.from_parameters({"preset": task}).max_tokens
        <= provenance["recipe"]["row_tokens"]
    )


# ---- corpus


def test_no_held_out_question_in_the_corpus(task):
    """Checked as text on the documents themselves, not through the filter that keeps them out."""
    held_out = [s for s in TASKS[task].splits if s != "train"]
    held_out = [p.question for split in held_out for p in generate_problems(512, split, task=task)]
    text = "\n".join(islice(documents(0, task), 6_000))
    assert not [question for question in held_out if question in text]
    read = set(re.findall(QUESTION, text))
    assert len(read) > 4000 and all(question in text for question in read)
    if task == "laptop":  # of the longer ones hardly two are alike
        train = [p.question for p in generate_problems(6400, "train")]
        assert any(question in text for question in train)  # the search does find what is there


QUESTION = r"[A-Z][a-z]+ (?:has|starts with|owns|buys) \d[^?\n]*\?"


def test_every_question_in_the_corpus_is_a_training_question(task):
    text = "\n".join(islice(documents(1, task), 3000))
    questions = re.findall(rf"(?<![a-z.] ){QUESTION}", text)
    assert len(questions) > 2000
    assert {split_of(question, TASKS[task]) for question in questions} == {"train"}


def test_corpus_is_seeded_and_its_shares_add_up(task):
    first, again, other = (list(islice(documents(seed, task), 50)) for seed in (0, 0, 1))
    assert first == again != other
    assert sum(weight for _, weight in KINDS) == pytest.approx(1)
    assert sum(weight for _, weight in THINK_ENDINGS) == pytest.approx(1)


def test_a_doubt_marks_wrong_lines_and_what_is_said_again_changes_nothing():
    rng = Rng("doubts")
    rng.task = TASKS["laptop_long"]
    doubted, wrong = [], []
    for _ in range(600):
        story = draw_train_story(rng)
        work, answer = solve(rng, story, "long", wrong=0.5)
        doubted.append("Hmm." in work)
        wrong.append(answer != story.answer)
        body, *again = work.split(" Let me check. ")
        lines = [line for line in re.findall(r"[^.]+\.", body.replace(" Hmm.", ""))]
        assert all(said == "".join(lines[-2:]).strip() for said in again)
    right = [d for d, w in zip(doubted, wrong) if not w]
    doubted = [d for d, w in zip(doubted, wrong) if w]
    assert sum(doubted) / len(doubted) > 0.7 and sum(right) / len(right) < 0.2


def test_most_reasoning_is_right_and_some_is_wrong():
    text = "\n".join(islice(documents(2), 2000))
    equations = re.findall(r"(\d+) ([-+*]) (\d+) = (\d+)(?=[^\d])", text)
    right = [
        int(d) == {"+": int(a) + int(c), "-": int(a) - int(c), "*": int(a) * int(c)}[op]
        for a, op, c, d in equations
    ]
    assert len(right) > 5000 and sum(right) / len(right) > 0.98


# ---- how well it does


BANDS = {"laptop": (0.01, 0.14, 0.04, 0.26), "laptop_long": (0.01, 0.16, 0.04, 0.40)}


def test_base_accuracy_leaves_room_for_rl(task, model, tokenizer):
    """On 128 problems: a wider band (two standard errors) than what is wanted of the recorded figures."""
    result = evaluate(
        make_sampler("transformers", model, tokenizer),
        generate_problems(128, "validation", task=task),
        load_prompt("r1_zero"),
        max_tokens=Config.from_parameters({"preset": task}).max_tokens,
        seed=0,
    )
    low, high, format_low, format_high = BANDS[task]
    assert low <= result.accuracy <= high
    assert format_low <= result.format_rate <= format_high


def test_recorded_figures_are_of_the_wanted_shape(task, provenance):
    base = {
        name: (figures["accuracy"], figures["format_rate"]) for name, figures in provenance["base"].items()
    }
    assert set(base) == set(prompt_names()) - {"chat"}  # it has no chat template
    accuracy, format_rate = base["r1_zero"]
    assert base["question_only"][1] > 0.5  # boxes it has seen often
    if task == "laptop":
        assert 0.04 <= accuracy <= 0.09 and 0.08 <= format_rate <= 0.20
        assert 0.4 <= accuracy / format_rate <= 0.6
        assert base["r1_zero_three_shot"][0] > 1.5 * accuracy  # worked examples help
        assert base["question_only"][1] > 0.6
    else:
        assert 0.03 <= accuracy <= 0.12 and 0.1 <= format_rate <= 0.30


def test_a_short_run_on_the_long_problems_learns(tmp_path):
    """Seven small steps: most responses become well-formed, and more of them right."""
    config = Config.from_parameters(
        dict(preset="laptop_long", n_steps=7, lr=3e-4, rollout_batch_size=64, n_val=0, checkpoint_every=0)
        | dict(run_dir=str(tmp_path / "run"), rollouts_every=0)
    )
    run = train(config)
    metrics = run.metrics.set_index("step")[["format_reward", "reward"]]
    assert run.config["model"] == "laptop_long" and run.finished
    rise = metrics.loc[6:7].mean() - metrics.loc[1:2].mean()
    assert rise.format_reward > 0.3 and rise.reward > 0, metrics


# ---- the recipe


def test_a_tiny_pretraining_learns_and_repeats_itself():
    recipe = RECIPE | dict(
        steps=12,
        warmup=2,
        rows=2,
        row_tokens=96,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=1,
        intermediate_size=64,
        tokenizer_docs=200,
        threads=1,
    )
    first, second = pretrain(recipe), pretrain(recipe)
    (model, tokenizer, record), (again, _, _) = first, second
    assert record["losses"][-1]["held_out"] < 0.95 * torch.log(torch.tensor(len(tokenizer) * 1.0))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters()))


def test_the_long_recipe_goes_on_from_the_laptops_weights_and_is_the_recorded_one(tokenizer):
    short = dict(steps=2, rows=2, row_tokens=128, tokenizer_docs=50, threads=1, muon_lr=0.0, adam_lr=0.0)
    model, own, _ = pretrain(RECIPES["laptop_long"] | short)
    start = load_file(model_path() / "model.safetensors")
    assert all(torch.equal(p, start[name]) for name, p in model.named_parameters())  # rates of 0 move nothing
    assert own.get_vocab() == tokenizer.get_vocab()  # one tokenizer for both
    for task, recipe in RECIPES.items():
        recorded = json.loads((model_path(task) / "provenance.json").read_text())["recipe"]
        assert recipe | recorded == recipe | {"threads": recorded["threads"]}


def test_orthogonalize_brings_singular_values_near_one():
    g = torch.randn(3, 8, 20, generator=torch.Generator().manual_seed(0))
    for x in (orthogonalize(g), orthogonalize(g.mT)):
        values = torch.linalg.svdvals(x)
        assert 0.6 < values.min() and values.max() < 1.3
    u, _, vh = torch.linalg.svd(g, full_matrices=False)
    assert (orthogonalize(g) - u @ vh).norm() < 0.3 * (u @ vh).norm()  # the same singular vectors
