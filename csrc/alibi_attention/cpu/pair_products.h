// bfloat16 on AVX512-BF16: rounding, pairs, and products of small matrices, for which a call of libtorch's costs as
// much as the product.

#pragma once

#include <torch/headeronly/util/BFloat16.h>

#include <cstdint>

namespace seqwarm {

// Whether the compiler knew the instructions. Callers make sure that the CPU has them: this file is compiled with them.
bool multiplies_pairs();

// A matrix of bfloat16 whose pair p of row i, of columns 2 p and 2 p + 1, is at data + 2 (i * row + p * column).
struct PairMatrix {
  const c10::BFloat16* data;
  int64_t row;
  int64_t column;
};

// C (m, n) = A (m, k) · B (k, n), or C += with `accumulate`. n is a multiple of 16 and k of 2. B is in pairs: (k / 2, n, 2),
// where ldb counts pairs.
void multiply_pairs(
    int64_t m, int64_t n, int64_t k, PairMatrix a, const c10::BFloat16* b, int64_t ldb, float* c, int64_t ldc,
    bool accumulate);

// The right side (k, n) from its rows, k a multiple of 2 and n of 32.
void pair_rows(const c10::BFloat16* rows, int64_t ld, c10::BFloat16* pairs, int64_t k, int64_t n);

// Rounds (rows, columns) floats in rows of `ld`. Stores them in pairs of neighbors in a column, (rows / 2, ld, 2), and
// in their own order if `rounded` is not null. `rows` is a multiple of 2, `columns` of 16. Subnormal numbers become 0.
void round_to_pairs(
    const float* values, int64_t rows, int64_t columns, int64_t ld, c10::BFloat16* rounded, c10::BFloat16* pairs);

// Rounds the first `count` floats of a row, which has room for a multiple of 32. Subnormal numbers become 0.
void round_row(const float* values, int64_t count, c10::BFloat16* rounded);

// The same for whole cache lines, past the caches.
void stream_rounded_row(const float* values, int64_t count, c10::BFloat16* rounded);

}  // namespace seqwarm
