"""Plugin of pytest: resize_batch's CUDA kernel serves CPU tensors as backend "native"."""

import os

import torch

import seqwarm_kernels.ops  # noqa: F401

torch.ops.load_library(os.environ["SEQWARM_CUDA_SHIM"])
