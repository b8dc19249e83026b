#include "products.h"

#include "pair_products.h"
#include "tile_products.h"

#include <ATen/Context.h>
#include <ATen/Version.h>
#include <ATen/core/ivalue.h>
#include <ATen/cpu/Utils.h>
#include <ATen/native/CPUBlas.h>

#include <exception>

namespace seqwarm {

using at::native::cpublas::brgemm;

void multiply(
    int64_t m, int64_t n, int64_t k, const float* a, int64_t lda, const float* b, int64_t ldb, float* c, int64_t ldc,
    bool accumulate) {
  brgemm(m, n, k, lda, ldb, ldc, accumulate, a, b, c, /*is_vnni=*/false);
}

void multiply(
    int64_t m, int64_t n, int64_t k, const c10::BFloat16* a, int64_t lda, const c10::BFloat16* b, int64_t ldb, float* c,
    int64_t ldc, bool accumulate) {
  if (multiplies_tiles()) {
    multiply_tiles(m, n, k, a, lda, b, ldb, c, ldc, accumulate);
  } else {
    brgemm(m, n, k, lda, ldb, ldc, accumulate, a, b, c, /*is_vnni=*/true);
  }
}

namespace {

// Only a call shows what is available: ONEDNN_MAX_CPU_ISA, for example, may limit oneDNN to less than the CPU has.
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

bool multiplies_bfloat16() {
  // Without native instructions bfloat16 is emulated, which is slower than float32.
  static const bool fast = [] {
    const auto has = at::cpu::get_cpu_capabilities();
    const auto found = has.find("avx512_bf16");
    return multiplies_pairs() && at::get_cpu_capability() != "DEFAULT" && found != has.end() && found->second.toBool();
  }();
  if (!fast || !at::globalContext().userEnabledMkldnn()) {
    return false;
  }
  static const bool works = multiplies_tiles() || try_bfloat16();
  return works;
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
  at::native::cpublas::brgemm_release();
}

}  // namespace seqwarm
