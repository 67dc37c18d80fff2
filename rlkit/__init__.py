"""rlkit: the thin library behind the workbook, from a prompt to reasoning RL.

Every name of the course's handout is importable from here (``from rlkit import grpo_train_step``). Names are
looked up on first use, so ``import rlkit`` costs nothing: no torch, transformers, vllm, ray, ipywidgets or
matplotlib is imported until something that needs it is touched.
"""

from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.1.0"

# module -> the public names whose one home it is
_PUBLIC = {
    "tasks.problems": "Problem load_problems load_gsm8k",
    "laptop.problems": "generate_problems",
    "tasks.prompts": "Prompt load_prompt",
    "tasks.grading": "r1_zero_reward_fn question_only_reward_fn",
    "tasks.evaluation": "evaluate",
    "tokenization": "tokenize_prompt_and_output",
    "batch": "RolloutBatch rollout_batch",
    "log_probs": "get_response_log_probs",
    "advantages": "compute_rollout_rewards compute_group_normalized_rewards",
    "losses": "compute_policy_gradient_loss aggregate_loss_across_microbatch",
    "grpo": "grpo_train_step train_step response_log_probs",
    "algorithms": "Algorithm ALGORITHMS get_algorithm",
    "trainer": "train",
    "support.models": "load_model",
    "samplers": "Completion SamplingParams Sampler make_sampler TransformersSampler VLLMServer"
    " VLLMCompletion",
    "jobs.config": "Config",
    "jobs.runs": "Run load_run",
    "jobs.sweep": "sweep grid",
    "jobs.environment": "doctor",
}
_HOME = {name: module for module, names in _PUBLIC.items() for name in names.split()}
__all__ = sorted(_HOME)


def __getattr__(name):
    if name in _HOME:
        return getattr(import_module(f"rlkit.{_HOME[name]}"), name)
    if name == "stats":  # intervals, paired differences, pass@k: rlkit.stats.paired_interval(a, b)
        return import_module("rlkit.support.stats")
    raise AttributeError(f"module 'rlkit' has no attribute {name!r}")


def __dir__():
    return sorted([*globals(), *_HOME, "stats"])


if TYPE_CHECKING:  # pragma: no cover  (for editors and type checkers)
    from rlkit.advantages import compute_group_normalized_rewards, compute_rollout_rewards
    from rlkit.algorithms import ALGORITHMS, Algorithm, get_algorithm
    from rlkit.batch import RolloutBatch, rollout_batch
    from rlkit.grpo import grpo_train_step, response_log_probs, train_step
    from rlkit.jobs.config import Config
    from rlkit.jobs.environment import doctor
    from rlkit.jobs.runs import Run, load_run
    from rlkit.jobs.sweep import grid, sweep
    from rlkit.laptop.problems import generate_problems
    from rlkit.log_probs import get_response_log_probs
    from rlkit.losses import aggregate_loss_across_microbatch, compute_policy_gradient_loss
    from rlkit.samplers import (
        Completion,
        Sampler,
        SamplingParams,
        TransformersSampler,
        VLLMCompletion,
        VLLMServer,
        make_sampler,
    )
    from rlkit.support import stats
    from rlkit.support.models import load_model
    from rlkit.tasks.evaluation import evaluate
    from rlkit.tasks.grading import question_only_reward_fn, r1_zero_reward_fn
    from rlkit.tasks.problems import Problem, load_gsm8k, load_problems
    from rlkit.tasks.prompts import Prompt, load_prompt
    from rlkit.tokenization import tokenize_prompt_and_output
    from rlkit.trainer import train
