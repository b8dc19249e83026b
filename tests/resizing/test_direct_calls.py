"""Known calls, which run in C++: the same results as the checked call of Python, or the same errors."""

import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from seqwarm_kernels import resize_batch
from seqwarm_kernels.ops import backends
from seqwarm_kernels.ops.call_kind import CallCache
from seqwarm_kernels.resizing import functional

pytestmark = pytest.mark.skipif(backends.extension is None, reason="the extension does not serve here")

IDS = torch.arange(20).view(2, 10)


@pytest.fixture(autouse=True)
def known(monkeypatch):
    monkeypatch.setattr(functional, "_direct_calls", CallCache())
    return functional._direct_calls


@pytest.fixture
def refuse_new(monkeypatch):
    """From its call on, calls that are not known fail."""
    return lambda: monkeypatch.setattr(functional, "cached_call", lambda *_: pytest.fail("the call is not known"))


def strided(shape, strides):
    items = torch.arange(2 * torch.Size(shape).numel())
    if strides == "gaps":
        return items.view(*shape[:-1], 2 * shape[-1])[..., ::2]
    if strides == "transposed":
        return items[::2].view(shape[1], shape[0], *shape[2:]).transpose(0, 1)
    return items[::2].view(shape)


MASKS = {
    "right": [[1, 1, 1, 1, 1, 0], [1, 1, 0, 0, 0, 0]],
    "left": [[1, 1, 1, 1, 1, 1], [0, 0, 0, 1, 1, 1]],
    "empty row": [[1, 1, 1, 1, 1, 1], [0, 0, 0, 0, 0, 0]],
}
METHODS = [
    {},
    {"keep_last_token": True},
    {"mode": "reshape"},
    {"mode": "reshape", "remainder": "pad"},
    {"mode": "reshape", "remainder": "overlap"},
    {"mode": "flatten"},
]


@st.composite
def batches(draw):
    batch = {"input_ids": strided((2, 6), draw(st.sampled_from(["contiguous", "gaps", "transposed"])))}
    mask = draw(st.sampled_from([None, *MASKS]))
    if mask is not None:
        dtype = draw(st.sampled_from([torch.int64, torch.bool, torch.bfloat16, torch.complex64]))
        batch["attention_mask"] = torch.tensor(MASKS[mask]).to(dtype)
    more = {
        "labels": IDS[:, :6].int(),
        "weight": torch.ones(2),
        "class_weights": torch.ones(5),
        "inputs_embeds": strided((2, 6, 3), draw(st.sampled_from(["contiguous", "gaps", "transposed"]))).double(),
        "square_mask": torch.arange(72).view(2, 6, 6),
        "step": torch.tensor(3),
    }
    names = draw(st.sets(st.sampled_from(sorted(more)), max_size=3))
    return {**batch, **{name: more[name] for name in sorted(names)}}


def outcome(batch, seq_len, options):
    """The result's items, which of them are the batch's own, and which share its memory; or the error."""
    try:
        resized = resize_batch(batch, seq_len, **options)
    except ValueError as error:
        return str(error)
    return [
        (name, tensor.dtype, tensor.stride(), tensor.tolist(), tensor is batch[name], tensor._is_view())
        for name, tensor in resized.items()
    ]


@settings(max_examples=60, deadline=None)
@given(
    batch=batches(),
    lengths=st.lists(st.integers(1, 8), min_size=1, max_size=2),
    copy=st.booleans(),
    options=st.sampled_from(METHODS),
    backend=st.sampled_from([None, "native", "reference"]),
)
def test_known_calls_equal_new_ones(batch, lengths, copy, options, backend):
    options = {**options, "copy": copy, "backend": backend}
    functional._direct_calls.clear()
    outcome(batch, 8, options)  # with all its tokens, also where rows begin with padding
    known = [outcome(batch, length, options) for length in lengths]
    for length, result in zip(lengths, known, strict=True):
        functional._direct_calls.clear()
        assert outcome(batch, length, options) == result


