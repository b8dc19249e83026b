"""BatchBuffers: its sizes and errors. The written values are tested by backend in tests/ops."""

import weakref

import pytest
import torch

from seqwarm_kernels import BatchBuffers, resize_batch


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
    with pytest.raises(
        ValueError, match=r"out\['input_ids'\] must be contiguous with at least 28 elements for \(4, 7\)"
    ):
        resize_batch(batch(), 7, out=buffers)


def test_mask_keys_say_what_is_cut_on_both_sides():
    source = {"ids": torch.arange(40).view(4, 10), "allowed": torch.randn(4, 10, 10), "bias": torch.randn(4, 10, 10)}
    options = {"mask_keys": ["allowed"]}
    buffers = BatchBuffers(source, 6, **options)
    assert buffers["allowed"].numel() == 4 * 6 * 6
    assert torch.equal(resize_batch(source, 6, out=buffers, **options)["bias"], source["bias"][:, :6])


def test_buffers_on_another_device():
    buffers = BatchBuffers(batch(), 6, device="meta")
    assert {buffers.device, *(tensor.device for tensor in buffers.values())} == {torch.device("meta")}


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
    source = {"ids": torch.arange(40).view(10, 4), "pixels": torch.rand(4, 3, 8, 8)}
    buffers = BatchBuffers(source, 10, seq_dim=0, keys=["ids"])
    assert list(buffers) == ["ids"]
    cut = resize_batch(source, 3, seq_dim=0, keys=["ids"], out=buffers)
    assert torch.equal(cut["ids"], source["ids"][:3])
    assert cut["pixels"] is source["pixels"]


def test_a_call_overwrites_the_previous_results():
    source = {"input_ids": torch.arange(40).view(4, 10)}
    buffers = BatchBuffers(source, 10)
    first = resize_batch(source, 5, out=buffers)["input_ids"]
    resize_batch({"input_ids": source["input_ids"] + 100}, 5, out=buffers)
    assert torch.equal(first, source["input_ids"][:, :5] + 100)


def test_results_may_be_changed():
    source = {"x": torch.rand(4, 10)}
    buffers = BatchBuffers(source, 10)
    first = resize_batch(source, 5, out=buffers)["x"].requires_grad_()
    first.sum().backward()
    first.detach().unsqueeze_(1)
    second = resize_batch(source, 5, out=buffers)["x"]
    assert (second.requires_grad, second.grad, second.shape) == (False, None, (4, 5))


def test_autograd_notices_that_a_saved_tensor_was_overwritten():
    source = {"x": torch.rand(4, 10)}
    buffers = BatchBuffers(source, 10)
    weight = torch.rand(5, requires_grad=True)
    loss = (resize_batch(source, 5, out=buffers)["x"] * weight).sum()
    resize_batch(source, 5, out=buffers)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


BAD_BATCHES = [
    ({"labels": torch.ones(4, 10)}, "out must hold a tensor 'labels' to write to, its names are"),
    ({"input_ids": torch.ones(4, 10)}, r"out\['input_ids'\] must be torch.float32 on cpu, got torch.int64 on cpu"),
    ({"input_ids": torch.ones(9, 10, dtype=torch.int64)}, r"at least 45 elements for \(9, 5\), got 40"),
    (
        {"input_ids": torch.ones(4, 10, dtype=torch.int64, device="meta")},
        r"batch\['input_ids'\] must be on cpu or in pinned memory",
    ),
]


@pytest.mark.parametrize(("other", "message"), BAD_BATCHES)
def test_another_batch(other, message):
    buffers = BatchBuffers({"input_ids": torch.arange(40).view(4, 10)}, 10)
    buffers["input_ids"].fill_(7)
    with pytest.raises(ValueError, match=message):
        resize_batch(other, 5, out=buffers)
    assert (buffers["input_ids"] == 7).all()


def test_a_batch_in_its_own_buffers():
    buffers = BatchBuffers({"input_ids": torch.arange(40).view(4, 10)}, 10)
    inside = resize_batch({"input_ids": torch.arange(40).view(4, 10)}, 10, out=buffers)
    with pytest.raises(ValueError, match=r"out\['input_ids'\] must not share memory with an entry of batch"):
        resize_batch(inside, 5, out=buffers)


def test_bad_arguments():
    with pytest.raises(ValueError, match="max_seq_len must be at least 1, got 0"):
        BatchBuffers({"input_ids": torch.ones(4, 10)}, 0)
    with pytest.raises(ValueError, match="batch must hold a tensor with a sequence dimension"):
        BatchBuffers({"weight": torch.ones(4)}, 5)
    with pytest.raises(ValueError, match="mode must be one of"):
        BatchBuffers({"input_ids": torch.ones(4, 10)}, 5, mode="cut")
