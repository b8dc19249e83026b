// Products of bfloat16 on AMX. libtorch configures the tile registers anew for every shape, which takes longer than a
// product of short rows. Here one configuration serves every shape.

#pragma once

#include <torch/headeronly/util/BFloat16.h>

#include <cstdint>

namespace seqwarm {

// Whether this CPU has AMX, and the system lets this process use it.
bool multiplies_tiles();

// Configures the tile registers of the calling thread for tiles of 8, 16 or 32 rows. No other library may use them
// until release_tiles.
void configure_tiles(int64_t size);
void release_tiles();

// C (m, n) = A (m, k) · B (k, n), or C += with `accumulate`. m, n and k are multiples of 32, B is in pairs:
// (k / 2, n, 2), where ldb counts pairs.
void multiply_tiles(
    int64_t m, int64_t n, int64_t k, const c10::BFloat16* a, int64_t lda, const c10::BFloat16* b, int64_t ldb, float* c,
    int64_t ldc, bool accumulate);

// The same for one tile of m rows: 8 or 16, as configured. n is a multiple of 16, and k is m or a multiple of 32.
void multiply_small_tiles(
    int64_t m, int64_t n, int64_t k, const c10::BFloat16* a, int64_t lda, const c10::BFloat16* b, int64_t ldb, float* c,
    int64_t ldc, bool accumulate);

}  // namespace seqwarm
