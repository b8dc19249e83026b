"""Where Triton's kernels run, checks of results in float64, and what is launched and called."""

import json
import os
import subprocess
import sys
from functools import partial

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from seqwarm_kernels import alibi_attention
from seqwarm_kernels.ops import backends
from seqwarm_kernels.self_check import exact
from seqwarm_kernels.self_check.calls import RESULTS, differentiate

#: Marks tests of Triton's attention kernels on DEVICES.
TRITON_RUNS = pytest.mark.skipif(
    backends.why_not("alibi_attention", "triton", "cpu", torch.float32) is not None and not torch.cuda.is_available(),
    reason="Triton serves neither a GPU nor its interpreter here",
)
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


class Exact(exact.Exact):
    """With `rounds_scores`, budgets are at least four times the error of the reference in float32.

    Moves of inputs do not show how large terms are that cancel for all inputs alike. ALiBi has such terms where a mask
    hides all keys near a query: its scores hold one large bias, which cancels in the weights, but each score is rounded
    at its size. Kernels round a score and the constant of its row about twice as often as the reference, and the
    largest of many random errors varies. (Measured with three seeds: at most 1.8.)
    """

    def __init__(self, compute, tensors, *, rounds_scores=False):
        super().__init__(compute, tensors)
        rounded = compute([tensor.detach().float() for tensor in tensors]) if rounds_scores else self.results
        self.losses = [exact.largest(one.double() - other) for one, other in zip(rounded, self.results, strict=True)]

    def check(self, names, results, dtypes):
        """Check each result in the precision of its dtype."""
        for comparison, loss in zip(self.compare(names, results, dtypes), self.losses, strict=True):
            comparison = comparison._replace(budget=max(comparison.budget, 4 * loss))
            assert comparison.within(), str(comparison)


def check_attention(backend, attend, leaves, *, rounds_scores=False):
    """out, lse and gradients of attend(leaves, backend, **options), beside the reference in float64, with one dropout.

    Queries that see no key have results and gradients of 0, and so have keys and values that no query sees. With NaN in
    these queries, in their gradients, and in keys and values that no query sees, results have the same bits.
    """
    query = leaves[0]
    weights = torch.randn_like(query), torch.randn(query.shape[:-1], device=query.device)
    inputs = [*leaves, *weights]  # gradients of results are moved, too: theirs may cancel in that of a slope

    def results_of(inputs, backend):
        torch.manual_seed(5)
        *leaves, grad_out, grad_lse = (tensor.detach() for tensor in inputs)
        leaves = [leaf.requires_grad_() for leaf in leaves]
        return differentiate(partial(attend, backend=backend), leaves, (grad_out, grad_lse))

    results = results_of(inputs, backend)
    exact = Exact(partial(results_of, backend="reference"), inputs, rounds_scores=rounds_scores)
    assert results[0].dtype == query.dtype
    exact.check(RESULTS, results, (query.dtype, torch.float32, *[query.dtype] * 4))
    out, lse, grad_query, grad_key, grad_value, _ = results
    blind = exact.results[1] == float("-inf")
    unseen = _unseen_keys(attend, leaves)
    assert (lse[blind] == float("-inf")).all()
    assert (out[blind] == 0).all()
    assert (grad_query[blind] == 0).all()
    assert (grad_key[unseen] == 0).all()
    assert (grad_value[unseen] == 0).all()
    if (backend, query.device.type) == ("triton", "cpu") and not (blind.any() or unseen.any()):
        return results  # the interpreter runs one program after another, so all bits are the same
    for tensor, tokens in zip((query, weights[0], *leaves[1:3]), (blind, blind, unseen, unseen), strict=True):
        _fill_with_nan(tensor, tokens)
    for name, first, second in zip(RESULTS, results, results_of(inputs, backend), strict=True):
        assert torch.equal(first, second), f"other bits of {name}"
    return results


def _unseen_keys(attend, leaves):
    """Those that no query sees. All others have a weight, where all scores are alike."""
    query, key, value, slopes = (leaf.detach().float() for leaf in leaves)
    leaves = [torch.zeros_like(query), key, value.requires_grad_(), torch.zeros_like(slopes)]
    out, _ = attend(leaves, "reference", dropout_p=0.0)
    (gradient,) = torch.autograd.grad(out.sum(), value)
    return (gradient == 0).all(-1)


def _fill_with_nan(tensor, tokens):
    if tensor.stride(1) == 0:  # expanded from one head
        tensor, tokens = tensor[:, :1], tokens[:, :1]
    tensor.detach()[tokens] = float("nan")


def check_extreme_slopes(backend, slope, *, causal=True, hides_nearest=False, queries, keys, device="cpu"):
    """One key has all the weight of each query, so scores and slopes have no gradient."""
    leaves = [torch.randn(1, 1, length, 16, device=device) for length in (queries, keys, keys)]
    leaves.append(torch.tensor([slope], device=device))
    weights = torch.randn(1, 1, queries, 16, device=device), torch.zeros(1, 1, queries, device=device)
    mask = (torch.arange(keys, device=device) < 10)[None] if hides_nearest else None

    def results_of(leaves, backend):
        options = {"causal": causal, "key_padding_mask": mask, "return_lse": True, "backend": backend}
        leaves = [leaf.detach().requires_grad_() for leaf in leaves]
        return differentiate(lambda given: alibi_attention(*given, **options), leaves, weights)

    expected = results_of([leaf.double() for leaf in leaves], "reference")
    for name, got, want in zip(RESULTS, results_of(leaves, backend), expected, strict=True):
        terms = max(queries, keys)
        if name == "grad_slopes":  # terms hold distances, and sums of 16 products
            terms = max(queries, 16) * keys
        most = max(want.abs().max().item(), 1.0)
        assert (got - want).abs().max().item() <= terms * 2**-23 * most, name


def pretended(report, chip, **environment):
    """What a function of tests/support/pretend_gpu.py returns, where Triton compiles."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | environment
    command = [sys.executable, "-m", "tests.support.pretend_gpu", report, str(chip)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


def allocations_of(function, *arguments, **options):
    """In bytes, on the CPU. What is freed again counts."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        function(*arguments, **options)
    sizes = [event.nbytes() for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    return [size for size in sizes if size > 0]


class CalledOperators(TorchDispatchMode):
    """Notes the name of each operator that is called."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


def record_launches(monkeypatch, host):
    """The programs and arguments of each launch that `host`, a module, prepares from now on, by its kernel's name."""
    launches = {}

    class Recorded(host.Launch):
        def __init__(self, kernel, programs, **arguments):
            launches[kernel.fn.__name__] = {"programs": programs, **arguments}
            super().__init__(kernel, programs, **arguments)

    monkeypatch.setattr(host, "Launch", Recorded)
    return launches


class CountedKernel:
    """Takes the place of the Triton kernel `name` of `host`, a module, and records its launches."""

    def __init__(self, monkeypatch, host, name):
        self.kernel, self.grids = getattr(host, name), []
        self.arg_names = self.kernel.arg_names
        monkeypatch.setattr(host, name, self)

    def __getitem__(self, grid):
        self.grids.append(grid)
        return self.kernel[grid]
