"""Arguments, return types and errors of resize_batch. Its results are tested by backend in tests/ops."""

from collections import OrderedDict, UserDict, defaultdict
from collections.abc import MutableMapping
from contextlib import nullcontext
from types import MappingProxyType

import numpy as np
import pytest
import torch

from seqwarm_kernels import resize_batch
from seqwarm_kernels.resizing.functional import check_resize_options

from ..support.defaults import other_defaults


class Encoding(UserDict):
    """Has an attribute besides its data, like transformers' BatchEncoding."""

    def __init__(self, data, encodings=None):
        super().__init__(data)
        self.encodings = encodings


class OwnMapping(MutableMapping):
    def __init__(self, entries):
        self.entries = dict(entries)

    def __getitem__(self, name):
        return self.entries[name]

    def __setitem__(self, name, value):
        self.entries[name] = value

    def __delitem__(self, name):
        del self.entries[name]

    def __iter__(self):
        return iter(self.entries)

    def __len__(self):
        return len(self.entries)


def entries():
    return {"input_ids": torch.arange(20).view(2, 10), "names": ["a", "b"], "labels": torch.arange(20).view(2, 10)}


@pytest.mark.parametrize("make", [dict, OrderedDict, Encoding, OwnMapping, lambda e: defaultdict(list, e)])
def test_the_result_has_the_same_type_and_the_input_is_not_changed(make):
    batch = make(entries())
    resized = resize_batch(batch, 4)
    assert type(resized) is type(batch)
    assert list(resized) == list(batch)
    assert resized["input_ids"].shape == (2, 4)
    assert resized["names"] is batch["names"]
    assert batch["input_ids"].shape == (2, 10)


def test_attributes_of_the_batch_are_kept():
    resized = resize_batch(Encoding(entries(), encodings="kept"), 4)
    assert resized.encodings == "kept"


@pytest.mark.parametrize("seq_len", [4, 10, 50])
def test_only_views_share_memory_with_the_input(seq_len):
    batch = entries()
    tensor = batch["input_ids"]
    assert resize_batch(batch, seq_len)["input_ids"].untyped_storage().data_ptr() != tensor.untyped_storage().data_ptr()
    for mode in ("truncate", "reshape", "flatten"):
        view = resize_batch(batch, seq_len, mode=mode, copy=False, keys=["input_ids", "labels"])["input_ids"]
        shares = view.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
        assert shares == (mode != "reshape" or 10 % seq_len in (0, 10))
    for options in (
        {"mode": "reshape", "remainder": "pad"},
        {"mode": "reshape", "remainder": "overlap"},
        {"keep_last_token": True},
    ):
        masked = {"input_ids": tensor, "attention_mask": torch.ones_like(tensor)}
        view = resize_batch(masked, seq_len, copy=False, **options)["input_ids"]
        shares = view.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
        assert shares == (seq_len >= 10)


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


def test_views_carry_gradients():
    embeddings = torch.randn(2, 10, 3, requires_grad=True)
    view = resize_batch({"inputs_embeds": embeddings}, 4, copy=False)["inputs_embeds"]
    (gradient,) = torch.autograd.grad(view.sum(), embeddings)
    assert gradient.sum().item() == 2 * 4 * 3


def test_tensors_that_keys_does_not_name_pass_through():
    batch = {**entries(), "pixel_values": torch.randn(2, 3, 8, 8), "weight": torch.rand(2)}
    resized = resize_batch(batch, 5, mode="reshape", keys=["input_ids", "labels"])
    assert resized["input_ids"].shape == resized["labels"].shape == (4, 5)
    assert resized["pixel_values"] is batch["pixel_values"]
    assert resized["weight"] is batch["weight"]


@pytest.mark.parametrize(
    "batch", [None, [torch.ones(2, 3)], torch.ones(2, 3), MappingProxyType({"x": torch.ones(2, 3)})]
)
def test_a_batch_is_a_mutable_mapping(batch):
    with pytest.raises(TypeError, match="batch must be a mutable mapping or a dataclass, got"):
        resize_batch(batch, 2)


