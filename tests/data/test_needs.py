"""`seqwarm_kernels.data` needs only NumPy and torch to be imported."""

import subprocess
import sys

import pytest

BLOCKED = """
import sys

class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"torchdata", "transformers", "datasets", "matplotlib", "backports"}:
            raise ModuleNotFoundError(f"{name} is blocked", name=name)

sys.meta_path.insert(0, Block())
from seqwarm_kernels.data import BatchPlanner, LengthBatchSampler, PackedCollator

batches = list(LengthBatchSampler([3, 1, 2], BatchPlanner(6, packed=True)))
assert PackedCollator()([[1] * 3])["max_length_q"] == 3 and len(batches) == 1
try:
    import seqwarm_kernels.data.torchdata_nodes
except ModuleNotFoundError as error:
    assert error.name == "torchdata.nodes" or error.name == "torchdata", error
else:
    raise AssertionError("torchdata was not blocked")
"""


@pytest.mark.slow
def test_it_needs_numpy_and_torch():
    result = subprocess.run([sys.executable, "-c", BLOCKED], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
