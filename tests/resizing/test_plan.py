"""One plan is made for all batches of a signature, and known plans give the results of new ones."""

import weakref

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

from seqwarm_kernels import resize_batch
from seqwarm_kernels.ops import backends
from seqwarm_kernels.resizing import plan
from tests.support.ranks import one_rank

IDS = torch.arange(20).view(2, 10)


@pytest.fixture
def made(monkeypatch):
    """The arguments of each plan that is made, with none kept before."""
    seen, make = [], plan.make_plan
    monkeypatch.setattr(plan, "_plans", {})
    monkeypatch.setattr(plan, "make_plan", lambda *arguments: (seen.append(arguments), make(*arguments))[1])
    return seen


@pytest.mark.parametrize("options", [{"pad_values": {"input_ids": 7}}, {"keys": ["input_ids"], "seq_dim": 0}])
def test_a_plan_serves_all_lengths(made, options):
    for seq_len in (1, 1, 2, 20):
        for copy in (True, False):
            resize_batch({"input_ids": IDS.clone(), "names": ["a"]}, seq_len, copy=copy, **options)
    assert len(made) == 1


def test_a_few_hundred_plans_are_kept(made):
    batches = [{"input_ids": IDS[:, :1].expand(2, length)} for length in range(1, 258)]
    for batch in [*batches[:256], batches[0]]:
        resize_batch(batch, 1, copy=False)
    assert len(made) == len(plan._plans) == 256
    resize_batch(batches[256], 1, copy=False)
    assert len(plan._plans) == 1, "memory grows with each shape"


def test_calls_that_differ_do_not_share_a_plan():
    padded = [
        resize_batch({"x": torch.ones(1, 3)}, 2, mode="reshape", remainder="pad", pad_values={"x": value}, backend=name)
        for name in (None, "reference")
        for value in (0.0, -0.0)
    ]
    assert [torch.signbit(result["x"][1, 1]).item() for result in padded] == [False, True, False, True]
    resize_batch({"labels": IDS}, 4, mode="reshape", remainder="pad")
    with pytest.raises(ValueError, match="pad_values must have a value for 'labels'"):
        resize_batch({"labels": IDS.byte()}, 4, mode="reshape", remainder="pad")


def test_gradients():
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


def test_tangents():
    """Copies of rows would lose them. Views and packed batches carry them."""
    values, packed = torch.rand(1, 10), {"cu_seqlens": torch.tensor([0, 5, 10])}
    with forward_ad.dual_level():
        batch = {"inputs_embeds": forward_ad.make_dual(values, values + 1)}
        with pytest.raises(ValueError, match=r"batch\['inputs_embeds'\] must have no tangent"):
            resize_batch(batch, 4)
        for each, kept in ((resize_batch(batch, 4, copy=False), 4), (resize_batch(batch | packed, 2), 4)):
            carried, tangent = forward_ad.unpack_dual(each["inputs_embeds"])
            assert carried.shape == (1, kept)
            assert torch.equal(tangent, carried + 1)


@pytest.mark.skipif(backends.module is None, reason="the module for this torch is not built")
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


def test_no_tensor_is_kept():
    ids = IDS.clone()
    resize_batch({"input_ids": ids}, 4)
    gone = weakref.ref(ids)
    del ids
    assert gone() is None


def test_dtensors_are_refused():
    with one_rank():
        mesh = init_device_mesh("cpu", (1,))
        resize_batch({"input_ids": IDS}, 4)
        tokens = torch.arange(6)[None]
        for batch in ({"input_ids": IDS}, {"input_ids": tokens, "position_ids": tokens % 3}):
            distributed = {name: distribute_tensor(tensor, mesh, [Replicate()]) for name, tensor in batch.items()}
            with pytest.raises(TypeError, match="must be a plain tensor, got a DTensor; resize its to_local"):
                resize_batch(distributed, 4)
