"""AMD's GPUs: Triton serves them, all kernels compile for them, and the first call says that none has run yet."""

import pytest
import torch

from seqwarm_kernels.ops import backends
from tests.support.kernels import pretended

pytest.importorskip("triton")


@pytest.mark.slow
@pytest.mark.parametrize("chip", ["gfx942", pytest.param("gfx950", marks=pytest.mark.exhaustive)])
def test_calls_launch_kernels_on_a_pretended_gpu(chip):
    report = pretended("amd", chip)
    assert report["problem"] is None
    kernels = report["kernels"]
    tiled = {"forward", "backward_query", "backward_key", "key_norms", "decode", "short_forward", "short_backward"}
    assert kernels.keys() == {f"{name}_kernel" for name in (*tiled, "backward_ranges", "merge", "resize")}
    for name, kernel in kernels.items():
        assert kernel["spilled_bytes"] == 0, (name, kernel)
        if name.removesuffix("_kernel") in tiled:
            assert kernel["wide_loads"] > 0, (name, kernel)
            assert kernel["other_loads"] == 0, (name, kernel)


@pytest.mark.parametrize("is_hip", [False, True])
def test_the_first_launch_says_that_no_amd_gpu_has_run_it(monkeypatch, recwarn, is_hip):
    from seqwarm_kernels.ops import triton_launch

    monkeypatch.setattr(backends, "IS_HIP", is_hip)
    triton_launch._warn_not_yet_run.cache_clear()
    for _ in range(2):
        triton_launch.on(torch.device("cuda", 0))
        triton_launch.on(torch.device("cpu"))
    assert ["AMD" in str(warning.message) for warning in recwarn] == [True] * is_hip
