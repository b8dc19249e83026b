"""Batches as models expect them, also those without items, which ranks get that run out."""

import itertools

import numpy as np
import pytest
import torch

from seqwarm_kernels import SequenceLengthScheduler, resize_batch
from seqwarm_kernels.data import PackedCollator, PaddedCollator, Piece

LOSS_MASKS = ("completion_mask", "assistant_masks", "loss_mask")
COLLATORS = [PaddedCollator(), PackedCollator()]
KINDS = {
    "lists": [[5, 6, 7], [8]],
    "tensors": [torch.tensor([5, 6, 7]), torch.tensor([8], dtype=torch.int32)],
    "arrays": [np.array([5, 6, 7], dtype=np.uint16), np.array([8], dtype=np.int64)],
    "mappings": [{"input_ids": [5, 6, 7], "attention_mask": [1, 1, 1]}, {"input_ids": torch.tensor([8])}],
}


@pytest.mark.parametrize("items", KINDS.values(), ids=KINDS)
def test_items_of_every_kind(items):
    batch = PaddedCollator(pad_token_id=9, multiple_of=4)(items)
    assert list(batch) == ["input_ids", "attention_mask", "labels"]
    assert batch["input_ids"].tolist() == [[5, 6, 7, 9], [8, 9, 9, 9]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 0], [1, 0, 0, 0]]
    assert batch["labels"].tolist() == [[5, 6, 7, -100], [8, -100, -100, -100]]
    assert {tensor.dtype for tensor in batch.values()} == {torch.int64}
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


@pytest.mark.parametrize("collator", COLLATORS)
@pytest.mark.parametrize("make", [list, np.array, torch.tensor])
def test_entries_that_are_refused(make, collator):
    """Collators left these out of the batch: padding and prompts were trained on, tokens saw those of other texts."""
    for name, values in (
        ("attention_mask", [1, 1, 1, 0, 0]),
        *((name, [0, 0, 1, 1, 1]) for name in LOSS_MASKS),
        ("position_ids", [0, 1, 2, 0, 1]),
        ("position_ids", [3, 4, 0, 1, 2]),
        ("position_ids", [0, 0, 0, 0, 0]),
        ("seq_lengths", [3, 2]),
        ("seq_idx", [0, 0, 0, 1, 1]),
        ("document_ids", [7, 7, 7, 4, 4]),
        ("cu_seq_lens_q", [0, 3, 5]),
    ):
        with pytest.raises(ValueError, match=name):
            collator([[1, 2], {"input_ids": [1, 2, 3, 4, 5], name: make(values)}])
    for name in LOSS_MASKS:
        item = {"input_ids": [5, 6, 7], name: make([0, 0, 1])}
        with pytest.raises(ValueError, match=name):
            collator([{**item, "labels": [-100, 6, 7]}])
        assert collator([{**item, "labels": [-100, -100, 7]}])["labels"].tolist() == [[-100, -100, 7]]


@pytest.mark.parametrize("collator", COLLATORS)
def test_entries_that_change_nothing(collator):
    """They are of one sequence, or hide nothing. Masks of pairs and of floating point have no 0 for what is hidden."""
    ids = torch.tensor([5, 6, 7])
    expected = collator([ids])
    masks = (
        *([1, 1, 1], [True, 2, 1], None, [[1, 0, 0], [1, 1]], torch.ones(3, 3).tril().bool()),
        *(torch.tensor([0.0, 0.5, 1.0], dtype=torch.bfloat16), np.array([0.0, 0.0, -np.inf])),
    )
    for name, values in (
        *itertools.product(("attention_mask", *LOSS_MASKS), masks),
        *(("position_ids", positions) for positions in ([0, 1, 2], [5, 6, 7], [[0, 1, 0]], [0.0, 1.0, 0.0])),
        ("position_ids", [0, 1, 1]),  # tokens of an image share a position in some models
        *(("seq_lengths", [3]), ("seq_idx", [4, 4, 4]), ("cu_seq_lens_q", [0, 3])),
    ):
        batch = collator([{"input_ids": ids, name: values}])
        assert all(torch.equal(batch[entry], expected[entry]) for entry in ("input_ids", "labels"))
    collator([{"input_ids": ids, "labels": ids}])
    assert ids.tolist() == [5, 6, 7]


