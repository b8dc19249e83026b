"""Nested batches, batches of batches and the containers of libraries."""

import pytest
import torch

from seqwarm_kernels import BatchBuffers, resize_batch
from seqwarm_kernels.resizing.containers import cut_entries

MASK = torch.tensor([[1, 1, 1, 1, 1, 0], [1, 1, 0, 0, 0, 0]])


def ids():
    return torch.arange(12).view(2, 6)


def test_paths_name_nested_entries():
    batch = {"encoder": {"input_ids": ids(), "attention_mask": MASK}, "labels": ids(), "meta": {"task": "x"}}
    options = {"keys": ["encoder.input_ids"], "pad_values": {"encoder.input_ids": 9}}
    resized = resize_batch(batch, 4, mode="reshape", remainder="pad", **options)
    assert resized["encoder"]["input_ids"].tolist() == [[0, 1, 2, 3], [4, 5, 9, 9], [6, 7, 8, 9], [10, 11, 9, 9]]
    assert resized["encoder"]["attention_mask"] is MASK
    assert resized["meta"] == batch["meta"]
    paths = ["encoder.input_ids", "encoder.attention_mask", "labels"]
    out = {path: torch.zeros(12, dtype=torch.int64) for path in paths}
    assert resize_batch(batch, 3, out=out)["labels"].data_ptr() == out["labels"].data_ptr()
    assert list(BatchBuffers(batch, 6)) == paths
    with pytest.raises(ValueError, match="keys names 'input_ids'"):
        resize_batch(batch, 4, keys=["input_ids"])
    ((path, before, after),) = cut_entries(batch, {**resized, "added": ids()})
    assert path == "encoder.input_ids"
    assert before is batch["encoder"]["input_ids"]
    assert after is resized["encoder"]["input_ids"]


@pytest.mark.xdist_group("trainers")  # where transformers is imported already
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
    entries = {"inner": inner, "labels": ids(), "note": "hello"}
    batch = tensordict.TensorDict(entries, batch_size, device="cpu", names=["rows", "tokens"][: len(batch_size)])
    for mode, shape in {"truncate": (2, 3), "reshape": (4, 3), "flatten": (4, 3)}.items():
        resized = resize_batch(batch, 3, mode=mode)
        assert type(resized) is type(batch)
        assert resized["inner", "input_ids"].shape == resized["labels"].shape == shape
        assert resized.batch_size == resized["inner"].batch_size == shape[: len(batch_size)]
        assert (resized["note"], resized.device, resized.names) == ("hello", batch.device, batch.names)
    assert batch["labels"].shape == (2, 6)
    extra = tensordict.TensorDict({"x": torch.ones(2, 3)}, batch_size=[2, 3])
    for other in (
        {"input_ids": ids(), "extra": extra},
        tensordict.TensorDict({"input_ids": ids(), "extra": extra}, [2]),
    ):
        assert resize_batch(other, 3, keys=["input_ids"])["extra"]["x"].shape == (2, 3)


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
