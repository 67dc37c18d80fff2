"""The checkers: right functions pass, planted mistakes get their own diagnosis, stubs are open."""

import importlib
import json
import math
import re

import pytest
import sympy as sp
import torch

import rlkit
from rlkit.study import derivations
from rlkit.study.exercises import EXERCISES, bugs, check, get_exercise, hint, plugged_in, reveal
from rlkit.study.exercises.core import OpenExercise

MISTAKES = [(exercise.name, mistake.name) for exercise in EXERCISES.values() for mistake in exercise.mistakes]


def test_there_are_enough_of_them():
    assert len(EXERCISES) >= 25 and len(MISTAKES) >= 60
    components = {
        "tokenize_prompt_and_output",
        "get_response_log_probs",
        "compute_rollout_rewards",
        "compute_group_normalized_rewards_grpo",
        "compute_group_normalized_rewards_drgrpo",
        "compute_group_normalized_rewards_maxrl",
        "compute_policy_gradient_loss_on_policy",
        "compute_policy_gradient_loss_off_policy",
        "compute_policy_gradient_loss_off_policy_gspo",
        "aggregate_loss_across_microbatch_sequence",
        "aggregate_loss_across_microbatch_constant",
        "grpo_train_step_standard_on_policy",
        "grpo_train_step_variants_on_policy",
        "grpo_train_step_off_policy",
        "baseline_calcs",
        "derive_difficulty_reweightings",
        "derive_surrogate_objectives",
    }
    assert components <= {exercise.problem for exercise in EXERCISES.values()}


@pytest.mark.parametrize("name", EXERCISES)
def test_the_librarys_function_passes(name):
    result = EXERCISES[name].check(EXERCISES[name].solution)
    assert result.status == "right", result.message


@pytest.mark.parametrize("name, mistake_name", MISTAKES, ids=[f"{e}-{m}" for e, m in MISTAKES])
def test_a_planted_mistake_is_recognised(name, mistake_name):
    (mistake,) = [m for m in EXERCISES[name].mistakes if m.name == mistake_name]
    result = EXERCISES[name].check(mistake.function)
    assert result.status == "wrong" and result.diagnosis == mistake_name, result.message
    assert mistake.diagnosis in result.message and "\n" not in result.message


@pytest.mark.parametrize("name", EXERCISES)
def test_a_stub_is_open(name):
    exercise = EXERCISES[name]

    def marked(*_):
        raise OpenExercise

    for stub in (None, ..., lambda *_: None, lambda *_: ..., marked):
        assert exercise.check(stub).status == "open"
    scope = {}
    exec(exercise.stub(), scope)  # the stub we offer is Python, and open
    assert exercise.check(scope[name]).status == "open"


@pytest.mark.parametrize("name", EXERCISES)
def test_metadata(name):
    exercise = EXERCISES[name]
    assert exercise.title and exercise.hints and 1 <= exercise.difficulty <= 5 and exercise.minutes >= 5
    assert len(exercise.mistakes) >= 2 and exercise.notebook in {"01", "02", "03", "04", "05", "06", "08"}
    labels = [label for label, _ in exercise.cases()]
    assert len(set(labels)) == len(labels)