IDS = torch.arange(20).view(2, 10)
BAD_CALLS = [
    ({}, {"seq_len": 0}, ValueError, "seq_len must be at least 1, got 0"),
    ({}, {"seq_len": 4.0}, TypeError, "seq_len must be an int"),
    ({}, {"mode": "cut"}, ValueError, "mode must be one of truncate, reshape, flatten, segments, window, got 'cut'"),
    ({}, {"mode": "reshape", "remainder": "keep"}, ValueError, "remainder"),
    ({}, {"remainder": "pad"}, ValueError, "remainder='pad' needs mode='reshape', got mode='truncate'"),
    ({}, {"seq_dim": 2}, ValueError, "seq_dim must be 0 or 1, got 2"),
    ({}, {"seq_dim": "1"}, TypeError, "seq_dim must be an int"),
    ({}, {"keep_last_token": True}, ValueError, "keep_last_token needs an 'attention_mask'"),
    ({}, {"keep_last_token": True, "mode": "reshape"}, ValueError, "keep_last_token needs mode='truncate'"),
    ({}, {"keys": ["tokens"]}, ValueError, r"keys names 'tokens', the tensors of the batch are \['input_ids'\]"),
    ({}, {"keys": "input_ids"}, ValueError, "keys names 'i'"),
    ({}, {"keys": []}, ValueError, "batch must hold a tensor with a sequence dimension to resize"),
    ({}, {"mask_keys": ["m"]}, ValueError, "mask_keys names 'm'"),
    ({}, {"pad_values": {"labels": 1}}, ValueError, "pad_values names 'labels'"),
    ({}, {"pad_values": {"input_ids": "x"}}, TypeError, r"pad_values\['input_ids'\] must be a number, got str"),
    ({}, {"pad_values": {"input_ids": 0.5}}, ValueError, r"pad_values\['input_ids'\] must fit torch.int64"),
    ({}, {"pad_values": {"input_ids": 2**53 + 1}}, ValueError, r"pad_values\['input_ids'\] must fit .* float64"),
    ({"x": IDS > 3}, {"pad_values": {"x": 2}}, ValueError, r"pad_values\['x'\] must fit torch.bool and float64, got 2"),
    ({"x": IDS.to(torch.complex128)}, {"backend": "triton"}, ValueError, "backend='triton' cannot serve this call"),
    ({}, {"backend": "fast"}, ValueError, "backend must be None or one of"),
    ({}, {"backend": "fast", "copy": False}, ValueError, "backend must be None or one of"),
    ({"labels": torch.ones(2, 9)}, {}, ValueError, r"must agree .*, got input_ids \(2, 10\), labels \(2, 9\)"),
    ({"labels": torch.ones(3, 10)}, {}, ValueError, r"must agree on batch size .* labels \(3, 10\)"),
    ({"weight": torch.ones(2)}, {"mode": "flatten"}, ValueError, "mode='flatten' cannot resize 'weight'"),
    ({"names": ["a", "b"]}, {"mode": "flatten"}, ValueError, "mode='flatten' cannot resize 'names'"),
    ({"labels": torch.ones(2, 10, device="meta")}, {}, ValueError, "the tensors of batch must be on one device"),
    ({"labels": torch.ones(2, 10).to_sparse()}, {}, TypeError, r"batch\['labels'\] must be a dense tensor"),
    ({"x": torch.ones(2, 10, requires_grad=True)}, {}, ValueError, r"batch\['x'\] requires a gradient"),
    ({}, {"copy": False, "out": {}}, ValueError, "out must be None with copy=False"),
    (
        {"labels": torch.nested.nested_tensor([torch.ones(10), torch.ones(9)])},
        {},
        TypeError,
        r"batch\['labels'\] must be a dense tensor, got a nested tensor",
    ),
]


@pytest.mark.parametrize(("more", "options", "error", "message"), BAD_CALLS)
def test_bad_input(more, options, error, message):
    resize_batch({"input_ids": IDS}, 4)  # a plan of the same batch does not hide the error
    with pytest.raises(error, match=message):
        resize_batch({"input_ids": IDS, **more}, **{"seq_len": 4, **options})


def test_an_iterator_of_names_is_not_used_up():
    batch = {"input_ids": IDS, "allowed": torch.ones(2, 10, 10, dtype=torch.bool)}
    names = (name for name in ("input_ids", "allowed"))
    resized = resize_batch(batch, 4, keys=names, mask_keys=iter(["allowed"]))
    assert resized["input_ids"].shape == (2, 4)
    assert resized["allowed"].shape == (2, 4, 4)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"mode": "cut"}, ValueError),
        ({"length": 3}, TypeError),
        ({"backend": "fast"}, ValueError),
        ({"seq_dim": 3}, ValueError),
        ({"mode": "reshape", "remainder": "pad", "keys": ["anything"], "pad_values": {"x": 0.5}}, None),
        ({"backend": "triton"}, None),
    ],
)
def test_options_that_no_batch_can_make_right(options, error):
    with pytest.raises(error) if error else nullcontext():
        check_resize_options(options)


