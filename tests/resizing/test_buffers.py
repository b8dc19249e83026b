"""Memory of the caller, and BatchBuffers: sizes and errors. The written values are tested by backend in tests/ops."""

import weakref

import pytest
import torch

from seqwarm_kernels import BatchBuffers, resize_batch

from ..support.defaults import other_defaults


def batch():
    return {
        "input_ids": torch.arange(40).view(4, 10),
        "embeddings": torch.randn(4, 10, 3),
        "pair_mask": torch.ones(4, 10, 10, dtype=torch.bool),
        "weight": torch.rand(4),
    }


def test_sizes_fit_the_maximum_length():
    buffers = BatchBuffers(batch(), 6)
    assert {name: tensor.numel() for name, tensor in buffers.items()} == {
        "input_ids": 24,
        "embeddings": 72,
        "pair_mask": 144,
        "weight": 4,
    }
    assert buffers["embeddings"].dtype == torch.float32
    assert buffers.device == torch.device("cpu")
    assert len(buffers) == 4
    assert all(tensor.data_ptr() % 16 == 0 for tensor in buffers.values())
    assert buffers.nbytes >= sum(tensor.nbytes for tensor in buffers.values())
    with pytest.raises(ValueError, match=r"out\['input_ids'\] must be .* at least 28 elements"):
        resize_batch(batch(), 7, out=buffers)
    elsewhere = BatchBuffers(batch(), 6, device="meta")
    assert {elsewhere.device, *(tensor.device for tensor in elsewhere.values())} == {torch.device("meta")}


def test_a_graph_keeps_what_it_reads(monkeypatch):
    """A batch in pinned memory that a captured step reads lives as long as the buffers."""
    monkeypatch.setattr("seqwarm_kernels.resizing.buffers.is_capturing", lambda device: True)
    buffers = BatchBuffers(batch(), 6)
    tensor = torch.ones(3)
    is_kept = weakref.ref(tensor)
    buffers.keep_while_read([tensor])
    del tensor
    assert is_kept() is not None
    del buffers
    assert is_kept() is None


def test_padding_needs_more_than_the_source():
    source = {"input_ids": torch.arange(40).view(4, 10), "weight": torch.rand(4)}
    dropped, padded = (BatchBuffers(source, 10, mode="reshape", remainder=r) for r in ("drop", "pad"))
    assert dropped["input_ids"].numel() == 40
    assert padded["input_ids"].numel() == 4 * 2 * 9  # rows of 9
    assert padded["weight"].numel() == 40  # rows of 1
    for seq_len in range(1, 11):
        assert resize_batch(source, seq_len, mode="reshape", remainder="pad", out=padded)["weight"].numel() >= 4


def test_pad_values_belong_to_the_call():
    source = {"labels": torch.arange(10, dtype=torch.uint8).view(2, 5)}
    options = {"mode": "reshape", "remainder": "pad"}
    buffers = BatchBuffers(source, 5, **options)
    padded = resize_batch(source, 4, **options, pad_values={"labels": 255}, out=buffers)["labels"]
    assert padded[1].tolist() == [4, 255, 255, 255]
    with pytest.raises(ValueError, match="pad_values must have a value for 'labels'"):
        resize_batch(source, 4, **options, out=buffers)


def test_options_of_the_call():
    source = {"ids": torch.arange(40).view(10, 4), "pixels": torch.rand(4, 3, 8, 8), "allowed": torch.rand(4, 10, 10)}
    options = {"seq_dim": 0, "keys": ["ids", "allowed"], "mask_keys": ["allowed"]}
    buffers = BatchBuffers(source, 6, **options)
    assert {name: tensor.numel() for name, tensor in buffers.items()} == {"ids": 24, "allowed": 4 * 6 * 6}
    cut = resize_batch(source, 3, out=buffers, **options)
    assert torch.equal(cut["ids"], source["ids"][:3])
    assert torch.equal(cut["allowed"], source["allowed"][:, :3, :3])
    assert cut["pixels"] is source["pixels"]


