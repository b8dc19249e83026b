"""Masks and position ids that rows share, or that have more dimensions: cut along the tokens, kept along the rest."""

import warnings

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from seqwarm_kernels import BatchBuffers, resize_batch
from tests.support.tiers import examples

B, S, L = 2, 8, 5
TOKENS = torch.arange(B * S).view(B, S)
POSITIONS = torch.arange(10, 10 + S)
PAIRS = torch.randn(B, 3, S, S)
CUT = {
    "(S,)": ("position_ids", POSITIONS, POSITIONS[:L]),
    "(1, S)": ("position_ids", POSITIONS[None], POSITIONS[None, :L]),
    "(B, S)": ("position_ids", POSITIONS.expand(B, S), POSITIONS.expand(B, S)[:, :L]),
    "(3, B, S)": (
        "position_ids",
        TOKENS + torch.arange(3)[:, None, None],
        TOKENS[:, :L] + torch.arange(3)[:, None, None],
    ),
    "(B, B, S)": (
        "position_ids",
        TOKENS + torch.arange(B)[:, None, None],
        TOKENS[:, :L] + torch.arange(B)[:, None, None],
    ),
    "(3, 1, S)": ("position_ids", POSITIONS.expand(3, 1, S), POSITIONS[:L].expand(3, 1, L)),
    "decoder": ("decoder_position_ids", POSITIONS[None], POSITIONS[None, :L]),
    "(1, 1, S, S)": ("attention_mask", PAIRS[:1, :1], PAIRS[:1, :1, :L, :L]),
    "(B, 1, S, S)": ("attention_mask", PAIRS[:, :1], PAIRS[:, :1, :L, :L]),
    "(B, 3, S, S)": ("attn_bias", PAIRS, PAIRS[..., :L, :L]),
    "(1, S, S)": ("mask", PAIRS[0, :1], PAIRS[0, :1, :L, :L]),
    "(S, S)": ("causal_mask", PAIRS[0, 0], PAIRS[0, 0, :L, :L]),
    "(1, S) mask": ("attention_mask", torch.ones(1, S), torch.ones(1, L)),
}
OF_ROWS = ("(B, S)", "(3, B, S)", "(B, B, S)")


