"""Recorded runs: many runs' settings and metrics in one JSON-lines file, small enough to be committed.

A line is a run: name, config (config.json without what names the machine's folders), metrics (a list per
column) and, where it was made, ``final``: how often the trained model was right on each problem.
"""

import json
from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from rlkit.jobs.runs import Run
from rlkit.support.files import read_jsonl, write_text
from rlkit.support.stats import mean_se, pass_at_k
from rlkit.tasks.evaluation import Evaluation


class Record(Run):
    """A run read from a file of records: ``config``, ``metrics``, ``summary`` and ``final`` as a Run's."""

    def __init__(self, path, row: Mapping[str, Any]):
        super().__init__(Path(path) / row["name"])
        self._row = row

    @property
    def config(self) -> dict:
        return dict(self._row["config"])

    @cached_property
    def metrics(self) -> pd.DataFrame:  # pyright: ignore[reportIncompatibleVariableOverride]
        return pd.DataFrame(self._row["metrics"], dtype=float)

    @property
    def final(self) -> dict[str, Any]:
        """What ``final_record`` made; {} where the trained model was not evaluated."""
        return self._row.get("final", {})


def record_of(run: Run, final: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The line of a finished run. Metrics keep six digits; times are in there too."""
    config = {k: v for k, v in run.config.items() if k not in ("run_dir", "resume", "dry_run")}
    config["provenance"] = {k: v for k, v in config.get("provenance", {}).items() if k != "command"}
    columns = run.metrics.to_dict("list")
    metrics = {name: [_short(value) for value in values] for name, values in columns.items()}
    return {"name": run.name, "config": config, "metrics": metrics} | ({"final": final} if final else {})


def final_record(result: Evaluation) -> dict[str, Any]:
    """Of an evaluation with several samples: right ones per problem, steps of each, lengths by kind."""
    problems = result.rows.groupby("problem")
    right = result.rows.reward >= 1
    lengths = {"right": result.rows.length[right], "wrong": result.rows.length[~right]}
    return {
        "n_samples": result.n_samples,
        "right": right.groupby(result.rows.problem).sum().tolist(),
        "n_steps": problems.n_steps.first().tolist(),
        "format_rate": _short(result.format_rate),
        "truncated_share": _short(result.truncated_share),
    } | {f"length_{kind}": _short(values.mean()) for kind, values in lengths.items()}


def write_records(path, rows: Iterable[Mapping[str, Any]]) -> None:
    """One line per run, sorted by name, so that a new run changes one line."""
    lines = [json.dumps(row, separators=(",", ":")) for row in sorted(rows, key=lambda row: row["name"])]
    write_text(Path(path), "".join(line + "\n" for line in lines))


def read_records(path) -> list[Record]:
    """The runs in a file of records, by name; ValueError for a file that is not one."""
    rows = read_jsonl(path)
    if not rows or any(not {"name", "config", "metrics"} <= row.keys() for row in rows):
        raise ValueError(f"{path}: expected a file of recorded runs (name, config and metrics in each line)")
    return [Record(Path(path).with_suffix(""), row) for row in rows]


def by_name(records: Iterable[Record]) -> dict[str, list[Record]]:
    """The records in groups, {name without "-seed3": records by seed}."""
    groups: dict[str, list[Record]] = {}
    for run in sorted(records, key=lambda run: run.config["seed"]):
        groups.setdefault(run.name.rpartition("-seed")[0], []).append(run)
    return groups


def passes(final: Mapping[str, Any], k: int, chosen=None) -> tuple[float, float]:
    """(pass@k, its standard error over problems) of a ``final``; ``chosen``: which problems, a mask."""
    right = np.asarray(final["right"])
    right = right if chosen is None else right[np.asarray(chosen)]
    return mean_se([pass_at_k(final["n_samples"], int(c), k) for c in right])


def _short(value):
    if value is None or (isinstance(value, float) and not np.isfinite(value)):
        return None
    return value if isinstance(value, (int, str)) else float(f"{value:.6g}")
