"""Nested batches of all types: the entries that resize_batch reads, and the types that it returns."""

import dataclasses
from collections import OrderedDict
from types import MappingProxyType

import pytest
import torch

from seqwarm_kernels import BatchBuffers, resize_batch
from seqwarm_kernels.resizing.containers import cut_entries

MASK = torch.tensor([[1, 1, 1, 1, 1, 0], [1, 1, 0, 0, 0, 0]])


def ids():
    return torch.arange(12).view(2, 6)


def nested():
    return {
        "encoder": OrderedDict(input_ids=ids(), attention_mask=MASK),
        "labels": ids(),
        "meta": {"names": ["a", "b"], "task": "x"},
    }


def test_nested_batches():
    batch = nested()
    resized, info = resize_batch(batch, 3, keep_last_token=True, return_info=True)
    assert type(resized["encoder"]) is OrderedDict
    assert resized["encoder"]["input_ids"].tolist() == [[0, 1, 4], [6, 7, 8]]
    assert resized["labels"].tolist() == [[0, 1, 4], [6, 7, 8]]
    assert resized["meta"] == batch["meta"]
    assert info.valid_lengths.tolist() == [3, 2]
    assert batch["encoder"]["input_ids"].shape == (2, 6)


def test_paths_name_nested_entries():
    batch = nested()
    resized = resize_batch(
        batch, 4, mode="reshape", remainder="pad", keys=["encoder.input_ids"], pad_values={"encoder.input_ids": 9}
    )
    assert resized["encoder"]["input_ids"].tolist() == [[0, 1, 2, 3], [4, 5, 9, 9], [6, 7, 8, 9], [10, 11, 9, 9]]
    assert resized["encoder"]["attention_mask"] is MASK
    out = {
        name: torch.zeros(12, dtype=torch.int64) for name in ("encoder.input_ids", "encoder.attention_mask", "labels")
    }
    assert resize_batch(batch, 3, out=out)["labels"].data_ptr() == out["labels"].data_ptr()
    assert list(BatchBuffers(batch, 6)) == ["encoder.input_ids", "encoder.attention_mask", "labels"]
    with pytest.raises(ValueError, match=r"keys names 'input_ids', the tensors of the batch are \['encoder.input_ids'"):
        resize_batch(batch, 4, keys=["input_ids"])


def test_cut_entries_are_the_tensors_of_another_shape():
    batch = nested()
    resized = resize_batch(batch, 4, keys=["encoder.input_ids"])
    (cut,) = cut_entries(batch, {**resized, "added": ids()})
    assert cut[0] == "encoder.input_ids"
    assert cut[1] is batch["encoder"]["input_ids"]
    assert cut[2] is resized["encoder"]["input_ids"]


def test_the_kind_depends_on_the_last_part_of_the_path():
    batch = {"decoder": {"lm_labels": ids(), "pair_mask": torch.ones(2, 6, 6)}}
    assert resize_batch(batch, 4)["decoder"]["pair_mask"].shape == (2, 4, 4)
    padded = resize_batch(batch, 4, mode="reshape", remainder="pad", keys=["decoder.lm_labels"])
    assert padded["decoder"]["lm_labels"][1].tolist() == [4, 5, -100, -100]


def test_a_list_of_a_batch_with_one_row():
    batch = {"input_ids": torch.arange(10).view(1, 10), "names": ["a"]}
    assert resize_batch(batch, 5, mode="reshape")["names"] == ["a", "a"]


def test_lists_with_an_entry_for_each_row():
    names, images = ["a", "b"], ({"id": 1}, {"id": 2})
    batch = {"input_ids": ids(), "names": names, "images": images, "classes": ["x", "y", "z"]}
    reshaped = resize_batch(batch, 3, mode="reshape")
    assert reshaped["names"] == ["a", "a", "b", "b"]
    assert reshaped["images"] == (images[0], images[0], images[1], images[1])
    assert reshaped["classes"] is batch["classes"]  # not one entry for each row
    padded = resize_batch(batch, 4, mode="reshape", remainder="pad", keys=["input_ids", "names"], copy=False)
    assert padded["names"] == ["a", "a", "b", "b"]
    assert padded["images"] is images
    assert resize_batch(batch, 3)["names"] is names
    assert batch["names"] == ["a", "b"]


class Attributes(dict):
    """A dict whose entries are its attributes."""

    def __init__(self, *args, **entries):
        super().__init__(*args, **entries)
        self.__dict__ = self


