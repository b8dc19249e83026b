"""The cache key of a call, with the module for this torch and without."""

import pytest
import torch

from seqwarm_kernels.ops import backends, call_key
from tests.support.kernels import CalledOperators

ALL = [call_key._call_key]
if backends.module is not None:
    ALL.append(backends.module.call_key)
both = pytest.mark.parametrize("key_of", ALL)


class Subclass(torch.Tensor):
    pass


class FunctionMode(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


def whole(shape=(2, 3, 4, 8), **options):
    return torch.zeros(shape, **options)


DIFFERENT = [
    whole(),
    whole((2, 3, 8, 4)),
    whole((2, 3, 4)),
    whole((3, 2, 4, 8)).transpose(0, 1),
    whole((2, 3, 4, 9))[..., 1:],
    whole((2, 3, 4, 16))[..., ::2],
    whole(193)[1:].view(2, 3, 4, 8),
    whole(dtype=torch.float16),
    whole(dtype=torch.int32),
    *(None, True, False, 1, 0, 2**40, 1.0, 0.0, -0.0, 0.5, "", "1", "native"),
]


def test_the_extension_finds_keys_where_it_serves():
    assert call_key.call_key is ALL[-1]


@both
def test_arguments_that_differ_have_different_kinds(key_of):
    keys = [key_of(argument) for argument in DIFFERENT]
    assert None not in keys
    assert len(set(keys)) == len(keys)
    assert len({key_of(*arguments) for arguments in (("ab", "c"), ("a", "bc"), (None, 1), (1, None), (1,))}) == 5


@both
def test_contents_and_gradients_have_no_part_in_a_key(key_of):
    tensor = whole()
    same = [whole() + 1, whole().requires_grad_(), torch.nn.Parameter(whole()), tensor * tensor.requires_grad_()]
    assert {key_of(one) for one in same} == {key_of(tensor)}


@both
@pytest.mark.parametrize(
    "argument",
    [
        pytest.param(whole().as_subclass(Subclass), id="subclass"),
        pytest.param(whole().to_sparse(), id="sparse"),
        pytest.param(whole().to("meta"), id="meta"),
        pytest.param(torch.view_as_complex(whole((4, 2))).conj(), id="conjugate"),
        pytest.param(torch.view_as_complex(whole((4, 2))).conj().imag, id="negative"),
        *(1j, [1], int, torch.float32),
    ],
)
def test_other_arguments_have_no_key(key_of, argument):
    assert key_of(argument) is None


@both
@pytest.mark.parametrize("mode", [CalledOperators, FunctionMode])
def test_no_key_in_a_mode(key_of, mode):
    with mode():
        assert key_of(1) is None
    assert key_of(1) is not None


@pytest.mark.skipif("len(ALL) == 1", reason="the module for this torch is not built")
@pytest.mark.parametrize(("excluded", "has_key"), [("NestedTensor", True), ("CPU", False)])
def test_excluded_keys_that_no_plain_tensor_has_do_not_matter(excluded, has_key):
    """Autograd of torch 2.11 excludes one, Named, in each backward."""
    keys, tensor = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, excluded)), whole()
    with torch._C._ExcludeDispatchKeyGuard(keys):
        assert (ALL[-1](tensor) is not None) == has_key


@both
def test_no_key_in_a_transform_or_trace(key_of):
    keys = []

    def f(tensor):
        keys.append(key_of(1))
        return tensor * 1

    torch.func.vmap(f)(torch.ones(2))
    torch.func.grad(lambda tensor: f(tensor).sum())(torch.ones(2))
    torch.jit.trace(f, torch.ones(2), check_trace=False)
    assert keys == [None, None, None]


@both
def test_a_key_with_autocast_and_without_gradients(key_of):
    expected = key_of(1)
    for context in (torch.autocast("cpu"), torch.no_grad(), torch.inference_mode()):
        with context:
            assert key_of(1) == expected


def test_a_cache_is_bounded():
    calls = call_key.CallCache()
    for key in range(3 * call_key._MAX_KEYS):
        calls.remember(key, key)
        assert calls[key] == key
    assert len(calls) <= call_key._MAX_KEYS
    calls.remember(None, 1)
    assert None not in calls