# what does the work in the library's own code: a pattern, over the code without docstrings and comments
WORK = {
    "fill_prompt": r"split\(SLOT\).*question\.join\(parts\)",
    "last_boxed": r"rfind\(.*boxed",
    "extract_answer": r"partition\(.<answer>.\)",
    "gsm8k_gold": r"partition\(.####.\)",
    "bernoulli_score": r"sp\.diff\(sp\.log\(chance\), theta\)",
    "softmax_gradient": r"sp\.diff\(objective, logit\)",
    "baseline_variance_a": r"second - mean ?\*\* ?2",
    "baseline_variance_b": r"second - mean ?\*\* ?2",
    "baseline_variance_c": r"second - mean ?\*\* ?2",
    "optimal_baseline": r"sp\.solve\(sp\.diff\(variance, b\), b\)",
    "baseline_crossing": r"sp\.Eq\(baseline_variance\(.*\), baseline_variance\(p\)\)",
    "group_mean_factor": r"\(rewards\[a\] - mean\) \* scores\[a\]",
    "tokenize_prompt_and_output": r"tokens\[:, :-1\].*tokens\[:, 1:\].*is_output\[:, 1:\]",
    "response_log_probs": r"log_softmax\(.*\.gather\(.*head\(features\)",
    "log_prob_at_temperature": r"logits / temperature.*log_softmax\(.*\.gather\(",
    "token_entropy": r"-log_p\.exp\(\)\.mul_\(log_p.*\.sum\(",
    "mean_token_entropy": r"entropies\[mask\]\.mean\(\)",
    "rollout_rewards": r"reward_fn\(response, truth\)",
    "group_advantages_std": r"rewards\.mean\(.*shape\[1\] - 1\)\)\.sqrt\(\).* else eps\).*ences / divisors",
    "loss_none": r"return -advantages \* log_probs",
    "aggregate_sequence": r"masked_fill\(~mask.*masked_sums\(loss, mask\) / mask\.sum\(dim=1\)",
    "microbatch_losses": r"\.split\(size\).*loss \* \(len\(rows\) / len\(batch\)\).*backward\(",
    "pass_at_k": r"comb\(n - c, k\) / math\.comb\(n, k\)",
    "group_advantages_none": r"rewards\.mean\(.*ones_like.*differences = rewards - ",
    "group_advantages_mean": r"rewards\.mean\(.*differences = rewards - .* else eps\).*ences / divisors",
    "aggregate_constant": r"masked_fill\(~mask.*masked_sums\(loss, mask\)\.sum\(\) / constant",
    "pruned_loss": r"batch\.advantages != 0.*len\(rows\) / len\(batch\)",
    "difficulty_weight_none": r"sp\.limit\(",
    "difficulty_weight_std": r"sp\.limit\(",
    "difficulty_weight_mean": r"sp\.limit\(",
    "finite_group_weight": r"sp\.binomial\(.*group_norm\(",
    "finite_weight_mean": r"sp\.diff\(generating, z\)",
    "rft_second_moments": r"expectation\(.*p ?\*\* ?2",
    "offpolicy_advantages": r"compute_group_normalized_rewards\(.*tensor\[rows\]",
    "loss_noclip": r"log_probs - old_log_probs\).*\.exp\(\).*-advantages \* token_ratio\(",
    "loss_grpo": r"\.exp\(\).*minimum\(advantages \* w, advantages \* w\.clamp\(\*bounds\(cliprange\)",
    "loss_gspo": r"masked_fill\(~mask.*log_ratio / mask\.sum\(dim=1.*minimum\(advantages \* s",
    "loss_cispo": r"\.exp\(\).*clamp\(max=bounds\(cliprange\)\[1\]\)\.detach\(\) \* advantages \* log_probs",
    "clip_fraction": r"bounds\(cliprange\).*ratio > highest.*\(advantages < 0\) & below",
    "selected_rows": r"tensor\[rows\].*function\(t\) for name, t",
    "token_surrogate": r"sp\.prod\(.*new if t in inside else old",
    "pairwise_surrogate": r"sp\.prod\(.*new if t in inside else old",
    "ppo_coefficient": r"sp\.diff\(objective, l\).*score_coefficient\(\"grpo\"",
    "cispo_coefficient": r"held \* advantage \* l",
    "gspo_token_gradient": r"sp\.exp\(power \* sum\(",
    "sequence_weight_variance": r"sp\.binomial\(size, k\).*\(p / q\)",
    "k3_estimator": r"sp\.exp\(-d\) - 1 \+ d",
    "pack_documents": r"tokens\[1:\]",
    "dpo_loss": r"logsigmoid\(beta \*",
    "parse_mmlu": r"said\[-1\]",
    "parse_gsm8k": r"numbers\[-1\]",
}
MOST_LINES = {True: 40, False: 45}  # of what reveal() prints: of the core, of the rest


