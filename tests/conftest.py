"""Fixtures of all tests: the folders of the cases and of GSM8K, and one thread per process."""

import os
import sys
from pathlib import Path

import pytest

# before torch is imported: test processes share few cores, and spinning threads would starve each other
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

# servers, ranks, kills and memory limits are tested with signals, /proc and fork
POSIX_ONLY = ["test_vllm_server.py", "test_ranks.py", "test_resume.py", "test_memory.py", "engine", "kills"]
collect_ignore = POSIX_ONLY if sys.platform == "win32" else []

REPO = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def repo() -> Path:
    """The root of the checkout."""
    return REPO


@pytest.fixture(scope="session")
def shared_cases() -> Path:
    """The folder with the cases: grading*.jsonl and faults.jsonl."""
    return REPO / "tests" / "data"


@pytest.fixture(scope="session")
def gsm8k_dir() -> Path:
    """The folder with GSM8K's train.jsonl and test.jsonl (not shipped); skips where it is absent."""
    shared = Path(os.environ.get("RLKIT_SHARED") or REPO.parent / "shared")
    folder = shared / "data" / "gsm8k"
    if not folder.is_dir():
        pytest.skip(f"{folder} is not here (set RLKIT_SHARED to the folder that holds data/gsm8k)")
    return folder
