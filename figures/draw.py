"""Redraws README's figure and results from figures/records: python figures/draw.py"""

from pathlib import Path

from rlkit.jobs import plots
from rlkit.jobs.collapse import collapsed_at
from rlkit.jobs.parameters import recorded
from rlkit.jobs.records import passes
from rlkit.jobs.tables import difference_table, find_group
from rlkit.support.stats import mean_interval

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
    baseline = find_group(groups)
    gaps = difference_table(groups, baseline)
    head = f"| `algo` | start | end (95 % interval) | minus `{baseline}`, by seed | pass@8 | collapsed | "
    lines = [f"{head}CPU s a run |", "|---|---|---|---|---|---|---|"]
    for name, runs in groups.items():
        row = gaps.loc[f"{name} - {baseline}"] if name != baseline else None
        gap = "" if row is None else f"{row.difference:+.3f} ({row.low:+.3f} to {row.high:+.3f})"
        fallen = sum(bool(collapsed_at(run.metrics.to_dict("records"))) for run in runs)
        cpu = [run.summary["cpu_seconds"] for run in runs]
        cells = [f"`{name}`", f"{mean_interval([run.summary['val_start'] for run in runs])[0]:.3f}"]
        cells += [interval(ends(runs)), gap, interval([passes(run.final, 8)[0] for run in runs])]
        cells += [f"{fallen} of {len(runs)}", f"{min(cpu):.0f} to {max(cpu):.0f}"]
        lines.append(f"| {' | '.join(cells)} |")
    first = groups[baseline][0]
    text = (
        f"{len(groups[baseline])} seeds of each, {first.config['n_steps']} steps of 128 responses, 512 "
        f"validation problems at the end (one evaluation has a standard error of "
        f"{first.summary['val_end_se']:.3f}). With so many seeds a true difference of "
        f"{gaps.detectable.min():.3f} to {gaps.detectable.max():.3f} would be seen in four tries of five; a "
        "smaller one may well be there."
    )
    return "\n".join(lines) + "\n\n" + text


def readme_with(block: str) -> str:
    text = README.read_text(encoding="utf-8")
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}\n{block}\n{rest[rest.index(END) :]}"


if __name__ == "__main__":
    groups = recorded("variants")
    plots.seeds({"grpo": groups["grpo"]}).savefig(HERE / "laptop_accuracy.png", dpi=110)
    plots.ends(groups).savefig(HERE / "variants.png", dpi=110)
    README.write_text(readme_with(results(groups)), encoding="utf-8")
    print(results(groups))