def test_a_call_overwrites_the_previous_results_which_may_be_changed():
    source = {"x": torch.rand(4, 10)}
    buffers = BatchBuffers(source, 10)
    first = resize_batch(source, 5, out=buffers)["x"].requires_grad_()
    first.sum().backward()
    first.detach().unsqueeze_(1)
    second = resize_batch({"x": source["x"] + 100}, 5, out=buffers)["x"]
    assert (second.requires_grad, second.grad, second.shape) == (False, None, (4, 5))
    assert torch.equal(first, source["x"][:, :5] + 100)


def test_autograd_notices_that_a_saved_tensor_was_overwritten():
    source = {"x": torch.rand(4, 10)}
    buffers = BatchBuffers(source, 10)
    weight = torch.rand(5, requires_grad=True)
    loss = (resize_batch(source, 5, out=buffers)["x"] * weight).sum()
    resize_batch(source, 5, out=buffers)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


IDS = torch.arange(40).view(4, 10)


def refused(batch, out, message):
    with pytest.raises(ValueError, match=message):
        resize_batch(batch, 5, out=out)


def test_memory_that_does_not_fit_is_refused_and_not_written():
    batch, buffers = {"input_ids": IDS}, BatchBuffers({"input_ids": IDS}, 10)
    buffers["input_ids"].fill_(7)
    refused({"labels": IDS}, buffers, "out must hold a tensor 'labels'")
    refused({"input_ids": IDS.float()}, buffers, r"out\['input_ids'\] must be torch.float32 on cpu")
    refused({"input_ids": torch.ones(9, 10, dtype=torch.int64)}, buffers, r"at least 45 elements for \(9, 5\), got 40")
    refused({"input_ids": IDS.to("meta")}, buffers, r"batch\['input_ids'\] must be on cpu or in pinned memory")
    refused(batch, {"input_ids": IDS.to("meta")}, "must be torch.int64 on cpu, got torch.int64 on meta")
    refused(batch, {"input_ids": torch.zeros(4, 20, dtype=torch.int64)[:, ::2]}, "not contiguous")
    inside, mask = resize_batch(batch, 10, out=BatchBuffers(batch, 10)), torch.ones_like(IDS)
    refused(inside, inside, "must not share memory with an entry of batch")
    with pytest.raises(ValueError, match="must not share memory with an entry of batch"):
        resize_batch(batch | {"attention_mask": mask}, 5, keys=["input_ids"], out={"input_ids": mask})
    storage = torch.full((80,), 7)
    outputs = {"input_ids": storage, "labels": storage[4:]}
    refused(
        {"input_ids": IDS, "labels": IDS}, outputs, r"out\['labels'\] must not share memory with out\['input_ids'\]"
    )
    assert (storage == 7).all()
    assert (buffers["input_ids"] == 7).all()


def test_outputs_may_lie_side_by_side():
    storage = torch.empty(40, dtype=torch.int64)
    out = {"input_ids": storage[:20], "labels": storage[20:]}
    with other_defaults():
        _, info = resize_batch({"input_ids": IDS, "labels": IDS + 100}, 5, out=out, return_info=True)
    assert torch.equal(storage.view(2, 4, 5), torch.stack([IDS, IDS + 100])[..., :5])
    assert info.valid_lengths.tolist() == [5] * 4


def test_a_batch_without_rows_is_written():
    """Its outputs have no memory, so they share none."""
    batch = {"input_ids": IDS[:0], "labels": IDS[:0]}
    resized = resize_batch(batch, 4, out={name: torch.empty(0, dtype=torch.int64) for name in batch})
    assert resized["input_ids"].shape == resized["labels"].shape == (0, 4)


def test_a_maximum_of_no_tokens_is_refused():
    with pytest.raises(ValueError, match=r"^max_seq_len must"):
        BatchBuffers({"input_ids": IDS}, 0)