@pytest.mark.parametrize("options", [{}, {"mode": "reshape"}, {"copy": False}])
def test_a_dict_whose_entries_are_its_attributes(options):
    """Its attributes kept the whole rows."""
    batch = Attributes(input_ids=ids(), names=["a", "b"])
    resized = resize_batch(batch, 3, **options)
    assert type(resized) is Attributes
    assert resized.input_ids is resized["input_ids"]
    assert resized.input_ids.shape[1] == 3
    assert batch.input_ids.shape == (2, 6)
    resized.names = "new"
    assert resized["names"] == "new"
    assert batch.names == ["a", "b"]


@dataclasses.dataclass
class Batch:
    input_ids: torch.Tensor
    names: list
    attention_mask: torch.Tensor | None = None


@dataclasses.dataclass(frozen=True)
class Frozen:
    input_ids: torch.Tensor


@pytest.mark.parametrize("batch", [Batch(ids(), ["a", "b"]), Frozen(ids())])
def test_dataclasses(batch):
    resized = resize_batch(batch, 2, mode="reshape")
    assert type(resized) is type(batch)
    assert resized.input_ids.shape == (6, 2)
    assert getattr(resized, "names", ["a"] * 3 + ["b"] * 3) == ["a"] * 3 + ["b"] * 3
    assert batch.input_ids.shape == (2, 6)


def test_numbers_as_names():
    assert resize_batch({0: ids(), 1: MASK}, 2)[0].shape == (2, 2)


def test_batch_encoding_and_model_output_of_transformers():
    transformers = pytest.importorskip("transformers")
    encoding = transformers.BatchEncoding({"input_ids": ids(), "batch_size": 2})
    resized = resize_batch(encoding, 4)
    assert type(resized) is transformers.BatchEncoding
    assert resized.input_ids.shape == (2, 4)
    output = transformers.modeling_outputs.BaseModelOutput(last_hidden_state=torch.randn(2, 6, 3))
    resized = resize_batch({"encoder_outputs": output, "labels": ids()}, 4)["encoder_outputs"]
    assert type(resized) is type(output)
    assert resized.last_hidden_state.shape == resized["last_hidden_state"].shape == (2, 4, 3)
    assert output.last_hidden_state.shape == (2, 6, 3)


@pytest.mark.parametrize("batch_size", [[], [2], [2, 6]])
def test_tensordict(batch_size):
    tensordict = pytest.importorskip("tensordict")
    inner = tensordict.TensorDict({"input_ids": ids()}, batch_size=batch_size)
    batch = tensordict.TensorDict({"inner": inner, "labels": ids()}, batch_size=batch_size)
    for mode, shape in {"truncate": (2, 3), "reshape": (4, 3), "flatten": (4, 3)}.items():
        resized = resize_batch(batch, 3, mode=mode)
        assert type(resized) is type(batch)
        assert resized["inner", "input_ids"].shape == resized["labels"].shape == shape
        assert resized.batch_size == resized["inner"].batch_size == shape[: len(batch_size)]
    assert batch["labels"].shape == (2, 6)


def test_other_values_in_a_tensordict():
    tensordict = pytest.importorskip("tensordict")
    batch = tensordict.TensorDict({"input_ids": ids(), "note": "hello"}, batch_size=[2], device="cpu", names=["rows"])
    resized = resize_batch(batch, 3, mode="reshape")
    assert resized["note"] == "hello"
    assert resized["input_ids"].shape == (4, 3)
    assert (resized.device, resized.names) == (batch.device, ["rows"])


def test_a_nested_tensordict_that_is_not_resized():
    tensordict = pytest.importorskip("tensordict")
    extra = tensordict.TensorDict({"x": torch.ones(2, 3)}, batch_size=[2, 3])
    for batch in (
        {"input_ids": ids(), "extra": extra},
        tensordict.TensorDict({"input_ids": ids(), "extra": extra}, [2]),
    ):
        resized = resize_batch(batch, 3, keys=["input_ids"])
        assert resized["extra"]["x"].shape == (2, 3)
        assert resized["input_ids"].shape == (2, 3)


@dataclasses.dataclass
class SizedBatch:
    input_ids: torch.Tensor
    batch_size: int = 2


def test_a_dataclass_with_a_batch_size():
    assert resize_batch(SizedBatch(ids()), 3).input_ids.shape == (2, 3)


def test_bad_batches():
    with pytest.raises(TypeError, match=r"batch\['inner'\] must be a mutable mapping .*, got mappingproxy"):
        resize_batch({"inner": MappingProxyType({"input_ids": ids()})}, 2)
    with pytest.raises(TypeError, match=r"batch must be a mutable mapping .*, got type"):
        resize_batch(Batch, 2)


