"""Composer imports torchvision and its platform's client, mcli. These tests need neither, so both can be missing."""

from importlib.util import find_spec

from ...support.stand_ins import stand_ins

if find_spec("composer") is not None:
    with stand_ins("torchvision", "mcli"):
        import composer.functional  # noqa: F401  # all of it
