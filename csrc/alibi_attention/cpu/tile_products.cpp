#include "tile_products.h"

#include "cpu_features.h"

#ifdef SEQWARM_AMX

#include <immintrin.h>

#include <algorithm>
#include <cctype>
#include <cstdlib>
#include <string>

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#endif

namespace seqwarm {
namespace {

// Intel's layout of the operand of ldtilecfg.
struct alignas(64) Configuration {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t bytes_of_rows[16];
  uint8_t rows[16];
};

constexpr Configuration tiles_of_32 = {
    .bytes_of_rows = {64, 64, 64, 64, 64, 64, 64, 64}, .rows = {16, 16, 16, 16, 16, 16, 16, 16}};

// C in register 0, and 32 columns of A in 1 with as many rows of B in 2, or `size` of them in 3 and 4.
constexpr Configuration small_tiles(uint8_t size) {
  const uint16_t bytes = 2 * size;
  const uint8_t pairs = size / 2;
  return {.bytes_of_rows = {64, 64, 64, bytes, 64}, .rows = {size, size, 16, size, pairs}};
}

// ONEDNN_MAX_CPU_ISA limits the instructions of libtorch's products. It limits these, too.
bool is_allowed() {
  const char* limit = std::getenv("ONEDNN_MAX_CPU_ISA");
  std::string name = limit == nullptr ? "" : limit;
  std::transform(name.begin(), name.end(), name.begin(), [](unsigned char letter) { return std::toupper(letter); });
  return name.empty() || name == "DEFAULT" || name.find("AMX") != std::string::npos;
}

// AddressSanitizer does not see what tiles load and store. Here it sees the rows of an operand.
inline void check_rows(
    [[maybe_unused]] const void* first, [[maybe_unused]] int64_t rows, [[maybe_unused]] int64_t bytes,
    [[maybe_unused]] int64_t bytes_to_next) {
#ifdef __SANITIZE_ADDRESS__
  for (int64_t row = 0; row < rows; ++row) {
    char* begin = static_cast<char*>(const_cast<void*>(first)) + row * bytes_to_next;
    if (const void* poisoned = __asan_region_is_poisoned(begin, bytes)) {
      static_cast<void>(*static_cast<const volatile char*>(poisoned));  // which ends the process with a report
    }
  }
#endif
}

}  // namespace

bool multiplies_tiles() {
#ifdef SEQWARM_AMX_IS_EMULATED
  static const bool found = is_allowed();
#else
  static const bool found = is_allowed() && start_amx();
#endif
  return found;
}

void configure_tiles(int64_t size) {
  static constexpr Configuration of_8 = small_tiles(8), of_16 = small_tiles(16);
  _tile_loadconfig(size == 8 ? &of_8 : size == 16 ? &of_16 : &tiles_of_32);
}

void release_tiles() {
  _tile_release();
}

void multiply_tiles(
    int64_t m, int64_t n, int64_t k, const c10::BFloat16* a, int64_t lda, const c10::BFloat16* b, int64_t ldb, float* c,
    int64_t ldc, bool accumulate) {
  const int64_t a_bytes = lda * 2, b_bytes = ldb * 4, c_bytes = ldc * 4;
  check_rows(a, m, k * 2, a_bytes);
  check_rows(b, k / 2, n * 4, b_bytes);
  check_rows(c, m, n * 4, c_bytes);
  for (int64_t row = 0; row < m; row += 32) {
    for (int64_t column = 0; column < n; column += 32) {
      float* upper = c + row * ldc + column;
      float* lower = upper + 16 * ldc;
      if (accumulate) {
        _tile_loadd(0, upper, c_bytes);
        _tile_loadd(1, upper + 16, c_bytes);
        _tile_loadd(2, lower, c_bytes);
        _tile_loadd(3, lower + 16, c_bytes);
      } else {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
      }
      for (int64_t p = 0; p < k; p += 32) {
        const c10::BFloat16* left = a + row * lda + p;
        const c10::BFloat16* right = b + p * ldb + column * 2;
        _tile_loadd(4, left, a_bytes);
        _tile_loadd(6, right, b_bytes);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, right + 32, b_bytes);
        _tile_dpbf16ps(1, 4, 7);
        _tile_loadd(5, left + 16 * lda, a_bytes);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
      }
      _tile_stored(0, upper, c_bytes);
      _tile_stored(1, upper + 16, c_bytes);
      _tile_stored(2, lower, c_bytes);
      _tile_stored(3, lower + 16, c_bytes);
    }
  }
}

void multiply_small_tiles(
    [[maybe_unused]] int64_t m, int64_t n, int64_t k, const c10::BFloat16* a, int64_t lda, const c10::BFloat16* b,
    int64_t ldb, float* c, int64_t ldc, bool accumulate) {
  const int64_t a_bytes = lda * 2, b_bytes = ldb * 4, c_bytes = ldc * 4;
  check_rows(a, m, k * 2, a_bytes);
  check_rows(b, k / 2, n * 4, b_bytes);
  check_rows(c, m, n * 4, c_bytes);
  for (int64_t column = 0; column < n; column += 16) {
    if (accumulate) {
      _tile_loadd(0, c + column, c_bytes);
    } else {
      _tile_zero(0);
    }
    const c10::BFloat16* right = b + column * 2;
    int64_t p = 0;
    for (; p + 32 <= k; p += 32) {
      _tile_loadd(1, a + p, a_bytes);
      _tile_loadd(2, right + p * ldb, b_bytes);
      _tile_dpbf16ps(0, 1, 2);
    }
    if (p < k) {
      _tile_loadd(3, a + p, a_bytes);
      _tile_loadd(4, right + p * ldb, b_bytes);
      _tile_dpbf16ps(0, 3, 4);
    }
    _tile_stored(0, c + column, c_bytes);
  }
}

}  // namespace seqwarm

#else

namespace seqwarm {

bool multiplies_tiles() {
  return false;
}

void configure_tiles(int64_t) {}

void release_tiles() {}

void multiply_tiles(
    int64_t, int64_t, int64_t, const c10::BFloat16*, int64_t, const c10::BFloat16*, int64_t, float*, int64_t, bool) {}

void multiply_small_tiles(
    int64_t, int64_t, int64_t, const c10::BFloat16*, int64_t, const c10::BFloat16*, int64_t, float*, int64_t, bool) {}

}  // namespace seqwarm

#endif
