"""The checks of a call run once for all batches of the same signature."""

import pytest
import torch

from seqwarm_kernels import resize_batch
from seqwarm_kernels.ops.call_kind import CallCache
from seqwarm_kernels.resizing import checked_call, functional

IDS = torch.arange(20).view(2, 10)
OPTIONS = [
    {},
    {"mode": "reshape", "remainder": "pad", "pad_values": {"input_ids": 7}},
    {"keys": ["input_ids"]},
    {"mask_keys": ["input_ids"]},
    {"backend": "reference", "seq_dim": 0},
]


@pytest.fixture
def checks(monkeypatch):
    """The arguments of each check, with nothing cached before."""
    seen, check = [], checked_call.check_call
    monkeypatch.setattr(checked_call, "_calls", {})
    monkeypatch.setattr(functional, "_direct_calls", CallCache())
    monkeypatch.setattr(checked_call, "check_call", lambda *arguments: (seen.append(arguments), check(*arguments))[1])
    return seen


@pytest.mark.parametrize("options", OPTIONS)
def test_the_checks_run_once(checks, options):
    for seq_len in (1, 1, 2, 20):
        for copy in (True, False):
            resize_batch({"input_ids": IDS.clone(), "names": ["a"]}, seq_len, copy=copy, **options)
    assert len(checks) == 1


def test_the_checks_run_for_each_signature(checks):
    batches = [
        {"input_ids": IDS},
        {"tokens": IDS},
        {"input_ids": IDS.int()},
        {"input_ids": IDS[:1]},
        {"input_ids": IDS[:, :9]},
        {"input_ids": IDS, "names": ["a", "b"]},
        {"input_ids": IDS, "names": ["a", "b", "c"]},
        {"input_ids": IDS, "names": "ab"},
    ]
    for batch in batches:
        resize_batch(batch, 1)
    for options in OPTIONS[1:]:
        resize_batch(batches[0], 1, **options)
    assert len(checks) == len(batches) + len(OPTIONS) - 1


def test_few_checked_calls_are_kept(checks, monkeypatch):
    monkeypatch.setattr(checked_call, "_MAX_CALLS", 3)
    kept = []
    for rows in range(1, 9):
        resize_batch({"input_ids": torch.ones(rows, 10)}, 4)
        kept.append(len(checked_call._calls))
    assert kept == [1, 2, 3, 1, 2, 3, 1, 2]
    assert len(checks) == 8


def test_as_many_calls_are_kept_as_a_ramp_has_lengths(checks):
    batches = [{"input_ids": IDS[:, :1].expand(2, length)} for length in range(1, 258)]
    for batch in [*batches[:256], batches[0]]:
        resize_batch(batch, 1, copy=False)
    assert len(checks) == len(checked_call._calls) == 256
    resize_batch(batches[256], 1, copy=False)
    assert len(checked_call._calls) == 1, "memory grows with each shape"


def test_calls_with_another_mask_are_checked_again(checks):
    batch = {"first": torch.tensor([[1, 1, 0]]), "second": torch.tensor([[1, 0, 0]])}
    for name in batch:
        resize_batch(batch, 2, mask_keys=[name])
    assert len(checks) == 2
