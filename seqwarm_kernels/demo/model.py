"""A small decoder-only GPT. ALiBi is its only source of positions."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..attention.functional import alibi_attention
from ..attention.slopes import alibi_slopes

#: One token for each byte.
VOCABULARY = 256


class GPT(nn.Module):
    """Pre-norm blocks without position embeddings, and with tied input and output embeddings.

    input_ids (B, S) int64 -> logits (B, S, 256)
    """

    def __init__(self, layers: int, heads: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(heads, width) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.apply(_initialize)
        for name, weight in self.named_parameters():
            if name.endswith("project.weight"):  # as in GPT-2: keeps the scale of the sum over all layers
                nn.init.normal_(weight, std=0.02 / math.sqrt(2 * layers))

    def forward(self, input_ids: Tensor) -> Tensor:
        hidden = self.embedding(input_ids)
        for block in self.blocks:
            hidden = block(hidden)
        return F.linear(self.norm(hidden), self.embedding.weight)


class Block(nn.Module):
    def __init__(self, heads: int, width: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(heads, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.expand = nn.Linear(width, 4 * width, bias=False)
        self.project = nn.Linear(4 * width, width, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self.attention(self.attention_norm(hidden))
        return hidden + self.project(F.gelu(self.expand(self.mlp_norm(hidden))))


class Attention(nn.Module):
    slopes: Tensor

    def __init__(self, heads: int, width: int) -> None:
        super().__init__()
        self.heads = heads
        self.query_key_value = nn.Linear(width, 3 * width, bias=False)
        self.project = nn.Linear(width, width, bias=False)
        self.register_buffer("slopes", alibi_slopes(heads), persistent=False)

    def forward(self, hidden: Tensor) -> Tensor:
        heads = self.query_key_value(hidden).unflatten(-1, (3, self.heads, -1))  # (B, S, 3, H, D)
        query, key, value = heads.permute(2, 0, 3, 1, 4)  # (B, H, S, D), as views
        attended = alibi_attention(query, key, value, self.slopes)
        return self.project(attended.transpose(1, 2).flatten(2))


def _initialize(module: nn.Module) -> None:
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=0.02)


def next_byte_loss(logits: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """Returns the mean cross-entropy in nats per byte. Labels of −100 are ignored."""
    return F.cross_entropy(logits.flatten(0, 1).float(), batch["labels"].flatten())


def build_model(layers: int, heads: int, width: int, seed: int, device: str) -> GPT:
    """Makes a GPT whose initial weights depend only on the seed."""
    torch.manual_seed(seed)
    return GPT(layers, heads, width).to(device)
