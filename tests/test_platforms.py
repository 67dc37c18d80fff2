"""Windows, as far as Linux can play it: no POSIX modules, its file system, few characters to print."""

import os
import subprocess
import sys

import pytest

# a Python in which everything is missing that Windows lacks; third-party libraries get along without, too
WITHOUT_POSIX = """
import os, signal, sys
import torch, transformers, pandas, psutil, matplotlib, IPython, papermill, multiprocessing.util

MODULES = "fcntl resource termios pwd grp tty pty syslog".split()
FUNCTIONS = "fork forkpty killpg getuid geteuid getgid getpgid getsid setsid setpgrp uname nice mkfifo chown"
CONSTANTS = "sched_getaffinity sched_setaffinity getloadavg O_DIRECTORY"
SIGNALS = "SIGHUP SIGKILL SIGUSR1 SIGUSR2 SIGALRM SIGCHLD SIGPIPE SIGQUIT alarm setitimer pthread_sigmask"


class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name in MODULES:
            raise ModuleNotFoundError(name)


for name in MODULES:
    sys.modules.pop(name, None)
sys.meta_path.insert(0, Blocked())
for name in (FUNCTIONS + " " + CONSTANTS).split():
    delattr(os, name)
for name in SIGNALS.split():
    delattr(signal, name)
"""


def run(code, **options):
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, **options)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def modules(repo):
    names = [path.relative_to(repo).with_suffix("") for path in sorted((repo / "rlkit").rglob("*.py"))]
    dotted = [".".join(name.parts).removesuffix(".__init__") for name in names]
    # vLLM's own process and the guard around it, which no Windows has
    own = ("rlkit.samplers.vllm.worker", "rlkit.samplers.vllm.guard")
    return [name for name in dotted if name not in own]


@pytest.mark.slow
def test_everything_imports_and_trains_without_posix(repo, tmp_path):
    code = f"""{WITHOUT_POSIX}
from importlib import import_module
for name in {modules(repo)!r}:
    import_module(name)
from dataclasses import replace
from rlkit import Config, doctor
from rlkit.trainer import train
doctor()
config = Config(n_steps=2, n_train=32, n_val=4, n_val_final=4, rollout_batch_size=16, checkpoint_every=1,
                run_dir={str(tmp_path / "run")!r})
assert train(config).finished
assert train(replace(config, resume=True, n_steps=3)).metrics.step.tolist() == [0, 1, 2, 3]
assert train(replace(config, run_dir=None, dry_run=True)) is None
print("trained")
"""
    assert run(code, cwd=tmp_path).endswith("trained\n")


WINDOWS_FILES = """
import builtins, io, os, re, shutil
taken = {}  # path of an open file -> how many handles


def key(path):
    return os.path.normcase(os.path.abspath(os.fspath(path))).lower()


def legal(path):
    for part in os.path.abspath(os.fspath(path)).split("/"):
        if re.search(r'[<>:"|?*\\\\\\x00-\\x1f]', part) or part.endswith((" ", ".")):
            raise OSError(22, "Invalid argument", os.fspath(path))
        if re.fullmatch(r"(?i)(con|prn|aux|nul|com\\\\d|lpt\\\\d)(\\\\..*)?", part):
            raise OSError(22, "a reserved name", os.fspath(path))


def guarded(name, module, *, positions):
    real = getattr(module, name)

    def call(*paths, **options):
        for i in positions:
            if i < len(paths) and isinstance(paths[i], (str, os.PathLike)):
                base = key(paths[i])
                if options.get("dir_fd") is not None:
                    continue
                if any(open_ == base or open_.startswith(base + "/") for open_ in taken):
                    raise PermissionError(13, "another process uses the file", os.fspath(paths[i]))
                legal(paths[i])
        if name == "rename" and os.path.lexists(paths[1]):
            raise FileExistsError(17, "the file exists already", os.fspath(paths[1]))
        return real(*paths, **options)

    setattr(module, name, call)


real_open = builtins.open


def tracked_open(file, mode="r", *rest, **options):
    ours = isinstance(file, (str, os.PathLike)) and watched(file)
    if ours:
        legal(file)
    handle = real_open(file, mode, *rest, **options)
    if ours:
        name = key(file)
        taken[name] = taken.get(name, 0) + 1
        real_close = handle.close

        def close():
            if not handle.closed:
                taken[name] -= 1
                if not taken[name]:
                    del taken[name]
            real_close()

        try:
            handle.close = close
        except AttributeError:  # a binary file has no room for it: see below
            return _Tracked(handle, name)
    return handle


class _Tracked:
    def __init__(self, handle, name):
        self.__dict__.update(handle=handle, name=name)

    def __getattr__(self, name):
        return getattr(self.handle, name)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.close()

    def __iter__(self):
        return iter(self.handle)

    def close(self):
        if not self.handle.closed:
            taken[self.name] -= 1
            if not taken[self.name]:
                del taken[self.name]
        self.handle.close()


def watched(path):
    return key(path).startswith(key(FOLDER))


builtins.open = io.open = tracked_open
guarded("replace", os, positions=(0, 1))
guarded("rename", os, positions=(0, 1))
guarded("unlink", os, positions=(0,))
guarded("remove", os, positions=(0,))
guarded("rmdir", os, positions=(0,))
real_os_open = os.open


def no_folders(path, *rest, **options):
    named = isinstance(path, (str, os.PathLike)) and "dir_fd" not in options
    if named and watched(path) and os.path.isdir(path):
        raise PermissionError(13, "Permission denied", os.fspath(path))
    return real_os_open(path, *rest, **options)


os.open = no_folders
shutil._use_fd_functions = False  # as on Windows
"""


