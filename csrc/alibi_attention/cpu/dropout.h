// The dropout mask defined in ops/alibi_attention/dropout.py: Philox-4x32-10 on (key / 4, query, head, 0).

#pragma once

#include "problem.h"
#include "simd.h"

namespace seqwarm {
inline namespace CPU_CAPABILITY {

// (keys, queries): `kept_value` where a weight is kept, else 0. `first_key` and `keys` are multiples of 4.
inline void keep_tile(
    const Dropout& dropout, float kept_value, int64_t head, int64_t first_query, int64_t first_key, int64_t keys,
    int64_t queries, float* keep) {
  for (int64_t key = 0; key < keys; key += 4) {
    for (int64_t query = 0; query < queries; ++query) {
      uint32_t c0 = static_cast<uint32_t>((first_key + key) / 4), c1 = static_cast<uint32_t>(first_query + query);
      uint32_t c2 = static_cast<uint32_t>(head), c3 = 0;
      uint32_t k0 = static_cast<uint32_t>(dropout.seed), k1 = static_cast<uint32_t>(dropout.seed >> 32);
      for (int round = 0; round < 10; ++round) {
        const uint64_t product0 = uint64_t{0xD2511F53} * c0, product1 = uint64_t{0xCD9E8D57} * c2;
        c0 = static_cast<uint32_t>(product1 >> 32) ^ c1 ^ k0;
        c2 = static_cast<uint32_t>(product0 >> 32) ^ c3 ^ k1;
        c1 = static_cast<uint32_t>(product1);
        c3 = static_cast<uint32_t>(product0);
        k0 += 0x9E3779B9;
        k1 += 0xBB67AE85;
      }
      float* column = keep + key * queries + query;
      column[0 * queries] = c0 >= dropout.threshold ? kept_value : 0.f;
      column[1 * queries] = c1 >= dropout.threshold ? kept_value : 0.f;
      column[2 * queries] = c2 >= dropout.threshold ? kept_value : 0.f;
      column[3 * queries] = c3 >= dropout.threshold ? kept_value : 0.f;
    }
  }
}

}  // namespace CPU_CAPABILITY
}  // namespace seqwarm
