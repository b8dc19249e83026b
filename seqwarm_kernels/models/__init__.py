"""ALiBi into models that exist: `apply_alibi`."""

from .alibi_layer import AlibiHeads, Packing, attend
from .apply import apply_alibi
from .load import load_alibi_model
from .report import SurgeryReport
from .surgery import Surgery, register_alibi
from .transformers_attention import RegisterOnImport

RegisterOnImport.install()

__all__ = [
    "AlibiHeads",
    "Packing",
    "Surgery",
    "SurgeryReport",
    "apply_alibi",
    "attend",
    "load_alibi_model",
    "register_alibi",
]
