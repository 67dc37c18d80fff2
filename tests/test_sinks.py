"""Sinks: imported only when asked for, told the same lines as metrics.jsonl."""

import sys
from types import ModuleType

import pytest

from rlkit.jobs.sinks import check_sink, open_sink


def test_none_keeps_nothing_and_unknown_names_are_refused(tmp_path):
    sink = open_sink("none", tmp_path, {})
    sink.log({"loss": 1.0}, 1)
    sink.close()
    assert not list(tmp_path.iterdir())
    with pytest.raises(ValueError, match="^sink: got 'mlflow'"):
        open_sink("mlflow", tmp_path, {})


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_trackers_get_config_lines_and_an_end(tmp_path, monkeypatch, name):
    calls, module = [], ModuleType(name)
    module.init = lambda **options: calls.append(("init", options["name"], options["config"]))
    module.log = lambda row, step: calls.append(("log", row, step))
    module.finish = lambda: calls.append(("finish",))
    monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr("rlkit.jobs.sinks.find_spec", lambda package: object())
    sink = open_sink(name, tmp_path / "run-1", {"lr": 1e-4})
    sink.log({"loss": 0.5}, 3)
    sink.close()
    assert calls == [("init", "run-1", {"lr": 1e-4}), ("log", {"loss": 0.5}, 3), ("finish",)]


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setattr("rlkit.jobs.sinks.find_spec", lambda package: None)
    for name in ("wandb", "tensorboard", "trackio"):
        with pytest.raises(ValueError, match=f"^sink: got '{name}', but {name} is not installed"):
            check_sink(name)
    check_sink("none")


def test_tensorboard_writes_events(tmp_path):
    pytest.importorskip("tensorboard")
    sink = open_sink("tensorboard", tmp_path, {})
    sink.log({"loss": 0.5, "reward": 0.25}, 1)
    sink.close()
    assert any(path.stat().st_size for path in (tmp_path / "tensorboard").iterdir())
