// The dropout mask defined in ops/alibi_attention/dropout.py: Philox-4x32-10 on (key / 4, query, head, 0). `row` counts
// through batch and heads.

#pragma once

#include "problem.h"
#include "simd.h"

#include <array>

namespace seqwarm {
inline namespace CPU_CAPABILITY {

// The counters of the first weight of a row.
struct Offset {
  uint64_t seed;
  int64_t head;
  int64_t query;
  int64_t key;  // a multiple of 4
};

inline Offset offset_of(const Dropout& dropout, int64_t row) {
  if (dropout.head_offsets == nullptr) {
    return {dropout.seed, row, 0, 0};
  }
  const int64_t* values = dropout.head_offsets + 4 * row;
  return {static_cast<uint64_t>(values[0]), values[1], values[2], values[3]};
}

// For 4 neighboring keys.
inline std::array<uint32_t, 4> draw(uint64_t seed, int64_t head, int64_t query, int64_t key_block) {
  uint32_t c0 = static_cast<uint32_t>(key_block), c1 = static_cast<uint32_t>(query);
  uint32_t c2 = static_cast<uint32_t>(head), c3 = 0;
  uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
  for (int round = 0; round < 10; ++round) {
    const uint64_t product0 = uint64_t{0xD2511F53} * c0, product1 = uint64_t{0xCD9E8D57} * c2;
    c0 = static_cast<uint32_t>(product1 >> 32) ^ c1 ^ k0;
    c2 = static_cast<uint32_t>(product0 >> 32) ^ c3 ^ k1;
    c1 = static_cast<uint32_t>(product1);
    c3 = static_cast<uint32_t>(product0);
    k0 += 0x9E3779B9;
    k1 += 0xBB67AE85;
  }
  return {c0, c1, c2, c3};
}

// One query and any keys, `step` apart: `kept_value` where a weight is kept, else 0.
inline void keep_column(
    const Dropout& dropout, float kept_value, int64_t row, int64_t query, int64_t first_key, int64_t keys,
    int64_t step, float* keep) {
  const Offset offset = offset_of(dropout, row);
  query += offset.query;
  first_key += offset.key;
  std::array<uint32_t, 4> drawn{};
  for (int64_t key = first_key; key < first_key + keys; ++key) {
    if (key == first_key || key % 4 == 0) {
      drawn = draw(offset.seed, offset.head, query, key / 4);
    }
    keep[(key - first_key) * step] = drawn[key % 4] >= dropout.threshold ? kept_value : 0.f;
  }
}

// (keys, queries): `kept_value` where a weight is kept, else 0. `first_key` and `keys` are multiples of 4.
inline void keep_tile(
    const Dropout& dropout, float kept_value, int64_t row, int64_t first_query, int64_t first_key, int64_t keys,
    int64_t queries, float* keep) {
  const Offset offset = offset_of(dropout, row);
  first_query += offset.query;
  first_key += offset.key;
  for (int64_t key = 0; key < keys; key += 4) {
    for (int64_t query = 0; query < queries; ++query) {
      const auto drawn = draw(offset.seed, offset.head, first_query + query, (first_key + key) / 4);
      for (int64_t index = 0; index < 4; ++index) {
        keep[(key + index) * queries + query] = drawn[index] >= dropout.threshold ? kept_value : 0.f;
      }
    }
  }
}

}  // namespace CPU_CAPABILITY
}  // namespace seqwarm
