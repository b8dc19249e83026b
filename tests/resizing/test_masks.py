"""Masks and biases by their names: what is known to hide padding, and what is cut in both sequence dimensions."""

import pytest
import torch

from seqwarm_kernels import resize_batch
from seqwarm_kernels.resizing import plan
from seqwarm_kernels.resizing.containers import flatten_batch

IDS = torch.arange(16).view(2, 8)
MASK = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1], [1] * 8])
RIGHT = torch.tensor([[1, 1, 1, 0, 0, 0, 0, 0], [1] * 8])
#: From the first valid token on.
CUT = [[3, 4, 5, 6], [8, 9, 10, 11]]


@pytest.fixture(autouse=True)
def _no_plan_is_known():
    """Masks of integers are read for the first batch of a signature."""
    plan._plans.clear()


@pytest.mark.parametrize("seq_dim", [0, 1])
@pytest.mark.parametrize("name", ["input_ids", "inputs_embeds"])
def test_a_mask_that_keys_leaves_out_tells_where_rows_begin(name, seq_dim):
    batch = {name: IDS, "attention_mask": MASK}
    batch = batch if seq_dim else {name: tensor.T for name, tensor in batch.items()}
    resized = resize_batch(batch, 4, keys=[name], seq_dim=seq_dim)
    assert (resized[name] if seq_dim else resized[name].T).tolist() == CUT
    assert resized["attention_mask"] is batch["attention_mask"]
    with pytest.raises(ValueError, match=r"copy must be True where rows of batch\['attention_mask'\] begin"):
        resize_batch(batch, 4, keys=[name], seq_dim=seq_dim, copy=False)


def test_nested_masks():
    """One that `keys` leaves out tells where rows begin. The outermost counts the tokens."""
    batch = {"encoder": {"input_ids": IDS, "attention_mask": MASK}, "decoder": {"input_ids": IDS}}
    assert resize_batch(batch, 4, keys=["encoder.input_ids"])["encoder"]["input_ids"].tolist() == CUT
    batch = {"input_ids": IDS, "attention_mask": RIGHT, "adapter": {"attention_mask": torch.ones_like(IDS)}}
    assert resize_batch(batch, 4, return_info=True)[1].valid_lengths.tolist() == [3, 4]


def test_of_two_masks_the_one_that_keys_names_counts():
    batch = {"input_ids": IDS, "attention_mask": MASK, "decoder_attention_mask": torch.ones_like(MASK)}
    assert resize_batch(batch, 4, keys=["input_ids", "attention_mask"])["input_ids"].tolist() == CUT
    decoder = resize_batch(batch, 4, keys=["input_ids", "decoder_attention_mask"])
    assert decoder["input_ids"].tolist() == IDS[:, :4].tolist()
    assert resize_batch(batch, 4, keys=["input_ids"])["input_ids"].tolist() == CUT
    batch = {"input_ids": IDS, "attention_mask": MASK, "decoder_input_ids": IDS}  # whose mask moves no other row
    assert resize_batch(batch, 4, keys=["decoder_input_ids"])["decoder_input_ids"].tolist() == IDS[:, :4].tolist()
    batch = {"decoder_input_ids": IDS, "decoder_attention_mask": MASK, "attention_mask": torch.ones_like(MASK)}
    with pytest.raises(ValueError, match=r"batch\['decoder_attention_mask'\] must begin with a valid token"):
        resize_batch(batch, 4, keys=["decoder_input_ids"])


REFUSED = [
    (MASK - 1, {}, "must be 0 or 1, got torch.int64 with -1"),
    ((MASK - 1).to(torch.int8), {}, "must be 0 or 1, got torch.int8 with -1"),
    (MASK * 2, {"mode": "reshape"}, "must be 0 or 1, got torch.int64 with 2"),  # numbers of packed sequences
    (MASK * 2, {}, "must be 0 or 1, got torch.int64 with 2"),
    ((1.0 - MASK) * -1e4, {"keys": ["input_ids"]}, "must be 0 where a token is hidden"),
    (torch.where(MASK == 1, 0.0, -torch.inf), {}, "must be 0 where a token is hidden, got torch.float32 with -inf"),
]


@pytest.mark.parametrize(("mask", "options", "message"), REFUSED)
def test_masks_that_do_not_hide_by_0_are_refused(mask, options, message):
    if mask.is_floating_point():  # whose values are read in every batch
        resize_batch({"input_ids": IDS, "attention_mask": torch.zeros(2, 8)}, 4, **options)
    for _ in range(2):
        with pytest.raises(ValueError, match=rf"batch\['attention_mask'\] {message}"):
            resize_batch({"input_ids": IDS, "attention_mask": mask}, 4, **options)


def test_features_of_the_size_of_a_row_are_kept():
    batch = {"inputs_embeds": torch.randn(2, 8, 8), "biased": torch.randn(2, 8, 8), "bias": torch.randn(2, 8)}
    resized = resize_batch(batch, 4)
    assert [tensor.shape for tensor in resized.values()] == [(2, 4, 8), (2, 4, 8), (2, 4)]
    kept = resize_batch({"input_ids": IDS, "bias": batch["inputs_embeds"]}, 4, mask_keys=[])
    assert kept["bias"].shape == (2, 4, 8)


def side(mask, prefix=""):
    return {f"{prefix}input_ids": IDS, f"{prefix}attention_mask": mask}


SEVERAL = [
    (lambda mask: side(mask) | side(RIGHT, "decoder_"), "attention_mask"),
    (lambda mask: {"encoder": side(RIGHT), "decoder": side(mask), "labels": IDS}, "decoder.attention_mask"),
    (lambda mask: side(mask, "prompt_"), "prompt_attention_mask"),
]


@pytest.mark.parametrize("copy", [True, False])
@pytest.mark.parametrize(("make", "begins_masked"), SEVERAL, ids=["two masks", "nested", "another name"])
def test_one_mask_does_not_move_the_tokens_of_another(make, begins_masked, copy):
    for _ in range(2):  # the second call is a known one
        with pytest.raises(ValueError, match=rf"batch\['{begins_masked}'\] must begin with a valid token in each row"):
            resize_batch(make(MASK), 3, copy=copy)
    assert resize_batch(make(MASK), 8, copy=copy).keys() == make(MASK).keys()  # nothing is cut
    for tensor in flatten_batch(resize_batch(make(RIGHT), 3, copy=copy)).values():
        assert tensor.shape == (2, 3)


def test_global_attention_hides_no_token():
    """Longformer's mask is 0 where a token attends locally."""
    attends = torch.zeros(2, 8, dtype=torch.int64)
    attends[:, 3] = 1
    batch = {"input_ids": IDS, "attention_mask": torch.ones_like(IDS), "global_attention_mask": attends}
    resized = resize_batch(batch, 4)
    assert resized["input_ids"].equal(IDS[:, :4])
    assert resized["global_attention_mask"].equal(attends[:, :4])


def test_a_mask_of_as_many_rows_as_tokens_is_one_of_rows():
    tokens, mask = torch.arange(16).view(4, 4), torch.ones(4, 4, dtype=torch.int64)
    mask[1, 0] = 0
    resized = resize_batch({"input_ids": tokens, "attention_mask": mask}, 2)
    assert resized["input_ids"].tolist() == [[0, 1], [5, 6], [8, 9], [12, 13]]
    assert resized["attention_mask"].tolist() == [[1, 1]] * 4
