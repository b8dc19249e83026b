"""Without native kernels, the first call that they would serve warns, and only that one."""

import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import seqwarm_kernels
from seqwarm_kernels.ops import backends
from tests.support.tiers import first_fast

#: A module that the copied package lacks would else be found in an editable installation.
PROLOGUE = """
import sys, warnings, torch
sys.meta_path = [finder for finder in sys.meta_path if "editable" not in str(finder)]
"""

EAGER = """
from seqwarm_kernels import alibi_attention, resize_batch

tensors, batch = [torch.zeros(1, 2, 4, 8)] * 3, {"input_ids": torch.zeros(2, 8, dtype=torch.long)}
with warnings.catch_warnings():
    warnings.simplefilter("error")
    alibi_attention(*tensors, backend="reference")
    alibi_attention(*[tensor.double() for tensor in tensors])
    alibi_attention(*[tensor.to("meta") for tensor in tensors])
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for _ in range(2):
        alibi_attention(*tensors)
        resize_batch(batch, 4)
"""

COMPILED = """
from seqwarm_kernels import alibi_attention

tensors = torch.randn(3, 1, 2, 4, 8).unbind()
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    attend = torch.compile(alibi_attention, backend="eager", fullgraph=True)
    for _ in range(2):
        assert torch.equal(attend(*tensors), alibi_attention(*tensors, backend="reference"))
"""

REPORT = """
for warning in caught:
    if "native kernels" in str(warning.message):
        print(warning.filename, warning.message, sep=": ")
"""


UNSUPPORTED = """
import platform
platform.machine = lambda: "s390x"
from seqwarm_kernels import alibi_attention
from seqwarm_kernels.ops import backends

with warnings.catch_warnings(record=True) as caught:
    alibi_attention(*[torch.zeros(1, 2, 4, 8)] * 3)
print(backends.problem("native"))
"""


@pytest.fixture
def printed(tmp_path):
    """The lines that a script prints, run with a copy of the package without kernels, or with a broken library."""

    def run(code, *, broken=False):
        package = Path(seqwarm_kernels.__file__).parent
        copy = tmp_path / package.name
        shutil.copytree(package, copy, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
        if broken:
            (copy / "_kernels.so").write_bytes(b"not a library")
        script = tmp_path / "script.py"
        script.write_text(PROLOGUE + code + REPORT)
        return subprocess.run([sys.executable, script], capture_output=True, text=True, check=True).stdout.splitlines()

    return run


@pytest.mark.skipif(not backends.is_supported_platform(), reason="there are no kernels for this platform")
@pytest.mark.parametrize(
    ("code", "state"), first_fast([(EAGER, "are not built"), (COMPILED, "do not load")]), ids=["eager", "compiled"]
)
def test_one_warning(printed, tmp_path, code, state):
    (line,) = printed(code, broken=state == "do not load")
    start = "alibi_attention runs in plain PyTorch, many times slower than native kernels: the kernels"
    assert line.startswith(f"{tmp_path / 'script.py'}: {start} {state}")
    assert "`pip install --no-build-isolation .`" in line


def test_no_warning_where_there_are_no_kernels(printed):
    (line,) = printed(UNSUPPORTED)
    assert line == f"there are no native kernels for {platform.system()} on s390x"
