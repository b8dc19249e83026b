"""nn.MultiheadAttention, and the layers that hold it."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from ...attention.context_parallel import refuse_context_parallel_style
from ...utils.checks import check_values
from ..alibi_layer import alibi_layer_attention
from ..surgery import Surgery, register_alibi

#: Largest number that hides a key. Added to a score, it makes the weight 0 beside any key that is not hidden.
_HIDDEN = -1e4


class AlibiMultiheadAttention(nn.MultiheadAttention):
    """nn.MultiheadAttention of self-attention, with ALiBi."""

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """See nn.MultiheadAttention. Returns None for the weights, which are never computed.

        Args:
            key: `query`, or a tensor of the same memory.
            value: As `key`.
            key_padding_mask: Bool, True at a key to hide. Or floating point, 0 at a key to attend, and -inf or any
                number of -1e4 or less at a key to hide. A query that sees no key gives the bias of `out_proj`.
            attn_mask: None, or a causal mask together with `is_causal`.
        """
        refuse_context_parallel_style(self)
        if not (_are_one(query, key) and _are_one(query, value)):
            raise ValueError(f"key and value must be the query in ALiBi self-attention, got key {tuple(key.shape)}")
        if attn_mask is not None and not is_causal:
            raise ValueError(f"attn_mask needs is_causal=True, got a mask of {tuple(attn_mask.shape)}")
        x = query if query.dim() == 3 else query.unsqueeze(0 if self.batch_first else 1)
        x = x if self.batch_first else x.transpose(0, 1)
        mixed = functional.linear(x, self.in_proj_weight, self.in_proj_bias)
        heads = mixed.unflatten(-1, (3, self.num_heads, self.head_dim)).permute(2, 0, 3, 1, 4)
        out = alibi_layer_attention(
            self,
            *heads,
            causal=is_causal,
            dropout_p=self.dropout if self.training else 0.0,
            key_padding_mask=_visible(key_padding_mask, x),
        )
        out = self.out_proj(out.transpose(1, 2).flatten(2))
        out = out if self.batch_first else out.transpose(0, 1)
        return (out if query.dim() == 3 else out.squeeze(0 if self.batch_first else 1)), None


def _are_one(query: Tensor, other: Tensor) -> bool:
    """Whether two arguments are one tensor, or views of it: the hooks of fully_shard and torch's reentrant checkpoint
    make views of all arguments."""
    if query is other:
        return True
    return not torch.compiler.is_compiling() and query.shape == other.shape and query.is_set_to(other)


def _visible(key_padding_mask: Tensor | None, x: Tensor) -> Tensor | None:
    """Return (B, S), True where a key is attended. In PyTorch's masks True or a large negative number hides a key."""
    if key_padding_mask is None:
        return None
    if key_padding_mask.dtype == torch.bool:
        return ~key_padding_mask.view(x.shape[:2])
    if not key_padding_mask.is_floating_point():
        raise TypeError(f"key_padding_mask must be bool or floating point, got {key_padding_mask.dtype}")
    visible = key_padding_mask == 0
    is_known = visible | (key_padding_mask <= _HIDDEN)
    check_values(is_known.all(), "key_padding_mask must be bool, or hold 0 at keys to attend, else -1e4 or less")
    return visible.view(x.shape[:2])


@register_alibi(nn.MultiheadAttention)
def convert_multihead_attention(module: nn.MultiheadAttention, surgery: Surgery) -> None:
    parent_path, _, name = surgery.path.rpartition(".")
    parent = surgery.model.get_submodule(parent_path)
    if isinstance(parent, nn.TransformerDecoderLayer) and name == "multihead_attn":
        return  # cross-attention
    if type(parent).__module__.startswith("transformers."):
        return  # of images and queries that are parameters, as in SigLIP; tokens attend in transformers' own classes
    if type(module) not in (nn.MultiheadAttention, AlibiMultiheadAttention):
        raise ValueError(
            f"{surgery.path} must be an nn.MultiheadAttention itself, got its subclass {type(module).__qualname__}"
        )
    if not module._qkv_same_embed_dim or module.bias_k is not None or module.add_zero_attn:
        raise ValueError(
            f"{surgery.path} must have keys and values like its queries, got kdim, vdim, add_bias_kv or add_zero_attn"
        )
    surgery.give_alibi(module, module.num_heads, causal=None)
    surgery.set(module, "__class__", AlibiMultiheadAttention)


@register_alibi(nn.TransformerEncoderLayer)
def convert_encoder_layer(module: nn.TransformerEncoderLayer, surgery: Surgery) -> None:
    """Turn off PyTorch's fused path for evaluation, which bypasses the attention module."""
    surgery.set(module, "activation_relu_or_gelu", 0)


@register_alibi(nn.TransformerEncoder)
def convert_encoder(module: nn.TransformerEncoder, surgery: Surgery) -> None:
    """Turn off nested tensors, which only the fused path takes."""
    surgery.set(module, "use_nested_tensor", False)
