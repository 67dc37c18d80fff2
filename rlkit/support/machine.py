"""Memory of this machine, or of the container that the process runs in."""

from pathlib import Path

import psutil


def memory() -> tuple[int, int]:
    """(total, available) bytes; a container's limit, which psutil does not see, counts where it is lower."""
    machine = psutil.virtual_memory()
    total, available = machine.total, machine.available
    try:
        files = (Path("/sys/fs/cgroup", name) for name in ("memory.max", "memory.current"))
        limit, used = (int(file.read_text()) for file in files)
    except (OSError, ValueError):  # not in a container, or one without a limit ("max")
        return total, available
    return min(total, limit), min(available, max(0, limit - used))
