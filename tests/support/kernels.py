"""Where Triton's kernels run, checks of results in float64, and a kernel that counts its launches."""

import pytest
import torch

from seqwarm_kernels.ops import backends
from seqwarm_kernels.self_check import exact

#: Marks tests of Triton's attention kernels on DEVICES.
TRITON_RUNS = pytest.mark.skipif(
    backends.why_not("alibi_attention", "triton", "cpu", torch.float32) is not None and not torch.cuda.is_available(),
    reason="Triton serves neither a GPU nor its interpreter here",
)
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


class Exact(exact.Exact):
    def check(self, names, results, dtypes):
        """Check each result in the precision of its dtype."""
        for comparison in self.compare(names, results, dtypes):
            assert comparison.within(), str(comparison)


def record_launches(monkeypatch, host):
    """The programs and arguments of each launch that `host`, a module, prepares from now on, by its kernel's name."""
    launches = {}

    class Recorded(host.Launch):
        def __init__(self, kernel, programs, **arguments):
            launches[kernel.fn.__name__] = {"programs": programs, **arguments}
            super().__init__(kernel, programs, **arguments)

    monkeypatch.setattr(host, "Launch", Recorded)
    return launches


class CountedKernel:
    """A Triton kernel that records its launches."""

    def __init__(self, kernel):
        self.kernel, self.grids = kernel, []
        self.arg_names = kernel.arg_names

    @property
    def launches(self):
        return len(self.grids)

    def __getitem__(self, grid):
        self.grids.append(grid)
        return self.kernel[grid]
