"""A guard: runs a command that must not outlive the process that asked for it.

    python -I guard.py PARENT_PID FOLDER -- COMMAND ...

The guard leads a new session, so whatever the command starts is in its process group. It ends when the
command
ends, on SIGTERM, or when PARENT_PID is no longer its parent: then that process is dead, whichever signal
ended it and whichever thread started the guard. It then sends SIGTERM, and later SIGKILL, to the rest of its
group and to no other process. If the parent is dead, it removes FOLDER and the folders that FOLDER/also
lists.
"""

import ctypes
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import psutil

TERM_SECONDS = 10  # from SIGTERM to SIGKILL
STOP_SECONDS = 25  # for the guard to end its command
ORPHAN_SECONDS = 5  # for a command whose guard was killed, which sends it SIGTERM


def main(arguments: list[str]) -> int:
    parent, folder, command = int(arguments[0]), Path(arguments[1]), arguments[3:]
    asked, also = threading.Event(), folder / "also"
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: asked.set())
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        child = subprocess.Popen(command, preexec_fn=_die_with_parent)
        while child.poll() is None and os.getppid() == parent and not asked.wait(0.2):
            pass
        group = os.getpgrp()
        segments = shared_memory(group)  # before the command kills those that have them mapped
        if child.poll() is None:
            child.terminate()
        _wait(lambda: child.poll() is not None, TERM_SECONDS)
        segments |= shared_memory(group)
        for number, patience in ((signal.SIGTERM, TERM_SECONDS / 2), (signal.SIGKILL, TERM_SECONDS)):
            for process in others(group):
                with suppress(psutil.Error):
                    process.send_signal(number)
            _wait(lambda: not others(group), patience)
        for segment in segments:
            segment.unlink(missing_ok=True)
        code = child.wait()
    finally:
        if os.getppid() != parent:
            for unwanted in [*(also.read_text().splitlines() if also.is_file() else []), folder]:
                shutil.rmtree(unwanted, ignore_errors=True)
    return code if code >= 0 else 128 - code


def _die_with_parent() -> None:
    """SIGTERM for the command if the guard itself is killed (Linux only)."""
    with suppress(AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # 1 is PR_SET_PDEATHSIG
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def others(group: int) -> list[psutil.Process]:
    """The live processes of a group, except for this one."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            if os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return [process for process in found if process.pid != os.getpid()]


def shared_memory(group: int) -> set[Path]:
    """The files of Python's shared memory and semaphores that the group's processes have mapped."""
    found = set()
    for process in others(group):
        with suppress(psutil.Error, OSError):
            found |= {m.path for m in process.memory_maps() if re.match("/dev/shm/(psm_|sem.mp-)", m.path)}
    return {path for path in map(Path, found) if path.exists()}


def _wait(condition, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)


def start(command: list[str], folder: Path, log, environment: dict, segments: set[Path]) -> subprocess.Popen:
    """The command under a guard, printing to the file ``log``. segments: its shared memory, where known."""
    guard = [sys.executable, "-I", __file__, str(os.getpid()), str(folder), "--", *command]
    how = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": subprocess.STDOUT, "env": environment}
    process = subprocess.Popen(guard, **how, start_new_session=True)
    threading.Thread(target=_watch, args=(process, segments), daemon=True, name="vllm-watch").start()
    return process


def ended(process: subprocess.Popen) -> bool:
    """Whether the guard has ended; it is not reaped here, as `Popen.poll` and `wait` would."""
    try:
        look = os.WEXITED | os.WNOHANG | os.WNOWAIT
        return process.returncode is not None or os.waitid(os.P_PID, process.pid, look) is not None
    except ChildProcessError:  # reaped by another thread, or another process's child
        return True


def end(process: subprocess.Popen, folder: Path, owner: int, segments: set[Path]) -> None:
    """Have the guard end its command, kill what is left, remove ``folder``; not in a fork of ``owner``."""
    if os.getpid() != owner:
        return
    try:
        if not ended(process):
            os.kill(process.pid, signal.SIGTERM)
            _wait(lambda: ended(process), STOP_SECONDS)
        _kill_rest(process, segments)
        with _REAPING:
            process.wait()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


# a guard's process group keeps its number until the guard is reaped: what is left of it is killed before
_REAPING = threading.Lock()


def _kill_rest(process: subprocess.Popen, segments: set[Path]) -> None:
    """Kill the group of a guard that has ended, which is ours alone, and remove its shared memory."""
    _wait(lambda: not others(process.pid), ORPHAN_SECONDS)
    segments = segments | shared_memory(process.pid)
    with _REAPING:
        if process.returncode is None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
    for segment in segments:
        segment.unlink(missing_ok=True)


def _watch(process: subprocess.Popen, segments: set[Path]) -> None:
    """Clean up after a guard that was killed: its command has SIGTERM, but may wait for open requests."""
    while process.returncode is None and not ended(process):
        time.sleep(1)
    if process.returncode is None:
        _kill_rest(process, segments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
