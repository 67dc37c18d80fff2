"""One home for progress bars: a live line while something runs, one short line in what is saved.

In a terminal this is an ordinary tqdm bar. In a notebook the bar is one text output that is rewritten in
place, so it moves in JupyterLab and a saved notebook keeps only its last state ("train: 60/60 in 01:43"); the
widget bars of `tqdm.auto` would be saved frozen at 0 %. A bar opened while another runs shares that output
and leaves nothing behind. A notebook that is executed from a terminal (papermill) also shows the bar there,
since its output cannot be seen yet. Where nobody watches (a log file, a test) nothing is written.
"""

import io
import os
import sys
from collections.abc import Iterable, Sized

from tqdm import tqdm

_LIVE = "{desc}{percentage:3.0f}%|{bar:20}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}]"
_LIVE_OPEN = "{desc}{n_fmt} [{elapsed}{postfix}]"  # no total known
_DONE = "{desc}{n_fmt}/{total_fmt} in {elapsed}{postfix}"
_DONE_OPEN = "{desc}{n_fmt} in {elapsed}{postfix}"


def in_notebook() -> bool:
    """True inside a Jupyter kernel (JupyterLab, papermill, nbval), without importing IPython."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return getattr(shell, "kernel", None) is not None


def _terminal() -> int | None:
    """File descriptor of the terminal that this kernel was started from, unless a Jupyter server did it."""
    stderr = getattr(sys.stderr, "_original_stdstream_copy", None)  # from before ipykernel took it over
    by_server = "JPY_SESSION_NAME" in os.environ
    return stderr if stderr is not None and not by_server and os.isatty(stderr) else None


class _NotebookBar(tqdm):
    """A tqdm bar drawn into one display output; bars opened inside it are further lines of that output."""

    open_bars: list["_NotebookBar"] = []

    def __init__(self, *args, desc=None, **kwargs):
        self.output, self.terminal = None, _terminal()
        if not kwargs.get("disable"):
            self.open_bars.append(self)
        kwargs |= {"desc": f"{desc}: " if desc else "", "file": io.StringIO(), "mininterval": 0.5}
        super().__init__(*args, **kwargs)

    def display(self, msg=None, pos=None):
        top = self.open_bars[0] if self.open_bars else self
        text = {"text/plain": "\n".join(map(str, self.open_bars)) or str(self)}
        if top.output is None:
            from IPython.display import display

            top.output = display(text, raw=True, display_id=True)
        else:
            top.output.update(text, raw=True)
        if self.terminal is not None:
            live = self.bar_format in (_LIVE, _LIVE_OPEN)
            line = " | ".join(map(str, self.open_bars)) if live else ""
            width = os.get_terminal_size(self.terminal).columns or 80
            os.write(self.terminal, f"\r\x1b[K{line[: width - 1]}".encode())

    def close(self):
        if self.disable:
            return
        is_top = self.open_bars[:1] == [self]
        if self in self.open_bars:
            self.open_bars.remove(self)
        if is_top:
            del self.open_bars[:]  # whatever a failure left open inside
            self.open_bars.append(self)
            self.bar_format = _DONE if self.total else _DONE_OPEN
            self.display()
            del self.open_bars[:]
        self.leave = False
        self.display = lambda *args, **kwargs: None  # tqdm's own clean-up has nothing left to draw
        super().close()


def progress(iterable: Iterable | None = None, *, total=None, desc=None, disable=None, **kwargs) -> tqdm:
    """A tqdm bar over ``iterable``, or over ``total`` calls of ``update`` where it is None.

    total: a number or None. desc: what is going on, one word or two. disable: True is off; None is off where
    neither a notebook nor a terminal is watching. Other keywords go to tqdm. The object is tqdm's: iterate
    over it, use it in a ``with``, call ``update(n)``, ``set_postfix(name=value)``, ``close()``.
    """
    kwargs |= {"total": total, "desc": desc}
    if not in_notebook():
        return tqdm(iterable, disable=disable, dynamic_ncols=True, **kwargs)
    if total is None and isinstance(iterable, Sized):
        kwargs["total"] = len(iterable)
    live = _LIVE if kwargs["total"] else _LIVE_OPEN
    return _NotebookBar(iterable, disable=bool(disable), bar_format=live, **kwargs)
