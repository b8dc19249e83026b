"""What the host side of attention's Triton kernels decides: copies, tiles and tolerances."""

import math

import pytest
import torch

from seqwarm_kernels.ops import backends
from seqwarm_kernels.ops.alibi_attention import triton_configurations
from seqwarm_kernels.ops.alibi_attention.schema import DenseOptions
from seqwarm_kernels.ops.alibi_attention.triton_configurations import Chip, short_tile
from tests.support.kernels import record_launches

pytest.importorskip("triton")
host = pytest.importorskip("seqwarm_kernels.ops.alibi_attention.triton")

PLAIN = DenseOptions(None, None, None, 0, True, 1.0, None, None, 0.0, 2**-20)
MASK = torch.ones(1, 40, dtype=torch.bool)
SLOPES = torch.ones(1)


def rows_of(length, batch_size=1, dtype=torch.float16):
    return torch.empty(batch_size, 1, length, 16, dtype=dtype)


def launches_of(monkeypatch, query, key, options=PLAIN):
    """Of forward and backward. Nothing is launched."""
    launches = record_launches(monkeypatch, host)
    host.Forward(query, key, key, SLOPES, options)
    host.Backward(query, None, query, query[..., 0].float(), False, query, key, key, SLOPES, options)
    return launches


@pytest.mark.parametrize(
    ("query", "key", "mask", "in_bulk"),
    [
        (rows_of(70), rows_of(70), None, True),
        (rows_of(70), rows_of(40), MASK, False),
        (rows_of(70, dtype=torch.float32), rows_of(70, dtype=torch.float32), None, False),
        (rows_of(70), rows_of(0), None, False),
        (rows_of(0), rows_of(70), None, False),
    ],
)
def test_which_calls_load_tiles_by_bulk_copies(monkeypatch, query, key, mask, in_bulk):
    monkeypatch.setattr(triton_configurations, "BULK_COPIES", range(90, 120))
    launches = launches_of(monkeypatch, query, key, PLAIN._replace(key_padding_mask=mask))
    kernels = "forward_kernel", "backward_query_kernel", "backward_key_kernel"
    expected = (host.BULK if in_bulk else host.ALIGNED).value
    assert [launches[kernel]["ACCESS"] for kernel in kernels] == [expected] * 3


@pytest.mark.parametrize(("chip", "bounds"), [(Chip(90), True), (Chip(120), False), (Chip(90, is_hip=True), False)])
def test_on_which_chips_forward_looks_for_bounds(monkeypatch, chip, bounds):
    monkeypatch.setattr(host, "chip_of", lambda device: chip)
    assert launches_of(monkeypatch, rows_of(70), rows_of(70))["forward_kernel"]["BOUNDS"] is bounds


@pytest.mark.parametrize(("capability", "is_hip"), [((9, 0), False), ((9, 4), True)])
def test_tiles_are_those_of_the_chip(monkeypatch, capability, is_hip):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(backends, "IS_HIP", is_hip)
    chip = host.chip_of(torch.device("cuda"))
    assert chip == (10 * capability[0] + capability[1], is_hip)
    assert chip.copies_in_bulk is not is_hip
    assert (triton_configurations.gluon_tiles(chip, 64) is None) is is_hip


@pytest.mark.parametrize(("causal", "sides"), [(True, 1), (False, 2)])
def test_the_tolerance_is_shared_by_both_sides(monkeypatch, causal, sides):
    def log2_of(tolerance):
        options = PLAIN._replace(causal=causal, skip_tolerance=tolerance)
        return launches_of(monkeypatch, rows_of(256), rows_of(512), options)["forward_kernel"]["log2_tolerance"]

    assert log2_of(2**-20) == math.log2(2**-20 / sides)
    assert log2_of(0.0) == -math.inf


def test_no_query_has_empty_results():
    """Other layers answer such calls before, save in traced graphs."""
    query = rows_of(5, batch_size=0)
    out, lse, log2_sum, ranges = host.forward(query, query, query, SLOPES, PLAIN)
    assert (out.shape, lse.shape, log2_sum.shape, ranges.shape) == (query.shape, (0, 1, 5), (0, 1, 5), (0, 1, 2))


@pytest.mark.parametrize(
    ("chip", "tokens", "limited"),
    [
        (Chip(86), 32, False),
        (Chip(90), 64, True),
        (Chip(103), 64, False),
        (Chip(120), 32, False),
        (Chip(90, is_hip=True), 32, False),
    ],
)
def test_short_tiles_are_those_of_the_chip(chip, tokens, limited):
    tile = short_tile(chip, 64, 2)
    assert (tile.tokens, tile.backward_registers is not None) == (tokens, limited)
