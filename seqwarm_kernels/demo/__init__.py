"""`python -m seqwarm_kernels demo`: one small GPT trained twice, with and without sequence-length warmup."""
