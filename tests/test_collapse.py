"""The rule by which a run counts as collapsed, on curves whose answer is plain, and where it shows."""

import json

import pytest

from rlkit.jobs.collapse import collapse, collapsed_at
from rlkit.jobs.runs import load_run
from rlkit.jobs.tables import comparison
from rlkit.jobs.watch import Watch


def curve(rewards, **other):
    columns = {"format_reward": [1.0], "response_length": [40.0], "truncated_share": [0.0]} | other
    rows = [{"step": 0, "val_reward": 0.5}]  # an evaluation alone does not count
    for i, reward in enumerate(rewards):
        rest = {name: values[min(i, len(values) - 1)] for name, values in columns.items()}
        rows.append({"step": i + 1, "reward": reward} | rest)
    return rows


RISE = [0.1 * i for i in range(1, 9)] + [0.8] * 7  # 15 steps, best five: 0.8


@pytest.mark.parametrize(
    "rows, at, why",
    [
        (curve(RISE), None, ""),
        (curve(RISE + [0.41] * 9), None, ""),  # more than half is left
        # windows of 0.8 end at step 15; 5 x 0.0 after it: mean of the last five is .8 .64 .48 .32 at 16 17 18
        (curve(RISE + [0.0] * 9), 18, "the mean reward fell from 0.80 to 0.32"),
        (curve([0.09] * 10 + [0.0] * 10), None, ""),  # never above 0.1: noise of a model that learns nothing
        (
            curve([0.5] * 20, format_reward=[1.0] * 10 + [0.2] * 10),
            14,
            "well-formed share fell from 1.00 to 0.36",
        ),
        (curve([0.5] * 20, response_length=[100.0] * 10 + [20.0] * 10), None, ""),  # short, and as good
        (
            curve([0.5] * 10 + [0.35] * 10, response_length=[100.0] * 10 + [20.0] * 10),
            15,
            "with a falling reward the mean length fell from 100 to 20 tokens",
        ),
        (
            curve([0.5] * 10 + [0.35] * 10, truncated_share=[0.3] * 10 + [0.9] * 10),
            14,  # four of five at .35: .38 < .8 x .5; and .3 + .8 x .6 = .78 are cut
            "with a falling reward the share of cut responses rose from 0.30 to 0.78",
        ),
        (curve([0.5] * 10 + [0.35] * 10, truncated_share=[0.5] * 10 + [0.9] * 10), None, ""),  # not twice
    ],
)
def test_the_rule(rows, at, why):
    found = collapsed_at(rows)
    assert (found and found[0]) == at and (found is None or why in found[1])
    if at:
        assert why in collapse(rows[: at + 1]) and collapse(rows[:at]) == ""  # rows[0] is step 0


def test_own_rewards_without_a_format_and_short_runs_are_no_collapse():
    rows = [{"step": i, "reward": 1.0, "response_length": 5.0, "truncated_share": 0.0} for i in range(9)]
    assert collapse(rows) == "" and collapse([]) == "" and collapsed_at(rows[:3]) is None
    rows += [row | {"step": 9 + i, "reward": 0.0} for i, row in enumerate(rows)]
    assert "mean reward fell" in collapse(rows)


def test_the_alarm_says_it_marks_the_steps_and_knows_what_was_before_a_resume(tmp_path):
    said, rows = [], curve(RISE + [0.0] * 9)
    more = {"rows_used": 1, "groups_identical": 0, "groups_all_right": 0, "optimizer_steps": 1}
    watch = Watch(said.append, history=rows[:12])
    logged = [row | more for row in rows[12:]]
    for row in logged:
        watch(row["step"], row, 4)
    assert [row["step"] for row in logged if "collapsed" in row] == list(range(18, 25))
    assert said[0].startswith("warning: step 18: collapse: the mean reward fell from 0.80 to 0.32")
    assert len(said) == 2 and said[1].startswith("warning: step 23")  # once in five steps


def test_comparisons_count_collapsed_runs(tmp_path):
    for seed, rewards in enumerate((RISE, RISE + [0.0] * 9)):
        folder = tmp_path / f"run{seed}"
        folder.mkdir()
        config = {"algorithm": {"name": "grpo"}, "model": "laptop", "seed": seed, "n_steps": len(rewards)}
        (folder / "config.json").write_text(json.dumps(config))
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in curve(rewards)))
    notes = comparison([load_run(tmp_path / f"run{seed}") for seed in (0, 1)])[1]
    assert notes[0] == "collapsed, 1 of 2 runs: run1 (step 18: the mean reward fell from 0.80 to 0.32)"
    assert not any("collapsed" in note for note in comparison([load_run(tmp_path / "run0")])[1])
