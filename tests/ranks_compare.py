"""Run by torchrun: steps of a sharded model against the same steps of a whole one, in float64."""

import copy
import itertools
import sys

import torch

from rlkit import ALGORITHMS, Completion, load_model, response_log_probs, rollout_batch, train_step
from rlkit.jobs import sharding
from rlkit.support.ranks import join, leave


def made_up_batch():
    """20 rows of five prompts; lengths from 1 to 20 tokens, one in four without advantage."""
    torch.manual_seed(0)
    groups = []
    for i in range(5):
        prompt = torch.randint(5, 600, (10 + 3 * i,)).tolist()
        lengths = (3, 9, 1, 20)
        rows = [(torch.randint(5, 600, (n,)).tolist(), [-2.0] * n) for n in lengths]
        groups.append([Completion("", ids, "stop", log_p, prompt) for ids, log_p in rows])
    batch = rollout_batch(groups)
    batch.advantages = torch.tensor([1.0, -1.0, 0.0, 0.5] * 5)
    return batch


def main() -> str | None:
    torch.set_num_threads(1)
    ranks, device = join("cpu")
    start, _ = load_model("laptop", "float64", "cpu")
    whole_batch = made_up_batch()
    algorithms = ("grpo", "drgrpo", "offpolicy_gspo")
    errors = []
    for algo, pieces, n_rows in itertools.product(algorithms, (1, 3), (20, 1, 0)):
        weights, reports, old = [], [], []
        batch = whole_batch.select(torch.arange(max(n_rows, 1)))
        batch.advantages = batch.advantages * bool(n_rows)  # 0: no rank has a row that teaches
        for sharded in (False, True):
            model = copy.deepcopy(start)
            model = sharding.shard(model, ranks.size) if sharded else model
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            options = {"gradient_accumulation_steps": pieces, "max_grad_norm": 0.5}
            for _ in range(2):
                old.append(response_log_probs(model, batch, microbatch_size=3))
                batch.old_log_probs = old[-1].float() - 0.1
                report = train_step(
                    model, optimizer, batch, ALGORITHMS[algo], normalization_constant=100.0, **options
                )[1]
            reports.append(report)
            whole = copy.deepcopy(start) if sharded else model
            if sharded:
                sharding.gather_into(whole, model)
            weights.append(torch.cat([p.detach().flatten() for p in whole.parameters()]))
        (before, after), case = reports, f"{algo}, {pieces} microbatches, {n_rows} rows"
        moved = torch.cat([p.detach().flatten() for p in start.parameters()])
        distance = (weights[0] - weights[1]).norm() / (weights[0] - moved).norm().clamp(min=1e-9)
        if distance > 1e-6:
            errors.append(f"{case}: weights differ by {distance:.1e} of the update")
        if before.keys() != after.keys():
            errors.append(f"{case}: metrics {before.keys() ^ after.keys()}")
        other = [n for n in before if abs(before[n] - after.get(n, 0)) > 1e-6 * max(1, abs(before[n]))]
        errors += [f"{case}: {name} is {after[name]}, expected {before[name]}" for name in other]
        if not torch.allclose(old[1], old[3], atol=1e-5):
            errors.append(f"{case}: old log-probs differ")
    leave()
    return "\n".join(errors) or None


if __name__ == "__main__":
    sys.exit(main())