@pytest.mark.slow
def test_a_run_on_windows_file_rules(tmp_path):
    """Open files stay where they are, a rename replaces nothing, no folder is opened, no ":" in names."""
    folder = str(tmp_path)
    code = f"""FOLDER = {folder!r}
import sys
{WINDOWS_FILES}
# the rules hold
for name in ("a:b", "nul", "x?.txt"):
    try:
        open(FOLDER + "/" + name, "w")
        raise SystemExit(name + " was made")
    except OSError:
        pass
file = open(FOLDER + "/open.txt", "w")
for what in (os.unlink, lambda path: os.replace(path, path + "2")):
    try:
        what(FOLDER + "/open.txt")
        raise SystemExit("an open file was moved")
    except PermissionError:
        pass
file.close()
os.unlink(FOLDER + "/open.txt")
from dataclasses import replace
from rlkit import Config, train
from rlkit.jobs.runs import checkpoints
config = Config(n_steps=4, n_train=32, n_val=4, n_val_final=4, rollout_batch_size=16, checkpoint_every=1,
                run_dir=FOLDER + "/Run")


try:
    calls = []
    def reward(response, ground_truth):
        calls.append(1)
        if len(calls) > 40:
            raise RuntimeError("stop here")
        return {{"reward": 0.0}}
    train(config, reward_fn=reward)
    raise SystemExit("did not stop")
except RuntimeError:
    pass
assert [p.name for p in checkpoints(config.run_dir)] == ["step-000001", "step-000002"]
reward.__code__ = (lambda response, ground_truth: {{"reward": 0.0}}).__code__
run = train(replace(config, resume=True), reward_fn=reward)
assert run.finished and run.metrics.step.tolist() == [0, 1, 2, 3, 4]
assert [p.name for p in checkpoints(config.run_dir)] == ["step-000004"]
assert not taken, taken
files = [(at, name) for at, _, found in os.walk(FOLDER) for name in found]
names = [os.path.relpath(os.path.join(at, name), FOLDER) for at, name in files]
assert len({{name.lower() for name in names}}) == len(names), names
for name in names:
    legal(name)
print("done")
"""
    assert run(code, cwd=tmp_path).endswith("done\n")


@pytest.mark.slow
@pytest.mark.parametrize("encoding", ["cp1252", "ascii"])
def test_what_we_print_can_be_printed(encoding, tmp_path):
    """An old encoding of stdout ends no job, also where a model or a folder has other scripts."""
    code = """
import sys
import pandas
from rlkit import Config, doctor
from rlkit.jobs.parameters import print_responses
from rlkit.trainer import train

folder, tasks = "run-\\u0e01\\u03c0", dict(n_train=16, n_val=2, n_val_final=2, rollout_batch_size=8)
row = {"question": "\\u2192", "response": "\\U0001f600", "gold": "\\u0e01"}
for job in (
    lambda: print_responses(pandas.DataFrame([row])),
    doctor,
    lambda: train(Config(**tasks, run_dir=folder, dry_run=True)),
    lambda: train(Config(**tasks, run_dir=folder, n_steps=1)),
):
    sys.stdout.reconfigure(errors="strict")
    job()
print("printed")
"""
    done = run(code, cwd=tmp_path, env=os.environ | {"PYTHONIOENCODING": encoding, "PYTHONUTF8": "0"})
    assert done.endswith("printed\n") and "\\u03c0" in done and "\\U0001f600" in done
