"""Arguments and errors of resize_batch. Its results are in test_batches.py, and by backend in tests/ops."""

from types import MappingProxyType

import numpy as np
import pytest
import torch

from seqwarm_kernels import resize_batch

IDS = torch.arange(20).view(2, 10)
LEFT_PADDED = {"input_ids": torch.arange(20).view(2, 10), "attention_mask": torch.ones(2, 10, dtype=torch.int64)}
LEFT_PADDED["attention_mask"][1, :3] = 0
NO_VIEWS = r"copy must be True where rows of batch\['attention_mask'\] begin with padding"


@pytest.mark.parametrize("rows", [2, 100])
@pytest.mark.parametrize("seq_dim", [0, 1])
def test_views_of_rows_that_begin_with_padding_are_refused(rows, seq_dim):
    options = {"copy": False, "seq_dim": seq_dim}
    mask = torch.ones(rows, 10)
    batch = {"ids": torch.ones(rows, 10), "attention_mask": mask}
    batch = {name: tensor if seq_dim else tensor.T for name, tensor in batch.items()}
    resize_batch(batch, 4, **options)
    mask[-1, :9] = 0
    with pytest.raises(ValueError, match=rf"{NO_VIEWS}, got padding in row {rows - 1}"):
        resize_batch(batch, 4, **options)
    resize_batch(batch, 10, **options)
    mask[-1, 9] = 0  # no valid token: the row may begin anywhere
    resize_batch(batch, 4, **options)


def test_compiled_views_of_rows_that_begin_with_padding_are_refused():
    cut = torch.compile(lambda batch: resize_batch(batch, 4, copy=False), backend="eager", fullgraph=True)
    assert cut({**LEFT_PADDED, "attention_mask": torch.ones(2, 10)})["input_ids"].shape == (2, 4)
    with pytest.raises(RuntimeError, match=NO_VIEWS):
        cut({**LEFT_PADDED, "attention_mask": LEFT_PADDED["attention_mask"].float()})


ONES = torch.ones(2, 10)
BAD_CALLS = [
    (None, {}, TypeError, "batch"),
    (ONES, {}, TypeError, "batch"),
    (MappingProxyType({"x": ONES}), {}, TypeError, "batch"),
    ({"inner": MappingProxyType({"x": ONES})}, {}, TypeError, r"batch\['inner'\]"),
    ({"weight": torch.ones(2)}, {}, ValueError, "batch must hold a tensor"),
    ({"x": ONES}, {"keys": []}, ValueError, "batch must hold a tensor"),
    ({"x": torch.ones(2, 0)}, {}, ValueError, "sequence length"),
    ({"x": ONES}, {"seq_len": 0}, ValueError, "seq_len"),
    ({"x": ONES}, {"seq_len": 4.0}, TypeError, "seq_len"),
    ({"x": ONES}, {"mode": "cut"}, ValueError, "mode"),
    ({"x": ONES}, {"mode": "reshape", "remainder": "keep"}, ValueError, "remainder"),
    ({"x": ONES}, {"remainder": "pad"}, ValueError, "remainder='pad' needs mode='reshape'"),
    ({"x": ONES}, {"seq_dim": 2}, ValueError, "seq_dim"),
    ({"x": ONES}, {"keep_last_token": True}, ValueError, "keep_last_token needs an 'attention_mask'"),
    ({"x": ONES}, {"keep_last_token": True, "mode": "reshape"}, ValueError, "keep_last_token needs mode='truncate'"),
    ({"x": ONES}, {"keys": ["tokens"]}, ValueError, "keys names 'tokens'"),
    ({"x": ONES}, {"mask_keys": ["m"]}, ValueError, "mask_keys names 'm'"),
    ({"x": ONES}, {"pad_values": {"labels": 1}}, ValueError, "pad_values names 'labels'"),
    ({"x": ONES}, {"pad_values": {"x": "x"}}, TypeError, r"pad_values\['x'\]"),
    ({"x": IDS}, {"pad_values": {"x": 0.5}}, ValueError, r"pad_values\['x'\] must fit"),
    ({"x": IDS}, {"pad_values": {"x": 2**53 + 1}}, ValueError, r"pad_values\['x'\] must fit"),
    ({"x": IDS > 3}, {"pad_values": {"x": 2}}, ValueError, r"pad_values\['x'\] must fit"),
    ({"x": IDS.to(torch.complex128)}, {"backend": "triton"}, ValueError, "backend='triton' cannot serve this call"),
    ({"x": ONES}, {"backend": "fast"}, ValueError, "backend"),
    ({"x": ONES, "labels": torch.ones(2, 9)}, {}, ValueError, r"must agree .* labels \(2, 9\)"),
    ({"x": ONES, "labels": ONES[:1]}, {}, ValueError, "must agree"),
    ({"x": ONES, "position_ids": IDS[:1, :9]}, {}, ValueError, "must agree"),
    ({"x": ONES, "weight": torch.ones(2)}, {"mode": "flatten"}, ValueError, "mode='flatten' cannot resize 'weight'"),
    ({"x": ONES, "names": ["a", "b"]}, {"mode": "flatten"}, ValueError, "mode='flatten' cannot resize 'names'"),
    ({"x": ONES, "labels": ONES.to("meta")}, {}, ValueError, "one device"),
    ({"x": ONES.to_sparse()}, {}, TypeError, r"batch\['x'\] must be a dense tensor"),
    (
        {"x": torch.nested.nested_tensor([torch.ones(10), torch.ones(9)])},
        {},
        TypeError,
        r"batch\['x'\] must be a dense",
    ),
    ({"x": ONES.clone().requires_grad_()}, {}, ValueError, r"batch\['x'\] requires a gradient"),
    ({"x": ONES}, {"copy": False, "out": {}}, ValueError, "out must be None with copy=False"),
]


