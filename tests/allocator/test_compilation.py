"""Compilations are recorded by name, and nothing compiles after warmup_allocator."""

import importlib.util
import sys
import types

import pytest
import torch
from torch import nn

from seqwarm_kernels import (
    SequenceLengthScheduler,
    alibi_attention,
    compilations,
    no_compilation,
    warmup_allocator,
)

from ..support.kernels import pretended
from ..support.tiers import first_fast


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 12)

    def forward(self, input_ids):
        query = self.embedding(input_ids).unflatten(-1, (3, 4)).transpose(1, 2)
        return alibi_attention(query, query, query).transpose(1, 2).flatten(2)


def step(model, batch):
    model(batch["input_ids"]).square().mean().backward()


class Embedding(nn.Embedding):
    def __init__(self):
        super().__init__(11, 4)

    def forward(self, input_ids):
        return super().forward(input_ids)


@pytest.mark.parametrize(("model_class", "mode"), first_fast([(Embedding, "truncate"), (Model, "reshape")]))
def test_a_compiled_model_compiles_nothing_after_the_warmup(model_class, mode):
    model = model_class()
    model.compile(backend="eager")
    scheduler = SequenceLengthScheduler(8, 64, duration=10, step_size=8)
    batch = {"input_ids": torch.randint(11, (2, 64))}
    report = warmup_allocator(model, 64, example_batch=batch, scheduler=scheduler, resize_options={"mode": mode})
    assert report.compiled
    assert set(report.compiled) == {"graph of torch.compile"}
    with no_compilation():
        for _ in range(12):
            step(model, scheduler.resize(batch, mode=mode))
            scheduler.step()


def test_a_compiled_model_runs_at_two_lengths():
    """Else the first other length would compile again."""
    model = Embedding()
    model.compile(backend="eager")
    report = warmup_allocator(model, 64, batch_size=2)
    assert report.lengths == (64, 32)
    with no_compilation():
        for length in (64, 50, 7, 33):
            model(torch.randint(11, (2, length)))


def test_a_compilation_is_named():
    function = torch.compile(lambda x: x * 2, backend="eager")
    message = r"no_compilation: the block compiled graph of torch.compile \(1 times\)"
    with pytest.raises(RuntimeError, match=message), no_compilation():
        function(torch.ones(3))
    with no_compilation():
        function(torch.ones(3))


def test_triton_kernels_are_named(monkeypatch):
    seen = []
    runtime = types.SimpleNamespace(jit_post_compile_hook=lambda *, fn, **_: seen.append(fn.name))
    monkeypatch.setitem(sys.modules, "triton", types.SimpleNamespace(knobs=types.SimpleNamespace(runtime=runtime)))
    before = runtime.jit_post_compile_hook
    with compilations() as names:
        runtime.jit_post_compile_hook(fn=types.SimpleNamespace(name="forward_kernel"), key="", repr="")
    assert names == seen == ["forward_kernel"]
    assert runtime.jit_post_compile_hook is before


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_no_kernel_of_this_package_compiles_after_a_pass_at_every_length():
    found = pretended("ramp", 90)
    assert found["lengths"] == 128
    assert any("resize_kernel" in name for name in found["compiled"])
    assert len(found["compiled"]) == 11  # 9 of attention, see test_attention_launch.py; 2 of resizing


def test_an_error_in_the_block_comes_through():
    with pytest.raises(KeyError), no_compilation():
        raise KeyError
