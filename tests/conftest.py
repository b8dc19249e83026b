import os

# A graph from torch's cache on disk brings narrower guards than one compiled afresh: what a test counts would
# depend on what ran on this machine before.
os.environ["TORCHINDUCTOR_FORCE_DISABLE_CACHES"] = "1"

import pytest
import torch
from hypothesis import settings

# Without a GPU Triton's kernels run in its interpreter. Triton asks for it when it is first imported.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

settings.register_profile("default", deadline=None, derandomize=bool(os.environ.get("CI")), print_blob=True)
settings.load_profile("default")


@pytest.fixture(autouse=True)
def _fixed_seed():
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _fresh_compiler():
    """Each test that compiles starts without graphs of others."""
    yield
    torch._dynamo.reset()


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu") is not None:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
