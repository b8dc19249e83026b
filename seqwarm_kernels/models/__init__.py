"""ALiBi into models that exist: `apply_alibi`."""

from .apply import apply_alibi
from .heads import AlibiHeads, Packing, attend
from .huggingface import RegisterOnImport
from .load import load_alibi_model
from .report import SurgeryReport
from .surgery import Surgery, register_alibi

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
