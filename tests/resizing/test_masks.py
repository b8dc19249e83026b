"""Masks and biases by their names: what is known to hide padding, and what is cut in both sequence dimensions."""

import warnings

import pytest
import torch
from torch import nn

from seqwarm_kernels import SequenceLengthScheduler, resize_batch
from seqwarm_kernels.resizing import checked_call, functional
from seqwarm_kernels.resizing.entry_names import warn_once

IDS = torch.arange(16).view(2, 8)
MASK = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1], [1] * 8])
#: From the first valid token on.
CUT = [[3, 4, 5, 6], [8, 9, 10, 11]]


@pytest.fixture(autouse=True)
def _no_call_is_known():
    """Masks of known kinds are not looked at again."""
    warn_once.cache_clear()
    checked_call._calls.clear()
    functional._direct_calls.clear()


@pytest.mark.parametrize("seq_dim", [0, 1])
@pytest.mark.parametrize("name", ["input_ids", "inputs_embeds"])
def test_a_mask_that_keys_leaves_out_tells_where_rows_begin(name, seq_dim):
    batch = {name: IDS, "attention_mask": MASK}
    batch = batch if seq_dim else {name: tensor.T for name, tensor in batch.items()}
    resized = resize_batch(batch, 4, keys=[name], seq_dim=seq_dim)
    assert (resized[name] if seq_dim else resized[name].T).tolist() == CUT
    assert resized["attention_mask"] is batch["attention_mask"]
    with pytest.raises(ValueError, match=r"copy must be True where a row begins with padding: batch\['attention_mask'"):
        resize_batch(batch, 4, keys=[name], seq_dim=seq_dim, copy=False)


def test_a_nested_mask_that_keys_leaves_out():
    batch = {"encoder": {"input_ids": IDS, "attention_mask": MASK}, "decoder": {"input_ids": IDS}}
    resized = resize_batch(batch, 4, keys=["encoder.input_ids"])
    assert resized["encoder"]["input_ids"].tolist() == CUT


def test_a_mask_of_tokens_that_pass_through_moves_no_row():
    batch = {"input_ids": IDS, "attention_mask": MASK, "decoder_input_ids": IDS}
    with pytest.warns(UserWarning, match=r"which is not looked for in batch\['attention_mask'\]"):
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


@pytest.mark.parametrize(
    ("name", "mask"),
    [
        ("key_padding_mask", MASK == 0),
        ("padding_mask", MASK),
        ("mask", MASK),
        ("encoder.mask", MASK),
        *((f"{name}_mask", MASK) for name in ("att", "attn", "decoder_attn", "input", "pad", "src", "token", "valid")),
        ("attention_mask", MASK[:, None, None, :].expand(2, 1, 8, 8)),
        ("attention_mask", MASK[:, :, None]),
    ],
)
def test_a_mask_that_is_not_read_is_told_once(name, mask):
    nested, _, own = name.rpartition(".")
    batch = {nested: {"input_ids": IDS, own: mask}} if nested else {"input_ids": IDS, own: mask}
    with pytest.warns(UserWarning, match=rf"padding, which is not looked for in batch\['{name}'\]") as caught:
        resize_batch(batch, 4)
    assert [warning.filename for warning in caught] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        resize_batch(batch, 4)
        resize_batch(batch, 4, return_info=True)


class Called(nn.Module):
    def forward(self, input_ids, padding_mask):
        return input_ids


@pytest.mark.parametrize("attached", [False, True])
def test_the_warning_names_the_line_of_the_user(attached):
    scheduler, model = SequenceLengthScheduler(4, 8, duration=10, step_size=4), Called()
    if attached:
        scheduler.attach(model)
    batch = {"input_ids": IDS, "padding_mask": MASK}
    with pytest.warns(UserWarning, match="not looked for in") as caught:
        _ = model(**batch) if attached else scheduler.resize(batch)
    assert [warning.filename for warning in caught] == [__file__]


@pytest.mark.parametrize(
    ("more", "options"),
    [
        ({"loss_mask": MASK, "special_tokens_mask": MASK}, {}),
        ({"attention_mask": MASK, "key_padding_mask": MASK, "mask": MASK[:, None, None].expand(2, 1, 8, 8)}, {}),
        ({"mask": torch.ones(2)}, {}),
        ({"padding_mask": None}, {}),
        ({"padding_mask": MASK}, {"mode": "reshape"}),
    ],
)
def test_no_warning_where_nothing_is_left_to_find(more, options):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        resize_batch({"input_ids": IDS, **more}, 4, **options)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int8])
def test_an_additive_mask_of_integers_is_refused(dtype):
    batch = {"input_ids": IDS, "attention_mask": (MASK - 1) * 100}
    with pytest.raises(ValueError, match=rf"must be 0 where a token is hidden, got {dtype} with -100: of a mask"):
        resize_batch({**batch, "attention_mask": batch["attention_mask"].to(dtype)}, 2)


@pytest.mark.parametrize("name", ["bias", "attn_bias", "alibi_bias", "decoder.position_bias", "mask", "causal_mask"])
@pytest.mark.parametrize("heads", [(), (1,)])
@pytest.mark.filterwarnings("ignore:rows are cut from their first token")
def test_masks_and_biases_over_pairs_of_tokens_are_cut_on_both_sides(name, heads):
    pairs = torch.randn(2, *heads, 8, 8)
    resized = resize_batch({"input_ids": IDS, name: pairs}, 4)[name]
    assert torch.equal(resized, pairs[..., :4, :4])
    with pytest.raises(ValueError, match=rf"mode='reshape' cannot resize '{name}'"):
        resize_batch({"input_ids": IDS, name: pairs}, 4, mode="reshape")


@pytest.mark.filterwarnings("ignore:.* has as many features as tokens")
def test_features_of_the_size_of_a_row_are_kept():
    batch = {"inputs_embeds": torch.randn(2, 8, 8), "biased": torch.randn(2, 8, 8), "bias": torch.randn(2, 8)}
    resized = resize_batch(batch, 4)
    assert [tensor.shape for tensor in resized.values()] == [(2, 4, 8), (2, 4, 8), (2, 4)]
    kept = resize_batch({"input_ids": IDS, "bias": batch["inputs_embeds"]}, 4, mask_keys=[])
    assert kept["bias"].shape == (2, 4, 8)


def test_pairs_of_tokens_of_another_name_are_told_once():
    batch = {"input_ids": IDS, "distances": torch.ones(2, 8, 8)}
    with pytest.warns(UserWarning, match=r"batch\['distances'\] has as many features as tokens") as caught:
        assert resize_batch(batch, 4)["distances"].shape == (2, 4, 8)
    assert [warning.filename for warning in caught] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        resize_batch(batch, 4)


@pytest.mark.parametrize(
    ("name", "options"), [("distances", {"mask_keys": ["distances"]}), ("x", {"mask_keys": []}), ("inputs_embeds", {})]
)
def test_no_warning_of_pairs_or_features_that_are_known(name, options):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        resize_batch({"input_ids": IDS, name: torch.ones(2, 8, 8)}, 4, **options)


def test_an_iterator_of_names_is_not_used_up_in_silence():
    batch = {"input_ids": IDS, "allowed": torch.ones(2, 8, 8, dtype=torch.bool)}
    with pytest.raises(TypeError, match="mask_keys must be a collection of names, such as a list, got generator"):
        resize_batch(batch, 4, mask_keys=(name for name in ["allowed"]))


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
