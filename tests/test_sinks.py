"""Sinks: what a tracker gets, that a run goes on in it, and that no fault of a tracker reaches the run."""

import json
import os
import subprocess
import sys
import time

import psutil
import pytest

from rlkit.jobs import sinks
from rlkit.jobs.config import Config
from rlkit.jobs.planning import plan
from rlkit.jobs.run_writer import RunWriter
from rlkit.jobs.runs import Run
from rlkit.jobs.sinks import check_sink, open_sink

# a package with wandb's functions: notes in a file what it is told; each can have a fault, a line of Python
FAKE = """
import atexit, json, os, sys, threading, time

def note(*what):
    with open({seen!r}, "a") as file:
        file.write(json.dumps(what) + "\\n")

class Settings:
    def __init__(self, **values): self.values = values

def Table(**values): return {{"table": len((values.get("data") or values["dataframe"].values.tolist()))}}

def init(**options):
    note("init", {{k: v for k, v in options.items() if k != "settings"}})
    {init}

def log(row, step):
    note("log", step, row)
    {log}

def finish():
    note("finish")
    {finish}

def login(**options): return False
def setup(): return type("", (), {{"settings": type("", (), {{"mode": "online"}})}})
"""


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """fake(init=..., log=..., finish=...) puts such a wandb and trackio in front of the installed ones."""

    def make(**faults):
        seen, folder = tmp_path / "seen", tmp_path / "packages"
        folder.mkdir()
        code = FAKE.format(seen=str(seen), **{"init": "", "log": "", "finish": ""} | faults)
        for name in ("wandb", "trackio"):
            (folder / f"{name}.py").write_text(code)
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")]))
        monkeypatch.setenv("WANDB_MODE", "offline")
        monkeypatch.setattr(sinks, "find_spec", lambda package: object())
        monkeypatch.setattr(sinks, "CALL_SECONDS", 2)
        monkeypatch.setattr(sinks, "CLOSE_SECONDS", 4)
        return lambda: [json.loads(line) for line in seen.read_text().splitlines()] if seen.exists() else []

    return make


@pytest.fixture
def writer(tmp_path):
    """writer(name) is the folder of a run that has begun."""

    def make(name="laptop-grpo-seed3"):
        (tmp_path / name).mkdir(exist_ok=True)
        config = {"algorithm": {"name": "grpo"}, "model": "m", "seed": 3, "n_steps": 9, "preset": "laptop"}
        if not (tmp_path / name / "config.json").exists():
            (tmp_path / name / "config.json").write_text(json.dumps(config))
        return RunWriter(tmp_path / name)

    return make


ROLLOUTS = [
    {"prompt": f"p{i}", "response": "a | b\n<b>", "gold": "1", "reward": 0.0, "step": 1} for i in range(9)
]


def run_five(name, folder, first=0):
    """Log five rows; the longest log call in seconds."""
    sink, longest = open_sink(name, folder, first), 0.0
    for step in range(first, first + 5):
        start = time.monotonic()
        sink.log({"step": step, "loss": step / 2}, step, ROLLOUTS if step == first else ())
        longest = max(longest, time.monotonic() - start)
    sink.close()
    return longest


def test_none_keeps_nothing_and_unknown_names_are_refused(writer):
    sink = open_sink("none", writer())
    sink.log({"loss": 1.0}, 1)
    sink.close()
    assert [path.name for path in writer().path.iterdir()] == ["config.json"]
    with pytest.raises(ValueError, match="^sink: got 'mlflow'"):
        open_sink("mlflow", writer())


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_trackers_get_config_rows_a_table_and_an_end(fake, writer, name, capsys):
    seen, folder = fake(), writer()
    run_five(name, folder)
    calls, config = seen(), Run(folder.path).config
    (_, options), run_id = calls[0], config["tracker_id"]
    assert options["config"] == config and options["group"] == "laptop-grpo" and options["resume"] == "allow"
    if name == "wandb":
        assert options["id"] == run_id and options["name"] == "laptop-grpo-seed3"
        assert options["tags"] == ["laptop", "grpo", "seed3"] and options["dir"] == str(folder.path)
    else:
        assert options["name"] == run_id
    assert calls[1] == ["log", 0, {"loss": 0.0, "rollouts": {"table": 4}}]
    assert calls[2:] == [["log", step, {"loss": step / 2}] for step in range(1, 5)] + [["finish"]]
    assert capsys.readouterr().out == ""


def test_an_id_belongs_to_one_run_and_stays_when_it_goes_on(fake, writer, tmp_path):
    seen = fake()
    (tmp_path / "other").mkdir()
    run_five("wandb", writer())
    run_five("wandb", writer(), first=5)
    run_five("wandb", writer("other/laptop-grpo-seed3"))
    odd = writer("a b:c[1]")
    run_five("wandb", odd)
    ids = [options["id"] for call, *rest in seen() if call == "init" for options in rest]
    assert ids[0] == ids[1] != ids[2] and ids[3].startswith("a-b-c-1-")