@pytest.fixture(autouse=True)
def _no_warning():
    """Megatron's causal mask (B, 1, S, S) was taken for one of padding."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@pytest.mark.parametrize("shape", CUT)
@pytest.mark.parametrize("backend", [None, "reference"])
def test_entries_are_cut_along_the_tokens(shape, backend):
    name, tensor, expected = CUT[shape]
    batch = {"tokens": TOKENS, name: tensor}
    before = tensor.clone()
    for copy in (True, False):
        resized, info = resize_batch(batch, L, copy=copy, return_info=True, backend=backend)
        assert torch.equal(resized["tokens"], TOKENS[:, :L])
        assert torch.equal(resized[name], expected)
        assert (resized[name].untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()) == (not copy)
        assert info.valid_lengths.tolist() == [L] * B
    assert torch.equal(tensor, before)
    assert torch.equal(resize_batch(batch, S + 1)[name], tensor)


@pytest.mark.parametrize("shape", CUT)
def test_entries_are_written_to_the_memory_of_the_caller(shape):
    name, tensor, expected = CUT[shape]
    batch = {"tokens": TOKENS, name: tensor}
    out = {key: torch.empty(value.numel(), dtype=value.dtype) for key, value in batch.items()}
    for storage in (BatchBuffers(batch, L), out):
        if shape not in (*OF_ROWS, "(B, 1, S, S)"):
            with pytest.raises(ValueError, match=f"out must be None with '{name}', which rows share"):
                resize_batch(batch, L, out=storage)
            continue
        resized = resize_batch(batch, L, out=storage)
        assert torch.equal(resized[name], expected)
        assert resized[name].untyped_storage().data_ptr() == storage[name].untyped_storage().data_ptr()


@pytest.mark.parametrize("shape", CUT)
@pytest.mark.parametrize("options", [{"mode": "reshape"}, {"mode": "reshape", "remainder": "pad"}, {"mode": "flatten"}])
def test_modes_that_make_rows(shape, options):
    name, tensor, _ = CUT[shape]
    batch = {"tokens": TOKENS, name: tensor}
    if shape not in OF_ROWS:
        with pytest.raises(ValueError, match=f"mode='{options['mode']}' cannot resize '{name}'"):
            resize_batch(batch, L, **options)
        return
    layers = tensor if tensor.dim() == 3 else tensor[None]
    expected = torch.stack([resize_batch({"x": layer}, L, **options)["x"] for layer in layers])
    for copy in (True, False):
        resized = resize_batch(batch, L, copy=copy, **options)[name]
        assert torch.equal(resized, expected if tensor.dim() == 3 else expected[0])


def test_stacked_position_ids_move_with_their_rows():
    mask = torch.ones(B, S, dtype=torch.int64)
    mask[1, :2] = 0
    positions = torch.stack([TOKENS, TOKENS + 100, TOKENS + 200])
    batch = {"input_ids": TOKENS, "attention_mask": mask, "position_ids": positions}
    for options in ({}, {"keep_last_token": True}):
        resized = resize_batch(batch, L, **options)
        assert torch.equal(resized["position_ids"] % 100, resized["input_ids"].expand(3, B, L))
    assert resize_batch(batch, L)["input_ids"][1].tolist() == [10, 11, 12, 13, 14]


def test_rows_that_begin_with_padding_share_no_entry():
    """Rows are cut at different places then."""
    mask = torch.ones(B, S, dtype=torch.int64)
    batch = {"input_ids": TOKENS, "attention_mask": mask, "position_ids": POSITIONS[None]}
    assert torch.equal(resize_batch(batch, L)["position_ids"], POSITIONS[None, :L])
    mask[1, :2] = 0
    for copy in (True, False):
        with pytest.raises(ValueError, match=r"batch\['attention_mask'\] must begin with a valid token .* in row 1"):
            resize_batch(batch, L, copy=copy)
    assert torch.equal(resize_batch(batch, S)["position_ids"], POSITIONS[None])
    with pytest.raises(ValueError, match=r"keep_last_token needs .* no tensor that rows share"):
        resize_batch(batch, L, keep_last_token=True)


def test_sequence_first():
    batch = {"tokens": TOKENS.T, "position_ids": POSITIONS, "mask": PAIRS[:, :1]}
    resized = resize_batch(batch, L, seq_dim=0)
    assert torch.equal(resized["tokens"], TOKENS.T[:L])
    assert torch.equal(resized["position_ids"], POSITIONS[:L])
    assert torch.equal(resized["mask"], PAIRS[:, :1, :L, :L])


def test_other_names_are_not_shared():
    """A (1, S) tensor of tokens beside (B, S) ones is a mistake."""
    with pytest.raises(ValueError, match="must agree on batch size and sequence length"):
        resize_batch({"tokens": TOKENS, "labels": TOKENS[:1]}, L)
    with pytest.raises(ValueError, match="must agree on batch size and sequence length"):
        resize_batch({"tokens": TOKENS, "position_ids": POSITIONS[None, :7]}, L)


def test_a_batch_of_masks_alone():
    masks = {"attn_bias": PAIRS, "mask": PAIRS[:, :1]}
    resized, info = resize_batch(masks, L, return_info=True)
    assert torch.equal(resized["attn_bias"], PAIRS[..., :L, :L])
    assert info.num_valid_tokens == B * L
    assert torch.equal(resize_batch({"attn_bias": PAIRS}, L)["attn_bias"], PAIRS[..., :L, :L])
    assert resize_batch({"attn_bias": PAIRS}, L, return_info=True)[1].valid_lengths.tolist() == [L] * B


@examples(50)
@given(rows=st.integers(1, 3), length=st.integers(2, 9), seq_len=st.integers(1, 10), depth=st.integers(1, 3))
def test_position_ids_of_any_shape(rows, length, seq_len, depth):
    tokens, kept = torch.arange(rows * length).view(rows, length), min(seq_len, length)
    shared = torch.arange(depth * length).view(depth, 1, length)
    for positions in (shared, shared.expand(depth, rows, length)):
        resized = resize_batch({"tokens": tokens, "position_ids": positions}, seq_len)
        assert torch.equal(resized["position_ids"], positions[..., :kept])
        assert torch.equal(resized["tokens"], tokens[:, :kept])


def test_stacked_position_ids_alone():
    stacked = TOKENS + torch.arange(3)[:, None, None]
    assert torch.equal(resize_batch({"position_ids": stacked}, L)["position_ids"], stacked[..., :L])


def test_stacked_position_ids_of_one_row_are_reshaped():
    stacked = torch.arange(3 * S).view(3, 1, S)
    resized = resize_batch({"tokens": TOKENS[:1], "position_ids": stacked}, 4, mode="reshape")
    assert torch.equal(resized["position_ids"], stacked.view(3, 2, 4))
