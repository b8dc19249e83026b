"""Compilations are recorded by name, and nothing compiles after warmup_allocator."""

import importlib.util
import sys
import types

import pytest
import torch
from torch import nn

from seqwarm_kernels import SequenceLengthScheduler, compilations, no_compilation, warmup_allocator

from ..support.kernels import pretended


class Embedding(nn.Embedding):
    """torch.compile skips the forward of torch's own layers."""

    def forward(self, input_ids):
        return super().forward(input_ids)


class Packed(Embedding):
    """Takes the boundaries of segments, whose number is the same at each length."""

    def forward(self, input_ids, cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k):
        return super().forward(input_ids) * cu_seq_lens_q.sum() * max_length_q


def compiled_model(kind=Embedding):
    model = kind(11, 4)
    model.compile(backend="eager")
    return model


@pytest.mark.parametrize(("kind", "mode"), [(Embedding, "truncate"), (Packed, "segments")])
def test_a_compiled_model_compiles_nothing_after_the_warmup(kind, mode):
    model, scheduler = compiled_model(kind), SequenceLengthScheduler(8, 64, duration=10, step_size=8)
    batch = {"input_ids": torch.randint(11, (2, 64))}
    options = {"example_batch": batch, "scheduler": scheduler, "resize_options": {"mode": mode}}
    report = warmup_allocator(model, 64, **options)
    assert set(report.compiled) == {"graph of torch.compile"}
    scheduler.attach(model, mode=mode)
    with no_compilation():
        for _ in range(12):
            model(**batch).square().mean().backward()
            scheduler.step()


def test_a_compiled_model_runs_at_two_lengths():
    """Else the first other length would compile again."""
    model = compiled_model()
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
