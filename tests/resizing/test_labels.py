"""Entries that are labels by their names: they are padded with -100, and repeated tokens are not trained on twice."""

import pytest
import torch

from seqwarm_kernels import resize_batch


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", ["targets", "target", "label", "label_ids", "decoder_targets", "token_labels"])
def test_labels_of_other_names_are_neither_padding_nor_trained_twice(name, packed):
    """An entry of another name than "labels" was padded with 0, and repeated tokens kept their labels."""
    tokens = torch.arange(10, 20)[None]
    batch = {"idx": tokens, name: tokens}
    if packed:
        batch["cu_seqlens"] = torch.tensor([0, 10])
    overlapping = resize_batch(batch, 4, mode="reshape", remainder="overlap")[name].flatten()
    assert overlapping.tolist() == [10, 11, 12, 13, 14, 15, 16, 17, -100, -100, 18, 19]
    if not packed:  # a packed batch is not padded
        padded = resize_batch(batch, 4, mode="reshape", remainder="pad")[name]
        assert padded[2].tolist() == [18, 19, -100, -100]


@pytest.mark.parametrize("labels_too", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_a_loss_mask_of_repeated_tokens(packed, labels_too):
    """Repeated tokens counted twice in a loss that is weighted by the mask."""
    ids = torch.arange(10).view(1, 10)
    batch = {"tokens": ids, "loss_mask": torch.ones(1, 10), **({"labels": ids} if labels_too else {})}
    if packed:
        batch["cu_seqlens"] = torch.tensor([0, 10])
    resized = resize_batch(batch, 6, mode="reshape", remainder="overlap")
    assert resized["loss_mask"].sum() == 10
    if labels_too:
        assert ((resized["labels"] == -100) == (resized["loss_mask"] == 0)).all()


@pytest.mark.parametrize("remainder", ["pad", "overlap"])
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *[
            ("y", torch.int64),
            ("target_ids", torch.int64),
            ("decoder_target_ids", torch.int32),
            ("labels", torch.float32),
        ],
        *[("targets", torch.float32), ("label", torch.float16), ("labels", torch.uint8)],
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
