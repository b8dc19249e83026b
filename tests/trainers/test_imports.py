"""The modules of `trainers` name a missing package. tests/test_structure.py tries that nothing is imported before."""

import sys

import pytest

from seqwarm_kernels import trainers


@pytest.mark.parametrize("module", [trainers, trainers.composer])
def test_an_unknown_name_is_an_attribute_error(module):
    with pytest.raises(AttributeError, match="keras"):
        _ = module.keras


@pytest.mark.parametrize(("package", "trainer"), [("transformers", "huggingface"), ("lightning", "lightning")])
def test_a_missing_package_is_named(package, trainer, monkeypatch):
    module = f"seqwarm_kernels.trainers.{trainer}"
    for name in [name for name in sys.modules if name == module or name.startswith(f"{module}.")]:
        monkeypatch.delitem(sys.modules, name)
    for name in [package, *(name for name in sys.modules if name.startswith(f"{package}."))]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(vars(trainers), trainer, raising=False)
    with pytest.raises(ImportError, match=rf"{package}.*seqwarm_kernels\[{trainer}\]"):
        getattr(trainers, trainer)


def test_a_missing_composer_is_named(monkeypatch):
    for module in ("composer", "composer.core"):
        monkeypatch.setitem(sys.modules, module, None)
    for module in ("algorithms", "monitor"):
        monkeypatch.delitem(sys.modules, f"seqwarm_kernels.trainers.composer.{module}", raising=False)
        monkeypatch.delattr(trainers.composer, module, raising=False)
    with pytest.raises(ImportError, match=r"Alibi.*Composer"):
        _ = trainers.composer.Alibi
