"""What pytest and nbval share: notebooks are compared by their outputs, not by stderr."""

import os

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # notebook kernels inherit it
os.environ.setdefault("HF_HUB_OFFLINE", "1")


def pytest_collectstart(collector: pytest.Collector) -> None:
    if hasattr(collector, "skip_compare"):  # nbval's notebook collector
        # tables are compared as text; their HTML only repeats it
        collector.skip_compare += ("stderr", "text/html", "image/svg+xml")
