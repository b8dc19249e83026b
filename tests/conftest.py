import os

# A graph from torch's cache on disk has narrower guards than a freshly compiled one, so counts of compilations would
# depend on earlier runs on this machine.
os.environ["TORCHINDUCTOR_FORCE_DISABLE_CACHES"] = "1"

import pytest
import torch
from hypothesis import settings

# Without a GPU, Triton's kernels run in its interpreter. Triton reads the variable at its first import.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

settings.register_profile("default", deadline=None, derandomize=bool(os.environ.get("CI")), print_blob=True)
settings.load_profile("default")


@pytest.fixture(autouse=True)
def _fixed_seed():
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _fresh_compiler():
    """Each test starts without compiled graphs of other tests."""
    yield
    torch._dynamo.reset()


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu") is not None:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
