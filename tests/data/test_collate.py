"""Batches as models expect them."""

import re

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from seqwarm_kernels import alibi_attention, alibi_attention_varlen, apply_alibi
from seqwarm_kernels.data import (
    PackedCollator,
    PaddedCollator,
    Piece,
    PieceDataset,
    Prepare,
    cut_item,
    progress_bar,
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
        with pytest.raises(ValueError, match=rf"{name} must be as long as the 3 tokens of its item, got 2$"):
            collator([{**item, name: make([0, 1])}])


@pytest.mark.parametrize("collator", [PaddedCollator(), PackedCollator()])
@pytest.mark.parametrize("name", ["attention_mask", "completion_mask", "assistant_masks", "loss_mask"])
@pytest.mark.parametrize(
    "mask",
    [
        torch.ones(3, 3).tril().bool(),
        torch.ones(3, 3).tril().long().numpy(),
        [torch.tensor([1, 0, 0]), torch.tensor([1, 1, 0])],
        [[1, 0, 0], [1, 1]],
        torch.tensor([0.0, 0.0, -1e9]),
        torch.tensor([0.0, 0.5, 1.0], dtype=torch.bfloat16),
        np.array([0.0, 0.0, -np.inf]),
        [0.0, 0.0, -1e9],
    ],
    ids=["causal", "causal ints", "tensors", "rows", "additive", "weights", "array", "floats"],
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


def test_items_without_any_tokens():
    assert PaddedCollator()([[], [3]])["attention_mask"].tolist() == [[0], [1]]
    packed = PackedCollator()([[1, 2], [], torch.zeros(0)])
    assert packed["cu_seq_lens_q"].tolist() == [0, 2]


@given(lengths=st.lists(st.integers(0, 12), min_size=1, max_size=8))
def test_the_attention_kernel_accepts_packed_batches(lengths):
    items = [torch.arange(1, length + 1) for length in lengths]
    batch = PackedCollator()(items)
    heads, dim = 2, 4
    table = torch.randn(14, heads, dim)
    states = table[batch["input_ids"][0]]
    out = alibi_attention_varlen(
        states,
        states,
        states,
        batch["cu_seq_lens_q"],
        batch["cu_seq_lens_k"],
        batch["max_length_q"],
        batch["max_length_k"],
    )
    served = [item for item in items if len(item)] or [torch.zeros(1, dtype=torch.int64)]
    alone = [table[item].transpose(0, 1)[None] for item in served]
    expected = [alibi_attention(one, one, one)[0].transpose(0, 1) for one in alone]
    torch.testing.assert_close(out, torch.cat(expected))


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
    with pytest.raises(ValueError, match="max_tokens is 7, got a batch of 8 tokens: items are longer than planned, so"):
        collator([[1, 2, 3, 4], [5, 6, 7, 8]])


@pytest.mark.parametrize("collator", [PaddedCollator(), PackedCollator()])
@pytest.mark.parametrize(
    ("item", "message"),
    [
        ({"ids": [1]}, "an item must have input_ids, got ['ids']"),
        ({"input_ids": [1, 2], "labels": [1]}, "labels must be as long as the 2 input_ids of their item, got 1"),
        ([[1, 2]], "an item must hold one int for each token, got [[1, 2]]"),
        ({"input_ids": [0.5]}, "input_ids must hold one int for each token, got [0.5]"),
    ],
)
def test_invalid_items(collator, item, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        collator([item])


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
        message = re.escape(f"{name} of an item must tell one sequence, got several: {values}, which the batch would")
        with pytest.raises(ValueError, match=message):
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


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_nested_tensor_is_no_item():
    nested = torch.nested.nested_tensor([torch.arange(3), torch.arange(2)])
    for item, name in ((nested, "an item"), ({"input_ids": [1], "labels": nested}, "labels")):
        with pytest.raises(ValueError, match=f"{name} must hold one int for each token, got a nested tensor"):
            PaddedCollator()([item])


@pytest.mark.parametrize("collator", [PaddedCollator(), PackedCollator()])
@pytest.mark.parametrize(
    ("item", "error", "message"),
    [
        (None, TypeError, "an item must hold one int for each token, got NoneType"),
        (5, TypeError, "got the int 5: if it is the index of an item, pass a dataset to Prepare"),
        (np.int64(5), TypeError, "got the int 5: if it"),
        (torch.tensor(5), ValueError, "an item must hold one int for each token, got torch.int64 of shape ()"),
        ("abc", TypeError, "got 'abc', which is not tokenized: pass a transform to Prepare"),
        ("", TypeError, "got '', which is not tokenized"),
        ({"input_ids": "abc"}, TypeError, "input_ids must hold one int for each token, got 'abc', which is not"),
        (("abc", 3), ValueError, "got ('abc', 3), which is not tokenized: pass a transform to Prepare"),
        (Piece(0, 0, 2), TypeError, "got a Piece: wrap the dataset in PieceDataset, or use Prepare"),
        ([[1], [1, 2]], ValueError, "an item must hold one int for each token, got [[1], [1, 2]]: "),
        ([True, False], ValueError, "got [True, False]"),
        (np.array([2**63], np.uint64), ValueError, f"an item must hold ints below 2**63, got {2**63}"),
        ([2**63], ValueError, f"an item must hold ints below 2**63, got {2**63}"),
        ([2**64], ValueError, f"an item must hold one int for each token, got [{2**64}]"),
        (torch.zeros(2, dtype=torch.bfloat16), ValueError, "got torch.bfloat16 of shape (2,): "),
        ({"input_ids": [1], "labels": 7}, TypeError, "labels must hold one int for each token, got the int 7"),
    ],
)
def test_items_without_tokens(collator, item, error, message):
    with pytest.raises(error, match=re.escape(message)):
        collator([item])


@pytest.mark.parametrize("collator", [PaddedCollator(), PackedCollator()])
@pytest.mark.parametrize("batch", [None, 5, "abc", {"input_ids": [1]}, Piece(0, 0, 1)])
def test_invalid_batches(collator, batch):
    with pytest.raises(TypeError, match=f"items must be a list of items, got {type(batch).__name__}"):
        collator(batch)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: PaddedCollator(pad_token_id=None), TypeError, "pad_token_id must be an int, got NoneType"),
        (lambda: PaddedCollator(multiple_of=0), ValueError, "multiple_of must be at least 1, got 0"),
        (lambda: PaddedCollator(max_tokens=0), ValueError, "max_tokens must be at least 1, got 0"),
        (lambda: PackedCollator(max_tokens=1.0), TypeError, "max_tokens must be an int, got float"),
        (lambda: Prepare(5), TypeError, "collate must be a function, got int"),
        (lambda: Prepare(list, transform=5), TypeError, "transform must be a function, got int"),
        (lambda: Prepare(list, cut=None), TypeError, "cut must be a function, got NoneType"),
        (lambda: Prepare(list, dataset=5), TypeError, "dataset must be a map-style dataset or a list, got int"),
        (
            lambda: Prepare(list, dataset=list),
            TypeError,
            "dataset must be a map-style dataset or a list, got the class list",
        ),
        (lambda: PieceDataset(5), TypeError, "dataset must be a map-style dataset or a list, got int"),
        (lambda: PieceDataset("abc"), TypeError, "dataset must be a map-style dataset or a list, got str"),
        (lambda: PieceDataset([1], cut=5), TypeError, "cut must be a function, got int"),
        (lambda: cut_item(5, 0, 1), TypeError, "an item to cut must be a mapping or a sequence of tokens, got int"),
        (lambda: cut_item({"ids": [1]}, 0, 1), ValueError, "an item to cut must have input_ids, got \\['ids'\\]"),
        (lambda: progress_bar(5), TypeError, "batches must be a ResumableLoader, .* got int"),
        (lambda: progress_bar([[1]]), TypeError, "batches must be a ResumableLoader, .* got list"),
    ],
)
def test_bad_arguments(make, error, message):
    with pytest.raises(error, match=message):
        make()
