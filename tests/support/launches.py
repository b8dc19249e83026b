"""Triton kernels that are counted."""


class CountedKernel:
    """The kernel, and how often it was launched."""

    def __init__(self, kernel):
        self.kernel, self.launches = kernel, 0

    def __getitem__(self, grid):
        self.launches += 1
        return self.kernel[grid]
