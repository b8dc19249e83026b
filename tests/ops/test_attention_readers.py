"""How Triton's attention reads tensors. In its interpreter all ways give the same results."""

import pytest
import torch

triton = pytest.importorskip("triton")

from triton.tools.tensor_descriptor import TensorDescriptor  # noqa: E402

from seqwarm_kernels.ops.alibi_attention import triton_tiles as tiles  # noqa: E402
from seqwarm_kernels.ops.alibi_attention.triton_readers import Reader, is_aligned, strides_of  # noqa: E402


def halves(*shape):
    return torch.randn(shape, dtype=torch.bfloat16)


ALIGNED = {
    "dense": halves(2, 3, 5, 16),
    "tokens before heads": halves(2, 5, 3, 16).transpose(1, 2),
    "one dim": halves(2, 3, 5, 8)[..., :1],
    "one dim of any stride": halves(2, 3, 5, 16)[..., ::8][..., :1],
    "odd stride of one row": halves(1, 1, 1, 16).as_strided((1, 1, 1, 16), (7, 7, 7, 1)),
    "one row of stride 0": halves(1, 3, 5, 16).as_strided((1, 3, 5, 16), (0, 80, 16, 1)),
    "repeated": halves(1, 3, 5, 16).expand(2, 3, 5, 16),
    "packed": halves(7, 3, 16),
}
NOT_ALIGNED = {
    "odd head_dim": halves(2, 3, 5, 15),
    "sparse dims": halves(2, 3, 5, 32)[..., ::2],
    "two dims of odd stride": halves(2, 3, 5, 16)[..., :9:8],
    "odd start": halves(2, 3, 5, 24)[..., 1:17],
    "odd batch": halves(600).as_strided((2, 3, 5, 16), (244, 80, 16, 1)),
    "odd tokens": halves(600).as_strided((2, 3, 5, 16), (240, 80, 20, 1)),
    "float32 of half a block": torch.zeros(2, 3, 5, 6),
}


@pytest.mark.parametrize("access", [tiles.ALIGNED.value, tiles.BULK.value], ids=["pointers", "bulk"])
@pytest.mark.parametrize("name", [*ALIGNED, *NOT_ALIGNED])
def test_which_tensors_are_copied(name, access):
    tensor = (ALIGNED | NOT_ALIGNED)[name]
    assert is_aligned(tensor) == (name in ALIGNED)
    reader = Reader(tensor, access)
    read = reader(tensor)
    copied = name in NOT_ALIGNED or (name == "repeated" and access == tiles.BULK.value)
    assert (read is not tensor) == copied
    assert read.shape == tensor.shape
    assert is_aligned(read)
    assert reader.strides == strides_of(read)
    torch.testing.assert_close(read, tensor, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("tensor", "strides"),
    [
        (halves(2, 3, 40, 64), [7680, 2560, 64, 1]),
        # A dimension of one element may have any stride, for which the hardware takes no odd ones.
        (halves(2, 1, 5, 16).as_strided((2, 1, 5, 16), (80, 3, 16, 1)), [80, 8, 16, 1]),
        (torch.zeros(1, 1, 5, 16), [4, 4, 16, 1]),
    ],
)
def test_descriptors_are_those_of_triton(tensor, strides):
    made = Reader(tensor, tiles.BULK.value).tiles(32)(tensor)
    expected = TensorDescriptor(tensor, list(tensor.shape), strides, [1, 1, 32, tensor.shape[-1]])
    assert type(made) is TensorDescriptor
    assert made.base is tensor
    assert all(getattr(made, name) == value for name, value in vars(expected).items() if name != "base")
    assert Reader(tensor, tiles.ALIGNED.value).tiles(64)(tensor) is tensor


def test_descriptors_of_packed_sequences():
    packed = halves(7, 3, 16)
    reader = Reader(packed, tiles.BULK.value)
    assert reader.sizes == (1, 3, 7, 16)
    assert reader.strides == (0, 16, 48, 1)
    assert reader.tiles(32)(packed).strides == [8, 16, 48, 1]
