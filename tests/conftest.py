import gc
import os
from collections import Counter
from contextlib import suppress

# A graph from torch's cache on disk has narrower guards than a freshly compiled one, so counts of compilations would
# depend on earlier runs on this machine.
os.environ["TORCHINDUCTOR_FORCE_DISABLE_CACHES"] = "1"

import pytest
import torch
from hypothesis import Phase, settings

# Without a GPU, Triton's kernels run in its interpreter. Triton reads the variable at its first import.
HAS_GPU = torch.cuda.is_available()
if not HAS_GPU:
    os.environ["TRITON_INTERPRET"] = "1"
    with suppress(ImportError):
        from .support.interpreter import check_accesses, make_faster, poison_masked_loads

        make_faster()
        poison_masked_loads()
        check_accesses()

# No test cuts the power, and a wait for the disk takes as long as many tests.
os.fsync = lambda descriptor: None

settings.register_profile("default", deadline=None, derandomize=bool(os.environ.get("CI")), print_blob=True)
settings.register_profile("exhaustive", settings.get_profile("default"), derandomize=False, max_examples=1000)
# On a GPU nearly every example of resize_batch compiles another Triton kernel: 30 of the 200.
settings.register_profile("gpu", settings.get_profile("default"), max_examples=15)
# For mutants: the same examples in each run. No smaller one is searched for one that fails.
phases = (Phase.explicit, Phase.generate)
settings.register_profile("mutation", deadline=None, derandomize=True, phases=phases, database=None)
settings.load_profile("default")


def pytest_addoption(parser):
    parser.addoption("--seed", type=int, default=0, help="torch's seed at the start of each test (default: 0)")


@pytest.fixture(autouse=True)
def _fixed_seed(request):
    """torch.manual_seed takes milliseconds: it notes a traceback for each kind of device that is not there."""
    seed = request.config.getoption("seed")
    torch.default_generator.manual_seed(seed)
    if HAS_GPU:
        torch.cuda.manual_seed_all(seed)


@pytest.fixture(autouse=True)
def _fresh_compiler():
    """Each test starts without compiled graphs of other tests."""
    yield
    torch._dynamo.reset()


#: Tests that name these need the server of tests/support/ranks.py. With `--dist loadgroup` one worker starts it, and
#: imports transformers and the trainers.
RANKS = {"run_ranks", "run_on_mesh", "mean_of_two_ranks", "assert_kills_change_nothing"}


@pytest.hookimpl(tryfirst=True)  # before pytest selects by marker
def pytest_collection_modifyitems(items):
    for item in items:
        if item.path.parent.name in ("models", "trainers") or RANKS & vars(item.module).keys():
            item.add_marker(pytest.mark.xdist_group("trainers"))
    if HAS_GPU:
        return
    for item in items:
        if item.get_closest_marker("gpu") is not None:
            item.add_marker(
                pytest.mark.skip(reason="needs a CUDA device"), append=False
            )  # its reason is the one that is shown
        elif _is_interpreted(item):
            for tier in ("slow", "exhaustive"):
                if item.get_closest_marker(f"{tier}_in_interpreter") is not None:
                    item.add_marker(tier)


def _is_interpreted(item):
    """Whether Triton's interpreter runs the test. It takes seconds where other backends take milliseconds."""
    backend = item.callspec.params.get("backend") if hasattr(item, "callspec") else None
    return "triton" in (backend if isinstance(backend, tuple) else [backend])


def pytest_collection_finish(session):
    if session.config.getoption("loadgroup", False):
        grouped = [item.nodeid for item in session.items if item.get_closest_marker("xdist_group")]
        assert all("@" in name for name in grouped), "pytest-xdist lost its groups, as 3.8 does with pytest 9.2"
    # Without this, each collection of garbage goes through all imported modules, and takes half a second.
    gc.collect()
    gc.freeze()


def pytest_terminal_summary(terminalreporter):
    """How many tests, or files that need a package, were skipped for which reason."""
    reports = terminalreporter.stats.get("skipped", ())
    for reason, count in Counter(report.longrepr[2] for report in reports).most_common():
        terminalreporter.write_line(f"{count} skipped: {reason.removeprefix('Skipped: ')}")


@pytest.fixture
def poisoned_memory(monkeypatch):
    """torch.empty returns NaN, so an element that a kernel does not write becomes visible."""
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)
