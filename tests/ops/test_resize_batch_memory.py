"""The memory of large results on the CPU, which is kept for later results."""

import os
import random
import signal
import threading
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from seqwarm_kernels import resize_batch
from seqwarm_kernels.ops import backends

pytestmark = pytest.mark.skipif(
    backends.why_not("resize_batch", "native", "cpu") is not None or not Path("/proc/self/statm").exists(),
    reason="the kernels are not built, or this is no Linux",
)
MEGABYTE = 2**20


def resized(value, rows, length=1024):
    """8 KB for each row."""
    return resize_batch({"ids": torch.full((1, 1), value).expand(rows, 2 * length)}, length, backend="native")["ids"]


def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_the_next_result_reuses_freed_memory():
    first = resized(1, 1700)  # a size of this test alone
    address = first.data_ptr()
    del first
    second = resized(2, 1700)
    assert second.data_ptr() == address
    assert (second == 2).all()


def test_memory_in_use_is_never_reused():
    """A view keeps its memory, too."""
    random.seed(0)
    held = {}
    for value in range(50):
        held[value] = resized(value, random.choice([300, 310, 500, 1000]))[10:]
        if len(held) > 4:
            del held[random.choice(list(held))]
        assert all((tensor == number).all() for number, tensor in held.items())


def test_kept_memory_never_exceeds_the_most_in_use():
    for rows in range(1000, 4000, 100):  # a ramp: 8 to 32 MB
        resized(1, rows)
    before = resident_bytes()
    for rows in range(4000, 8000, 100):  # 32 to 64 MB: larger than any kept block
        resized(1, rows)
    assert resident_bytes() - before < 64 * MEGABYTE


def test_forks_while_another_thread_allocates(threads):
    """Each of the processes must be able to allocate, too."""
    threads(1)
    stopped = threading.Event()

    def allocate():
        rows = 100
        while not stopped.is_set():
            resized(1, rows := rows % 4000 + 37)

    thread = threading.Thread(target=allocate)
    thread.start()
    try:
        for _ in range(10):
            if (child := os.fork()) == 0:
                signal.alarm(20)
                with suppress(BaseException):
                    resized(1, 1000)
                    os._exit(0)
                os._exit(1)
            assert os.waitpid(child, 0)[1] == 0
    finally:
        stopped.set()
        thread.join()
