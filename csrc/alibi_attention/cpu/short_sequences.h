// Short sequences: rows of a batch, segments of rows, or packed sequences, of at most as many queries and
// keys as a tile has. Groups of them share a tile.

#pragma once

#include "problem.h"

#include <torch/headeronly/util/BFloat16.h>

#include <vector>

namespace seqwarm {

struct Sequence {
  int64_t batch;
  int64_t slope_row;  // of slopes (B, H)
  int64_t first_query, num_queries;
  int64_t first_key, num_keys;
  int64_t position;  // of the first query; the first key is at position 0
};

// Neighboring sequences whose queries fit into a piece and whose keys fit into a tile, gaps included; or a longer one.
// Larger groups are slower: docs/kernels/attention_cpu.md.
struct Group {
  const Sequence* begin;
  const Sequence* end;
};

// The sequences of a tile, and neighboring key heads.
struct ShortItem {
  Group group;
  int64_t first_head, last_head;
};

struct ShortSequences {
  std::vector<Sequence> sequences;
  std::vector<Group> groups;  // empty if a sequence is too long
  ShortProducts products = ShortProducts::Float;
};

// How a short tile is multiplied, and what follows for it. `Element` is the dtype of operands. Sequences start at
// multiples of `step`, as products need, so that none sums over tokens of two sequences. `width` is that of a piece of
// queries, and `most` the number of queries, and of keys, of a tile.
struct FloatProducts {
  using Element = float;
  static constexpr int64_t step = 1, width = 16, most = 64;
};

struct PairProducts {  // AVX512-BF16
  using Element = c10::BFloat16;
  static constexpr int64_t step = 2, width = 16, most = 128;
};

template <int64_t size>
struct TileProducts {  // AMX
  using Element = c10::BFloat16;
  static constexpr int64_t step = size, width = size == 32 ? 32 : 16, most = size == 32 ? 128 : 16;
};

// Returns function(products) for one of these.
template <typename Function>
inline auto with_products(ShortProducts products, const Function& function) {
  switch (products) {
    case ShortProducts::Float:
      return function(FloatProducts());
    case ShortProducts::Pairs:
      return function(PairProducts());
    case ShortProducts::Tiles8:
      return function(TileProducts<8>());
    case ShortProducts::Tiles16:
      return function(TileProducts<16>());
    case ShortProducts::Tiles32:
      break;
  }
  return function(TileProducts<32>());
}

ShortSequences short_sequences_of(const Problem& problem);

}  // namespace seqwarm
