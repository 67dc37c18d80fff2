"""A vLLM server's log, read for an error message."""

import re
import signal
from pathlib import Path
from typing import NamedTuple

CRASHES = {"Illegal instruction": "SIGILL", "Segmentation fault": "SIGSEGV", "Bus error": "SIGBUS"}
CRASHES |= {"Floating-point exception": "SIGFPE", "Aborted": "SIGABRT"}
MEANING = {
    "SIGILL": " (illegal instruction): the CPU refuses what vLLM uses in this dtype; use float32 "
    "(dtype float32, autocast False) or sampler=transformers",
    "SIGKILL": " (killed from outside, often because memory ran out)",
}


class Report(NamedTuple):
    """The first errors and the last lines of a log; what ended the engine, such as "SIGILL", or ""."""

    last_words: str = "(its log is gone)"
    ended_by: str = ""

    @property
    def cause(self) -> str:
        """A clause for an error message: what ended the engine, and what to do."""
        meaning = MEANING.get(self.ended_by, "")
        return f"; the engine's process ended by {self.ended_by}{meaning}" if self.ended_by else ""


def report(path: Path | None, before: Report) -> Report:
    """What the log tells, or ``before`` where it is gone."""
    if path is None or not path.is_file():
        return before
    text = path.read_text(errors="replace")
    text = re.sub(r"(?m)^\([^)\n]{1,80}\) ?|\x1b\[[0-9;]*m", "", text)  # names of processes, colours
    rows = [row[:400].rstrip() for row in text.splitlines()]
    errors = [r for r in rows if re.search(r"(Error|Exception): \S", r) and not re.match("INFO|WARNING", r)]
    first = list(dict.fromkeys(errors))[:3]
    words = ["Its errors:", *first] * bool(first) + ["Its last lines:", *rows[-12:]]
    return Report("\n".join(words), ended_by(text))


def ended_by(text: str) -> str:
    """What ended a process of the engine: the name of a signal, "exit code 1", or "" if the log has neither.

    A process that crashes prints its signal, by Python's fault handler. The engine prints its worker's exit
    code (vLLM 0.32: None if it looks too early); codes 0 and -SIGTERM follow from a stop.
    """
    if crash := re.search(f"Fatal Python error: ({'|'.join(CRASHES)})", text):
        return CRASHES[crash[1]]
    codes = map(int, re.findall(r"died unexpectedly \(exit code: (-?\d+)\)", text))
    code = next((code for code in codes if code not in (0, -signal.SIGTERM)), 0)
    return f"exit code {code}" if code > 0 else signal.Signals(-code).name if code else ""