@pytest.mark.parametrize("collator", COLLATORS)
def test_what_is_no_item(collator):
    for item in (
        *(None, 5, np.int64(5), torch.tensor(5), "abc", "", b"abc", ("abc", 3), [True, False], [[1, 2]], [2**64]),
        *({"input_ids": ids} for ids in ("abc", [0.5], [[1], [1, 2]])),
        *({"input_ids": [1, 2], "labels": labels} for labels in (7, [1])),
        Piece(0, 0, 2),
    ):
        with pytest.raises(ValueError, match=r"item|input_ids|labels|inhomogeneous"):
            collator([item])
    with pytest.raises(ValueError, match="item"):
        collator({"input_ids": [1]})  # a batch is a list of items


def test_a_model_accepts_packed_batches():
    from ..models import zoo

    model = zoo.converted("llama", torch.float64)
    items = [torch.randint(zoo.VOCABULARY, (length,)) for length in (9, 4, 1, 6)]
    with torch.no_grad():
        packed, padded = (model(**collator(items)) for collator in (PackedCollator(), PaddedCollator()))
    expected = torch.cat([padded.logits[row, : len(item)] for row, item in enumerate(items)])
    torch.testing.assert_close(packed.logits[0], expected)
    torch.testing.assert_close(packed.loss, padded.loss)


# ---- batches without items, and of items without tokens


@pytest.mark.parametrize("items", [[], [[]], [[], torch.zeros(0)], [{"input_ids": [], "labels": []}]])
def test_no_tokens(items):
    batch = PaddedCollator(pad_token_id=9, multiple_of=4, max_tokens=8)(items)
    rows = max(len(items), 1)
    assert {name: tensor.tolist() for name, tensor in batch.items()} == {
        "input_ids": [[9] * 4] * rows,
        "attention_mask": [[0] * 4] * rows,
        "labels": [[-100] * 4] * rows,
    }
    assert {tensor.dtype for tensor in batch.values()} == {torch.int64}
    batch = PackedCollator(max_tokens=1)(items)
    assert batch["input_ids"].tolist() == batch["position_ids"].tolist() == [[0]]
    assert batch["labels"].tolist() == [[-100]]
    assert batch["cu_seq_lens_q"].tolist() == batch["cu_seq_lens_k"].tolist() == [0, 1]
    assert batch["max_length_q"] == batch["max_length_k"] == 1
    assert {batch[name].dtype for name in ("input_ids", "position_ids", "labels")} == {torch.int64}


@pytest.mark.parametrize("collator", COLLATORS)
@pytest.mark.parametrize("is_converted", [True, False])
def test_models_run_on_no_tokens_and_learn_nothing(is_converted, collator):
    """They raised an error in the middle of the last step, where the other ranks wait."""
    from ..models import zoo

    model = zoo.converted("llama") if is_converted else zoo.make("gpt2")
    batch = collator([])
    labels = batch.pop("labels")
    logits = model(**batch).logits
    loss = torch.nn.functional.cross_entropy(logits[0, :-1], labels[0, 1:], reduction="sum")
    loss.backward()
    assert loss == 0
    assert model(**batch, labels=labels, num_items_in_batch=7).loss == 0  # as the Trainer sums over ranks
    model(**batch, labels=labels).loss.backward()  # a mean, NaN
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    assert gradients
    assert not any(gradient.any() for gradient in gradients)


@pytest.mark.parametrize("collator", [PaddedCollator(multiple_of=4), PackedCollator()])
@pytest.mark.parametrize("options", [{}, {"mode": "reshape"}, {"mode": "reshape", "remainder": "overlap"}])
def test_no_tokens_are_cut_like_others(options, collator):
    scheduler = SequenceLengthScheduler(2, 8, duration=10, step_size=2)
    for copy in (True, False):
        cut, info = resize_batch(collator([]), 2, copy=copy, return_info=True, **options)
        assert cut["input_ids"].numel() > 0
        assert (cut["labels"] == -100).all()
        assert info.num_valid_tokens == ("attention_mask" not in cut)
    assert scheduler.resize(collator([]), **options)["input_ids"].shape == cut["input_ids"].shape
