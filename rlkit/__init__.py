"""rlkit: the thin library behind the workbook, from a prompt to reasoning RL.

Every name of the course's handout is importable from here (``from rlkit import grpo_train_step``). Names are
looked up on first use, so ``import rlkit`` costs nothing: no torch, transformers, vllm, ray, ipywidgets or
matplotlib is imported until something that needs it is touched.
"""
from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.1.0"

# public name -> the module that is its one home
_HOME = {
    # problems and prompts
    "Problem": "problems", "load_problems": "problems", "load_gsm8k": "problems", "generate_problems": "problems",
    "Prompt": "prompts", "load_prompt": "prompts",
    # grading
    "r1_zero_reward_fn": "grading", "question_only_reward_fn": "grading",
    # the handout's components
    "tokenize_prompt_and_output": "tokenization",
    "get_response_log_probs": "log_probs",
    "compute_rollout_rewards": "advantages", "compute_group_normalized_rewards": "advantages",
    "compute_policy_gradient_loss": "losses", "aggregate_loss_across_microbatch": "losses",
    "grpo_train_step": "grpo",
    # algorithms, models, samplers
    "Algorithm": "algorithms", "ALGORITHMS": "algorithms", "get_algorithm": "algorithms",
    "load_model": "models",
    "Completion": "samplers", "SamplingParams": "samplers", "Sampler": "samplers", "make_sampler": "samplers",
    "TransformersSampler": "samplers", "VLLMServer": "samplers", "VLLMCompletion": "samplers",
    # the loop and what it leaves
    "Config": "config", "train": "trainer", "evaluate": "evaluation", "Run": "runs", "load_run": "runs",
    "doctor": "environment",
}
__all__ = sorted(_HOME)


def __getattr__(name):
    if name in _HOME:
        return getattr(import_module(f"rlkit.{_HOME[name]}"), name)
    raise AttributeError(f"module 'rlkit' has no attribute {name!r}")


def __dir__():
    return sorted([*globals(), *_HOME])


if TYPE_CHECKING:  # pragma: no cover  (for editors and type checkers)
    from rlkit.algorithms import ALGORITHMS, Algorithm, get_algorithm
    from rlkit.advantages import compute_group_normalized_rewards, compute_rollout_rewards
    from rlkit.config import Config
    from rlkit.environment import doctor
    from rlkit.evaluation import evaluate
    from rlkit.grading import question_only_reward_fn, r1_zero_reward_fn
    from rlkit.grpo import grpo_train_step
    from rlkit.log_probs import get_response_log_probs
    from rlkit.losses import aggregate_loss_across_microbatch, compute_policy_gradient_loss
    from rlkit.models import load_model
    from rlkit.problems import Problem, generate_problems, load_gsm8k, load_problems
    from rlkit.prompts import Prompt, load_prompt
    from rlkit.runs import Run, load_run
    from rlkit.samplers import (Completion, Sampler, SamplingParams, TransformersSampler, VLLMCompletion,
                                VLLMServer, make_sampler)
    from rlkit.tokenization import tokenize_prompt_and_output
    from rlkit.trainer import train
