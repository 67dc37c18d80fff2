"""Draws the README's figure and prints its table from the recorded runs: python figures/draw.py"""

from pathlib import Path

import pandas as pd

from rlkit import load_run
from rlkit.jobs import plots
from rlkit.support.stats import mean_interval

HERE = Path(__file__).parent


def recorded(folder="runs") -> dict[str, list]:
    """algorithm -> its recorded runs, by seed; in the folder vllm_runs those with sampler=vllm."""
    runs = [load_run(path) for path in sorted((HERE / folder).glob("*-seed*"))]
    names = dict.fromkeys(run.config["algo"] for run in runs)
    return {algo: [run for run in runs if run.config["algo"] == algo] for algo in names}


def table(groups) -> pd.DataFrame:
    """A row per algorithm: each seed's final validation accuracy, mean, 95 % interval, CPU seconds."""
    rows = {}
    for algo, runs in groups.items():
        ends = [run.summary["val_end"] for run in runs]
        mean, low, high = mean_interval(ends)
        cpu = [run.summary["cpu_seconds"] for run in runs]
        rows[algo] = {f"seed {run.config['seed']}": f"{end:.3f}" for run, end in zip(runs, ends)} | {
            "start (mean)": f"{sum(run.summary['val_start'] for run in runs) / len(runs):.3f}",
            "mean": f"{mean:.3f}",
            "95 % interval": f"{low:.3f} to {high:.3f}",
            "CPU s a run": f"{min(cpu):.0f} to {max(cpu):.0f}",
        }
    return pd.DataFrame(rows).T.rename_axis("algo")


def difference(runs, others) -> tuple[float, float, float]:
    """Mean difference of the final accuracy, seed by seed, and its 95 % interval."""
    ends, reference = (
        {run.config["seed"]: run.summary["val_end"] for run in group} for group in (runs, others)
    )
    return mean_interval([ends[seed] - reference[seed] for seed in sorted(ends.keys() & reference.keys())])


def in_words(name, found) -> str:
    return f"{name}: {found[0]:.3f}, 95 % interval {found[1]:.3f} to {found[2]:.3f}"


if __name__ == "__main__":
    groups = recorded()
    plots.seeds(groups).savefig(HERE / "laptop_accuracy.png", dpi=110)
    print(table(groups).to_string())
    print(in_words("drgrpo - grpo, by seed", difference(groups["drgrpo"], groups["grpo"])))
    for algo, runs in recorded("vllm_runs").items():
        ends = [run.summary["val_end"] for run in runs]
        print(", ".join(f"{end:.3f}" for end in ends), in_words(f"{algo} by vLLM", mean_interval(ends)))
        print(in_words(f"{algo}, vLLM - in process, by seed", difference(runs, groups[algo])))
        print("largest log-prob gap", max(run.metrics.logprob_gap_max.max() for run in runs))
