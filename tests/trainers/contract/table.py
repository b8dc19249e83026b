"""The trainers and the trainings of the contract. A trainer is one adapter, and a case one row."""

import importlib
from importlib.util import find_spec

import pytest

from .cases import Case

#: The adapter of each trainer, and the packages it needs.
TRAINERS = {
    "plain": ("Plain", ()),
    "huggingface": ("HuggingFace", ("transformers", "accelerate")),
    "lightning": ("Lightning", ("lightning",)),
    "composer": ("Composer", ("composer",)),
}

FLATTEN = {"mode": "flatten"}
WATCHED = {"is_watched": True, "clip": 0.1}
SEGMENTS = {"mode": "segments", "boundaries": "position_ids"}


def reshape(remainder):
    return {"mode": "reshape", "remainder": remainder}


#: Of each mode, remainder, unit and kind of batch one.
CASES = {
    "truncate": Case(is_watched=True),
    "truncate-padded": Case({}, "token", 80, "padded", accumulate=2, asks=True, rates="TokenLR", **WATCHED),
    "last-token": Case({"keep_last_token": True}, "sample", 20, "padded", accumulate=2, rates="StepByTokens"),
    "reshape-drop": Case(reshape("drop"), "token", 400, accumulate=2, log_every=3),
    "reshape-pad": Case(reshape("pad"), "sample", 60, rates="TokenLR"),
    "reshape-overlap": Case(reshape("overlap"), data="padded", log_every=3),
    "flatten": Case(FLATTEN, "token", 400, rates="TokenLR"),
    "flatten-accumulated": Case(FLATTEN, duration=6, accumulate=2, **WATCHED),
    "packed-truncate": Case(data="flattened", rates="TokenLR", is_watched=True),
    "packed-reshape": Case(reshape("pad"), "token", 220, "packed"),
    "packed-flatten": Case(FLATTEN, data="flattened"),
    "segments": Case(SEGMENTS, "token", 400, accumulate=2, rates="TokenLR"),
    "segments-padded": Case(SEGMENTS, data="padded"),
    "segments-packed": Case(SEGMENTS, data="packed"),
}

#: Decoders, whose "segments" are told as the trainer finds out for the model that it holds.
DECODERS = {
    network: Case({"mode": "segments"}, data="even", accumulate=2, duration=6, evaluate_every=None, network=network)
    for network in ("llama-alibi", "llama-sdpa", "llama-seqwarm")
}


def adapter_of(trainer):
    """Imports a trainer's adapter."""
    return getattr(importlib.import_module(f"{__package__}.{trainer}"), TRAINERS[trainer][0])


def _parametrized(names, rows):
    """Parametrizes a test by `rows(adapter)` of each trainer, and by a skipped one where a package is missing."""
    found = []
    for trainer, (_, packages) in TRAINERS.items():
        missing = [package for package in packages if find_spec(package) is None]
        if missing:
            skip = pytest.mark.skip(reason=f"needs {missing[0].capitalize()}: make test-{trainer}")
            found.append(pytest.param(*(None for _ in names), id=trainer, marks=skip))
        else:
            found += rows(trainer, adapter_of(trainer))
    return pytest.mark.parametrize(names, found)


def each_trainer(**attributes):
    """Parametrizes a test by the adapters with these attributes."""

    def rows(trainer, adapter):
        return [pytest.param(adapter, id=trainer)] if _has(adapter, attributes) else []

    return _parametrized(("adapter",), rows)


def each_case(cases, fast, **attributes):
    """Parametrizes a test by the adapters with these attributes, and the cases that they support.

    Those that are not in `fast` are slow.
    """

    def marks_of(name):
        return [] if name in fast else [pytest.mark.slow]

    def rows(trainer, adapter):
        return [
            pytest.param(adapter, case, id=f"{trainer}-{name}", marks=marks_of(name))
            for name, case in cases.items()
            if _has(adapter, attributes) and adapter.supports(case)
        ]

    return _parametrized(("adapter", "case"), rows)


def _has(adapter, attributes):
    return all(getattr(adapter, name) == value for name, value in attributes.items())