@pytest.mark.parametrize("name", EXERCISES)
def test_what_is_revealed_holds_the_operation_that_does_the_work(name):
    source = EXERCISES[name].source()
    code = re.sub(r'r?""".*?"""|# [^\n]*', "", source, flags=re.DOTALL)
    assert re.search(WORK[name], code.replace("\n", " ")), f"{WORK[name]} is not in\n{code}"
    assert len(source.splitlines()) <= MOST_LINES[bool(EXERCISES[name].door)]


@pytest.mark.parametrize("name", [name for name in EXERCISES if EXERCISES[name].door])
def test_what_is_revealed_names_the_public_function_that_calls_it(name):
    module, _, function = EXERCISES[name].door.partition(":")
    assert function in rlkit.__all__
    assert callable(getattr(importlib.import_module(module), function))
    assert EXERCISES[name].source().endswith(f"# called by {module}.{function}")


CORE = (
    "rlkit.tokenization",
    "rlkit.log_probs",
    "rlkit.advantages",
    "rlkit.losses",
    "rlkit.grpo",
    "rlkit.batch",
)


def test_exercises_on_the_core_name_a_door():
    for exercise in EXERCISES.values():
        if any(path.startswith(CORE) for path in exercise.reveals):
            assert exercise.door, exercise.name


def test_messages_name_the_case_the_row_and_both_values(capsys):
    def mine(raw_rewards, group_size, advantage_eps):
        groups = raw_rewards.reshape(-1, group_size)
        return ((groups - groups.mean(1, keepdim=True)) / groups.std(1, keepdim=True)).flatten()

    check.group_advantages_std(mine)
    said = capsys.readouterr().out.strip()
    assert "'a group all wrong'" in said and "row 0: expected 0, yours is nan" in said and "0/0" in said
    check.group_advantages_std(EXERCISES["group_advantages_std"].solution)
    assert capsys.readouterr().out.startswith("✓")
    table = check.summary("03")
    assert table.loc["group_advantages_std", "status"] == "✓" and table.loc["loss_none", "status"] == "○"


def test_an_unknown_mistake_gets_no_diagnosis():
    result = get_exercise("pass_at_k").check(lambda n, c, k: 0.123)
    assert (
        result.status == "wrong"
        and result.diagnosis is None
        and "expected 0.25, yours is 0.123" in result.message
    )


def test_mistakes_as_readers_write_them():
    """Two slips in one attempt: a missing pad id must not hide a wrong mask; joint text as it comes."""

    def rows_of(texts, pad):
        return torch.tensor([ids + [pad] * (max(map(len, texts)) - len(ids)) for ids in texts])

    def label_is_not_pad(prompts, outputs, tokenizer):
        ids = rows_of(
            [tokenizer.encode(p, False) + tokenizer.encode(o, False) for p, o in zip(prompts, outputs)],
            tokenizer.pad_token_id,
        )
        return {
            "input_ids": ids[:, :-1],
            "labels": ids[:, 1:],
            "response_mask": ids[:, 1:] != tokenizer.pad_token_id,
        }

    def joint(prompts, outputs, tokenizer):
        ids = rows_of(
            tokenizer([p + o for p, o in zip(prompts, outputs)])["input_ids"], tokenizer.eos_token_id
        )
        mask = torch.zeros_like(ids, dtype=torch.bool)
        for row, (prompt, output) in enumerate(zip(prompts, outputs)):
            mask[row, len(tokenizer.encode(prompt)) : len(tokenizer.encode(prompt + output))] = True
        return {"input_ids": ids[:, :-1], "labels": ids[:, 1:], "response_mask": mask[:, 1:]}

    tokenise = get_exercise("tokenize_prompt_and_output")
    assert tokenise.check(label_is_not_pad).diagnosis == "mask_is_label_not_pad"
    assert tokenise.check(joint).diagnosis == "tokenised_together_with_bos"
    greedy = get_exercise("last_boxed").check(
        lambda text: (re.findall(r"\\boxed\{(.*)\}", text) or [None])[-1]
    )
    assert greedy.diagnosis == "boxed_greedy_from_the_first"


