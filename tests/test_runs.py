"""The run folder: what is written, what a kill leaves, what is refused."""

import json
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
import torch

from rlkit.algorithms import ALGORITHMS, get_algorithm
from rlkit.jobs.config import Config
from rlkit.jobs.metrics import METRICS
from rlkit.jobs.run_writer import RunWriter, open_run, runs_folder
from rlkit.jobs.runs import Run, checkpoints, load_run
from rlkit.support.files import read_jsonl as read_any


def read_jsonl(path):
    return read_any(path, growing=True)


def config(tmp_path, **values):
    return Config(run_dir=str(tmp_path / "run"), n_steps=4, **values).resolved()


@pytest.fixture
def small():
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    return model, optimizer


def test_a_cut_last_line_is_left_out_and_any_other_is_an_error(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_text('{"step": 0, "text": "a\u2028b"}\n{"step": 1}\n{"ste', encoding="utf-8")
    assert [row["step"] for row in read_jsonl(path)] == [0, 1] and read_jsonl(tmp_path / "none") == []
    path.write_text('{"step": 0}\n{"ste\n{"step": 2}\n')
    with pytest.raises(ValueError, match="line 2"):
        read_jsonl(path)


def test_log_keeps_finite_numbers_only_and_flushes(tmp_path):
    writer = RunWriter(tmp_path)
    writer.log(
        {"reward": 0.5, "loss": float("nan"), "grad_norm": float("inf"), "lr": None, "step": 1, "own": 2}
    )
    text = (tmp_path / "metrics.jsonl").read_text()  # before it is closed
    assert text == '{"step": 1, "reward": 0.5, "own": 2}\n'
    writer.close()


def test_config_json_says_what_when_where_and_with_what(tmp_path):
    open_run(config(tmp_path, algo="drgrpo", seed=3), get_algorithm("drgrpo")).close()
    record = Run(tmp_path / "run").config
    assert record["seed"] == 3 and record["lr"] == 3e-4 and record["normalization_constant"] == 8192.0
    assert record["algorithm"]["name"] == "drgrpo" and record["algorithm"]["advantage_normalizer"] == "none"
    about = record["provenance"]
    assert (
        about["versions"]["torch"].split("+")[0] == torch.__version__.split("+")[0]
        and about["machine"]["cores"]
        and about["started"]
    )
    assert set(about) == {"started", "command", "versions", "git", "machine"}


def test_a_used_folder_is_refused_and_a_second_writer_too(tmp_path):
    first = open_run(config(tmp_path), get_algorithm("grpo"))
    first.log({"step": 0})  # a folder without any result is not used yet
    with pytest.raises(ValueError, match="another process"):
        open_run(config(tmp_path, resume=True), get_algorithm("grpo"))
    first.close()
    with pytest.raises(ValueError, match="run_dir: .* already holds a run .*resume=True"):
        open_run(config(tmp_path), get_algorithm("grpo"))
    open_run(config(tmp_path, resume=True), get_algorithm("grpo")).close()


def test_resume_names_what_differs_and_n_steps_may_grow(tmp_path):
    writer = open_run(config(tmp_path), get_algorithm("grpo"))
    writer.log({"step": 0})
    writer.close()
    with pytest.raises(
        ValueError, match=r"resume: .*lr \(there 0.0003, now 0.001\).*seed \(there 0, now 1\)"
    ):
        open_run(config(tmp_path, lr=1e-3, seed=1, resume=True), get_algorithm("grpo"))
    with pytest.raises(ValueError, match="baseline .there 'mean', now .*lambda"):
        own = replace(ALGORITHMS["grpo"], baseline=lambda rewards: rewards.mean(1, keepdim=True))
        open_run(config(tmp_path, resume=True), own)
    with pytest.raises(ValueError, match="n_steps: got 3"):
        open_run(replace(config(tmp_path, resume=True), n_steps=3), get_algorithm("grpo"))
    before = Run(tmp_path / "run").config
    longer = replace(config(tmp_path, resume=True), n_steps=9, checkpoint_every=3)
    (writer := open_run(longer, get_algorithm("grpo"))).close()
    assert Run(tmp_path / "run").config == before  # until all is loaded
    record = writer.record
    assert (record["n_steps"], record["checkpoint_every"], len(record["resumed"])) == (9, 3, 1)
    assert record["resumed"][0]["changes"] == []


def test_checkpoints_are_whole_and_the_last_two_stay(tmp_path, small, monkeypatch):
    writer = open_run(config(tmp_path), get_algorithm("grpo"))
    for step in (1, 2, 3):
        writer.log({"step": step})
        writer.add_rollouts([{"step": step, "response": "x"}])
        writer.save_checkpoint(step, *small)
    assert [p.name for p in checkpoints(writer.path)] == ["step-000002", "step-000003"]
    writer.log({"step": 4})
    monkeypatch.setattr(
        "os.rename", lambda *a: (_ for _ in ()).throw(KeyboardInterrupt)
    )  # killed before its name
    with pytest.raises(KeyboardInterrupt):
        writer.save_checkpoint(4, *small)
    monkeypatch.undo()
    writer.close()
    (writer.path / "metrics.jsonl").open("a").write('{"step": 5, "rew')
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    assert writer.restore(model, optimizer) == 3
    assert [p.name for p in (writer.path / "checkpoints").iterdir() if not p.name.startswith("step")] == []
    assert torch.equal(model.weight, small[0].weight)
    moments = zip(optimizer.state_dict()["state"].values(), small[1].state_dict()["state"].values())
    assert all(
        torch.equal(a[name], b[name]) for a, b in moments for name in ("step", "exp_avg", "exp_avg_sq")
    )
    assert [row["step"] for row in read_jsonl(writer.path / "metrics.jsonl")] == [1, 2, 3]
    assert [row["step"] for row in read_jsonl(writer.path / "rollouts.jsonl")] == [1, 2, 3]


def test_reading_a_run_and_its_summary(tmp_path):
    writer = open_run(config(tmp_path), get_algorithm("grpo"))
    assert len(Run(writer.path).metrics) == 0 and Run(writer.path).summary["steps"] == 0
    writer.log(
        {"step": 0, "val_reward": 0.1, "val_reward_se": 0.02, "val_format_reward": 0.2, "time_eval": 2.0}
    )
    for step, reward in ((1, 0.25), (2, 0.75)):
        writer.log({"step": step, "reward": reward, "time_train": 1.0, "tokens_per_second": 900.0})
    writer.log({"step": 3, "reward": 0.5, "val_reward": 0.6, "val_reward_se": 0.03, "val_format_reward": 0.9})
    writer.close()
    run = load_run(writer.path)
    summary = run.summary
    assert (summary["val_start"], summary["val_end"], summary["val_end_se"]) == (0.1, 0.6, 0.03)
    assert (summary["train_reward_last_10"], summary["seconds"], summary["steps"]) == (0.5, 4.0, 3)
    assert not run.finished and summary["algo"] == "grpo" and summary["seed"] == 0
    plain = pd.read_json(writer.path / "metrics.jsonl", lines=True)  # readable without our code
    assert plain.step.tolist() == [0, 1, 2, 3] and set(plain.columns) <= set(METRICS)
    assert json.loads((writer.path / "config.json").read_text())["n_steps"] == 4


def test_load_run_says_what_is_missing(tmp_path):
    with pytest.raises(ValueError, match="has no config.json and no metrics.jsonl"):
        load_run(tmp_path)
    with pytest.raises(ValueError, match="is not a folder"):
        load_run(tmp_path / "nothing")


def test_a_folder_of_its_own_by_default(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    paths = []
    for _ in range(2):
        writer = open_run(Config(algo="rft", seed=2).resolved(), get_algorithm("rft"))
        paths.append(writer.path)
        writer.close()
    assert paths[0] != paths[1] and all(p.parent == tmp_path / "runs" for p in paths)
    assert all(p.name.startswith("laptop-rft-seed2-") for p in paths)
    monkeypatch.chdir(Path(__file__).parent.parent / "notebooks")  # in the checkout: the one at its root
    assert runs_folder() == Path(__file__).parent.parent / "runs"


def test_a_log_cut_inside_a_character_is_read_up_to_there(tmp_path):
    path = tmp_path / "rollouts.jsonl"
    path.write_bytes('{"step": 0}\n{"step": 1, "response": "é'.encode()[:-1])
    assert read_jsonl(path) == [{"step": 0}]


def test_a_run_that_failed_before_any_result_leaves_the_folder_free(tmp_path):
    open_run(config(tmp_path), get_algorithm("grpo")).close()
    open_run(config(tmp_path, lr=0.5), get_algorithm("grpo")).close()
    assert Run(tmp_path / "run").config["lr"] == 0.5


def test_results_without_a_config_are_not_gone_on_with(tmp_path, small):
    writer = open_run(config(tmp_path), get_algorithm("grpo"))
    writer.save_checkpoint(1, *small)
    writer.close()
    (tmp_path / "run" / "config.json").unlink()
    with pytest.raises(ValueError, match="no config.json"):
        open_run(config(tmp_path, resume=True), get_algorithm("grpo"))


@pytest.mark.parametrize(
    "content, message",
    [
        ("", "cannot be read as JSON"),
        ("{broken", "cannot be read as JSON"),
        ("[1]", "has no algorithm"),
        ("{}", "has no algorithm, model, seed, n_steps"),
        ('{"algorithm": {}, "model": "", "seed": 0, "n_steps": 1}', "has no name of an algorithm"),
    ],
)
def test_a_broken_config_is_one_error_that_names_the_file(tmp_path, content, message):
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\n')
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ValueError, match=f"config.json: {message}"):
        load_run(tmp_path)
    with pytest.raises(ValueError, match=f"config.json: {message}"):
        open_run(replace(config(tmp_path), run_dir=str(tmp_path), resume=True), get_algorithm("grpo"))


@pytest.mark.parametrize(
    "content, message",
    [
        ('{"step": 0}\n{broken\n', "line 2 is not a JSON object"),
        ("7\n", "line 1 is not a JSON object"),
        ('{"reward": 1}\n', "no number as its 'step'"),
    ],
)
def test_broken_metrics_are_one_error_that_names_the_file(tmp_path, content, message):
    open_run(config(tmp_path), get_algorithm("grpo")).close()
    (tmp_path / "run/metrics.jsonl").write_text(content)
    with pytest.raises(ValueError, match=f"metrics.jsonl: .*{message}"):
        _ = load_run(tmp_path / "run").metrics


@pytest.mark.parametrize("path", ["a\0b", "x" * 5000, None, 7])
def test_load_run_refuses_what_is_no_path(path):
    with pytest.raises(ValueError, match="^run: "):
        load_run(path)


def test_a_folder_that_cannot_be_made_is_one_error(tmp_path):
    for name in ("x" * 300, "file/below"):
        (tmp_path / "file").touch()
        values = replace(config(tmp_path))
        object.__setattr__(values, "run_dir", str(tmp_path / name))
        with pytest.raises(ValueError, match="^run_dir: got .*expected a folder that can be written to"):
            open_run(values, get_algorithm("grpo"))
