"""Masks and position ids that rows share, or that have more dimensions: cut along the tokens, kept along the rest."""

import warnings

import pytest
import torch

from seqwarm_kernels import BatchBuffers, resize_batch

B, S, L = 2, 8, 5
TOKENS = torch.arange(B * S).view(B, S)
POSITIONS = torch.arange(10, 10 + S)
PAIRS = torch.randn(B, 3, S, S)
CUT = {
    "(S,)": ("decoder_position_ids", POSITIONS, POSITIONS[:L]),
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
    "(1, 1, S, S)": ("attention_mask", PAIRS[:1, :1], PAIRS[:1, :1, :L, :L]),
    "(B, 1, S, S)": ("attention_mask", PAIRS[:, :1], PAIRS[:, :1, :L, :L]),
    "(B, 3, S, S)": ("decoder.bias", PAIRS, PAIRS[..., :L, :L]),
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


@pytest.mark.parametrize("shape", [shape for shape in CUT if shape not in OF_ROWS])
def test_modes_that_make_rows_take_no_shared_entry(shape):
    name, tensor, _ = CUT[shape]
    for mode in ("reshape", "flatten"):
        with pytest.raises(ValueError, match=f"mode='{mode}' cannot resize '{name}'"):
            resize_batch({"tokens": TOKENS, name: tensor}, L, mode=mode)


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


def test_a_batch_of_masks_alone():
    masks = {"attn_bias": PAIRS, "mask": PAIRS[:, :1]}
    resized, info = resize_batch(masks, L, return_info=True)
    assert torch.equal(resized["attn_bias"], PAIRS[..., :L, :L])
    assert info.num_valid_tokens == B * L
    assert torch.equal(resize_batch({"attn_bias": PAIRS}, L)["attn_bias"], PAIRS[..., :L, :L])
    assert resize_batch({"attn_bias": PAIRS}, L, return_info=True)[1].valid_lengths.tolist() == [L] * B
