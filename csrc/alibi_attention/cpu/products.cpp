#include "products.h"

#include "cpu_features.h"
#include "pair_products.h"
#include "tile_products.h"

#include <algorithm>
#include <exception>

// libtorch's products of tiles, of oneDNN or MKL. They belong to no stable ABI, so a torch may be without them: weak
// symbols are null then.
namespace at::native::cpublas {
#define SEQWARM_WEAK __attribute__((weak, visibility("default")))
SEQWARM_WEAK void brgemm(
    int64_t m, int64_t n, int64_t k, int64_t lda, int64_t ldb, int64_t ldc, bool accumulate, const float* a,
    const float* b, float* c, bool is_vnni);
SEQWARM_WEAK void brgemm(
    int64_t m, int64_t n, int64_t k, int64_t lda, int64_t ldb, int64_t ldc, bool accumulate, const c10::BFloat16* a,
    const c10::BFloat16* b, float* c, bool is_vnni);
SEQWARM_WEAK void brgemm_release(bool is_vnni);
#undef SEQWARM_WEAK
}  // namespace at::native::cpublas

namespace seqwarm {
namespace {

using at::native::cpublas::brgemm;
using at::native::cpublas::brgemm_release;

using FloatProduct = void(
    int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, bool, const float*, const float*, float*, bool);
using BFloat16Product = void(
    int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, bool, const c10::BFloat16*, const c10::BFloat16*, float*,
    bool);

FloatProduct* const float_product = &brgemm;
BFloat16Product* const bfloat16_product = &brgemm;

void multiply_plainly(
    int64_t m, int64_t n, int64_t k, const float* a, int64_t lda, const float* b, int64_t ldb, float* c, int64_t ldc,
    bool accumulate) {
  for (int64_t i = 0; i < m; ++i) {
    float* row = c + i * ldc;
    if (!accumulate) {
      std::fill_n(row, n, 0.f);
    }
    for (int64_t p = 0; p < k; ++p) {
      const float factor = a[i * lda + p];
      for (int64_t j = 0; j < n; ++j) {
        row[j] += factor * b[p * ldb + j];
      }
    }
  }
}

// Only a call shows what is available: ONEDNN_MAX_CPU_ISA may limit oneDNN to less than the CPU has, and
// torch.backends.mkldnn.flags may turn it off at any time.
bool try_bfloat16() {
  constexpr int64_t size = 2;
  c10::BFloat16 inputs[size * size] = {};
  float outputs[size * size];
  try {
    multiply(size, size, size, inputs, size, inputs, size, outputs, size, /*accumulate=*/false);
  } catch (const std::exception&) {  // of libtorch or of oneDNN
    return false;
  }
  return true;
}

}  // namespace

void multiply(
    int64_t m, int64_t n, int64_t k, const float* a, int64_t lda, const float* b, int64_t ldb, float* c, int64_t ldc,
    bool accumulate) {
  if (float_product != nullptr) {
    float_product(m, n, k, lda, ldb, ldc, accumulate, a, b, c, /*is_vnni=*/false);
  } else {
    multiply_plainly(m, n, k, a, lda, b, ldb, c, ldc, accumulate);
  }
}

void multiply(
    int64_t m, int64_t n, int64_t k, const c10::BFloat16* a, int64_t lda, const c10::BFloat16* b, int64_t ldb, float* c,
    int64_t ldc, bool accumulate) {
  if (multiplies_tiles()) {
    multiply_tiles(m, n, k, a, lda, b, ldb, c, ldc, accumulate);
  } else {
    bfloat16_product(m, n, k, lda, ldb, ldc, accumulate, a, b, c, /*is_vnni=*/true);
  }
}

bool multiplies_bfloat16() {
  // Without native instructions bfloat16 is emulated, which is slower than float32.
  static const bool fast = multiplies_pairs() && has_avx512_bf16();
  return fast && (multiplies_tiles() || (bfloat16_product != nullptr && try_bfloat16()));
}

const char* bfloat16_instructions() {
  return !multiplies_bfloat16() ? nullptr : multiplies_tiles() ? "AMX" : "AVX512-BF16";
}

void start_multiplying() {
  if (multiplies_tiles()) {
    configure_tiles(32);
  }
}

void finish_multiplying() {
  if (multiplies_tiles()) {
    release_tiles();
  }
  if (brgemm_release != nullptr) {
    brgemm_release(/*is_vnni=*/true);
  }
}

}  // namespace seqwarm