FOR_EVER = "time.sleep(1e6)"
FAULTS = ["raise ConnectionError('no route')", "sys.exit('tracker says no')", "os._exit(3)", FOR_EVER]


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("call", ["init", "log", "finish"])
def test_no_fault_of_a_tracker_reaches_the_run(fake, writer, capsys, call, fault):
    fake(**{call: fault})
    start = time.monotonic()
    assert run_five("wandb", writer()) < 0.5
    assert time.monotonic() - start < 10
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("warning: wandb: ") and said[0].endswith("; the run goes on without it")
    reasons = ["ConnectionError: no route", "SystemExit: tracker says no", "it ended, or", "longer than 2 s"]
    assert reasons[FAULTS.index(fault)] in said[0]
    lost = ["wandb: 5 of 5 rows dropped; metrics.jsonl has all"] if call != "finish" else []
    assert said[1:] == lost


def test_a_slow_tracker_costs_rows_and_not_time(fake, writer, capsys, monkeypatch):
    seen = fake(log="time.sleep(0.1)")
    monkeypatch.setattr(sinks, "ROWS", 5)
    sink, start = open_sink("wandb", writer()), time.monotonic()
    for step in range(100):
        sink.log({"loss": 1.0}, step)
    assert time.monotonic() - start < 0.5
    sink.close()
    said, taken = capsys.readouterr().out.splitlines(), sum(call == "log" for call, *_ in seen())
    assert said == [
        "warning: wandb: 5 rows wait for it; the run goes on without it",
        f"wandb: {100 - taken} of 100 rows dropped; metrics.jsonl has all",
    ]
    assert 5 <= taken <= 30 and seen()[-1] == ["finish"]


@pytest.mark.slow
def test_a_tracker_that_will_not_end_ends_with_the_run(fake, writer, tmp_path):
    """A hook at exit, a thread that is not a daemon and a call that sleeps: neither the run nor it stays."""
    stay = "threading.Thread(target=time.sleep, args=(1e6,)).start(); atexit.register(time.sleep, 1e6)"
    seen, folder = fake(init=f"{stay}; note(os.getpid())"), writer()
    code = f"""
from pathlib import Path
from rlkit.jobs import sinks
from rlkit.jobs.config import Config
from rlkit.jobs.planning import plan
from rlkit.jobs.run_writer import RunWriter
sinks.CALL_SECONDS, sinks.CLOSE_SECONDS, sinks.find_spec = {{call}}, {{close}}, lambda name: True
sink = sinks.open_sink("wandb", RunWriter(Path({str(folder.path)!r})))
sink.log({{{{"loss": 1.0}}}}, 1)
sink.close()
"""
    for call, close in ((30, 1), (1, 30)):
        subprocess.run([sys.executable, "-c", code.format(call=call, close=close)], timeout=60, check=True)
    [first, second] = [call[0] for call in seen() if isinstance(call[0], int)]
    gone(first), gone(second)


def test_a_killed_run_leaves_no_tracker_behind(fake, writer):
    seen, folder = fake(init="note(os.getpid())", log="note('taken')"), writer()
    code = f"""
import os, time
from pathlib import Path
from rlkit.jobs import sinks
from rlkit.jobs.config import Config
from rlkit.jobs.planning import plan
from rlkit.jobs.run_writer import RunWriter
sinks.find_spec = lambda name: True
sink = sinks.open_sink("wandb", RunWriter(Path({str(folder.path)!r})))
sink.log({{"loss": 1.0}}, 1)
while not sink.taken:
    time.sleep(0.05)
os.kill(os.getpid(), 9)
"""
    subprocess.run([sys.executable, "-c", code], timeout=60)
    [child] = [call[0] for call in seen() if isinstance(call[0], int)]
    gone(child)
    assert seen()[-1] == ["finish"]


def gone(pid, seconds=10):
    end = time.monotonic() + seconds
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < end, f"{pid} still runs"
        time.sleep(0.05)


# ---- the check before a run


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setattr(sinks, "find_spec", lambda package: None)
    for name in ("wandb", "tensorboard", "trackio"):
        with pytest.raises(ValueError, match=f"^sink: got '{name}', but {name} is not installed"):
            check_sink(name)
    check_sink("none")


def test_wandb_without_a_login_is_refused_and_nobody_is_asked(fake, monkeypatch):
    fake()
    check_sink("wandb")  # offline
    monkeypatch.delenv("WANDB_MODE")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    with pytest.raises(ValueError, match="^sink: got 'wandb', but nobody is logged in .*WANDB_MODE=offline"):
        check_sink("wandb")
    small = dict(n_train=32, n_val=4, n_val_final=4, n_steps=1)
    errors = {name: plan(Config(sink=name, **small))["errors"] for name in ("wandb", "trackio", "none")}
    assert [len(lines) for lines in errors.values()] == [1, 0, 0] and "nobody is logged in" in errors[
        "wandb"
    ][0]
    monkeypatch.setenv("WANDB_API_KEY", "x" * 40)
    check_sink("wandb")


