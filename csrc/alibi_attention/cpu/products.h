// Products of tiles, by libtorch, which uses the matrix instructions of the CPU.

#pragma once

#include <torch/headeronly/util/BFloat16.h>

#include <cstdint>

namespace seqwarm {

// C (m, n) = A (m, k) · B (k, n), or C += with `accumulate`; row-major with leading dimensions lda, ldb, ldc.
void multiply(
    int64_t m, int64_t n, int64_t k, const float* a, int64_t lda, const float* b, int64_t ldb, float* c, int64_t ldc,
    bool accumulate);

// The same with B in pairs: (k / 2, n, 2), where ldb counts pairs.
void multiply(
    int64_t m, int64_t n, int64_t k, const c10::BFloat16* a, int64_t lda, const c10::BFloat16* b, int64_t ldb, float* c,
    int64_t ldc, bool accumulate);

// Whether this CPU has a fast product for bfloat16.
bool multiplies_bfloat16();

// Those that multiply bfloat16: "AMX" or "AVX512-BF16", or null where bfloat16 is multiplied as float32.
const char* bfloat16_instructions();

// Prepare and release the CPU's matrix registers, if any. Every thread calls them before and after its products.
void start_multiplying();
void finish_multiplying();

}  // namespace seqwarm
