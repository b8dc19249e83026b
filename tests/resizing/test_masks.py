"""Masks and biases by their names: what is known to hide padding, and what is cut in both sequence dimensions."""

import pytest
import torch
from torch import nn

from seqwarm_kernels import SequenceLengthScheduler, resize_batch
from seqwarm_kernels.resizing import plan

IDS = torch.arange(16).view(2, 8)
MASK = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1], [1] * 8])
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


def test_a_nested_mask_that_keys_leaves_out():
    batch = {"encoder": {"input_ids": IDS, "attention_mask": MASK}, "decoder": {"input_ids": IDS}}
    resized = resize_batch(batch, 4, keys=["encoder.input_ids"])
    assert resized["encoder"]["input_ids"].tolist() == CUT


def test_of_nested_masks_the_outermost_counts_tokens():
    batch = {"input_ids": IDS, "attention_mask": RIGHT, "adapter": {"attention_mask": torch.ones_like(IDS)}}
    assert resize_batch(batch, 4, return_info=True)[1].valid_lengths.tolist() == [3, 4]


def test_a_mask_of_tokens_that_pass_through_moves_no_row():
    batch = {"input_ids": IDS, "attention_mask": MASK, "decoder_input_ids": IDS}
    resized = resize_batch(batch, 4, keys=["decoder_input_ids"])
    assert resized["decoder_input_ids"].tolist() == IDS[:, :4].tolist()


def test_a_float_mask_that_keys_leaves_out_must_not_be_additive():
    batch = {"input_ids": IDS, "attention_mask": (1.0 - MASK) * -1e4}
    with pytest.raises(ValueError, match=r"batch\['attention_mask'\] must be 0 where a token is hidden"):
        resize_batch(batch, 4, keys=["input_ids"])


def test_of_two_masks_the_one_that_keys_names_counts():
    batch = {"input_ids": IDS, "attention_mask": MASK, "decoder_attention_mask": torch.ones_like(MASK)}
    assert resize_batch(batch, 4, keys=["input_ids", "attention_mask"])["input_ids"].tolist() == CUT
    decoder = resize_batch(batch, 4, keys=["input_ids", "decoder_attention_mask"])
    assert decoder["input_ids"].tolist() == IDS[:, :4].tolist()
    assert resize_batch(batch, 4, keys=["input_ids"])["input_ids"].tolist() == CUT
    batch = {"decoder_input_ids": IDS, "decoder_attention_mask": MASK, "attention_mask": torch.ones_like(MASK)}
    with pytest.raises(ValueError, match=r"batch\['decoder_attention_mask'\] must begin with a valid token"):
        resize_batch(batch, 4, keys=["decoder_input_ids"])


@pytest.mark.parametrize("dtype", [torch.int64, torch.int8])
def test_an_additive_mask_of_integers_is_refused(dtype):
    batch = {"input_ids": IDS, "attention_mask": MASK - 1}
    with pytest.raises(ValueError, match=rf"batch\['attention_mask'\] must be 0 or 1, got {dtype} with -1"):
        resize_batch({**batch, "attention_mask": batch["attention_mask"].to(dtype)}, 2)


@pytest.mark.parametrize("name", ["bias", "attn_bias", "alibi_bias", "decoder.position_bias", "mask", "causal_mask"])
@pytest.mark.parametrize("heads", [(), (1,)])
def test_masks_and_biases_over_pairs_of_tokens_are_cut_on_both_sides(name, heads):
    pairs = torch.randn(2, *heads, 8, 8)
    resized = resize_batch({"input_ids": IDS, name: pairs}, 4)[name]
    assert torch.equal(resized, pairs[..., :4, :4])
    with pytest.raises(ValueError, match=rf"mode='reshape' cannot resize '{name}'"):
        resize_batch({"input_ids": IDS, name: pairs}, 4, mode="reshape")


def test_features_of_the_size_of_a_row_are_kept():
    batch = {"inputs_embeds": torch.randn(2, 8, 8), "biased": torch.randn(2, 8, 8), "bias": torch.randn(2, 8)}
    resized = resize_batch(batch, 4)
    assert [tensor.shape for tensor in resized.values()] == [(2, 4, 8), (2, 4, 8), (2, 4)]
    kept = resize_batch({"input_ids": IDS, "bias": batch["inputs_embeds"]}, 4, mask_keys=[])
    assert kept["bias"].shape == (2, 4, 8)