def test_the_installed_wandb_is_asked_without_a_prompt(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    for name in ("WANDB_API_KEY", "WANDB_MODE", "NETRC"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "config"))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="nobody is logged in"):
        check_sink("wandb")
    (tmp_path / ".netrc").write_text(f"machine api.wandb.ai\n  login user\n  password {'0123456789' * 4}\n")
    (tmp_path / ".netrc").chmod(0o600)
    check_sink("wandb")


# ---- the real packages


def test_tensorboard_shows_no_step_twice(writer):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run_five("tensorboard", writer())
    time.sleep(1.1)  # its files are ordered by names that hold the second
    run_five("tensorboard", writer(), first=3)  # as after a kill: 3 and 4 were logged, the checkpoint is 2
    read = EventAccumulator(str(writer().path / "tensorboard"))
    read.Reload()
    assert [(event.step, event.value) for event in read.Scalars("loss")] == [(s, s / 2) for s in range(8)]
    assert read.Tags()["scalars"] == ["loss"]
    texts = {e.step: e.tensor_proto.string_val[0].decode() for e in read.Tensors("rollouts/text_summary")}
    assert sorted(texts) == [0, 3] and texts[0].count("\n") == 5 and "&lt;b&gt;" in texts[0]


def test_wandb_offline_holds_the_rows_and_one_id(writer, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    folder = writer()
    run_five("wandb", folder)
    run_five("wandb", folder, first=5)
    files = sorted(folder.path.glob("wandb/offline-run-*/*.wandb"))
    run_id = Run(folder.path).config["tracker_id"]
    assert [file.name for file in files] == [f"run-{run_id}.wandb"] * 2
    records = [record for file in files for record in wandb_records(file)]
    runs = [record.run for record in records if record.WhichOneof("record_type") == "run"]
    assert {(run.run_id, run.display_name, run.run_group, tuple(run.tags)) for run in runs} == {
        (run_id, folder.path.name, "laptop-grpo", ("laptop", "grpo", "seed3"))
    }
    found = {}
    for record in records:
        if record.WhichOneof("record_type") == "history":
            items = {
                item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item
            }
            found[items["_step"]] = (items["loss"], "rollouts" in items)
    assert found == {step: (step / 2, step in (0, 5)) for step in range(10)}
    [table, _] = folder.path.glob("wandb/offline-run-*/files/media/table/*.json")
    assert json.loads(table.read_text())["columns"] == ["prompt", "response", "gold", "reward"]


def wandb_records(path):
    """The records of a .wandb file: LevelDB's log format in blocks of 32 KiB, after 7 bytes."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, parts = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        size, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        parts, at = parts + data[at + 7 : at + 7 + size], at + 7 + size
        if kind in (1, 4):  # whole, or the last part
            yield Record.FromString(parts)
            parts = b""


def test_wandb_whose_service_hangs_ends_in_time(writer, monkeypatch, capsys):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setattr(sinks, "CALL_SECONDS", 30)
    monkeypatch.setattr(sinks, "CLOSE_SECONDS", 5)
    sink = open_sink("wandb", writer())
    sink.log({"loss": 1.0}, 0)
    end, services = time.monotonic() + 30, []
    while not (sink.taken and services) and time.monotonic() < end:
        time.sleep(0.1)
        services = psutil.Process(sink.child.pid).children(True)
    pids = [process.pid for process in services]
    for process in services:
        process.suspend()
    try:
        sink.log({"loss": 1.0}, 1)
        start = time.monotonic()
        sink.close()
        assert time.monotonic() - start < 10
    finally:
        for process in services:
            process.resume()
    assert "warning: wandb: " in capsys.readouterr().out
    for pid in pids:
        gone(pid, 30)


def test_trackio_goes_on_in_the_same_run(writer, monkeypatch, tmp_path):
    pytest.importorskip("trackio")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    run_five("trackio", writer())
    run_five("trackio", writer(), first=3)
    code = """
import json, trackio
from trackio.sqlite_storage import SQLiteStorage
runs = list(trackio.Api().runs("rlkit"))
print(json.dumps([[run.name, SQLiteStorage.get_logs("rlkit", run.name)] for run in runs]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    [[name, logs]] = json.loads(done.stdout.splitlines()[-1])
    assert name == Run(writer().path).config["tracker_id"]
    assert [(row["step"], row["loss"]) for row in logs] == [(step, step / 2) for step in range(8)]
    assert [row["step"] for row in logs if "rollouts" in row] == [0]
