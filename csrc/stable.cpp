// What Python asks the library on PyTorch's stable ABI, through ctypes.

#include "alibi_attention/cpu/products.h"

#define SEQWARM_EXPORT extern "C" __attribute__((visibility("default")))

// As in ops/kernels.py. Raise both with every change of a schema: the stable ABI does not compare types.
SEQWARM_EXPORT const char* seqwarm_interface() { return "1"; }

SEQWARM_EXPORT const char* seqwarm_torch() { return SEQWARM_TORCH_VERSION; }

SEQWARM_EXPORT const char* seqwarm_compiler() { return SEQWARM_COMPILER; }

SEQWARM_EXPORT const char* seqwarm_bfloat16_instructions() { return seqwarm::bfloat16_instructions(); }
