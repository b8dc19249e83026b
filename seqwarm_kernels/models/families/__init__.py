"""Converters of the model families, grouped by their source of positions. Importing this package registers them."""

from . import learned, native_alibi, torch_nn
from .rotary import converter_by_structure

__all__ = ["converter_by_structure", "learned", "native_alibi", "torch_nn"]
