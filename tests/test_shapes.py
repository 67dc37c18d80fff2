"""The shapes in the core's signatures hold at run time: whole runs with every annotation checked."""

import os
import subprocess
import sys
from pathlib import Path

CORE = ["tokenization", "batch", "log_probs", "advantages", "losses", "grpo"]
CORE += ["samplers.shared_scoring", "support.metrics", "tasks.rewards"]
HOOK = f"""
from jaxtyping import install_import_hook
with install_import_hook([f"rlkit.{{name}}" for name in {CORE}], "beartype.beartype"):
    import rlkit.grpo, rlkit.trainer
"""
RUN = """
from rlkit import ALGORITHMS, Config, train
from tiny_model import save_tiny_model, share_of_lower_case
import sys
for algo in ALGORITHMS:
    config = Config(model=str(save_tiny_model(sys.argv[1] + "/model")), algo=algo, n_steps=1,
                    n_train=4, n_val=0, rollout_batch_size=8, group_size=4, train_batch_size=4,
                    max_tokens=6, tis_cap=2.0, run_dir=sys.argv[1] + "/" + algo)
    train(config, reward_fn=share_of_lower_case)
print("checked", len(ALGORITHMS))
"""
MISTAKE = """
import torch
from rlkit.losses import loss_grpo
loss_grpo(torch.ones(2, 1), torch.zeros(2, 3), torch.zeros(2, 4), None, 0.2)
"""


def checked(code, *arguments):
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join([str(Path(__file__).parent), *sys.path]))
    command = [sys.executable, "-c", HOOK + code, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=environment)


def test_a_step_of_every_algorithm_with_all_shapes_checked(tmp_path):
    done = checked(RUN, tmp_path)
    assert "checked 11" in done.stdout, done.stderr[-3000:]


def test_a_wrong_shape_is_found():
    assert "TypeCheckError" in checked(MISTAKE).stderr
