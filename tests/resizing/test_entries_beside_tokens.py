"""Entries that are right only for the tokens that they came with: masks of the loss, and counts."""

import warnings

import pytest
import torch

from seqwarm_kernels import resize_batch
from seqwarm_kernels.resizing.entry_names import warn_once

IDS = torch.arange(16).view(2, 8)


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


@pytest.mark.parametrize("name", ["lengths", "source_lengths", "start_positions", "inputs.seq_lens"])
@pytest.mark.parametrize("options", [{}, {"mode": "reshape"}])
@pytest.mark.parametrize("packed", [False, True])
def test_counts_of_whole_rows(name, options, packed):
    """A mean over the tokens of a row was divided by the length of the whole row."""
    warn_once.cache_clear()
    batch = {"x": IDS.view(1, -1) if packed else IDS, name: torch.tensor([8, 8])}
    if packed:
        batch["cu_seqlens"] = torch.tensor([0, 8, 16])
    with pytest.warns(UserWarning, match=rf"^batch\['{name}'\] counts tokens of whole rows or points at them"):
        resize_batch(batch, 4, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        resize_batch({"x": IDS, "wavelengths_of_light": torch.tensor([8, 8]), "lengths": torch.tensor(3)}, 4, **options)


def test_global_attention_hides_no_token():
    """Longformer's mask is 0 where a token attends locally."""
    attends = torch.zeros(2, 8, dtype=torch.int64)
    attends[:, 3] = 1
    batch = {"input_ids": IDS, "attention_mask": torch.ones_like(IDS), "global_attention_mask": attends}
    resized = resize_batch(batch, 4)
    assert resized["input_ids"].equal(IDS[:, :4])
    assert resized["global_attention_mask"].equal(attends[:, :4])
