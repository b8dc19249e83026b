"""Batches as models expect them."""

import numpy as np
import pytest
import torch

from seqwarm_kernels import apply_alibi
from seqwarm_kernels.data import (
    PackedCollator,
    PaddedCollator,
    Piece,
    cut_item,
)

KINDS = [
    [[5, 6, 7], [8]],
    [torch.tensor([5, 6, 7]), torch.tensor([8], dtype=torch.int32)],
    [np.array([5, 6, 7], dtype=np.uint16), np.array([8], dtype=np.int64)],
    [{"input_ids": [5, 6, 7], "attention_mask": [1, 1, 1]}, {"input_ids": torch.tensor([8])}],
]


@pytest.mark.parametrize("items", KINDS, ids=["lists", "tensors", "arrays", "mappings"])
def test_padded(items):
    batch = PaddedCollator(pad_token_id=9, multiple_of=4)(items)
    assert list(batch) == ["input_ids", "attention_mask", "labels"]
    assert batch["input_ids"].tolist() == [[5, 6, 7, 9], [8, 9, 9, 9]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 0], [1, 0, 0, 0]]
    assert batch["labels"].tolist() == [[5, 6, 7, -100], [8, -100, -100, -100]]
    assert {tensor.dtype for tensor in batch.values()} == {torch.int64}


@pytest.mark.parametrize("items", KINDS, ids=["lists", "tensors", "arrays", "mappings"])
def test_packed(items):
    batch = PackedCollator()(items)
    assert batch["input_ids"].tolist() == [[5, 6, 7, 8]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0]]
    assert batch["labels"].tolist() == [[-100, 6, 7, -100]]
    assert batch["cu_seq_lens_q"].tolist() == batch["cu_seq_lens_k"].tolist() == [0, 3, 4]
    assert batch["cu_seq_lens_q"].dtype == torch.int32
    assert batch["max_length_q"] == batch["max_length_k"] == 3
    assert {batch[name].dtype for name in ("input_ids", "position_ids", "labels")} == {torch.int64}


def test_own_labels():
    items = [{"input_ids": [1, 2, 3], "labels": [-100, 7, 8]}, {"input_ids": [4], "labels": None}]
    assert PaddedCollator()(items)["labels"].tolist() == [[-100, 7, 8], [4, -100, -100]]
    assert PackedCollator()(items)["labels"].tolist() == [[-100, 7, 8, -100]]
    assert items[0]["labels"] == [-100, 7, 8]


def test_masks_that_hide_nothing():
    masks = {"attention_mask": torch.ones(2, dtype=torch.bfloat16), "completion_mask": [True, 2], "loss_mask": None}
    assert PaddedCollator()([{"input_ids": [1, 2], **masks}])["labels"].tolist() == [[1, 2]]


@pytest.mark.parametrize("collator", [PaddedCollator(), PackedCollator()])
@pytest.mark.parametrize("make", [list, tuple, np.array, torch.tensor])
class TestMasksOfItems:
    """Collators left masks out of the batch, so that padding and prompts were trained on."""

    def test_a_tokenizer_that_padded(self, make, collator):
        whole = {"input_ids": [5, 6, 7], "attention_mask": make([1, 1, 1])}
        padded = {"input_ids": [8, 0, 0], "attention_mask": make([1, 0, 0])}
        with pytest.raises(ValueError, match="attention_mask"):
            collator([whole, padded])
        assert collator([whole])["input_ids"].tolist() == [[5, 6, 7]]

    @pytest.mark.parametrize("name", ["completion_mask", "assistant_masks", "loss_mask"])
    def test_prompts(self, name, make, collator):
        item = {"input_ids": [5, 6, 7], name: make([0, 0, 1])}
        for trained in ({}, {"labels": [-100, 6, 7]}):
            with pytest.raises(ValueError, match=name):
                collator([{**item, **trained}])
        assert collator([{**item, "labels": [-100, -100, 7]}])["labels"].tolist() == [[-100, -100, 7]]


@pytest.mark.parametrize("collator", [PaddedCollator(), PackedCollator()])
@pytest.mark.parametrize("name", ["attention_mask", "completion_mask", "assistant_masks", "loss_mask"])
@pytest.mark.parametrize(
    "mask",
    [
        torch.ones(3, 3).tril().bool(),
        torch.ones(3, 3).tril().long().numpy(),
        [[1, 0, 0], [1, 1]],
        torch.tensor([0.0, 0.0, -1e9]),
        torch.tensor([0.0, 0.5, 1.0], dtype=torch.bfloat16),
        np.array([0.0, 0.0, -np.inf]),
    ],
    ids=["causal", "causal ints", "rows", "additive", "weights", "array"],
)
def test_masks_of_pairs_and_of_floating_point_are_left_out(mask, name, collator):
    """They are not 0 where a token is hidden or not trained on."""
    item = {"input_ids": [5, 6, 7]}
    batch, expected = collator([{**item, name: mask}]), collator([item])
    for entry in ("input_ids", "labels"):
        assert torch.equal(batch[entry], expected[entry])


