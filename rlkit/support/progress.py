"""One home for progress bars: a live line while something runs, one short line in what is saved.

In a terminal this is an ordinary tqdm bar. In a notebook the bar is one text output that is rewritten in
place, so it moves in JupyterLab and a saved notebook keeps only its last state ("train: 60/60 in 01:43"); the
widget bars of `tqdm.auto` would be saved frozen at 0 %. A bar opened while another runs shares that output
and leaves nothing behind. A notebook that is executed from a terminal (papermill) also shows the bar there,
since its output cannot be seen yet. Where nobody watches (a log file, a test) nothing is written.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterable

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
    descriptor = getattr(
        sys.stderr, "_original_stdstream_copy", None
    )  # from before ipykernel took stderr over
    started_by_server = "JPY_SESSION_NAME" in os.environ
    return descriptor if descriptor is not None and not started_by_server and os.isatty(descriptor) else None


class _NotebookBar(tqdm):
    """A tqdm bar drawn into one display output; bars opened inside it are further lines of that output."""

    open_bars: list[_NotebookBar] = []

    def __init__(self, *args, desc=None, **kwargs):
        self.output, self.terminal = None, _terminal()
        if not kwargs.get("disable"):
            self.open_bars.append(self)
        super().__init__(
            *args, desc=f"{desc}: " if desc else "", file=io.StringIO(), mininterval=0.5, **kwargs
        )

    def display(self, msg=None, pos=None):
        top = self.open_bars[0] if self.open_bars else self
        text = {"text/plain": "\n".join(str(bar) for bar in self.open_bars) or str(self)}
        if top.output is None:
            from IPython.display import display

            top.output = display(text, raw=True, display_id=True)
        else:
            top.output.update(text, raw=True)
        if self.terminal is not None:
            line = (
                " | ".join(str(bar) for bar in self.open_bars)
                if self.bar_format in (_LIVE, _LIVE_OPEN)
                else ""
            )
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


def progress(
    iterable: Iterable | None = None,
    *,
    total: int | None = None,
    desc: str | None = None,
    disable: bool | None = None,
    **kwargs,
) -> tqdm:
    """A tqdm bar over ``iterable``, or over ``total`` calls of ``update`` where it is None.

    desc: what is going on, one word or two. disable: None decides by itself (off where neither a notebook nor
    a terminal is watching), True is off. Other keywords go to tqdm. The object is tqdm's: iterate over it,
    use it in a ``with``, call ``update(n)``, ``set_postfix(name=value)``, ``close()``.
    """
    if in_notebook():
        total = len(iterable) if total is None and hasattr(iterable, "__len__") else total
        return _NotebookBar(
            iterable,
            total=total,
            desc=desc,
            disable=bool(disable),
            bar_format=_LIVE if total else _LIVE_OPEN,
            **kwargs,
        )
    return tqdm(iterable, total=total, desc=desc, disable=disable, dynamic_ncols=True, **kwargs)
