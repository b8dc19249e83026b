"""Misuse of batches by length that once gave wrong batches without a word."""

import numpy as np
import pytest
import torch

from seqwarm_kernels.data import PackedCollator, PaddedCollator


@pytest.mark.parametrize("collator", [PaddedCollator(), PackedCollator()])
@pytest.mark.parametrize("make", [list, tuple, np.array, torch.tensor])
class TestMasksOfItems:
    """Collators left masks out of the batch, so that padding and prompts were trained on."""

    def test_a_tokenizer_that_padded(self, make, collator):
        whole = {"input_ids": [5, 6, 7], "attention_mask": make([1, 1, 1])}
        padded = {"input_ids": [8, 0, 0], "attention_mask": make([1, 0, 0])}
        with pytest.raises(ValueError, match=r"attention_mask of an item must be 1 .* tokenize without padding"):
            collator([whole, padded])
        assert collator([whole])["input_ids"].tolist() == [[5, 6, 7]]

    @pytest.mark.parametrize("name", ["completion_mask", "assistant_masks", "loss_mask"])
    def test_prompts(self, name, make, collator):
        item = {"input_ids": [5, 6, 7], name: make([0, 0, 1])}
        with pytest.raises(ValueError, match=rf"must be -100 where its {name} is 0, got 5 at token 0: write -100 into"):
            collator([item])
        with pytest.raises(ValueError, match="got 6 at token 1"):
            collator([{**item, "labels": [-100, 6, 7]}])
        assert collator([{**item, "labels": [-100, -100, 7]}])["labels"].tolist() == [[-100, -100, 7]]
        with pytest.raises(ValueError, match=rf"{name} must be as long as the 3 tokens of its item, got \(2,\)"):
            collator([{**item, name: make([0, 1])}])