def test_items_are_not_modified():
    item = torch.tensor([1, 2, 3])
    PackedCollator()([item])
    PackedCollator()([{"input_ids": item, "labels": item}])
    assert item.tolist() == [1, 2, 3]


def test_a_model_accepts_packed_batches():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=23,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
    )
    model = transformers.LlamaForCausalLM(config).eval()
    apply_alibi(model, max_seq_length=32)
    items = [torch.randint(23, (length,)) for length in (9, 4, 1, 6)]
    packed, padded = PackedCollator()(items), PaddedCollator()(items)
    with torch.no_grad():
        one_row = model(**packed)
        rows = model(**padded)
    expected = torch.cat([rows.logits[row, : len(item)] for row, item in enumerate(items)])
    torch.testing.assert_close(one_row.logits[0], expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(one_row.loss, rows.loss, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("collator", [PaddedCollator(max_tokens=7), PackedCollator(max_tokens=7)])
def test_items_longer_than_planned(collator):
    collator([[1, 2, 3], [4, 5, 6]])
    with pytest.raises(ValueError, match="max_tokens"):
        collator([[1, 2, 3, 4], [5, 6, 7, 8]])


@pytest.mark.parametrize("collator", [PaddedCollator(), PackedCollator()])
@pytest.mark.parametrize("make", [list, tuple, np.array, torch.tensor])
class TestItemsThatWerePackedBefore:
    """Their sequences became one, whose tokens saw those of the sequence before."""

    @pytest.mark.parametrize(
        ("name", "values"),
        [
            ("position_ids", [0, 1, 2, 0, 1]),
            ("position_ids", [3, 4, 0, 1, 2]),
            ("position_ids", [0, 0, 0, 0, 0]),
            ("seq_lengths", [3, 2]),
            ("seq_idx", [0, 0, 0, 1, 1]),
            ("document_ids", [7, 7, 7, 4, 4]),
            ("cu_seq_lens_q", [0, 3, 5]),
        ],
    )
    def test_several_sequences(self, collator, make, name, values):
        item = {"input_ids": [1, 2, 3, 4, 5], name: make(values)}
        with pytest.raises(ValueError, match=name):
            collator([[1, 2], item])

    @pytest.mark.parametrize(
        ("name", "values"),
        [
            ("position_ids", [0, 1, 2]),
            ("position_ids", [5, 6, 7]),
            ("position_ids", [0, 1, 1]),  # tokens of an image share a position in some models
            ("position_ids", [[0, 1, 0]]),
            ("position_ids", [0.0, 1.0, 0.0]),
            ("seq_lengths", [3]),
            ("seq_idx", [4, 4, 4]),
            ("cu_seq_lens_q", [0, 3]),
        ],
    )
    def test_one_sequence_or_no_ints(self, collator, make, name, values):
        batch = collator([{"input_ids": [1, 2, 3], name: make(values)}])
        assert batch["input_ids"].tolist() == [[1, 2, 3]]


@pytest.mark.parametrize("collator", [PaddedCollator(), PackedCollator()])
@pytest.mark.parametrize(
    "item",
    [
        *(None, 5, np.int64(5), torch.tensor(5), "abc", "", b"abc", ("abc", 3), [True, False], [[1, 2]], [2**64]),
        *({"input_ids": ids} for ids in ("abc", [0.5], [[1], [1, 2]])),
        *({"input_ids": [1, 2], "labels": labels} for labels in (7, [1])),
        Piece(0, 0, 2),
    ],
)
def test_invalid_items(collator, item):
    with pytest.raises(ValueError, match=r"item|input_ids|labels|inhomogeneous"):
        collator([item])


@pytest.mark.parametrize("collator", [PaddedCollator(), PackedCollator()])
def test_a_batch_is_a_list_of_items(collator):
    with pytest.raises(ValueError, match="item"):
        collator({"input_ids": [1]})


@pytest.mark.parametrize("item", ["abc", {"input_ids": "abc"}, ("abc", 3)])
def test_text_is_not_cut(item):
    with pytest.raises(TypeError, match="item"):
        cut_item(item, 0, 1)
