"""Empty modules in place of packages that a library imports and that its tests do not need."""

import sys
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType


class _Empty(ModuleType):
    """A module that has a class for every name."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


class _Finder:
    """Finds empty modules for packages that are not installed."""

    def __init__(self, packages):
        self.packages = [name for name in packages if find_spec(name) is None]

    def replaces(self, name):
        return name.partition(".")[0] in self.packages

    def find_spec(self, name, path=None, target=None):
        return ModuleSpec(name, self, is_package=True) if self.replaces(name) else None

    def create_module(self, spec):
        return _Empty(spec.name)

    def exec_module(self, module):
        pass


@contextmanager
def stand_ins(*packages):
    """While a library is imported, packages that are not installed are empty modules. Afterwards they are gone."""
    from transformers.utils import is_torchvision_available

    is_torchvision_available()  # caches the answer before a stand-in is found
    finder = _Finder(packages)
    sys.meta_path.append(finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for module in [name for name in sys.modules if finder.replaces(name)]:
            del sys.modules[module]
