import pytest
import torch

from seqwarm_kernels.ops import backends
from seqwarm_kernels.ops.alibi_attention.triton_configurations import longer_tile, short_tile


@pytest.fixture
def threads():
    """Sets the number of threads for one test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture
def tiles_of_16_bits(monkeypatch):
    """Short rows of float32 share tiles as those of 16-bit tensors, which Triton's interpreter cannot multiply."""
    if torch.cuda.is_available() or backends.problem("triton") is not None:
        return
    from seqwarm_kernels.ops.alibi_attention import triton, triton_short

    monkeypatch.setattr(triton, "_known", type(triton._known)())
    monkeypatch.setattr(triton_short, "short_tile", lambda chip, head_dim, _: short_tile(chip, head_dim, 2))
    monkeypatch.setattr(triton_short, "longer_tile", lambda chip, head_dim, _: longer_tile(chip, head_dim, 2))


@pytest.fixture
def small_tiles(monkeypatch):
    """Short rows of few heads reach every loop of Triton's kernels."""
    from seqwarm_kernels.ops.alibi_attention import triton as host
    from seqwarm_kernels.ops.alibi_attention.triton_configurations import Configuration, Tiles

    tiles = Configuration(Tiles(32, 16, 4, 2), Tiles(32, 16, 4, 2), Tiles(16, 32, 4, 2))
    monkeypatch.setattr(host, "configuration", lambda *_, **__: tiles)
    monkeypatch.setattr(host, "_known", type(host._known)())


@pytest.fixture
def skipping_of_few_keys(monkeypatch):
    """Triton's kernels skip keys as with many."""
    from seqwarm_kernels.ops.alibi_attention import triton_ranges

    monkeypatch.setattr(triton_ranges, "MIN_KEYS_TO_SKIP", 16)
    monkeypatch.setattr(triton_ranges, "MIN_QUERIES_TO_SKIP", 1)
