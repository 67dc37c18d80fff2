"""What a long computation needs around it: seeds, threads, random states, a clock."""

import random
import time
from contextlib import contextmanager
from zlib import crc32

import numpy as np
import torch


def stream(seed: int, step: int, purpose: str) -> int:
    """A 31-bit seed of its own for every step and purpose of a run."""
    sequence = np.random.SeedSequence([seed, step, crc32(purpose.encode())])
    return int(sequence.generate_state(1)[0] >> 1)


def seed_everything(seed: int) -> None:
    """For whatever else draws numbers: dropout, a reader's own reward function."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


@contextmanager
def keep_random_state():
    """Leave the caller's random states as they were."""
    states = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        try:
            yield
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])


@contextmanager
def limited_threads(n: int):
    """``n`` CPU threads inside, the former number after."""
    before = torch.get_num_threads()
    torch.set_num_threads(n)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class Clock:
    """``with clock("train"): ...`` adds the seconds to ``seconds["time_train"]``."""

    def __init__(self):
        self.seconds, self.cpu_start = {}, time.process_time()

    def cpu_seconds(self) -> float:
        return time.process_time() - self.cpu_start

    @contextmanager
    def __call__(self, phase: str):
        start = time.perf_counter()
        yield
        self.seconds[f"time_{phase}"] = self.seconds.get(f"time_{phase}", 0.0) + time.perf_counter() - start
