"""Run a command that must not outlive the process that asked for it.

    python guard.py PARENT_PID FOLDER -- COMMAND ...

The guard is started as the leader of a new session, so that whatever the command starts is in the guard's
process group. It ends when the command ends, on SIGTERM, or when PARENT_PID is no longer its parent, which is
what the death of that process by any signal looks like, whichever of its threads started the guard. Then it
ends every process left in its own group, politely first. If it is the parent that is gone, and so cannot
clean up itself, it removes FOLDER and the folders that FOLDER/also names, one a line. Processes outside of
its group it never touches.

Standard library only: this file is run by path, not imported.
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
from pathlib import Path

POLL, POLITE = 0.2, 10.0  # seconds between looks, and for an orderly end before SIGKILL


def main(arguments: list[str]) -> int:
    parent, folder, command = int(arguments[0]), Path(arguments[1]), arguments[3:]
    asked = threading.Event()
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: asked.set())
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        child = subprocess.Popen(command, preexec_fn=die_with_parent)
        while child.poll() is None and os.getppid() == parent and not asked.wait(POLL):
            pass
        segments = shared_memory(os.getpgrp())  # before the server kills those that have them mapped
        if child.poll() is None:
            child.terminate()
        deadline = time.monotonic() + POLITE
        while child.poll() is None and time.monotonic() < deadline:
            time.sleep(POLL / 4)
        end_group(segments)
        code = child.wait()
    finally:
        if os.getppid() != parent:
            also = folder / "also"
            for unwanted in [*(also.read_text().splitlines() if also.is_file() else []), folder]:
                shutil.rmtree(unwanted, ignore_errors=True)
    return code if code >= 0 else 128 - code


def die_with_parent() -> None:
    """SIGTERM for the command should the guard itself be killed (Linux only)."""
    try:
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # 1 is PR_SET_PDEATHSIG
    except (OSError, AttributeError):
        pass
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def end_group(segments: set[Path]) -> None:
    """End whatever is left in this process's group: SIGTERM, then SIGKILL for what stays; remove its shared memory."""
    group = os.getpgrp()
    segments |= shared_memory(group)
    for number, patience in ((signal.SIGTERM, POLITE / 2), (signal.SIGKILL, POLITE)):
        for pid in others(group):
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                pass
        deadline = time.monotonic() + patience
        while others(group) and time.monotonic() < deadline:
            time.sleep(POLL / 4)
    for segment in segments:  # what nobody was left to remove
        segment.unlink(missing_ok=True)


def shared_memory(group: int) -> set[Path]:
    """The files of Python's shared memory and semaphores that the group's processes have mapped."""
    found = set()
    for pid in others(group):
        try:
            lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
        except OSError:
            continue
        found |= {
            Path(line[line.index("/") :]) for line in lines if re.search("/dev/shm/(psm_|sem.mp-)", line)
        }
    return {path for path in found if path.exists()}


def others(group: int) -> list[int]:
    """The live processes of a group, except for this one."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            state, _, its_group = (entry / "stat").read_text().rpartition(")")[2].split()[:3]
        except (OSError, ValueError):
            continue
        if int(its_group) == group and state != "Z" and int(entry.name) != os.getpid():
            found.append(int(entry.name))
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
