"""warmup_allocator on two ranks started by torchrun: state is restored, and both ranks take the same decision."""

import subprocess
import sys

import pytest


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_two_ranks(kind):
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "tests.allocator.ranks"]
    run = subprocess.run([sys.executable, *command, kind], capture_output=True, text=True, timeout=300, check=False)
    assert run.returncode == 0, run.stderr[-6000:]
