"""The native operators called directly, with arguments that fit in no way: an error, or the reference's result."""

import contextlib
import random

import pytest
import torch

from seqwarm_kernels.ops.alibi_attention.schema import DenseOptions, VarlenOptions
from seqwarm_kernels.ops.library import overload
from tests.support.backends import needs_native

pytestmark = needs_native

REFUSALS = (ValueError, TypeError, RuntimeError)
SAVED = ("grad_out", "grad_lse", "out", "lse", "log2_sum", "ranges", "slopes_need_grad")


def dense(query_length, key_length, *, heads=(4, 2), dtype=torch.float32, **options):
    query, key, value = (
        torch.randn(2, count, length, 8).to(dtype)
        for count, length in zip((heads[0], heads[1], heads[1]), (query_length, key_length, key_length), strict=True)
    )
    plain = DenseOptions(None, None, None, key_length - query_length, True, 0.5, None, None, 0.0, 2**-24)
    tensors = {"query": query, "key": key, "value": value, "slopes": torch.rand(heads[0])}
    return "alibi_attention", tensors | plain._replace(**options)._asdict()


def varlen(lengths_q, lengths_k, **options):
    query, key, value = (torch.randn(sum(lengths), 2, 8) for lengths in (lengths_q, lengths_k, lengths_k))
    ends = [torch.tensor([0, *lengths]).cumsum(0).int() for lengths in (lengths_q, lengths_k)]
    plain = VarlenOptions(*ends, None, max(lengths_q), max(lengths_k), True, 0.5, None, 0.0, 2**-24)
    tensors = {"query": query, "key": key, "value": value, "slopes": torch.rand(len(lengths_q), 2)}
    return "alibi_attention_varlen", tensors | plain._replace(**options)._asdict()


def everything(query_length, key_length):
    return dense(
        query_length,
        key_length,
        query_start=torch.tensor([2, key_length - query_length]),
        query_offset=0,
        key_padding_mask=torch.rand(2, key_length) > 0.3,
        dropout_seed=torch.randint(9, (2, 4, 4)) * 4,
        dropout_p=0.2,
        key_norm_bound=torch.full((2, 2), 9.0),
    )


CALLS = {
    "short rows": lambda: dense(5, 7),
    "short rows, everything": lambda: everything(5, 7),
    "short rows in bfloat16": lambda: dense(6, 6, dtype=torch.bfloat16),
    "segments": lambda: dense(12, 12, segment_length=4, query_offset=0),
    "tiles": lambda: dense(70, 150, window=60),
    "tiles, everything": lambda: everything(70, 150),
    "decoding": lambda: dense(2, 600),
    "decoding, everything": lambda: everything(1, 600),
    "packed, short": lambda: varlen([3, 5], [4, 6]),
    "packed": lambda: varlen([80, 3], [90, 40], dropout_seed=torch.tensor(5), dropout_p=0.3),
    "packed, starts": lambda: varlen([80, 3], [90, 40], query_start=torch.tensor([4, 60])),
}


def saved_of(operator, arguments):
    """What backward takes besides the arguments of forward."""
    outputs = overload(operator, "reference")(*arguments.values())
    saved = (torch.randn_like(outputs[0]), torch.randn_like(outputs[1]), *outputs, True)
    return dict(zip(SAVED, saved, strict=True))


def mutated(draw, argument):
    """Something else in place of an argument: None, another number, or a tensor of another shape, dtype or device."""
    if not isinstance(argument, torch.Tensor):
        return draw.choice([None, -(10**6), -1, 0, 1, 3, 2**40])
    shape, dtype = list(argument.shape), argument.dtype
    what = draw.choice(["size", "size", "size", "rank", "dtype", "meta"])
    if what == "meta":
        return argument.to("meta")
    if what == "dtype":
        others = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int32, torch.int64, torch.bool]
        return argument.to(draw.choice([other for other in others if other != dtype]))
    if what == "size" and shape:
        dimension = draw.randrange(len(shape))
        shape[dimension] = draw.choice([0, 1, shape[dimension] - 1, shape[dimension] + 1, shape[dimension] // 2, 300])
    elif shape and draw.random() < 0.5:
        shape.pop(draw.randrange(len(shape)))
    else:
        shape.insert(draw.randint(0, len(shape)), draw.choice([1, 2, 5]))
    filled = torch.zeros([max(size, 0) for size in shape], dtype=dtype)
    return filled if dtype in (torch.int32, torch.int64, torch.bool) else filled.normal_().to(dtype)


def changed_arguments(draw, arguments):
    """The arguments with one of them mutated, and which."""
    name = draw.choice([name for name in arguments if name not in ("scale", "skip_tolerance", "dropout_p")])
    old, new = arguments[name], mutated(draw, arguments[name])
    if name.startswith("cu_seqlens") and draw.random() < 0.5:
        new = old.clone()
        new[draw.randrange(len(new))] += draw.choice([-1, 1, 300])
    elif isinstance(old, torch.Tensor) and (old.shape, old.dtype, old.device) == (new.shape, new.dtype, new.device):
        return changed_arguments(draw, arguments)
    return {**arguments, name: new}, name


def attend(operator, backend, given, backward):
    if backward:
        operator += "_backward"
    return overload(operator, backend)(*given.values())[: 3 if backward else 2]


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("name", CALLS)
def test_a_wrong_argument_is_refused_or_means_what_the_reference_makes_of_it(name, backward):
    draw = random.Random(f"{name} {backward}")
    torch.manual_seed(0)
    operator, arguments = CALLS[name]()
    refused = 0
    for _ in range(25):
        given, changed = changed_arguments(draw, (saved_of(operator, arguments) if backward else {}) | arguments)
        about = f"{changed}: {getattr(given[changed], 'shape', given[changed])} {getattr(given[changed], 'dtype', '')}"
        if backward and changed in arguments:
            with contextlib.suppress(Exception):  # what the reference refuses, the native operator must refuse, too
                given |= saved_of(operator, {name: given[name] for name in arguments})
        try:
            results = attend(operator, "native", given, backward)
        except REFUSALS:
            refused += 1
            continue
        if getattr(given[changed], "is_meta", False):  # a fake implementation ran, which reads nothing
            continue
        expected = attend(operator, "reference", given, backward)
        for result, want in zip(results, expected, strict=True):
            close = torch.allclose(result.float(), want.float(), rtol=0.05, atol=0.2, equal_nan=True)
            assert close, about
    assert refused > 8


@pytest.mark.parametrize("name", ["tiles", "packed"])
def test_ranges_of_any_keys_are_read_inside_of_the_tensors(name):
    operator, arguments = CALLS[name]()
    given = saved_of(operator, arguments) | arguments
    expected = attend(operator, "native", given, True)
    given["ranges"][..., ::2], given["ranges"][..., 1::2] = -(2**31), 2**31 - 1
    for result, want in zip(attend(operator, "native", given, True), expected, strict=True):
        torch.testing.assert_close(result, want)
