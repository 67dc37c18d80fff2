"""Redraws README's figure and results from figures/records: python figures/draw.py [--check]"""

import sys
from pathlib import Path

from rlkit.jobs import plots
from rlkit.jobs.collapse import collapsed_at
from rlkit.jobs.parameters import recorded
from rlkit.jobs.records import passes
from rlkit.jobs.tables import find_group
from rlkit.support.stats import detectable_difference, mean_interval, mean_se, paired_interval

HERE = Path(__file__).parent
README = HERE.parent / "README.md"
BEGIN, END = "<!-- results: written by figures/draw.py -->", "<!-- end of results -->"


def ends(runs) -> list[float]:
    """The last validation accuracy of each run."""
    return [run.summary["val_end"] for run in runs]


def interval(values) -> str:
    return "{:.3f} ({:.3f} to {:.3f})".format(*mean_interval(values))


def results(groups) -> str:
    """README's table, a row per estimator, and what may be read off it."""
    reference = groups[find_group(groups)]
    head = (
        "| `algo` | start | end (95 % interval) | minus `grpo`, by seed | pass@8 | collapsed | CPU s a run |"
    )
    lines = [head, "|---|---|---|---|---|---|---|"]
    for name, runs in groups.items():
        gap = "" if runs is reference else "{:+.3f} ({:+.3f} to {:+.3f})".format(*gap_of(runs, reference))
        fallen = sum(bool(collapsed_at(run.metrics.to_dict("records"))) for run in runs)
        cpu = [run.summary["cpu_seconds"] for run in runs]
        cells = [f"`{name}`", f"{mean_interval([run.summary['val_start'] for run in runs])[0]:.3f}"]
        cells += [interval(ends(runs)), gap, interval([passes(run.final, 8)[0] for run in runs])]
        cells += [f"{fallen} of {len(runs)}", f"{min(cpu):.0f} to {max(cpu):.0f}"]
        lines.append(f"| {' | '.join(cells)} |")
    sds = [detectable(runs, reference) for runs in groups.values() if runs is not reference]
    seeds, steps = len(reference), reference[0].config["n_steps"]
    error = reference[0].summary["val_end_se"]
    text = (
        f"{seeds} seeds of each, {steps} steps of 128 responses, 512 validation problems at the end (one "
        f"evaluation has a standard error of {error:.3f}). With {seeds} seeds a true difference of "
        f"{min(sds):.3f} to {max(sds):.3f} would be seen in four tries of five; a smaller one may well be "
        "there."
    )
    return "\n".join(lines) + "\n\n" + text


def gap_of(runs, others) -> tuple[float, float, float]:
    """Mean difference of the last accuracy by seed, with its interval."""
    by_seed = {run.config["seed"]: run.summary["val_end"] for run in others}
    shared = [run for run in runs if run.config["seed"] in by_seed]
    return paired_interval(ends(shared), [by_seed[run.config["seed"]] for run in shared])


def detectable(runs, others) -> float:
    """The true difference that these pairs would show in four tries of five."""
    gaps = [a - b for a, b in zip(ends(runs), ends(others))]
    return detectable_difference(mean_se(gaps)[1] * len(gaps) ** 0.5, len(gaps))


def readme_with(block: str) -> str:
    text = README.read_text(encoding="utf-8")
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}\n{block}\n{rest[rest.index(END) :]}"


if __name__ == "__main__":
    groups = recorded("variants")
    plots.seeds({"grpo": groups["grpo"]}).savefig(HERE / "laptop_accuracy.png", dpi=110)
    plots.ends(groups).savefig(HERE / "variants.png", dpi=110)
    if "--check" not in sys.argv:
        README.write_text(readme_with(results(groups)), encoding="utf-8")
    print(results(groups))
