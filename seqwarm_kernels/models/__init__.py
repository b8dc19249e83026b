"""Convert existing models to ALiBi attention: `apply_alibi`."""

from .alibi_layer import AlibiHeads, Packing, alibi_layer_attention
from .apply import apply_alibi, load_alibi_model
from .report import SurgeryReport
from .surgery import Surgery, register_alibi

__all__ = [
    "AlibiHeads",
    "Packing",
    "Surgery",
    "SurgeryReport",
    "alibi_layer_attention",
    "apply_alibi",
    "load_alibi_model",
    "register_alibi",
]
