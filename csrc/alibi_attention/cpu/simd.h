// Vectors of floats, rows and transposes, for the kind of CPU that the including file is compiled for.

#pragma once

#include "pair_products.h"

#include <ATen/cpu/vec/functional.h>
#include <ATen/cpu/vec/vec.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <type_traits>

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#endif

namespace seqwarm {
inline namespace CPU_CAPABILITY {

using Vec = at::vec::Vectorized<float>;
using Ints = at::vec::Vectorized<int32_t>;

constexpr int64_t lanes = Vec::size();
constexpr float infinity = std::numeric_limits<float>::infinity();
constexpr float log2_e = 1.4426950408889634f;
constexpr float ln_2 = 0.6931471805599453f;

constexpr int64_t registers = lanes == 16 ? 32 : 16;  // of vectors

// The slope for exponentials of 2, finite as the slope is.
inline float in_base_2(float slope) {
  constexpr float largest = std::numeric_limits<float>::max();
  return std::clamp(log2_e * slope, -largest, largest);
}

// Calls visit(std::integral_constant<int, vectors>, first lane) for each group of the floats [lane, end) of a row: of
// at most four vectors, which fit into registers with their temporaries.
template <int most_vectors = 4, typename Visit>
inline void for_each_group(int64_t lane, int64_t end, const Visit& visit) {
  if constexpr (most_vectors == 4) {
    for (; end - lane >= 4 * lanes; lane += 4 * lanes) {
      visit(std::integral_constant<int, 4>(), lane);
    }
  }
  for (; end - lane >= 2 * lanes; lane += 2 * lanes) {
    visit(std::integral_constant<int, 2>(), lane);
  }
  for (; end - lane >= lanes; lane += lanes) {
    visit(std::integral_constant<int, 1>(), lane);
  }
}

// 2^x for x <= 127; 0 below 2^-126, NaN for NaN. Relative error at most 1.3 * 2^-24, and 2^0 is 1 exactly.
inline Vec exp2(Vec x) {
  // Adding this leaves x, rounded, plus the exponent's bias in the lowest bits.
  const Vec shift(12582912.f + 127.f);  // 1.5 * 2^23
  x = at::vec::clamp_min(x, Vec(-127.f));
  const Vec shifted = x + shift;
  const Vec fraction = x - (shifted - shift);
  // Minimax for (2^f - 1) / f on [-1/2, 1/2], its error weighed by f / 2^f.
  Vec power(0.00015353361912664489f);
  power = at::vec::fmadd(power, fraction, Vec(0.001339887441418896f));
  power = at::vec::fmadd(power, fraction, Vec(0.009618437357659396f));
  power = at::vec::fmadd(power, fraction, Vec(0.055503324711257185f));
  power = at::vec::fmadd(power, fraction, Vec(0.24022647913628994f));
  power = at::vec::fmadd(power, fraction, Vec(0.6931472028550671f));
  power = at::vec::fmadd(power, fraction, Vec(1.f));
  return power * at::vec::cast<float>(at::vec::cast<int32_t>(shifted) << Ints(23));
}

// A square of `lanes` rows, transposed.
inline void transpose_square(const float* from, int64_t ld_from, float* to, int64_t ld_to) {
#ifdef CPU_CAPABILITY_AVX512
  // at::vec's transposes of any size go through memory, which took a third of the time of steep heads.
  __m512 rows[16], pairs[16];
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) {
    rows[i] = _mm512_loadu_ps(from + i * ld_from);
  }
#pragma GCC unroll 8
  for (int i = 0; i < 16; i += 2) {
    pairs[i] = _mm512_unpacklo_ps(rows[i], rows[i + 1]);
    pairs[i + 1] = _mm512_unpackhi_ps(rows[i], rows[i + 1]);
  }
  // Afterwards rows[4 i + c] has, in its quarter q, column 4 q + c of rows 4 i to 4 i + 3.
#pragma GCC unroll 8
  for (int i = 0; i < 16; i += 4) {
    for (int half = 0; half < 2; ++half) {
      const __m512d upper = _mm512_castps_pd(pairs[i + half]), lower = _mm512_castps_pd(pairs[i + 2 + half]);
      rows[i + 2 * half] = _mm512_castpd_ps(_mm512_unpacklo_pd(upper, lower));
      rows[i + 2 * half + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(upper, lower));
    }
  }
#pragma GCC unroll 4
  for (int c = 0; c < 4; ++c) {
    const __m512 upper_even = _mm512_shuffle_f32x4(rows[c], rows[4 + c], 0x88);
    const __m512 upper_odd = _mm512_shuffle_f32x4(rows[c], rows[4 + c], 0xdd);
    const __m512 lower_even = _mm512_shuffle_f32x4(rows[8 + c], rows[12 + c], 0x88);
    const __m512 lower_odd = _mm512_shuffle_f32x4(rows[8 + c], rows[12 + c], 0xdd);
    _mm512_storeu_ps(to + c * ld_to, _mm512_shuffle_f32x4(upper_even, lower_even, 0x88));
    _mm512_storeu_ps(to + (4 + c) * ld_to, _mm512_shuffle_f32x4(upper_odd, lower_odd, 0x88));
    _mm512_storeu_ps(to + (8 + c) * ld_to, _mm512_shuffle_f32x4(upper_even, lower_even, 0xdd));
    _mm512_storeu_ps(to + (12 + c) * ld_to, _mm512_shuffle_f32x4(upper_odd, lower_odd, 0xdd));
  }
#else
  at::vec::transpose_mxn<float, lanes, lanes>(from, ld_from, to, ld_to);
#endif
}

// rows x columns -> columns x rows, multiples of `lanes`, in units of 32 bits. Only moves bits, so any dtype works.
inline void transpose(const void* from, int64_t ld_from, void* to, int64_t ld_to, int64_t rows, int64_t columns) {
  const float* source = static_cast<const float*>(from);
  float* target = static_cast<float*>(to);
  for (int64_t row = 0; row < rows; row += lanes) {
    for (int64_t column = 0; column < columns; column += lanes) {
      transpose_square(source + row * ld_from + column, ld_from, target + column * ld_to + row, ld_to);
    }
  }
}

// Rows of a matrix.
template <typename P>
struct Rows {
  const P* data;
  int64_t ld;
};

// Operands of products. P is the dtype of the products, float or BFloat16.
template <typename P>
constexpr int64_t pair_of = std::is_same_v<P, float> ? 1 : 2;

// The right side (k, n) of a product from its transpose, rows (n, k).
template <typename P>
inline void right_from_transpose(Rows<P> rows, P* right, int64_t n, int64_t k) {
  transpose(rows.data, rows.ld / pair_of<P>, right, n, n, k / pair_of<P>);
}

// The left side (m, k) from its transpose, rows (k, m). `pairs` has room for as many; float does not use it.
template <typename P>
inline void left_from_transpose(Rows<P> rows, P* left, int64_t ld_left, int64_t m, int64_t k, P* pairs) {
  if constexpr (std::is_same_v<P, float>) {
    transpose(rows.data, rows.ld, left, ld_left, k, m);
  } else {
    pair_rows(rows.data, rows.ld, pairs, k, m);
    transpose(pairs, m, left, ld_left / 2, k / 2, m);
  }
}

// `count` elements in another dtype, then zeros up to `padded`.
template <typename From, typename To>
inline void load_row(const From* from, To* to, int64_t count, int64_t padded) {
  if constexpr (std::is_same_v<From, To>) {
    std::memcpy(to, from, count * sizeof(To));
  } else {
    at::vec::convert(from, to, count);
  }
  std::memset(to + count, 0, (padded - count) * sizeof(To));
}

// For short rows, for which a call of memcpy takes longer. `from` has whole vectors.
inline void copy_row(const float* from, float* to, int64_t count) {
  for (; count >= lanes; count -= lanes, from += lanes, to += lanes) {
    Vec::loadu(from).store(to);
  }
  if (count > 0) {
    Vec::loadu(from).store(to, count);
  }
}

// Copies whole cache lines of floats to memory, past the caches.
inline void stream_row(const float* from, float* to, int64_t count) {
#if defined(CPU_CAPABILITY_AVX512)
  for (int64_t index = 0; index < count; index += lanes) {
    _mm512_stream_ps(to + index, _mm512_loadu_ps(from + index));
  }
#elif defined(CPU_CAPABILITY_AVX2)
  for (int64_t index = 0; index < count; index += lanes) {
    _mm256_stream_ps(to + index, _mm256_loadu_ps(from + index));
  }
#else
  std::memcpy(to, from, count * sizeof(float));
#endif
}

// Other threads see streamed rows after this.
inline void finish_streams() {
#if defined(CPU_CAPABILITY_AVX512) || defined(CPU_CAPABILITY_AVX2)
  _mm_sfence();
#endif
}

// `lanes` elements as floats.
template <typename T>
inline Vec load_floats(const T* from) {
  if constexpr (std::is_same_v<T, float>) {
    return Vec::loadu(from);
  } else {
    Vec floats;
    at::vec::load_to_float<T>(from, floats);
    return floats;
  }
}

// Σ a · b over values of any dtype.
template <typename T>
inline float dot(const T* a, const T* b, int64_t count) {
  using Loaded = at::vec::Vectorized<T>;
  Vec sum(0.f);
  for (int64_t index = 0; index < count; index += Loaded::size()) {
    const int64_t present = std::min<int64_t>(count - index, Loaded::size());
    const Loaded left = Loaded::loadu(a + index, present), right = Loaded::loadu(b + index, present);
    if constexpr (std::is_same_v<T, float>) {
      sum = at::vec::fmadd(left, right, sum);
    } else {
      const auto [left_low, left_high] = at::vec::convert_to_float(left);
      const auto [right_low, right_high] = at::vec::convert_to_float(right);
      sum = at::vec::fmadd(left_high, right_high, at::vec::fmadd(left_low, right_low, sum));
    }
  }
  return at::vec::vec_reduce_all<float>([](const Vec& left, const Vec& right) { return left + right; }, sum);
}

// Hands out memory in pieces aligned to a cache line. With a null pointer it only counts bytes.
class Arena {
 public:
  explicit Arena(char* memory) : memory_(memory) {}

  template <typename T>
  T* take(int64_t count) {
    T* piece = memory_ == nullptr ? nullptr : reinterpret_cast<T*>(memory_ + used_);
    const int64_t bytes = (count * static_cast<int64_t>(sizeof(T)) + 63) / 64 * 64;
#ifdef __SANITIZE_ADDRESS__
    if (memory_ != nullptr) {
      ASAN_UNPOISON_MEMORY_REGION(memory_ + used_, bytes);  // memory that was kept has the fences of an earlier call
    }
#endif
    used_ += bytes;
    fence();
    return piece;
  }

  int64_t used() const { return used_; }

 private:
  // A gap that AddressSanitizer checks.
  void fence() {
#ifdef __SANITIZE_ADDRESS__
    if (memory_ != nullptr) {
      ASAN_POISON_MEMORY_REGION(memory_ + used_, 64);
    }
    used_ += 64;
#endif
  }

  char* memory_;
  int64_t used_ = 0;
};

}  // namespace CPU_CAPABILITY
}  // namespace seqwarm
