"""The job notebooks as their users run them, through papermill's command line; strict parameters."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

from rlkit.jobs.config import Config
from rlkit.jobs.parameters import (
    CompareJob,
    EvaluateJob,
    before_and_after,
    find_runs,
    parameters,
    training_group,
)
from rlkit.jobs.runs import load_run
from rlkit.jobs.tables import (
    category_table,
    comparison,
    difference_table,
    final_table,
    find_group,
    group_runs,
    shared_metrics,
    validation_table,
)
from rlkit.samplers import SamplingParams

SHORT = {
    "n_steps": 2,
    "rollout_batch_size": 16,
    "group_size": 4,
    "n_train": 64,
    "n_val": 8,
    "n_val_final": 8,
    "max_tokens": 16,
    "gradient_accumulation_steps": 2,
}


def papermill(repo, folder, notebook, *arguments, short=True, output="out.ipynb"):
    """The finished process; ``folder`` is the working directory, so runs/ is made there."""
    extra = [a for name, value in SHORT.items() for a in ("-p", name, str(value))] if short else []
    command = [
        Path(sys.executable).with_name("papermill"),
        repo / "notebooks" / f"{notebook}.ipynb",
        output,
        *extra,
        *arguments,
    ]
    environment = os.environ | {"JUPYTER_PREFER_ENV_PATH": "1"}
    return subprocess.run(
        [str(a) for a in command if a is not None],
        cwd=folder,
        env=environment,
        text=True,
        capture_output=True,
        timeout=300,
        stdin=subprocess.DEVNULL,
    )


def texts(notebook):
    """All text that an executed notebook shows."""
    parts = []
    for cell in notebook["cells"]:
        for output in cell.get("outputs", []):
            parts.append("".join(output.get("text", "") or output.get("data", {}).get("text/plain", "")))
    return "\n".join(parts)


@pytest.fixture(scope="module")
def trained(repo, tmp_path_factory):
    """A short run, made by the literal command: no output path, the executed notebook goes down the pipe."""
    folder = tmp_path_factory.mktemp("job")
    done = papermill(repo, folder, "train", "-p", "algo", "drgrpo", output=None)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder, json.loads(done.stdout)


def test_literal_command_trains_and_writes_the_notebook_to_the_pipe(trained):
    folder, notebook = trained
    [run] = map(load_run, find_runs(str(folder / "runs/*")))
    assert run.finished and run.config["algorithm"]["name"] == "drgrpo" and run.config["n_steps"] == 2
    assert run.metrics.step.tolist() == [0, 1, 2]
    shown = texts(notebook)
    assert "train: 3/3 in" in shown and shown.count("%|") == 0  # one line of progress, the last
    images = [o for c in notebook["cells"] for o in c.get("outputs", []) if "image/png" in o.get("data", {})]
    assert len(images) == 1 and "val_reward_se" in shown and "A: " in shown


def test_notebook_runs_in_the_kernel_of_the_same_python(repo, tmp_path):
    import nbformat

    cell = nbformat.v4.new_code_cell("import sys; print(sys.prefix)")
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    nbformat.write(
        nbformat.v4.new_notebook(cells=[cell], metadata={"kernelspec": kernel}), tmp_path / "prefix.ipynb"
    )
    subprocess.run(
        [Path(sys.executable).with_name("papermill"), "prefix.ipynb", "out.ipynb"],
        cwd=tmp_path,
        check=True,
        capture_output=True,
        timeout=120,
        stdin=subprocess.DEVNULL,
    )
    assert texts(json.loads((tmp_path / "out.ipynb").read_text())).strip() == sys.prefix


def test_misspelt_names_and_bad_values_fail_the_job_by_name(repo, tmp_path):
    done = papermill(
        repo, tmp_path, "train", "-p", "lrr", "1e-4", "-p", "resume", "maybe", "-p", "seed", "[1,2]"
    )
    assert done.returncode == 1
    assert "lrr: unknown parameter; did you mean 'lr'?" in done.stderr
    assert "resume: 'maybe' is not true or false" in done.stderr
    assert "seed: '[1,2]' is not a whole number" in done.stderr
    assert not (tmp_path / "runs").exists()


def test_text_from_yaml_is_read_and_a_dry_run_trains_nothing(repo, tmp_path):
    done = papermill(
        repo,
        tmp_path,
        "train",
        "-y",
        "lr: 1e-5",
        "-p",
        "dry_run",
        "true",
        "-p",
        "resume",
        "no",
        "-r",
        "algo",
        "drgrp",
    )
    assert done.returncode == 1 and "drgrpo" in done.stderr  # did you mean
    done = papermill(
        repo,
        tmp_path,
        "train",
        "-y",
        "lr: 1e-5",
        "-p",
        "dry_run",
        "true",
        "-p",
        "resume",
        "no",
        "-p",
        "cliprange",
        "null",
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "lr 1e-05" in texts(json.loads((tmp_path / "out.ipynb").read_text()))
    assert not (tmp_path / "runs").exists()


def test_a_failure_keeps_the_run_and_says_how_to_go_on(repo, tmp_path, monkeypatch):
    """The run is stopped in its third step, as by a full disk; the printed command ends it."""
    startup = tmp_path / "ipython" / "profile_default" / "startup"  # code of a kernel that has its ports
    startup.mkdir(parents=True)
    (startup / "fail.py").write_text(
        "import os, rlkit.jobs.run_writer\n"
        "log = rlkit.jobs.run_writer.RunWriter.log\n"
        "def failing(self, row):\n"
        "    if row['step'] == 3 and not os.path.exists('failed'):\n"
        "        open('failed', 'w').close()\n"
        "        raise OSError('No space left on device')\n"
        "    log(self, row)\n"
        "rlkit.jobs.run_writer.RunWriter.log = failing\n"
    )
    settings = ["-p", "n_steps", "4", "-p", "checkpoint_every", "2", "-p", "seed", "3"]
    with monkeypatch.context() as patch:
        patch.delenv("PYTEST_CURRENT_TEST")  # with it a kernel leaves its descriptors alone
        patch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
        done = papermill(repo, tmp_path, "train", *settings)
    assert done.returncode == 1 and "No space left on device" in done.stderr, done.stderr[-2000:]
    shown = texts(json.loads((tmp_path / "out.ipynb").read_text()))
    assert "To go on from the last checkpoint, in a terminal:" in shown
    [run] = map(load_run, find_runs(str(tmp_path / "runs/*")))
    assert run.metrics.step.tolist() == [0, 1, 2] and not run.finished
    command = next(line for line in shown.splitlines() if line.strip().startswith("papermill "))
    assert f"-p run_dir {run.path} -p resume True" in command and command.strip() in done.stderr
    assert f"set run_dir = '{run.path}' and resume = True in its first cell" in shown
    elsewhere = tmp_path / "elsewhere"  # right wherever one stands
    elsewhere.mkdir()
    done = subprocess.run(
        [Path(sys.executable).with_name("papermill"), *shlex.split(command)[1:]],
        cwd=elsewhere,
        env=os.environ | {"JUPYTER_PREFER_ENV_PATH": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert run.finished and run.metrics.step.tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    "settings, said",
    [
        (
            ["-p", "n_val", "0"],
            (
                "no validation was made; the rewards of the training rollouts instead",
                "no validation was made; training responses of step 1, then of step 2",
            ),
        ),
        (
            ["-p", "rollouts_every", "0", "-p", "n_steps", "1"],
            ("validation responses of step 0, then of step 1", "no training responses were kept"),
        ),
        (
            ["-p", "n_val", "0", "-p", "n_steps", "0"],
            (
                "nothing to draw",
                "no step was trained either",
                "no responses were kept",
                "no training responses were kept",
            ),
        ),
    ],
    ids=["no_validation", "no_rollouts", "nothing"],
)
@pytest.mark.slow
def test_a_run_that_measured_little_is_still_a_finished_job(repo, tmp_path, settings, said):
    done = papermill(repo, tmp_path, "train", *settings)
    assert done.returncode == 0, done.stderr[-3000:]
    shown = texts(json.loads((tmp_path / "out.ipynb").read_text()))
    assert [text for text in said if text not in shown] == [] and "'finished': True" in shown


def test_evaluate_takes_a_runs_folder(repo, trained, tmp_path):
    folder, _ = trained
    [run] = find_runs(str(folder / "runs/*"))
    done = papermill(
        repo,
        tmp_path,
        "evaluate",
        "-p",
        "model",
        run,
        "-p",
        "n_problems",
        "8",
        "-p",
        "n_samples",
        "2",
        "-p",
        "sampler",
        "transformers",
        "-p",
        "against",
        "base",
        short=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    shown = texts(json.loads((tmp_path / "out.ipynb").read_text()))
    assert "difference" in shown and "better" in shown and "no second model" not in shown
    assert "8 problems x 2 samples, r1_zero; sampler transformers" in shown and "three_shot" not in shown
    assert "unknown parameter" not in done.stderr
    done = papermill(
        repo,
        tmp_path,
        "evaluate",
        "-p",
        "model",
        run,
        "-p",
        "n_problems",
        "8",
        "-p",
        "temperature",
        "0",
        short=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "8 problems x 1 samples, r1_zero" in texts(json.loads((tmp_path / "out.ipynb").read_text()))


def test_compare_refuses_what_is_no_run(repo, trained, tmp_path):
    folder, _ = trained
    done = papermill(repo, folder, "compare", "-p", "runs", "runs/*", short=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "one seed" not in texts(
        json.loads((folder / "out.ipynb").read_text())
    )  # that stands in the figure
    done = papermill(repo, tmp_path, "compare", "-p", "runs", "nothing/*", short=False)
    assert done.returncode == 1 and "means no run here" in done.stderr


# ---- the reading itself, without a kernel


def test_the_second_model_of_an_evaluation(trained):
    folder, _ = trained
    [run] = find_runs(str(folder / "runs/*"))
    job = EvaluateJob.from_parameters
    assert job({"model": str(run), "against": "base"}).against == "laptop"
    assert job({"against": str(run)}).against == str(run / "model")
    assert job({}).against is None
    for given, said in (
        ({"against": "base"}, "against: got 'base', but model is no run's folder"),
        ({"against": "no/such/model"}, "against: "),
    ):
        with pytest.raises(ValueError, match=said):
            job(given)


def test_every_parameter_of_a_job_is_in_its_parameters_cell(repo):
    """Papermill warns about the others, though they work."""
    for job, record in (("evaluate", EvaluateJob), ("compare", CompareJob)):
        cells = json.loads((repo / "notebooks" / f"{job}.ipynb").read_text())["cells"]
        [source] = [
            "".join(cell["source"]) for cell in cells if "parameters" in cell["metadata"].get("tags", [])
        ]
        named = {line.split(" =")[0] for line in source.splitlines() if not line.startswith("#")}
        candidates = {*Config.__dataclass_fields__, *record.__dataclass_fields__}
        taken = set()
        for name in candidates:
            try:
                record.from_parameters({"runs": "a"} | {name: None} if job == "compare" else {name: None})
                taken.add(name)
            except ValueError as error:
                assert "unknown parameter" in str(error) or name == "runs"
        assert named == taken | ({"runs"} if job == "compare" else set())


def test_parameters_are_the_plain_values_and_remembered():
    import math

    namespace = {
        "__name__": "__main__",
        "lr": 1e-4,
        "algo": "grpo",
        "PAPERMILL_INPUT_PATH": "x",
        "math": math,
        "parameters": parameters,
        "typo": [1],
    }
    assert parameters(namespace) == {"lr": 1e-4, "algo": "grpo", "typo": [1]}
    namespace |= {"lr": 3e-4, "run": "later"}
    assert parameters(namespace) == {"lr": 3e-4, "algo": "grpo", "typo": [1]}


@pytest.mark.parametrize(
    "values, message",
    [
        ({"n_problem": 3}, "n_problem: unknown parameter; did you mean 'n_problems'?"),
        ({"lr": 1e-3}, "lr: unknown parameter"),
        ({"n_problems": 0}, "n_problems: got 0, expected a whole number >= 1"),
        ({"n_samples": "2.5"}, "n_samples: '2.5' is not a whole number"),
        ({"fast": "maybe"}, "fast: 'maybe' is not true or false"),
        ({"prompts": 7}, "prompts: got 7"),
        ({"temperature": "nan"}, "temperature"),
        ({"temperature": -1}, "temperature: got -1, expected a number >= 0"),
        ({"prompts": "question_only,r1_zer"}, "prompts: got 'r1_zer', expected .* did you mean 'r1_zero'"),
        ({"prompts": "a\0b"}, "prompts: got .*expected names"),
        ({"model": "a\0b"}, "model: got .*NUL"),
        ({"model": "runs/a/b"}, "model: no folder 'runs/a/b'"),
    ],
)
def test_evaluate_job_refuses_by_name(values, message):
    with pytest.raises(ValueError, match=message.replace("?", r"\?")):
        EvaluateJob.from_parameters(values)


@pytest.mark.parametrize(
    "value",
    [
        "r1_zero, question_only",
        "[r1_zero, question_only]",
        '["r1_zero", "question_only"]',
        ["r1_zero", "question_only"],
    ],
)
def test_lists_may_arrive_as_text(value):
    assert EvaluateJob.from_parameters({"prompts": value}).prompts == ("r1_zero", "question_only")


def test_temperature_0_evaluates_greedily_one_response_each():
    for zero in (0, 0.0, "0"):
        job = EvaluateJob.from_parameters({"temperature": zero, "n_samples": 4})
        assert (job.temperature, job.n_samples, job.config.temperature) == (0, 1, 1)
    job = EvaluateJob.from_parameters({"temperature": 0.5, "n_samples": 4})
    assert (job.temperature, job.n_samples, job.config.temperature) == (0.5, 4, 0.5)
    assert EvaluateJob.from_parameters({}).temperature == 1


def test_what_only_sampling_takes_reaches_the_sampler_checked(tmp_path):
    given = dict(top_p="0.9", top_k=5, min_p=0.1, repetition_penalty=1.2, max_tokens=8, seed=3)
    job = EvaluateJob.from_parameters(given)
    assert job.sampling == given | {"top_p": 0.9, "temperature": 1.0}
    assert SamplingParams(**job.sampling).top_k == 5
    for name, value in (("top_p", 2), ("top_k", -1), ("min_p", 1.5), ("repetition_penalty", 0)):
        with pytest.raises(ValueError, match=f"^{name}: got {value}"):
            EvaluateJob.from_parameters({name: value})
    with pytest.raises(
        ValueError, match="(?s)^lr: unknown parameter.*model: no folder 'a/b/c'.*fast: 'x' is not"
    ):
        EvaluateJob.from_parameters({"fast": "x", "model": "a/b/c", "lr": 1})
    kept = dict(prompt="question_only", temperature=0.5, top_p=0.8, max_tokens=9, seed=2)
    run = make_run(tmp_path / "run", "grpo", values=[0.1], **kept)
    (run.path / "model").mkdir()
    (run.path / "model/config.json").touch()
    job = EvaluateJob.from_parameters({"model": str(run.path), "seed": 4})
    assert (job.temperature, job.top_p, job.config.max_tokens, job.config.seed) == (0.5, 0.8, 9, 4)
    assert job.prompts == ("question_only",) and job.config.temperature == 0.5


def test_compare_job_refuses_by_name():
    assert CompareJob.from_parameters({"runs": "a,b", "metrics": None}).runs == ("a", "b")
    with pytest.raises(ValueError, match="runs: got nothing"):
        CompareJob.from_parameters({})
    for value, text in ((0.001, "0.001"), ("1e-3", "1e-3"), (7, "7"), (True, "True")):
        assert CompareJob.from_parameters({"runs": "a", "baseline": value}).baseline == text
    with pytest.raises(ValueError, match="baseline: got \\[1\\], expected text"):
        CompareJob.from_parameters({"runs": "a", "baseline": [1]})
    with pytest.raises(ValueError, match="runs: got .*expected names"):
        CompareJob.from_parameters({"runs": "a\0*"})
    with pytest.raises(ValueError, match="by: got 'sed', expected a field of Config; did you mean 'seed'"):
        CompareJob.from_parameters({"runs": "a", "by": "sed"})


def make_run(folder, algo, seed=0, values=(), metric="val_reward", started=None, **fields):
    folder.mkdir(parents=True)
    provenance = {"provenance": {"started": f"2026-01-{started:02}T12:00:00+0000"}} if started else {}
    (folder / "config.json").write_text(
        json.dumps(
            {"algo": algo, "algorithm": {"name": algo}, "seed": seed, "n_steps": 40, "model": "laptop"}
            | {"rollout_batch_size": 128}
            | provenance
            | fields
        )
    )
    (folder / "metrics.jsonl").write_text(
        "".join(
            json.dumps({"step": 20 * i, "optimizer_steps": 1, metric: v, f"{metric}_se": 0.02}) + "\n"
            for i, v in enumerate(values)
        )
    )
    return load_run(folder)


def test_a_run_folder_whose_name_looks_like_a_pattern(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("runs/[a]*?", "runs/[b]"):
        make_run(tmp_path / name, "grpo", 0, [0.05, 0.5])
    (tmp_path / "runs/b").mkdir()
    assert find_runs("runs/[a]*?, runs/[b]") == [Path("runs/[a]*?"), Path("runs/[b]")]


def test_tables_of_several_seeds(tmp_path, monkeypatch):
    for seed, end in enumerate((0.70, 0.72, 0.74)):
        make_run(tmp_path / f"runs/a-{seed}", "grpo", seed, [0.05, 0.5, end])
        make_run(tmp_path / f"runs/b-{seed}", "drgrpo", seed, [0.05, 0.5, end + 0.01 * seed])
    make_run(tmp_path / "runs/c-0", "rft", 0, [0.05, 0.5, 0.9])
    (tmp_path / "runs/notes").mkdir()
    (tmp_path / "below").mkdir()
    monkeypatch.chdir(tmp_path / "below")  # patterns are looked for upwards
    paths = find_runs("runs/a-*, runs/b-*,runs/c-0")
    assert [p.name for p in paths] == ["a-0", "a-1", "a-2", "b-0", "b-1", "b-2", "c-0"]
    groups = group_runs([load_run(p) for p in paths])
    table = final_table(groups)
    # sd 0.02, t(0.975, 2) = 4.3027: 4.3027 * 0.02 / sqrt(3) = 0.0497
    assert table.loc["grpo"].tolist() == [3, 0.05, 0.72, 0.670, 0.770]
    assert pd.isna(table.loc["rft", "low"])
    gaps = difference_table(groups)
    # gaps 0, 0.01, 0.02: mean 0.01, sd 0.01, half width 4.3027 * 0.01 / sqrt(3) = 0.0248
    assert gaps.loc["drgrpo - grpo"].tolist()[:5] == [3, 0.01, -0.015, 0.035, "no difference shown"]
    assert 0.031 < gaps.loc["drgrpo - grpo", "detectable"] < 0.034  # 3.26 sd: published tables of n = 3
    assert sorted(difference_table({"rft": groups["rft"], **groups}).index) == sorted(gaps.index)
    assert gaps.loc["rft - grpo", "verdict"] == "no interval"
    with pytest.raises(ValueError, match="baseline: got 'grp'; did you mean 'grpo'"):
        difference_table(groups, "grp")


def names(groups):
    return {name: [run.name for run in runs] for name, runs in groups.items()}


def test_a_seed_counts_once_the_run_started_last(tmp_path):
    from rlkit.jobs.plots import seeds

    runs = [
        make_run(tmp_path / name, algo, 0, [0.1, 0.5, end], started=day)
        for name, algo, end, day in (
            ("a", "grpo", 0.6, 3),
            ("b", "grpo", 0.6, 1),
            ("c", "drgrpo", 0.7, 4),
            ("d", "drgrpo", 0.7, 2),
            ("e", "drgrpo", 0.7, 5),
        )
    ]
    (tmp_path / "a/config.json").write_text(
        (tmp_path / "a/config.json")
        .read_text()
        .replace("2026-01-03T12:00:00+0000", "2026-01-01T11:30:00-0100")
    )  # half an hour after b, by the other clock
    for refused in (final_table, difference_table, seeds):
        with pytest.raises(
            ValueError, match="groups: a, b of 'grpo' all have seed 0; expected one run of each seed"
        ):
            refused(group_runs(runs))
    groups, notes = comparison(runs)
    assert names(groups) == {"grpo": ["a"], "drgrpo": ["e"]}
    assert notes == [
        "grpo: several runs of seed 0; the latest of each seed counts: a; left out: b",
        "drgrpo: several runs of seed 0; the latest of each seed counts: e; left out: c, d",
    ]
    table, gaps = final_table(groups), difference_table(groups)
    assert table.seeds.tolist() == [1, 1] and table[["low", "high"]].isna().all(axis=None)
    assert gaps.loc["drgrpo - grpo", ["seeds", "verdict"]].tolist() == [1, "no interval"]
    [label] = [text.get_text() for text in seeds({"grpo": groups["grpo"]}).axes[0].get_legend().get_texts()]
    assert label == "grpo (one seed, no interval)"


def test_a_run_at_its_last_step_goes_before_a_later_one_that_stopped(tmp_path):
    runs = [
        make_run(tmp_path / "done", "grpo", 0, [0.1, 0.5, 0.6], started=1),
        make_run(tmp_path / "stopped", "grpo", 0, [0.1, 0.5], started=2),
        make_run(tmp_path / "going", "grpo", 1, [0.1], started=3),
    ]
    groups, notes = comparison(runs)
    assert names(groups) == {"grpo": ["done", "going"]}
    assert notes[0].endswith("counts: done; left out: stopped")
    assert notes[1] == "not at the last step, taken where they are: going (0 of 40)"


def test_what_runs_differ_in_besides_the_group_and_the_seed_is_said(tmp_path):
    def run(name, algo, seed, **fields):
        return make_run(tmp_path / name, algo, seed, [0.1, 0.5, 0.6], threads=seed, run_dir=name, **fields)

    same = [run(f"{algo}{seed}", algo, seed, lr=1e-4) for algo in ("grpo", "rft") for seed in (0, 1)]
    assert comparison(same)[1] == []
    groups, notes = comparison(
        [*same[:2], run("x0", "rft", 0, lr=1e-3, n_steps=10), run("x1", "rft", 1, lr=1e-3)]
    )
    assert notes == [
        "rft: its runs differ in more than the seed: n_steps 10 / 40",
        "groups differ in more than algo: n_steps 40 / 10, 40, lr 0.0001 / 0.001 (grpo / rft)",
    ]
    _, notes = comparison([same[0], run("y0", "grpo", 0, lr=1e-3), run("y1", "grpo", 1, lr=1e-3)], "lr")
    assert notes == []
    _, notes = comparison([same[0], run("z0", "grpo", 0, lr=1e-3)])  # a sweep whose `by` was forgotten
    assert notes[0].endswith("(they differ in lr 0.0001 / 0.001)")


def test_what_follows_from_the_algorithm_is_no_difference_of_its_own(tmp_path):
    shared = {"rollout_batch_size": 128, "max_tokens": 64}
    rows = [
        ("grpo", {"off_policy": False, "loss_normalization": "sequence", "cliprange": None}, 128, None, None),
        (
            "drgrpo",
            {"off_policy": False, "loss_normalization": "constant", "cliprange": None},
            128,
            None,
            8192.0,
        ),
        (
            "offpolicy_clip",
            {"off_policy": True, "loss_normalization": "sequence", "cliprange": 0.2},
            8,
            0.2,
            None,
        ),
    ]
    runs = [
        make_run(
            tmp_path / name,
            name,
            0,
            [0.1, 0.5, 0.6],
            algorithm={"name": name} | algorithm,
            cliprange=clip,
            train_batch_size=size,
            normalization_constant=constant,
            **shared,
        )
        for name, algorithm, size, clip, constant in rows
    ]
    assert comparison(runs)[1] == []
    other = make_run(
        tmp_path / "other",
        "offpolicy_clip",
        1,
        [0.1, 0.5, 0.6],
        train_batch_size=32,
        cliprange=0.2,
        algorithm={"name": "offpolicy_clip"} | rows[2][1],
        normalization_constant=None,
        **shared,
    )
    assert comparison([*runs, other])[1] == [
        "offpolicy_clip: its runs differ in more than the seed: train_batch_size default / 32",
        "groups differ in more than algo: train_batch_size default / default / default, 32 "
        "(grpo / drgrpo / offpolicy_clip)",
    ]


def test_a_run_without_a_step_is_left_out(tmp_path):
    runs = [make_run(tmp_path / "a", "grpo", 0, [0.1, 0.5, 0.6]), make_run(tmp_path / "new", "rft", 1, [])]
    groups, notes = comparison(runs)
    assert names(groups) == {"grpo": ["a"]} and notes == ["left out, no step is logged yet: new"]
    with pytest.raises(ValueError, match="runs: no step is logged yet in new; expected runs with metrics"):
        comparison(runs[1:])


def test_validation_table_falls_back_on_training_rewards(tmp_path, capsys):
    run = make_run(tmp_path / "a", "grpo", 0, [0.1, 0.5])
    assert validation_table(run).val_reward.tolist() == [0.1, 0.5] and capsys.readouterr().out == ""
    run = make_run(tmp_path / "b", "grpo", 0, [i / 100 for i in range(91)], "reward")
    assert validation_table(run).reward.tolist() == [i / 10 for i in range(10)]  # ten of 91, evenly
    assert "no validation was made; the rewards of the training rollouts instead" in capsys.readouterr().out


def test_responses_before_and_after(tmp_path, capsys):
    run = make_run(tmp_path / "a", "grpo", 0, [])
    assert [len(rows) for rows in before_and_after(run)] == [0, 0] and training_group(run).empty

    def write(*rows):
        (run.path / "rollouts.jsonl").write_text(
            "".join(json.dumps(dict(zip(("split", "step", "group", "reward"), row))) + "\n" for row in rows)
        )
        return before_and_after(run)

    train = [
        ("train", 1, 0, 1.0),
        ("train", 1, 0, 0.0),
        ("train", 9, 0, 1.0),
        ("train", 9, 0, 1.0),
        ("train", 9, 1, 0.0),
        ("train", 9, 1, 1.0),
    ]
    before, after = write(*train)
    assert (before.index.tolist(), after.index.tolist()) == ([0, 1], [2, 3, 4, 5])
    assert training_group(run).index.tolist() == [4, 5]  # the group with both
    capsys.readouterr()
    before, after = write(("validation", 0, 0, 0.0), *train, ("validation", 9, 0, 1.0))
    assert (before.index.tolist(), after.index.tolist()) == ([0], [7])
    before, after = write(*train, ("validation", 9, 0, 1.0))
    assert len(before) == 1 and after.empty
    assert capsys.readouterr().out == (
        "validation responses of step 0, then of step 9\nvalidation responses of step 9 alone\n"
    )


def test_a_baseline_is_found_by_its_value(tmp_path):
    runs = [
        make_run(tmp_path / f"r{i}", "grpo", 0, [0.1], lr=lr, autocast=i > 0, n_val=256)
        for i, lr in enumerate((1e-4, 1e-3, 2.0))
    ]
    groups = group_runs(runs, "lr")
    assert list(groups) == ["0.0001", "0.001", "2.0"] and find_group(groups) == "0.0001"
    for value in (0.001, "0.001", "1e-3", "1E-3", " .001"):
        assert find_group(groups, value) == "0.001"
        assert "0.0001 - 0.001" in difference_table(groups, value).index
    assert find_group(groups, 2) == find_group(groups, "2") == "2.0"
    assert (
        find_group(group_runs(runs, "autocast"), "true")
        == find_group(group_runs(runs, "autocast"), True)
        == "True"
    )
    with pytest.raises(ValueError, match="baseline: got 0.002.*"):
        find_group(groups, 0.002)
    with pytest.raises(ValueError, match="by: r0 has no 'top_p' in its config.json"):
        group_runs(runs, "top_p")


def test_metrics_are_checked_against_what_the_runs_have(tmp_path):
    validated = [make_run(tmp_path / f"v{i}", "grpo", i, [0.1, 0.5]) for i in (0, 1)]
    plain = [make_run(tmp_path / f"p{i}", "grpo", i, [0.2, 0.4], "reward") for i in (0, 1)]
    assert shared_metrics(validated) == ("val_reward",) and shared_metrics(plain) == ("reward",)
    assert final_table(group_runs(plain), "reward").loc["grpo", ["start", "end"]].tolist() == [0.2, 0.4]
    for runs, metrics, message in (
        (validated, ["val_rewrd"], "metrics: no run has 'val_rewrd'; did you mean 'val_reward'"),
        (plain, ["val_reward"], "metrics: no run has 'val_reward' .made without validation, n_val=0."),
        (validated + plain, ["val_reward"], "metrics: 'val_reward' is not in p0, p1"),
        (validated + plain, None, "metrics: none of val_reward, reward, .* is in every run"),
    ):
        with pytest.raises(ValueError, match=message):
            shared_metrics(runs, metrics)
    (tmp_path / "p0/metrics.jsonl").write_text("")
    with pytest.raises(ValueError, match="runs: no step is logged yet in p0"):
        shared_metrics(plain)


def test_runs_without_validation_are_compared_by_their_rewards(repo, tmp_path):
    for seed in (0, 1):
        for lr, end in ((1e-4, 0.4), (1e-3, 0.6)):
            make_run(tmp_path / f"runs/{lr}-{seed}", "grpo", seed, [0.2, end], "reward", lr=lr)
    make_run(tmp_path / "runs/new", "grpo", 2, [], lr=1e-4)
    done = papermill(
        repo,
        tmp_path,
        "compare",
        "-p",
        "runs",
        "runs/*",
        "-p",
        "by",
        "lr",
        "-p",
        "baseline",
        "1e-4",
        short=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    shown = texts(json.loads((tmp_path / "out.ipynb").read_text()))
    assert "by reward" in shown and "0.001 - 0.0001" in shown and "train_reward_last_10" in shown
    assert "left out, no step is logged yet: new" in shown and "seeds: {'0.0001': 2, '0.001': 2}" in shown
    done = papermill(repo, tmp_path, "compare", "-p", "runs", "runs/*", "-p", "metrics", "rewrd", short=False)
    assert done.returncode == 1 and "metrics: no run has 'rewrd'; did you mean 'reward'?" in done.stderr


def test_category_table_counts_and_intervals():
    from rlkit.tasks.evaluation import summarize

    rows = pd.DataFrame(
        [
            {
                "problem": i,
                "sample": 0,
                "reward": r,
                "format_reward": f,
                "answer_reward": r,
                "length": 5,
                "finish_reason": "stop",
                "n_steps": None,
            }
            for i, (f, r) in enumerate([(1.0, 1.0)] * 2 + [(1.0, 0.0)] * 3 + [(0.0, 0.0)] * 5)
        ]
    )
    table = category_table({"p": summarize(rows)})
    assert table["count"].tolist() == [2, 3, 5]
    # Wilson, 2 of 10 at 95 %: 0.0567 to 0.5098
    assert table.loc[("p", 1, 1), ["low", "high"]].tolist() == [0.057, 0.510]
