"""ALiBi attention on many devices."""

from .context_attention import context_attention, context_attention_varlen, halo_widths

__all__ = ["context_attention", "context_attention_varlen", "halo_widths"]