class MeanOfPrefix(nn.Module):
    """Predicts a label from the mean of the valid tokens up to it."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(50, 8), nn.Linear(8, 50)

    def forward(self, input_ids, attention_mask, labels):
        valid = attention_mask[..., None].float()
        means = (self.embedding(input_ids) * valid).cumsum(1) / valid.cumsum(1)  # NaN before the first valid token
        return nn.functional.cross_entropy(self.head(means).flatten(0, 1), labels.flatten())


def padded_batch(rows, length, side):
    batch = {
        "input_ids": torch.zeros(len(rows), length, dtype=torch.int64),
        "attention_mask": torch.zeros(len(rows), length, dtype=torch.int64),
        "labels": torch.full((len(rows), length), -100),
    }
    for index, row in enumerate(rows):
        where = slice(len(row)) if side == "right" else slice(length - len(row), length)
        for name, value in {"input_ids": row, "attention_mask": 1, "labels": row}.items():
            batch[name][index, where] = value
    return batch


@pytest.mark.parametrize("attached", [False, True])
def test_a_batch_padded_on_the_left_trains_on_its_tokens(attached):
    torch.manual_seed(0)
    model = MeanOfPrefix()
    rows = [torch.randint(50, (length,)) for length in (20, 12, 5)]
    losses = {}
    for side in ("right", "left"):
        batch = padded_batch(rows, 24, side)
        scheduler = SequenceLengthScheduler(8, 24, duration=2)
        attachment = scheduler.attach(model) if attached else None
        losses[side] = []
        for tokens in (8 + 8 + 5, 16 + 12 + 5, 20 + 12 + 5):
            losses[side].append(model(**batch) if attached else model(**scheduler.resize(batch)))
            assert attachment is None or attachment.take_seen().tokens == tokens
            scheduler.step()
        if attachment is not None:
            attachment.remove()
    torch.testing.assert_close(losses["left"], losses["right"])
    assert torch.stack(losses["left"]).isfinite().all()


LEFT, RIGHT = torch.tensor([[0, 0, 0, 0, 0, 1, 1, 1], [1] * 8]), torch.tensor([[1, 1, 1, 0, 0, 0, 0, 0], [1] * 8])


@pytest.mark.parametrize("copy", [True, False])
@pytest.mark.parametrize(
    ("batch", "begins_masked"),
    [
        (
            {"input_ids": IDS, "attention_mask": LEFT, "decoder_input_ids": IDS, "decoder_attention_mask": RIGHT},
            "attention_mask",
        ),
        (
            {
                "encoder": {"input_ids": IDS, "attention_mask": RIGHT},
                "decoder": {"input_ids": IDS, "attention_mask": LEFT},
                "labels": IDS,
            },
            "decoder.attention_mask",
        ),
        ({"prompt_input_ids": IDS, "prompt_attention_mask": LEFT}, "prompt_attention_mask"),
    ],
    ids=["two masks", "nested", "another name"],
)
def test_one_mask_does_not_move_the_tokens_of_another(batch, begins_masked, copy):
    for _ in range(2):  # the second call is a known one
        with pytest.raises(ValueError, match=rf"batch\['{begins_masked}'\] must begin with a valid token in each row"):
            resize_batch(batch, 3, copy=copy)
    assert resize_batch(batch, 8, copy=copy).keys() == batch.keys()  # nothing is cut


def test_an_encoder_and_a_decoder_by_themselves_are_cut_by_their_own_masks():
    batch = {
        "encoder": {"input_ids": IDS, "attention_mask": RIGHT},
        "decoder": {"input_ids": IDS, "attention_mask": LEFT},
    }
    resized = resize_batch(batch, 3)
    assert resized["encoder"]["input_ids"].tolist() == [[0, 1, 2], [8, 9, 10]]
    assert resized["decoder"]["input_ids"].tolist() == [[5, 6, 7], [8, 9, 10]]


def test_global_attention_hides_no_token():
    """Longformer's mask is 0 where a token attends locally."""
    attends = torch.zeros(2, 8, dtype=torch.int64)
    attends[:, 3] = 1
    batch = {"input_ids": IDS, "attention_mask": torch.ones_like(IDS), "global_attention_mask": attends}
    resized = resize_batch(batch, 4)
    assert resized["input_ids"].equal(IDS[:, :4])
    assert resized["global_attention_mask"].equal(attends[:, :4])


@pytest.mark.parametrize("mode", ["truncate", "reshape"])
def test_numbers_of_sequences_in_an_attention_mask_are_refused(mode):
    batch = {"input_ids": IDS[:1], "attention_mask": torch.tensor([[1, 1, 1, 1, 2, 2, 2, 2]])}
    for _ in range(2):
        with pytest.raises(ValueError, match=r"'attention_mask'\] must be 0 or 1, got torch.int64 with 2"):
            resize_batch(batch, 2, mode=mode)


def test_batches_of_two_masks_that_begin_with_tokens():
    batch = {"input_ids": IDS, "attention_mask": RIGHT, "decoder_input_ids": IDS, "decoder_attention_mask": RIGHT}
    for tensor in (resized := resize_batch(batch, 3)).values():
        assert tensor.shape == (2, 3)
    assert torch.equal(resized["decoder_input_ids"], IDS[:, :3])


def test_a_mask_to_be_added_is_not_read_as_its_opposite():
    first = {"input_ids": IDS, "attention_mask": torch.zeros(2, 8)}
    resize_batch(first, 3)
    with pytest.raises(ValueError, match=r"must be 0 where a token is hidden, got torch\.float32 with -inf"):
        resize_batch({**first, "attention_mask": torch.where(RIGHT == 1, 0.0, -torch.inf)}, 3)


def test_a_mask_of_as_many_rows_as_tokens_is_one_of_rows():
    tokens, mask = torch.arange(16).view(4, 4), torch.ones(4, 4, dtype=torch.int64)
    mask[1, 0] = 0
    resized = resize_batch({"input_ids": tokens, "attention_mask": mask}, 2)
    assert resized["input_ids"].tolist() == [[0, 1], [5, 6], [8, 9], [12, 13]]
    assert resized["attention_mask"].tolist() == [[1, 1]] * 4
