"""Entries that are labels by their names: they are padded with -100, and repeated tokens are not trained on twice."""

import pytest
import torch

from seqwarm_kernels import resize_batch

NAMES = ["targets", "target", "label", "label_ids", "decoder_targets", "token_labels", "loss_mask"]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_labels_by_their_names(name, packed):
    """A token counts once in a loss that reads labels, or is weighted by a mask."""
    tokens, ignored = torch.arange(10, 20)[None], 0 if name == "loss_mask" else -100
    batch = {"idx": tokens, name: tokens, **({"cu_seqlens": torch.tensor([0, 10])} if packed else {})}
    overlapping = resize_batch(batch, 4, mode="reshape", remainder="overlap")[name].flatten()
    assert overlapping.tolist() == [10, 11, 12, 13, 14, 15, 16, 17, ignored, ignored, 18, 19]
    if not packed:  # a packed batch is not padded
        padded = resize_batch(batch, 4, mode="reshape", remainder="pad")[name]
        assert padded[2].tolist() == [18, 19, ignored, ignored]


@pytest.mark.parametrize("remainder", ["pad", "overlap"])
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("y", torch.int64),
        ("target_ids", torch.int64),
        ("decoder_target_ids", torch.int32),
        ("labels", torch.float32),
        ("label", torch.float16),
        ("labels", torch.uint8),
    ],
)
def test_padding_of_what_may_be_labels_is_asked_for(name, dtype, remainder):
    batch = {"idx": torch.arange(10)[None], name: torch.arange(10, dtype=dtype)[None]}
    options = {"mode": "reshape", "remainder": remainder}
    message = rf"^pad_values must have a value for '{name}' \({dtype}\), which may hold labels"
    with pytest.raises(ValueError, match=message):
        resize_batch(batch, 4, **options)
    fill = -1 if dtype.is_signed else 1
    filled = resize_batch(batch, 4, **options, pad_values={name: fill})[name]
    assert filled[2].tolist().count(fill) >= 2
    for bounds in ({}, {"cu_seqlens": torch.tensor([0, 10])}):
        resize_batch(batch | bounds, 4, mode="reshape")  # nothing is filled
