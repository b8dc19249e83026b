"""How many bytes the CUDA kernel moves at once. tests/cuda_shim/test_resize_batch.py runs these tests."""

import os

import pytest
import torch

from seqwarm_kernels.ops.resize_batch.schema import Kind

from ..ops.test_resize_batch_launch import WIDTHS

pytestmark = pytest.mark.skipif("SEQWARM_CUDA_SHIM" not in os.environ, reason="needs the CUDA shim: make test-shim")
BYTES = torch.zeros(4, 64, dtype=torch.uint8)


def group_size(source, new_length, rule, kind=Kind.SEQUENCE):
    rows, length = source.shape[:2]
    output = source.new_empty(rows, new_length, *source.shape[2:])
    if kind == Kind.SQUARE:
        output = source.new_empty(rows, new_length, new_length)
    mask = torch.ones(rows, length)
    arguments = [source], mask, rows, length, new_length, rule, [kind], [0], False, [output]
    (size,) = torch.ops.seqwarm_cuda_shim.group_sizes(*arguments)
    return size


@pytest.mark.parametrize(("source", "new_length", "rule", "width"), WIDTHS)
def test_items_of_a_group_are_adjacent_in_source_and_output(source, new_length, rule, width):
    assert group_size(source, new_length, rule) == width * source.element_size()


@pytest.mark.parametrize(("start", "size"), [(0, 16), (1, 1), (2, 2), (4, 4), (8, 8), (16, 16)])
def test_groups_are_aligned(start, size):
    source = torch.zeros(4 * 64 + start, dtype=torch.uint8)[start:].view(4, 64)
    assert group_size(source, 32, "truncate") == size


@pytest.mark.parametrize(("rule", "size"), [("truncate", 16), ("truncate_keep_last", 1)])
def test_columns_of_a_square_mask(rule, size):
    source = torch.zeros(2, 64, 64, dtype=torch.bool)
    assert group_size(source, 32, rule, Kind.SQUARE) == size
    assert group_size(source.mT, 32, rule, Kind.SQUARE) == 1
    assert group_size(source, 24, "truncate", Kind.SQUARE) == 8


@pytest.mark.parametrize(("strides", "size"), [((192, 3, 1), 16), ((256, 4, 1), 2), ((256, 2, 64), 2)])
def test_groups_span_tokens_only_where_tokens_are_dense(strides, size):
    features = 2 if strides[1] == 2 else 3
    memory = torch.zeros(1024, dtype=torch.bfloat16)
    assert group_size(memory.as_strided((4, 64, features), strides), 32, "truncate") == size


def test_items_of_16_bytes():
    assert group_size(torch.zeros(4, 64, dtype=torch.complex128)[:, 1:], 3, "truncate") == 16
    assert group_size(torch.zeros(4, 64, dtype=torch.complex128)[:, ::2], 3, "truncate") == 16