def test_numbers_of_numpy_are_taken():
    options = {"mode": "reshape", "remainder": "pad", "pad_values": {"input_ids": np.int64(7)}}
    result = resize_batch({"input_ids": IDS}, np.int64(4), seq_dim=np.int64(1), **options)
    assert result["input_ids"][2].tolist() == [8, 9, 7, 7]


@pytest.mark.parametrize("batch", [{}, {"names": ["a"]}, {"weight": torch.ones(2)}])
def test_nothing_to_resize(batch):
    with pytest.raises(ValueError, match="batch must hold a tensor with a sequence dimension to resize"):
        resize_batch(batch, 4)


def test_a_batch_without_tokens():
    with pytest.raises(ValueError, match="sequence length of at least 1, got 0"):
        resize_batch({"input_ids": torch.ones(2, 0)}, 4)


BAD_STORAGE = [
    ({}, "out must hold a tensor 'input_ids' to write to, its names are"),
    ({"input_ids": torch.zeros(20)}, "must be torch.int64 on cpu, got torch.float32 on cpu"),
    (
        {"input_ids": torch.zeros(20, dtype=torch.int64, device="meta")},
        "must be torch.int64 on cpu, got torch.int64 on meta",
    ),
    ({"input_ids": torch.zeros(7, dtype=torch.int64)}, r"at least 8 elements for \(2, 4\), got 7"),
    ({"input_ids": torch.zeros(2, 20, dtype=torch.int64)[:, ::2]}, "got 20, not contiguous"),
    ({"input_ids": IDS}, r"out\['input_ids'\] must not share memory with an entry of batch"),
]


@pytest.mark.parametrize(("out", "message"), BAD_STORAGE)
def test_bad_storage(out, message):
    with pytest.raises(ValueError, match=message):
        resize_batch({"input_ids": IDS}, 4, out=out)


def test_one_tensor_with_its_own_storage_and_the_info():
    storage = torch.empty(8, dtype=torch.int64)
    with other_defaults():
        resized, info = resize_batch({"input_ids": IDS}, 4, out={"input_ids": storage}, return_info=True)
    assert resized["input_ids"].equal(IDS[:, :4])
    assert info.valid_lengths.tolist() == [4, 4]


def test_outputs_may_not_overlap_and_nothing_is_written():
    storage = torch.full((40,), 7)
    with pytest.raises(ValueError, match=r"out\['labels'\] must not share memory with out\['input_ids'\]"):
        resize_batch({"input_ids": IDS, "labels": IDS}, 4, out={"input_ids": storage, "labels": storage[4:]})
    mask = torch.ones(IDS.shape, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"out\['input_ids'\] must not share memory with an entry of batch"):
        resize_batch({"input_ids": IDS, "attention_mask": mask}, 4, keys=["input_ids"], out={"input_ids": mask})
    assert (storage == 7).all()
    assert mask.all()


def test_outputs_may_lie_side_by_side():
    storage = torch.empty(16, dtype=torch.int64)
    out = {"input_ids": storage[:8], "labels": storage[8:]}
    resize_batch({"input_ids": IDS, "labels": IDS + 100}, 4, out=out)
    assert torch.equal(storage.view(2, 2, 4), torch.stack([IDS, IDS + 100])[..., :4])


def test_a_batch_without_rows_is_written():
    """Its outputs have no memory, so they share none."""
    batch = {"input_ids": IDS[:0], "labels": IDS[:0]}
    resized = resize_batch(batch, 4, out={name: torch.empty(0, dtype=torch.int64) for name in batch})
    assert resized["input_ids"].shape == resized["labels"].shape == (0, 4)


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


@pytest.mark.parametrize("mode", ["truncate", "reshape", "flatten"])
def test_entries_of_another_number_than_the_rows_pass_through(mode):
    batch = {"input_ids": IDS, "class_weights": torch.ones(5), "classes": ["a", "b", "c"]}
    for keys in (None, list(batch)):
        resized = resize_batch(batch, 4, mode=mode, keys=keys)
        assert resized["class_weights"] is batch["class_weights"]
        assert resized["classes"] is batch["classes"]


def test_arrays_that_keep_their_size_pass_through():
    batch = {"input_ids": torch.ones(2, 8), "weights": np.ones(2)}
    assert resize_batch(batch, 4)["weights"] is batch["weights"]
