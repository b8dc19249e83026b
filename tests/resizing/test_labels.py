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


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("name", "dtype"), [("target", torch.bool), ("label", torch.uint8), ("y", torch.bool)])
def test_entries_that_cannot_hold_ignored_labels_are_repeated_as_others(name, dtype, packed):
    tokens = torch.arange(10)[None]
    batch = {"idx": tokens, name: tokens % 2 == 0 if dtype is torch.bool else tokens.to(dtype)}
    if packed:
        batch["cu_seqlens"] = torch.tensor([0, 10])
    resized = resize_batch(batch, 4, mode="reshape", remainder="overlap")
    expected = batch[name][0][resized["idx"]]
    assert resized[name].equal(expected)


@pytest.mark.parametrize("remainder", ["pad", "overlap"])
@pytest.mark.parametrize(
    ("name", "dtype"),
    [("y", torch.int64), ("target_ids", torch.int64), ("targets", torch.float32), ("label", torch.float16)],
)
def test_padding_of_what_may_be_labels_is_asked_for(name, dtype, remainder):
    batch = {"idx": torch.arange(10)[None], name: torch.arange(10, dtype=dtype)[None]}
    options = {"mode": "reshape", "remainder": remainder}
    message = rf"^pad_values must have a value for '{name}' \({dtype}\), which may hold labels: .* with -100; rename"
    with pytest.raises(ValueError, match=message):
        resize_batch(batch, 4, **options)
    filled = resize_batch(batch, 4, **options, pad_values={name: -1})[name]
    assert (filled[2] == -1).sum() == 2
    resize_batch(batch, 4, mode="reshape")  # nothing is filled