@pytest.mark.parametrize("copy", [True, False])
def test_a_dict_of_tensors_is_known_after_one_call(refuse_new, copy):
    batch = {"input_ids": IDS, "attention_mask": torch.ones_like(IDS), "step": torch.tensor(1)}
    first = resize_batch(batch, 4, copy=copy)
    refuse_new()
    for length in (1, 3, 10, 50):
        resized = resize_batch({name: tensor.clone() for name, tensor in batch.items()}, length, copy=copy)
        assert list(resized) == list(first)
        assert torch.equal(resized["input_ids"], IDS[:, :length])
    begins_masked = {**batch, "attention_mask": (IDS % 10 > 2).long()}
    assert torch.equal(resize_batch(begins_masked, 10, copy=copy)["input_ids"], IDS)  # nothing is cut
    for mode in ("reshape", "flatten"):
        with pytest.raises(pytest.fail.Exception):
            resize_batch(batch, 4, copy=copy, mode=mode)


@pytest.mark.parametrize("row", range(2))
def test_views_of_a_row_that_begins_with_padding(row):
    mask = torch.ones(2, 10)
    for _ in range(2):
        resize_batch({"input_ids": IDS, "attention_mask": mask}, 4, copy=False)
    mask[row, 0] = 0
    with pytest.raises(ValueError, match="copy must be True where a row begins with padding"):
        resize_batch({"input_ids": IDS, "attention_mask": mask}, 4, copy=False)


@pytest.mark.parametrize("copy", [True, False])
def test_wrong_lengths_in_a_known_call(copy):
    for _ in range(2):
        resize_batch({"input_ids": IDS}, 4, copy=copy)
    for length in (True, 4.0, None, 0, -1, 2**63, -(2**70)):
        with pytest.raises((TypeError, ValueError), match=r"^seq_len must"):
            resize_batch({"input_ids": IDS}, length, copy=copy)


def test_gradients_in_a_known_call():
    def batch(requires_grad):
        return {"inputs_embeds": torch.randn(2, 10, 3, requires_grad=requires_grad)}

    for copy in (True, False):
        resize_batch(batch(False), 4, copy=copy)
    with pytest.raises(ValueError, match="requires a gradient"):
        resize_batch(batch(True), 4)
    with torch.no_grad():
        assert not resize_batch(batch(True), 4)["inputs_embeds"].requires_grad
    leaves = batch(True)
    resize_batch(leaves, 4, copy=False)["inputs_embeds"].sum().backward()
    assert leaves["inputs_embeds"].grad.sum(1).eq(4).all()


def test_a_mode_or_transform_sees_a_known_call():
    seen = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

    for copy in (True, False):
        resize_batch({"input_ids": IDS}, 4, copy=copy)
        with Watch():
            resize_batch({"input_ids": IDS}, 4, copy=copy)
    assert seen == ["seqwarm.resize_batch.native", "aten.slice.Tensor"]
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert type(resize_batch({"input_ids": IDS}, 4)["input_ids"]).__name__ == "FakeTensor"
    cut = torch.func.vmap(lambda row: resize_batch({"x": row}, 4, copy=False)["x"])
    assert torch.equal(cut(IDS.view(2, 1, 10)), IDS.view(2, 1, 10)[..., :4])


def test_only_copies_of_the_native_backend_are_direct(known):
    resize_batch({"input_ids": IDS}, 4, backend="reference")
    assert list(known.values()) == [None]
    for options in ({"copy": False, "backend": "reference"}, {"backend": "native"}):
        resize_batch({"input_ids": IDS}, 4, **options)
    assert None not in list(known.values())[1:]


def test_no_tensor_is_kept(known):
    ids = IDS.clone()
    resize_batch({"input_ids": ids}, 4)
    gone = weakref.ref(ids)
    del ids
    assert known
    assert gone() is None
