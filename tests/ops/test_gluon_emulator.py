"""What the emulator of Gluon refuses that no mutation of the package's kernels shows."""

import numpy as np
import pytest

pytest.importorskip("triton.experimental.gluon.language.nvidia.hopper")

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tests.support.gluon import ProtocolError, launch


@gluon.jit
def store_twice(Out):
    gl.store(Out, 1.0)


def test_two_programs_store_one_item():
    with pytest.raises(ProtocolError, match=r"program \(., 0, 0\): .* two partitions store the same item"):
        launch(store_twice, (2,), {"Out": np.zeros(1, np.float32)})


@gluon.jit
def store_at(Out, offset):
    gl.store(Out + offset, 1.0)


def test_stores_stay_inside_of_a_tensor():
    launch(store_at, (1,), {"Out": np.zeros(4, np.float32), "offset": 3})
    with pytest.raises(ProtocolError, match="outside of a tensor"):
        launch(store_at, (1,), {"Out": np.zeros(4, np.float32), "offset": 4})