def test_exceptions_shapes_and_changed_inputs_are_reported_not_raised():
    exercise = get_exercise("group_advantages_none")
    assert "raised ZeroDivisionError" in exercise.check(lambda raw, size: 1 / 0).message
    assert (
        "expected shape (4,), yours is (1, 4)"
        in exercise.check(lambda raw, size: (raw - raw.mean())[None]).message
    )

    def changes(raw, size):
        result = raw.clone().reshape(-1, size) - raw.reshape(-1, size).mean(1, keepdim=True)
        raw.zero_()
        return result.flatten()

    assert "changes the arguments" in exercise.check(changes).message


def test_expressions_are_accepted_with_any_symbols_of_the_right_name():
    p, n = sp.symbols("p n")
    assert get_exercise("baseline_variance_a").check(p * (1 - p) ** 3 / n).status == "right"
    assert (
        get_exercise("baseline_variance_a").check(derivations.baseline_variance(sp.Integer(0))).status
        == "right"
    )
    result = get_exercise("baseline_variance_a").check(p * (1 - p) ** 3 / n + sp.Symbol("b"))
    assert result.status == "wrong" and "holds b" in result.message
    assert get_exercise("baseline_variance_a").check(p * (1 - p) ** 2 / n).diagnosis == "a_second_moment"
    assert get_exercise("baseline_crossing").check(sp.Rational(2, 3)).status == "right"
    assert get_exercise("difficulty_weight_none").check(1).status == "right"
    assert get_exercise("bernoulli_score").check((-p, 1 - p)).status == "right"


def test_names_hints_and_sources(capsys):
    with pytest.raises(AttributeError, match=r"got 'los_grpo'; did you mean 'loss_grpo'\?") as caught:
        _ = check.los_grpo
    assert len(str(caught.value)) < 120  # the names themselves are in check.summary()
    with pytest.raises(ValueError, match="did you mean"):
        hint("passatk")
    assert "pass_at_k" in dir(check)
    hint("loss_grpo"), hint("loss_grpo"), hint("loss_grpo")
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("hint 1 of 2") and said[1].startswith("hint 2 of 2")
    assert "last one" in said[2] and "starts again" in said[2] and said[3] == said[0]
    reveal("loss_grpo")
    said = capsys.readouterr().out.splitlines()
    assert [line.partition("(")[0] for line in said if line.startswith(("def", "#"))] == [
        "# rlkit.losses",
        "def token_ratio",
        "# rlkit.losses",
        "def bounds",
        "# rlkit.losses",
        "def loss_grpo",
        "# called by rlkit.losses.compute_policy_gradient_loss",
    ]
    assert len(said) < 22


def test_a_readers_loss_takes_the_librarys_place_and_gives_it_back():
    from rlkit import grpo, losses

    original = losses.compute_policy_gradient_loss
    with plugged_in(compute_policy_gradient_loss=len):
        assert grpo.compute_policy_gradient_loss is len and losses.compute_policy_gradient_loss is original
    assert grpo.compute_policy_gradient_loss is original and rlkit.compute_policy_gradient_loss is original
    with pytest.raises(ValueError, match="expected a function for one"):
        with plugged_in(not_a_component=len):
            pass


def test_a_readers_component_trains_a_real_model():
    model, tokenizer = rlkit.load_model("laptop")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)

    def step():
        return rlkit.grpo_train_step(
            model,
            tokenizer,
            optimizer,
            1,
            None,
            lambda response, truth: {"reward": float(response == truth), "format_reward": 1.0},
            ["1 + 1 ="] * 4,
            [" 2", " 3", " 2", " 5"],
            [" 2"] * 4,
            4,
        )[1]["grad_norm"]

    def mine(advantages, log_probs, *_, **__):
        return get_exercise("loss_none").solution(3 * advantages, log_probs), {}

    plain = step()
    with plugged_in(compute_policy_gradient_loss=mine):
        assert step() == pytest.approx(3 * plain, rel=1e-4)
    assert step() == pytest.approx(plain, rel=1e-6)


