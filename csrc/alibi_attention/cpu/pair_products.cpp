#include "pair_products.h"

#ifdef SEQWARM_AVX512_BF16

#include <immintrin.h>

#include <cstring>

namespace seqwarm {
namespace {

constexpr int64_t lanes = 16;

// Every lane has the same pair.
inline __m512bh broadcast(const c10::BFloat16* pair) {
  int32_t bits;
  std::memcpy(&bits, pair, sizeof(bits));
  return reinterpret_cast<__m512bh>(_mm512_set1_epi32(bits));
}

// C (rows, vectors), in registers, of `pairs` pairs of columns of A. In place, since a call would pass A through memory.
template <int rows, int vectors>
C10_ALWAYS_INLINE void multiply_block(
    int64_t pairs, PairMatrix a, const c10::BFloat16* b, int64_t ldb, float* c, int64_t ldc, bool accumulate) {
  __m512 sum[rows][vectors];
#pragma GCC unroll 8
  for (int i = 0; i < rows; ++i) {
#pragma GCC unroll 4
    for (int v = 0; v < vectors; ++v) {
      sum[i][v] = accumulate ? _mm512_loadu_ps(c + i * ldc + v * lanes) : _mm512_setzero_ps();
    }
  }
  for (int64_t p = 0; p < pairs; ++p) {
    __m512bh right[vectors];
#pragma GCC unroll 4
    for (int v = 0; v < vectors; ++v) {
      right[v] = reinterpret_cast<__m512bh>(_mm512_loadu_si512(b + 2 * (p * ldb + v * lanes)));
    }
#pragma GCC unroll 8
    for (int i = 0; i < rows; ++i) {
      const __m512bh left = broadcast(a.data + 2 * (i * a.row + p * a.column));
#pragma GCC unroll 4
      for (int v = 0; v < vectors; ++v) {
        sum[i][v] = _mm512_dpbf16_ps(sum[i][v], left, right[v]);
      }
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < rows; ++i) {
#pragma GCC unroll 4
    for (int v = 0; v < vectors; ++v) {
      _mm512_storeu_ps(c + i * ldc + v * lanes, sum[i][v]);
    }
  }
}

template <int rows, int vectors>
inline void multiply_rows(
    int64_t m, int64_t pairs, PairMatrix a, const c10::BFloat16* b, int64_t ldb, float* c, int64_t ldc,
    bool accumulate) {
  for (; m >= rows; m -= rows, a.data += 2 * rows * a.row, c += rows * ldc) {
    multiply_block<rows, vectors>(pairs, a, b, ldb, c, ldc, accumulate);
  }
  if constexpr (rows > 1) {
    if (m > 0) {
      multiply_rows<rows / 2, vectors>(m, pairs, a, b, ldb, c, ldc, accumulate);
    }
  }
}

// 32 floats in their order.
inline __m512i rounded_block(const float* values) {
  return reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(_mm512_loadu_ps(values + lanes), _mm512_loadu_ps(values)));
}

}  // namespace

bool multiplies_pairs() {
  return true;
}

void multiply_pairs(
    int64_t m, int64_t n, int64_t k, PairMatrix a, const c10::BFloat16* b, int64_t ldb, float* c, int64_t ldc,
    bool accumulate) {
  for (; n >= 4 * lanes; n -= 4 * lanes, b += 8 * lanes, c += 4 * lanes) {
    multiply_rows<4, 4>(m, k / 2, a, b, ldb, c, ldc, accumulate);
  }
  for (; n >= 2 * lanes; n -= 2 * lanes, b += 4 * lanes, c += 2 * lanes) {
    multiply_rows<8, 2>(m, k / 2, a, b, ldb, c, ldc, accumulate);
  }
  if (n > 0) {
    multiply_rows<8, 1>(m, k / 2, a, b, ldb, c, ldc, accumulate);
  }
}

void pair_rows(const c10::BFloat16* rows, int64_t ld, c10::BFloat16* pairs, int64_t k, int64_t n) {
  alignas(64) static constexpr int16_t lower[32] = {0, 32, 1, 33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39,
                                                    8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47};
  const __m512i first = _mm512_load_si512(lower), second = _mm512_add_epi16(first, _mm512_set1_epi16(16));
  for (int64_t row = 0; row < k; row += 2) {
    const c10::BFloat16 *even = rows + row * ld, *odd = even + ld;
    for (int64_t column = 0; column < n; column += 32, pairs += 64) {
      const __m512i low = _mm512_loadu_si512(even + column), high = _mm512_loadu_si512(odd + column);
      _mm512_storeu_si512(pairs, _mm512_permutex2var_epi16(low, first, high));
      _mm512_storeu_si512(pairs + 32, _mm512_permutex2var_epi16(low, second, high));
    }
  }
}

void round_to_pairs(
    const float* values, int64_t rows, int64_t columns, int64_t ld, c10::BFloat16* rounded, c10::BFloat16* pairs) {
  alignas(64) static constexpr int16_t alternating[32] = {0,  16, 1,  17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                          8,  24, 9,  25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  const __m512i order = _mm512_load_si512(alternating);
  const auto store_half = [](c10::BFloat16* to, __m256i half) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), half);
  };
  for (int64_t row = 0; row < rows; row += 2) {
    for (int64_t column = 0; column < columns; column += lanes) {
      const float* even = values + row * ld + column;
      const __m512i both =
          reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(_mm512_loadu_ps(even + ld), _mm512_loadu_ps(even)));
      _mm512_storeu_si512(pairs + row * ld + 2 * column, _mm512_permutexvar_epi16(order, both));
      if (rounded != nullptr) {
        store_half(rounded + row * ld + column, _mm512_castsi512_si256(both));
        store_half(rounded + (row + 1) * ld + column, _mm512_extracti64x4_epi64(both, 1));
      }
    }
  }
}

void round_row(const float* values, int64_t count, c10::BFloat16* rounded) {
  for (; count >= 2 * lanes; count -= 2 * lanes, values += 2 * lanes, rounded += 2 * lanes) {
    _mm512_storeu_si512(rounded, rounded_block(values));
  }
  if (count > 0) {
    _mm512_mask_storeu_epi16(rounded, (__mmask32{1} << count) - 1, rounded_block(values));
  }
}

void stream_rounded_row(const float* values, int64_t count, c10::BFloat16* rounded) {
  for (int64_t index = 0; index < count; index += 2 * lanes) {
    _mm512_stream_si512(reinterpret_cast<__m512i*>(rounded + index), rounded_block(values + index));
  }
}

}  // namespace seqwarm

#else

namespace seqwarm {

bool multiplies_pairs() {
  return false;
}

void multiply_pairs(int64_t, int64_t, int64_t, PairMatrix, const c10::BFloat16*, int64_t, float*, int64_t, bool) {}

void pair_rows(const c10::BFloat16*, int64_t, c10::BFloat16*, int64_t, int64_t) {}

void round_to_pairs(const float*, int64_t, int64_t, int64_t, c10::BFloat16*, c10::BFloat16*) {}

void round_row(const float*, int64_t, c10::BFloat16*) {}

void stream_rounded_row(const float*, int64_t, c10::BFloat16*) {}

}  // namespace seqwarm

#endif