@pytest.mark.parametrize(("batch", "options", "error", "message"), BAD_CALLS)
def test_bad_input(batch, options, error, message):
    resize_batch({"x": ONES}, 4)  # a plan of the same batch does not hide the error
    with pytest.raises(error, match=message):
        resize_batch(batch, **{"seq_len": 4, **options})


def test_an_iterator_of_names_is_not_used_up():
    batch = {"input_ids": IDS, "allowed": torch.ones(2, 10, 10, dtype=torch.bool)}
    names = (name for name in ("input_ids", "allowed"))
    resized = resize_batch(batch, 4, keys=names, mask_keys=iter(["allowed"]))
    assert resized["input_ids"].shape == (2, 4)
    assert resized["allowed"].shape == (2, 4, 4)


def test_names_may_be_numbers():
    assert [tensor.shape for tensor in resize_batch({0: IDS, 1: ONES}, 4).values()] == [(2, 4)] * 2


def test_numbers_of_numpy_are_taken():
    options = {"mode": "reshape", "remainder": "pad", "pad_values": {"input_ids": np.int64(7)}}
    result = resize_batch({"input_ids": IDS}, np.int64(4), seq_dim=np.int64(1), **options)
    assert result["input_ids"][2].tolist() == [8, 9, 7, 7]


LACKS_UINT16 = pytest.mark.skipif(torch.__version__ < (2, 13), reason="torch.where of torch 2.11 lacks uint16")


@pytest.mark.parametrize("dtype", [pytest.param(torch.uint16, marks=LACKS_UINT16), torch.float8_e4m3fn], ids=str)
def test_the_reference_fills_dtypes_that_masked_fill_lacks(dtype):
    batch = {"input_ids": torch.ones(1, 4).to(dtype)}
    resized = resize_batch(batch, 3, mode="reshape", remainder="pad", backend="reference")["input_ids"]
    assert resized.float().tolist() == [[1, 1, 1], [1, 0, 0]]


@pytest.mark.parametrize(
    ("array", "mode"), [(np.ones(2), "reshape"), (np.ones((2, 3)), "flatten"), (np.ones((2, 8)), "truncate")]
)
def test_arrays_whose_size_would_change_are_refused(array, mode):
    batch = {"input_ids": torch.ones(2, 8), "weights": array}
    with pytest.raises(TypeError, match=r"batch\['weights'\] must be a tensor to be resized, got ndarray"):
        resize_batch(batch, 4, mode=mode)
    assert resize_batch(batch, 4, mode=mode, keys=["input_ids"])["weights"] is array


def test_arrays_and_entries_of_another_number_than_the_rows_pass_through():
    batch = {"input_ids": IDS, "class_weights": torch.ones(5), "classes": ["a", "b", "c"], "weights": np.ones(5)}
    for mode in ("truncate", "reshape", "flatten"):
        for keys in (None, [name for name in batch if name != "weights"]):
            resized = resize_batch(batch, 4, mode=mode, keys=keys)
            assert all(resized[name] is batch[name] for name in ("class_weights", "classes", "weights"))
