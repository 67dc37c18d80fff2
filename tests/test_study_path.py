"""The map in 00_start_here names every problem of the handout, and its links lead to their sections."""

import re

import nbformat
import pytest

# every "Problem (...)" of CS336 Assignment 5, Spring 2026
HANDOUT = """
prompting_baselines baseline_calcs tokenize_prompt_and_output get_response_log_probs compute_rollout_rewards
compute_group_normalized_rewards_grpo compute_policy_gradient_loss_on_policy
aggregate_loss_across_microbatch_sequence grpo_train_step_standard_on_policy
grpo_experiments_standard_on_policy grpo_learning_rate grpo_prompt_ablation think_about_length_normalization
compute_group_normalized_rewards_drgrpo aggregate_loss_across_microbatch_constant think_about_rft
derive_difficulty_reweightings think_about_advantage_normalization compute_group_normalized_rewards_maxrl
grpo_train_step_variants_on_policy grpo_experiments_variants_on_policy derive_surrogate_objectives
compute_policy_gradient_loss_off_policy think_about_importance_reweighting
compute_policy_gradient_loss_off_policy_gspo grpo_train_step_off_policy grpo_experiments_off_policy
try_your_own """.split()
ROW = re.compile(r"^\| `(\w+)` \| \[(\w+)\]\((\w+\.ipynb)\) \|", re.MULTILINE)


def text_of(path):
    return "\n".join(cell.source for cell in nbformat.read(path, 4).cells if cell.cell_type == "markdown")


@pytest.fixture(scope="module")
def rows(repo):
    return ROW.findall(text_of(repo / "notebooks" / "00_start_here.ipynb"))


def test_every_problem_is_in_the_map_once(rows):
    assert sorted(problem for problem, _, _ in rows) == sorted(HANDOUT)


def test_the_map_points_at_sections_that_name_the_problem(rows, repo):
    texts = {}
    for problem, name, file in rows:
        assert file == f"{name}.ipynb"
        text = texts.setdefault(file, text_of(repo / "notebooks" / file))
        assert f"`{problem}`" in text, f"{file} never names {problem}"


def test_every_exercise_stands_in_its_notebook(repo):
    from rlkit.study.exercises import EXERCISES

    for exercise in EXERCISES.values():
        (path,) = (repo / "notebooks").glob(f"{exercise.notebook}_*.ipynb")
        code = "\n".join(cell.source for cell in nbformat.read(path, 4).cells if cell.cell_type == "code")
        assert f"check.{exercise.name}(" in code, f"{path.name} has no exercise {exercise.name}"
        written = f"def {exercise.name}(" in code  # else the answer is an expression
        assert not written or exercise.stub() in code, f"{path.name} has another stub of {exercise.name}"
