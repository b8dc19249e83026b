// Products of short tiles. For those of float, a call of libtorch's costs as much as the product.

#pragma once

#include "pair_products.h"
#include "problem.h"
#include "short_sequences.h"
#include "simd.h"
#include "tile_products.h"

namespace seqwarm {
inline namespace CPU_CAPABILITY {

// A matrix with element (i, p) at i * row + p * column.
struct Matrix {
  const float* data;
  int64_t row;
  int64_t column;
};

namespace detail {

// C (rows, vectors) of A (rows, k) · B (k, vectors), in registers. In place, since a call would pass A through memory.
template <int rows, int vectors, typename T>
C10_ALWAYS_INLINE void multiply_block(int64_t k, Matrix a, Rows<T> b, float* c, int64_t ldc, bool accumulate) {
  Vec sum[rows][vectors];
#pragma GCC unroll 8
  for (int i = 0; i < rows; ++i) {
#pragma GCC unroll 4
    for (int v = 0; v < vectors; ++v) {
      sum[i][v] = accumulate ? Vec::loadu(c + i * ldc + v * lanes) : Vec(0.f);
    }
  }
  for (int64_t p = 0; p < k; ++p) {
    Vec right[vectors];
#pragma GCC unroll 4
    for (int v = 0; v < vectors; ++v) {
      right[v] = load_floats(b.data + p * b.ld + v * lanes);
    }
#pragma GCC unroll 8
    for (int i = 0; i < rows; ++i) {
      const Vec left(a.data[i * a.row + p * a.column]);
#pragma GCC unroll 4
      for (int v = 0; v < vectors; ++v) {
        sum[i][v] = at::vec::fmadd(left, right[v], sum[i][v]);
      }
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < rows; ++i) {
#pragma GCC unroll 4
    for (int v = 0; v < vectors; ++v) {
      sum[i][v].store(c + i * ldc + v * lanes);
    }
  }
}

template <int rows, int vectors, typename T>
inline void multiply_rows_of(int64_t m, int64_t k, Matrix a, Rows<T> b, float* c, int64_t ldc, bool accumulate) {
  for (; m >= rows; m -= rows, a.data += rows * a.row, c += rows * ldc) {
    multiply_block<rows, vectors>(k, a, b, c, ldc, accumulate);
  }
  if constexpr (rows > 1) {
    if (m > 0) {
      multiply_rows_of<rows / 2, vectors>(m, k, a, b, c, ldc, accumulate);
    }
  }
}

}  // namespace detail

// C (m, n) = A (m, k) · B (k, n), or C += with `accumulate`. n is a multiple of `lanes`.
template <typename T>
inline void multiply_short(
    int64_t m, int64_t n, int64_t k, Matrix a, Rows<T> b, float* c, int64_t ldc, bool accumulate) {
  for_each_group<registers / 8>(0, n, [&](auto vectors, int64_t lane) {
    constexpr int rows = std::min<int>(8, registers / 2 / vectors.value);  // sums fill half of the registers
    detail::multiply_rows_of<rows, vectors.value>(m, k, a, Rows<T>{b.data + lane, b.ld}, c + lane, ldc, accumulate);
  });
}

// The same with B in pairs. k is rounded up to pairs, for which all operands have room.
inline void multiply_short(
    int64_t m, int64_t n, int64_t k, PairMatrix a, Rows<c10::BFloat16> b, float* c, int64_t ldc, bool accumulate) {
  multiply_pairs(m, n, round_up(k, 2), a, b.data, b.ld, c, ldc, accumulate);
}

// Rows as the left side of products on AMX, of which `step` are multiplied at a time.
template <int64_t step>
struct TileMatrix {
  const c10::BFloat16* data;
  int64_t ld;
};

// The same on AMX. m and k are rounded up to multiples of `step`, for which all operands have room. m may be 0.
template <int64_t step>
inline void multiply_short(
    int64_t m, int64_t n, int64_t k, TileMatrix<step> a, Rows<c10::BFloat16> b, float* c, int64_t ldc,
    bool accumulate) {
  const auto multiply = step == 32 ? multiply_tiles : multiply_small_tiles;
  for (int64_t row = 0; row < m; row += step) {
    multiply(step, n, round_up(k, step), a.data + row * a.ld, a.ld, b.data, b.ld, c + row * ldc, ldc, accumulate);
  }
}

// The tile registers of this thread, configured for products where those are on AMX.
template <typename Products>
struct Registers {};

template <int64_t size>
struct Registers<TileProducts<size>> {
  Registers() { configure_tiles(size); }
  ~Registers() { release_tiles(); }
};

// Rows as the left side of products.
inline Matrix left_of_rows(FloatProducts, Rows<float> rows) { return {rows.data, rows.ld, 1}; }
inline PairMatrix left_of_rows(PairProducts, Rows<c10::BFloat16> rows) { return {rows.data, rows.ld / 2, 1}; }
template <typename Products>
inline TileMatrix<Products::step> left_of_rows(Products, Rows<c10::BFloat16> rows) {
  return {rows.data, rows.ld};
}

// `k` rows of `n` elements as the right side of products, in `pairs` unless the rows serve.
inline Rows<float> right_of_rows(FloatProducts, Rows<float> rows, int64_t, int64_t, float*) { return rows; }
template <typename Products>
inline Rows<c10::BFloat16> right_of_rows(
    Products, Rows<c10::BFloat16> rows, int64_t k, int64_t n, c10::BFloat16* pairs) {
  pair_rows(rows.data, rows.ld, pairs, k, n);
  return {pairs, n};
}

}  // namespace CPU_CAPABILITY
}  // namespace seqwarm