# ---- the references against values worked out by others


@pytest.fixture(scope="module")
def faults(shared_cases):
    rows = map(json.loads, (shared_cases / "faults.jsonl").read_text(encoding="utf-8").splitlines())
    return {row["id"]: row for row in rows}


def test_references_agree_with_the_collected_faults(faults):
    def reference(name, *arguments):
        return get_exercise(name).reference(*arguments)

    def close(seen, wanted):
        seen, wanted = torch.as_tensor(seen).double(), torch.as_tensor(wanted).double()
        assert torch.allclose(seen, wanted, atol=1e-6), (seen, wanted)

    for fault in ("B019", "B021"):
        row = faults[fault]
        rewards = torch.tensor(row["input"]["raw_rewards"], dtype=torch.float64)
        close(reference("group_advantages_std", rewards, 4, 1e-6), row["expected"]["advantages"])
    clip = faults["B034"]["input"]
    seen = reference(
        "loss_grpo",
        torch.tensor(clip["advantages"]).double(),
        torch.tensor(clip["ratios"]).double()[:, None].log(),
        torch.zeros(4, 1),
        clip["cliprange"],
    )
    close(sum(seen["loss"], []), faults["B034"]["expected"]["per_token_loss"])
    assert [g[0] != 0 for g in seen["gradient"]] == faults["B034"]["expected"]["gradient_flows"]
    gspo = faults["B040"]
    seen = reference(
        "loss_gspo",
        torch.tensor([1.0]),
        torch.tensor(gspo["input"]["log_ratios"]),
        torch.zeros(1, 3),
        3e-4,
        torch.tensor(gspo["input"]["mask"]).bool(),
    )
    close(seen["loss"][0][0], gspo["expected"]["loss_A=+1"])
    entropy = faults["B015"]
    close(
        reference(
            "mean_token_entropy",
            torch.tensor(entropy["input"]["token_entropy"]),
            torch.tensor(entropy["input"]["response_mask"]).bool(),
        ),
        entropy["expected"]["token_weighted_mean"],
    )
    hot = faults["B016"]
    close(
        reference("log_prob_at_temperature", torch.tensor(hot["input"]["logits"]), 0, 0.5),
        hot["expected"]["log_prob_at_T"],
    )
    pruned = faults["B051"]
    close(
        reference("pruned_loss", torch.tensor([1.0, 0, 0, -1]), pruned["input"]["row_losses"])["loss"],
        pruned["expected"]["loss"],
    )
    slices = faults["B061"]["input"]
    close(
        reference(
            "offpolicy_advantages", torch.tensor(slices["raw_rewards"]).double(), 4, slices["train_rows"]
        ),
        faults["B061"]["expected"]["advantages"],
    )
    boxes = faults["B104"]["input"]["responses"]
    assert [reference("last_boxed", text) for text in boxes] == [None, r"\frac{1}{2}", "72", None]


# ---- find the bug


@pytest.mark.parametrize("name", bugs.BUGS)
def test_a_bug_shows_and_goes_away(name, capsys):
    bug = bugs.BUGS[name]
    assert bug.is_fixed(bug.fixed) and not bug.is_fixed(bug.buggy)
    assert bug.exercise is None or bug.exercise in EXERCISES
    figure = bugs.symptom(name, bug.fixed)
    (ax,) = figure.axes
    first, second = (torch.as_tensor(line.get_ydata()).double() for line in ax.lines)
    assert not torch.allclose(first, second) and ax.get_xlabel() and ax.get_ylabel()
    for attempt, mark in ((..., "○"), (lambda *_: None, "○"), (bug.buggy, "✗"), (bug.fixed, "✓")):
        bugs.check_fix(name, attempt)
        assert capsys.readouterr().out.startswith(mark)
    bugs.show_code(name), bugs.answer(name)
    assert "def " in capsys.readouterr().out


def test_a_fix_that_raises_is_reported(capsys):
    bugs.check_fix("growing_step", lambda *_: math.sqrt("no"))
    assert "raised TypeError" in capsys.readouterr().out
