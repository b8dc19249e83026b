// Short sequences: rows of a batch, segments of rows, or packed sequences, of at most most_tokens queries and as many keys.
// Groups of them share a tile.

#pragma once

#include "problem.h"

#include <type_traits>
#include <vector>

namespace seqwarm {

struct Sequence {
  int64_t batch;
  int64_t slope_row;  // of slopes (B, H)
  int64_t first_query, num_queries;
  int64_t first_key, num_keys;
  int64_t position;  // of the first query; the first key is at position 0
};

// Neighboring sequences, with at most most_tokens queries and as many keys in total, gaps included.
struct Group {
  const Sequence* begin;
  const Sequence* end;
};

struct ShortSequences {
  std::vector<Sequence> sequences;
  std::vector<Group> groups;  // empty if a sequence is too long
  bool native_products = false;  // as in Problem
};

// Queries, and keys, of a tile. P is the dtype of the products, float or BFloat16.
template <typename P>
constexpr int64_t most_tokens = std::is_same_v<P, float> ? 64 : 128;

// Sequences start at multiples of this in a tile, as products need.
template <typename P>
constexpr int64_t sequence_step = std::is_same_v<P, float> ? 1 : 32;

ShortSequences short_sequences_of(const Problem& problem);

}  // namespace seqwarm
