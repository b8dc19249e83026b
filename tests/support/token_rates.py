"""The learning rates that tokens should give."""

import math

import torch

import seqwarm_kernels as sw

PEAK = 0.1
WARMUP, DECAY = 40, 150


def token_lr(optimizer, source):
    return sw.TokenLR(optimizer, warmup_tokens=WARMUP, decay_tokens=DECAY, final=0.2, decay="linear", source=source)


def step_lr(optimizer, source):
    return sw.StepByTokens(torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.9), 10, source=source)


def share_at(tokens, warmup=WARMUP, decay=DECAY, final=0.2, shape="linear"):
    """The learning rate of TokenLR as a share of the peak."""
    if tokens < warmup:
        return tokens / warmup
    x = min(1.0, (tokens - warmup) / (decay - warmup)) if decay > warmup else 1.0
    return final + (1 - final) * {"cosine": 0.5 + 0.5 * math.cos(x * math.pi), "linear": 1 - x}[shape]


def token_lr_at(tokens):
    return PEAK * share_at(tokens)


def step_lr_at(tokens):
    return PEAK * 0.9 ** (tokens // 10)


#: How to make a scheduler, and its learning rate after a number of tokens.
SCHEDULERS = {
    "TokenLR": (token_lr, token_lr_at),
    "TokenLR by a function": (lambda optimizer, source: token_lr(optimizer, lambda: source()), token_lr_at),
    "StepByTokens": (step_lr, step_lr_at),
}
