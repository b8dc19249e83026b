"""A byte-level GPT with ALiBi: pre-norm or post-norm, with nothing that keeps its logits small."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import seqwarm_kernels as sw

from .settings import POST, Setting

ENTRIES = 256  #: bytes


class GPT(nn.Module):
    """As GPT-2, without query and key norms and without a z-loss. Input and output embeddings are tied.

    Weights start at a standard deviation of 1/√(inputs), as in arXiv 2309.14322: 0.02 is for a width of 768 and more.

    input_ids (B, S) int64 -> logits (B, S, 256).
    """

    def __init__(self, setting: Setting) -> None:
        super().__init__()
        self.embedding = nn.Embedding(ENTRIES, setting.width)
        self.blocks = nn.ModuleList(Block(setting) for _ in range(setting.layers))
        self.norm = nn.LayerNorm(setting.width)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                is_residual = name.endswith("project.weight")
                scale = math.sqrt(2 * setting.layers) if is_residual else 1.0
                nn.init.normal_(parameter, std=1 / (scale * math.sqrt(parameter.shape[1])))
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, input_ids: Tensor) -> Tensor:
        hidden = self.embedding(input_ids)
        for block in self.blocks:
            hidden = block(hidden)
        return F.linear(self.norm(hidden), self.embedding.weight)


class Block(nn.Module):
    slopes: Tensor

    def __init__(self, setting: Setting) -> None:
        super().__init__()
        width = setting.width
        self.heads, self.is_post = setting.heads, setting.norm == POST
        self.largest_logit = 0.0  #: of the last forward pass in which it was wanted
        self.wants_logit = False
        self.attention_norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.heads_projection, self.attention_project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp_expand, self.mlp_project = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.register_buffer("slopes", sw.alibi_slopes(setting.heads), persistent=False)

    def forward(self, hidden: Tensor) -> Tensor:
        if self.is_post:
            hidden = self.attention_norm(hidden + self._attend(hidden))
            return self.mlp_norm(hidden + self._expand(hidden))
        hidden = hidden + self._attend(self.attention_norm(hidden))
        return hidden + self._expand(self.mlp_norm(hidden))

    def _attend(self, hidden: Tensor) -> Tensor:
        heads = self.heads_projection(hidden).unflatten(-1, (self.heads, 3, -1))
        query, key, value = heads.permute(3, 0, 2, 1, 4)  # each (B, H, S, D)
        if self.wants_logit:
            logits = query.float() @ key.float().mT / math.sqrt(query.shape[-1])
            self.largest_logit = logits.abs().max().item()
        attended = sw.alibi_attention(query, key, value, self.slopes)
        return self.attention_project(attended.transpose(1, 2).flatten(2))

    def _expand(self, hidden: Tensor) -> Tensor:
        return self.mlp_project(F.gelu(self.mlp_expand(hidden), approximate="tanh"))


@torch.no_grad()
def largest_logits(model: GPT, input_ids: Tensor) -> tuple[float, float]:
    """What grows before large models diverge (arXiv 2309.14322), on `input_ids`.

    Returns:
        The largest |query · key| · scale over all layers, and the mean log of the softmax sum of the output logits.
    """
    blocks = [block for block in model.blocks if isinstance(block, Block)]
    for block in blocks:
        block.wants_logit = True
    log_sum = model(input_ids).float().logsumexp(-1).mean().item()
    for block in blocks:
        block.wants_logit = False
    return max(block.largest_logit for block in blocks), log_sum
