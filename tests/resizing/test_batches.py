"""Batches of rows with entries of every kind, in containers of every type, in every mode, against lists cut by hand."""

import copy
import dataclasses
from collections import ChainMap, OrderedDict, UserDict, defaultdict
from collections.abc import Mapping

import torch
from hypothesis import given
from hypothesis import strategies as st

from seqwarm_kernels import resize_batch
from tests.support.cut_tokens import METHODS, check_info, cut_rows, taken
from tests.support.same import assert_same
from tests.support.tiers import examples

LABELS = {"labels": -100, "targets": -100, "loss_mask": 0}  #: and the value of what is padded or repeated
PER_ROW = ("weights", "names", "images")
PASSING = ("class_weights", "scale", "pixel_values", "task", "nothing")


class Encoding(UserDict):
    """Has an attribute besides its data, like transformers' BatchEncoding."""

    def __init__(self, entries):
        super().__init__(entries)
        self.encodings = "kept"


class OwnMapping(ChainMap):
    """A mapping whose shallow copies share its entries."""

    __copy__ = None


class Attributes(dict):
    """A dict whose entries are its attributes."""

    def __init__(self, *args, **entries):
        super().__init__(*args, **entries)
        self.__dict__ = self


def dataclass_of(entries, **options):
    return dataclasses.make_dataclass("Batch", entries, **options)(**entries)


def nested(entries):
    inner = {name: value for name, value in entries.items() if name != "labels"}
    return {"inner": OrderedDict(inner), **{name: entries[name] for name in entries.keys() & {"labels"}}}


CONTAINERS = {
    "dict": dict,
    "defaultdict": lambda entries: defaultdict(list, entries),
    "Encoding": Encoding,
    "OwnMapping": OwnMapping,
    "Attributes": Attributes,
    "dataclass": dataclass_of,
    "frozen dataclass": lambda entries: dataclass_of(entries, frozen=True),
    "nested": nested,
}


def entries_of(container):
    """The entries of a container by their own names."""
    if "inner" in (items := container if isinstance(container, Mapping) else vars(container)):
        return {**items["inner"], **{name: value for name, value in items.items() if name != "inner"}}
    return dict(items)


@st.composite
def problems(draw):
    """A batch of rows (B, S) as a dict, and how to resize it: a method, whether it is copied, and `seq_dim`."""
    rows, length, method = draw(st.integers(1, 3)), draw(st.integers(1, 9)), draw(st.sampled_from(METHODS))
    copies, mode = draw(st.booleans()), method["mode"]
    tokens = torch.arange(rows * length).view(rows, length)
    places = torch.arange(10, 10 + length)
    if copies:
        size = rows * length
        mask = torch.tensor(draw(st.lists(st.booleans(), min_size=size, max_size=size))).view(rows, length)
    else:
        mask = torch.arange(length) < torch.tensor([[draw(st.integers(0, length))] for _ in range(rows)])
    entries = {
        "input_ids": tokens + 1000,
        "labels": tokens + 5000,
        "targets": tokens.int() + 7000,
        "attention_mask": mask.long(),
        "loss_mask": torch.ones(rows, length),
        "inputs_embeds": (tokens[..., None] + torch.arange(3) / 8).half(),
        "flags": tokens % 3 == 0,
        "position_ids": tokens + 100 * torch.arange(3)[:, None, None]
        if draw(st.booleans())
        else places.repeat(rows, 1),
        "class_weights": torch.ones(7),
        "scale": torch.tensor(3.0),
        "task": "x",
        "nothing": None,
    }
    if mode != "flatten":
        entries["weights"] = torch.arange(rows) + 0.5
        entries["names"], entries["images"] = list("abc"[:rows]), tuple({"id": row} for row in range(rows))
    if mode == "truncate":
        entries["pair_mask"] = torch.arange(rows * length**2).view(rows, length, length)
    left_out = draw(st.sets(st.sampled_from(list(entries))))
    needed = {"input_ids"} | ({"attention_mask"} if method.get("keep_last_token") else set())
    entries = {name: entries[name] for name in draw(st.permutations(list(entries))) if name not in left_out - needed}
    return entries, method, copies, draw(st.sampled_from([0, 1]))


