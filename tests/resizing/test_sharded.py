"""resize_batch of DTensors on two ranks: the tensors of all ranks together are those of the whole batch."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from seqwarm_kernels import resize_batch

from ..support.ranks import assert_no_errors, errors_fixture

ROWS, LENGTH = 6, 10
REFUSED = {
    "tokens": (
        lambda mesh: {"ids": distribute_tensor(batch()["input_ids"], mesh, [Shard(1)])},
        {},
        (ValueError, r"batch\['ids'\] must be replicated or sharded in its rows, Shard\(0\), got .*shard_sequence"),
    ),
    "a sum": (
        lambda mesh: {"ids": DTensor.from_local(batch()["input_ids"], mesh, [Partial()])},
        {},
        (ValueError, r"batch\['ids'\] must be replicated or sharded in its rows"),
    ),
    "plain": (
        lambda mesh: distributed(batch(), mesh) | {"attention_mask": batch()["attention_mask"]},
        {},
        (TypeError, r"batch\['attention_mask'\] must be a DTensor if other tensors are, got a plain tensor"),
    ),
    "placements": (
        lambda mesh: distributed(batch(), mesh) | distributed({"labels": batch()["labels"]}, mesh, Replicate()),
        {},
        (ValueError, r"batch\['labels'\] must have the mesh and the placements of batch\['input_ids'\]"),
    ),
    "rows": (
        lambda mesh: distributed(batch(5), mesh),
        {"mode": "reshape"},
        (ValueError, "batch must have a multiple of 2 rows to be cut into further rows, .* got 5"),
    ),
    "stream": (
        lambda mesh: distributed({"input_ids": batch()["input_ids"]}, mesh),
        {"mode": "flatten"},
        (ValueError, "seq_len must divide the 30 tokens of each rank for mode='flatten' of sharded rows, got 4"),
    ),
    "out": (
        lambda mesh: distributed({"ids": batch()["input_ids"]}, mesh),
        {"out": {"ids": torch.zeros(ROWS * 4, dtype=torch.int64)}},
        (ValueError, "out must be None for a batch of DTensors"),
    ),
    "packed": (
        lambda mesh: distributed({"position_ids": torch.tensor([[0, 1, 2, 0, 1, 2]])}, mesh, Replicate()),
        {},
        (ValueError, "batch must not be packed if it holds DTensors"),
    ),
}
CASES = [
    {},
    {"keep_last_token": True},
    {"copy": False, "keys": ["input_ids", "labels"]},
    *({"mode": "reshape", "remainder": remainder} for remainder in ("drop", "pad", "overlap")),
    {"mode": "flatten", "keys": ["input_ids", "labels"], "seq_len": 3},
    {"backend": "reference"},
    {"seq_dim": 0},
]


def batch(rows=ROWS, seq_dim=1):
    """Rows with padding on either side."""
    torch.manual_seed(0)
    mask = torch.zeros(rows, LENGTH, dtype=torch.int64)
    for row in range(rows):
        mask[row, row % 4 : LENGTH - row % 3] = 1
    ids = torch.randint(1, 50, (rows, LENGTH))
    tokens = {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}
    tokens["features"] = torch.rand(rows, LENGTH, 3)
    if seq_dim == 0:
        tokens = {name: tensor.transpose(0, 1).contiguous() for name, tensor in tokens.items()}
    return {**tokens, "weight": torch.rand(rows)}


def distributed(whole, mesh, placement=None, seq_dim=1):
    """Sharded by rows, or as given."""
    return {
        name: distribute_tensor(tensor, mesh, [placement or Shard(0 if tensor.dim() == 1 else 1 - seq_dim)])
        for name, tensor in whole.items()
    }


def check_case(mesh, options, placement):
    options = {"seq_len": 4, **options}
    seq_dim = options.get("seq_dim", 1)
    whole = {**batch(seq_dim=seq_dim), "names": list("abcdef")}
    if "keys" in options:
        whole = {name: whole[name] for name in options["keys"]}
    names = {"names": whole.pop("names")} if "names" in whole else {}
    expected, info = resize_batch({**whole, **names}, **options, return_info=True)
    given = distributed(whole, mesh, placement, seq_dim) | names
    for _ in range(2):  # also after a plain batch of these shapes
        found, found_info = resize_batch(given, **options, return_info=True)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        if name == "names":
            assert found[name] == tensor
            continue
        assert found[name].placements == given[name].placements
        assert found[name].shape == tensor.shape
        torch.testing.assert_close(found[name].full_tensor(), tensor, rtol=0, atol=0)
    for one, other in zip(found_info, info, strict=True):
        torch.testing.assert_close(one.full_tensor(), other, rtol=0, atol=0)


def check_uneven(mesh):
    """Truncation keeps rows, so ranks may have different numbers of them, or none."""
    for rows in (5, 1):
        found, info = resize_batch(distributed(batch(rows), mesh), 4, return_info=True)
        expected, expected_info = resize_batch(batch(rows), 4, return_info=True)
        for name, tensor in expected.items():
            assert torch.equal(found[name].full_tensor(), tensor)
        assert info.num_valid_tokens.full_tensor() == expected_info.num_valid_tokens


def check_two_dimensions(mesh):
    square = init_device_mesh("cpu", (2, 1))
    whole = batch()
    given = {n: distribute_tensor(t, square, [Shard(0), Replicate()]) for n, t in whole.items()}
    found = resize_batch(given, 5, mode="reshape")
    for name, tensor in resize_batch(whole, 5, mode="reshape").items():
        assert torch.equal(found[name].full_tensor(), tensor)


def checks():
    for number, options in enumerate(CASES):
        yield f"sharded {number}", lambda mesh, options=options: check_case(mesh, options, None)
        yield f"replicated {number}", lambda mesh, options=options: check_case(mesh, options, Replicate())
    yield "uneven", check_uneven
    yield "two dimensions", check_two_dimensions
    for name, case in REFUSED.items():
        yield f"refused {name}", lambda mesh, case=case: check_refusal(mesh, *case)


def check_refusal(mesh, make, options, refusal):
    with pytest.raises(refusal[0], match=refusal[1]):
        resize_batch(make(mesh), 4, **options)


errors = errors_fixture(checks)


@pytest.mark.parametrize("name", [name for name, _ in checks()])
def test_two_ranks(errors, name):
    assert_no_errors(errors, name)
