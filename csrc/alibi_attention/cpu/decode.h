// Decoding: few queries over many keys. The work of a key head is split over chunks of keys, whose results are merged.

#pragma once

#include "problem.h"

#include <algorithm>

namespace seqwarm {

constexpr int64_t most_decode_queries = 4;  // of a row of the batch; more of them pay for packed tiles
constexpr int64_t most_decode_rows = 16;     // queries of neighboring heads, which share the read of a key
constexpr int64_t decode_chunk = 512;        // keys; fixed, so that results do not depend on the number of threads

inline bool is_decoding(const Problem& problem) {
  return problem.cu_seqlens_q == nullptr && problem.query_length <= most_decode_queries &&
      problem.key_length >= 4 * problem.query_length;
}

// Neighboring query heads of one key head, and a chunk of its keys.
struct DecodeItem {
  int64_t batch;
  int64_t first_head;
  int64_t num_heads;
  int64_t chunk;
};

// How a call is cut into items.
struct DecodeItems {
  explicit DecodeItems(const Problem& problem)
      : batch_size(problem.batch_size),
        num_key_heads(problem.num_key_heads),
        group_size(problem.num_heads / problem.num_key_heads),
        heads_at_once(std::clamp<int64_t>(most_decode_rows / problem.query_length, 1, group_size)),
        num_parts((group_size + heads_at_once - 1) / heads_at_once),
        num_chunks((problem.key_length + decode_chunk - 1) / decode_chunk),
        heads_inside(problem.key.head < problem.key.token) {}

  int64_t count() const { return batch_size * num_key_heads * num_parts * num_chunks; }

  // Neighbors in memory come one after another: their pages are the same. The last heads have the flattest slopes, take
  // longest, and come first.
  DecodeItem operator[](int64_t index) const {
    const auto split = [&](int64_t size) {
      const int64_t inner = index % size;
      index /= size;
      return inner;
    };
    int64_t batch, key_head, part, chunk;
    if (heads_inside) {
      part = split(num_parts);
      key_head = split(num_key_heads);
      chunk = split(num_chunks);
      batch = index;
    } else {
      chunk = split(num_chunks);
      part = split(num_parts);
      batch = split(batch_size);
      key_head = index;
    }
    const int64_t first = part * heads_at_once;
    return {
        batch, (num_key_heads - 1 - key_head) * group_size + first, std::min(heads_at_once, group_size - first), chunk};
  }

  int64_t batch_size, num_key_heads, group_size, heads_at_once, num_parts, num_chunks;
  bool heads_inside;  // tokens before heads in memory
};

// Results of the chunks: for each row of (batch, head, query) and each chunk, padded_dims sums of weighted values, then
// the largest score and the sum of weights relative to it.
struct Partials {
  Partials(const Problem& problem, float* data_)
      : data(data_), dims(padded_dims(problem)), num_chunks(DecodeItems(problem).num_chunks) {}

  // Between the same chunk of neighboring rows.
  int64_t step() const { return num_chunks * (dims + 16); }
  float* out(int64_t row, int64_t chunk) const { return data + row * step() + chunk * (dims + 16); }
  float& largest(int64_t row, int64_t chunk) const { return out(row, chunk)[dims]; }
  float& total(int64_t row, int64_t chunk) const { return out(row, chunk)[dims + 1]; }

  static int64_t count(const Problem& problem) {
    return problem.batch_size * problem.num_heads * problem.query_length * Partials(problem, nullptr).step();
  }

  float* data;
  int64_t dims, num_chunks;
};

}  // namespace seqwarm