def oriented(name, value, seq_dim):
    """An entry of a batch whose tensors of tokens are (S, B, ...) if `seq_dim` is 0."""
    is_stacked = name == "position_ids" and value.dim() == 3
    if seq_dim == 1 or is_stacked or name in (*PASSING, *PER_ROW, "pair_mask"):
        return value
    return value.transpose(0, 1)


def with_gaps(value):
    if not isinstance(value, torch.Tensor) or value.dim() < 2:
        return value
    return value.repeat_interleave(2, -1)[..., ::2]


def expected_of(name, value, cut, seq_len):
    """An entry of the new batch, whose slots are `cut`."""
    rows = [slots[0][0] for slots in cut]
    if name in PASSING:
        return value
    if name in PER_ROW:
        return value[rows] if isinstance(value, torch.Tensor) else type(value)(value[row] for row in rows)
    if name == "pair_mask":
        places = [[place for _, place, _ in slots] for slots in cut]
        return torch.stack([value[row][kept][:, kept] for row, kept in zip(rows, places, strict=True)])
    if name == "position_ids" and value.dim() == 3:
        return torch.stack([taken(layer, cut, seq_len) for layer in value])
    return taken(value, cut, seq_len, LABELS.get(name, 0), fill_repeats=name in LABELS)


@examples(45)
@given(container=st.sampled_from([*CONTAINERS]), problem=problems(), data=st.data())
def test_batches_of_rows(container, problem, data):
    entries, method, copies, seq_dim = problem
    length, options = entries["input_ids"].shape[1], {**method, "copy": copies, "seq_dim": seq_dim}
    mask = entries.get("attention_mask", torch.ones_like(entries["input_ids"]))
    make = CONTAINERS[container]
    if make is not nested and data.draw(st.booleans()):
        options["keys"] = [name for name, value in entries.items() if isinstance(value, (torch.Tensor, list, tuple))]
        entries["pixel_values"] = torch.ones(5, 4, 2)
    for seq_len in data.draw(st.lists(st.integers(1, 10), min_size=1, max_size=3)):  # a plan serves all lengths
        strided = data.draw(st.booleans())  # a plan serves all strides, too
        given_entries = {name: oriented(name, value, seq_dim) for name, value in entries.items()}
        if strided:
            given_entries = {name: with_gaps(value) for name, value in given_entries.items()}
        before = copy.deepcopy(given_entries)
        batch = make(given_entries)
        resized, info = resize_batch(batch, seq_len, return_info=True, **options)
        cut = cut_rows(mask.tolist(), seq_len, **method)
        expected = {
            name: oriented(name, expected_of(name, value, cut, seq_len), seq_dim) for name, value in entries.items()
        }
        assert type(resized) is type(batch)
        assert container != "Encoding" or resized.encodings == "kept"
        assert container != "Attributes" or vars(resized) is resized
        assert make is nested or list(entries_of(resized)) == list(entries)
        assert_same(sorted(entries_of(resized).items()), sorted(expected.items()))
        assert_same(sorted(entries_of(batch).items()), sorted(before.items()))
        check_info(info, taken(mask, cut, seq_len) != 0)
        assert all(entries_of(resized)[name] is given_entries[name] for name in entries.keys() & {*PASSING})
        ids, is_whole = entries_of(resized)["input_ids"], seq_len >= length
        shares = ids.untyped_storage().data_ptr() == given_entries["input_ids"].untyped_storage().data_ptr()
        if copies:
            assert not shares
        elif not strided and ((seq_dim == 1 and method["mode"] != "reshape") or length % min(seq_len, length) == 0):
            assert shares == (is_whole or not method.get("keep_last_token", False))