# ---- batches of batches


def rows(count, length, first=0):
    return {"input_ids": first + torch.arange(count * length).view(count, length)}


def left_padded(count, length, first=0):
    mask = torch.ones(count, length, dtype=torch.int64)
    mask[-1, :2] = 0
    return {**rows(count, length, first), "attention_mask": mask}


INNER = [
    (rows(1, 6), rows(1, 6, 100)),
    (rows(2, 6), rows(1, 6, 100)),
    (rows(2, 6), rows(2, 5, 100)),
    (left_padded(2, 6), rows(2, 6, 100)),
    (left_padded(2, 6), left_padded(3, 5, 100)),
    ({**rows(1, 9), "position_ids": torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3]])}, rows(1, 9, 100)),
    ({"x": rows(2, 6), "y": rows(3, 7)}, rows(2, 5)),
]


@pytest.mark.parametrize(("first", "second"), INNER)
@pytest.mark.parametrize("options", [{}, {"mode": "reshape"}, {"mode": "reshape", "remainder": "pad"}])
def test_batches_in_one_are_resized_as_each_by_itself(first, second, options):
    """A plain row was cut at the boundaries of the packed row beside it."""
    batch = {"a": first, "b": second, "note": "x"}
    resized, info = resize_batch(batch, 4, return_info=True, **options)
    alone = {name: resize_batch(batch[name], 4, return_info=True, **options) for name in ("a", "b")}
    for name, (expected, _) in alone.items():
        torch.testing.assert_close(resized[name], expected, rtol=0, atol=0)
    assert resized["note"] == "x"
    assert info.valid_lengths.tolist() == [n for _, each in alone.values() for n in each.valid_lengths.tolist()]
    assert info.num_valid_tokens == sum(each.num_valid_tokens for _, each in alone.values())


def test_a_row_beside_a_packed_row_stays_whole():
    packed, plain = INNER[5]
    resized = resize_batch({"a": packed, "b": plain}, 4)
    assert resized["a"]["input_ids"].tolist() == [[0, 1, 2, 3, 5, 6, 7, 8]]
    assert resized["b"]["input_ids"].tolist() == [[100, 101, 102, 103]]


def test_keys_and_values_name_entries_of_inner_batches():
    batch = {"a": rows(2, 6), "b": {**rows(2, 7), "more": ids()}}
    resized = resize_batch(
        batch, 4, mode="reshape", remainder="pad", keys=["a.input_ids", "b.input_ids"], pad_values={"b.input_ids": 9}
    )
    assert resized["a"]["input_ids"][1].tolist() == [4, 5, 0, 0]
    assert resized["b"]["input_ids"][1].tolist() == [4, 5, 6, 9]
    assert resized["b"]["more"] is batch["b"]["more"]
    only = resize_batch(batch, 4, keys=["b.input_ids"])
    assert only["a"]["input_ids"] is batch["a"]["input_ids"]
    with pytest.raises(ValueError, match=r"keys names 'c\.input_ids'"):
        resize_batch(batch, 4, keys=["c.input_ids"])
    with pytest.raises(ValueError, match=r"out must be None .* for several batches in one"):
        resize_batch({"a": rows(2, 6), "b": rows(2, 6)}, 4, out={"a.input_ids": ids()})


@pytest.mark.parametrize(
    "batch",
    [
        {"inputs": left_padded(2, 6), "labels": ids()},
        {"inputs": left_padded(2, 6), "targets": {"labels": ids()}},
    ],
)
def test_containers_of_other_names_are_parts_of_one_batch(batch):
    """Labels are cut where the mask of the inputs says."""
    resized = resize_batch(batch, 3)
    labels = resized["labels"] if "labels" in resized else resized["targets"]["labels"]
    assert resized["inputs"]["input_ids"].tolist() == labels.tolist() == [[0, 1, 2], [8, 9, 10]]


def test_tensordicts_of_batches():
    tensordict = pytest.importorskip("tensordict")
    inner = [tensordict.TensorDict(batch, [2]) for batch in (left_padded(2, 6), rows(2, 5))]
    resized = resize_batch(tensordict.TensorDict({"a": inner[0], "b": inner[1]}, []), 3)
    assert resized["a", "input_ids"].tolist() == [[0, 1, 2], [8, 9, 10]]
    assert resized["b", "input_ids"].tolist() == [[0, 1, 2], [5, 6, 7]]
