// A call as plain numbers and pointers. operator.cpp, which uses torch's tensors, fills it in. forward.cpp and
// backward.cpp, which are compiled once for each kind of CPU, read it.

#pragma once

#include <algorithm>
#include <cstdint>

namespace seqwarm {

enum class InputType { Float, BFloat16, Half };

// How short sequences are multiplied: in float32, in pairs of bfloat16 on AVX512-BF16, or in tiles of 8, 16 or 32
// tokens on AMX.
enum class ShortProducts { Float, Pairs, Tiles8, Tiles16, Tiles32 };

// (batch, head, token, dim): strides in elements, the last dimension is dense. Packed sequences are a batch of one.
struct Strided {
  void* data;
  int64_t batch;
  int64_t head;
  int64_t token;

  template <typename T>
  T* row(int64_t batch_index, int64_t head_index, int64_t token_index) const {
    return static_cast<T*>(data) + batch_index * batch + head_index * head + token_index * token;
  }
};

struct Dropout {
  bool active;
  uint64_t seed;
  const int64_t* head_offsets;  // (rows of batch and head, 4): seed, head, first query, first key; null: `seed` and zeros
  uint32_t threshold;
  float inverse_keep;  // 1 / (1 - dropout_p)
};

struct Problem {
  InputType input_type;
  bool native_products;  // whether products take 16-bit operands; otherwise operands are converted to float32
  ShortProducts short_products;
  Strided query;
  Strided key;
  Strided value;
  const float* slopes;
  int64_t slope_batch;  // strides
  int64_t slope_head;
  const int64_t* query_start;  // of rows or packed sequences; may be null
  int64_t query_start_stride;
  const bool* key_padding_mask;  // may be null
  int64_t mask_batch;
  int64_t mask_key;
  const float* key_norm_bound;  // (batch, key head): no key is longer; null if unknown
  int64_t bound_batch;
  int64_t bound_head;
  const int32_t* cu_seqlens_q;  // null: not packed
  const int32_t* cu_seqlens_k;
  int64_t num_sequences;
  int64_t batch_size;
  int64_t num_heads;
  int64_t num_key_heads;
  int64_t query_length;
  int64_t key_length;
  int64_t used_keys;  // keys after these belong to no packed sequence, and may hold NaN
  int64_t head_dim;
  int64_t query_offset;
  int64_t window;
  int64_t segment_length;
  int64_t longest;      // of the rows, segments or packed sequences, in queries or keys
  int64_t widest_view;  // no query sees keys farther apart than this
  bool causal;
  bool hides_keys;  // no query sees some of the keys of a row or packed sequence, because of their positions
  float scale;
  bool reach;  // look for keys to skip
  float log2_tolerance;  // for each side
  bool streams;  // whether results of short sequences are stored past the caches, which are too small for them
  Dropout dropout;
};

struct ForwardOutputs {
  Strided out;
  float* lse;  // (rows of batch and head, tokens)
  float* log2_sum;
  int32_t* ranges;
};

struct BackwardInputs {
  Strided grad_out;
  Strided out;
  const float* grad_lse;  // dense, as lse; null for zeros
  const float* lse;
  const float* log2_sum;
  const int32_t* ranges;
};

struct BackwardOutputs {
  Strided grad_query;
  Strided grad_key;
  Strided grad_value;
  float* slope_rows;  // contribution of each query to grad_slopes, shaped as lse; null if not needed
  float* partial;  // (items, 2, padded keys, padded dims): key and value gradients of each item; null for one chunk
};

// A unit of work for a thread: every num_chunks-th block of queries of the heads that share a key head.
struct Item {
  int64_t batch;
  int64_t key_head;
  int64_t chunk;
  int64_t num_chunks;
};

constexpr int64_t farthest_position = int64_t{1} << 60;  // schema.py: FARTHEST_POSITION
constexpr int64_t unbounded = 2 * farthest_position;      // a window that no distance exceeds
constexpr int64_t most_queries = 64;  // in a tile: columns of its scores
constexpr int64_t most_keys = 128;    // in a tile: rows of its scores
constexpr int64_t key_step = 32;      // tiles start and end at multiples of this, which limits the shapes of products
constexpr int64_t range_block = 32;   // schema.py: RANGE_BLOCK

// The position of the first query of a row of the batch.
inline int64_t first_position(const Problem& problem, int64_t batch) {
  const int64_t start = problem.query_start == nullptr ? 0 : problem.query_start[batch * problem.query_start_stride];
  return problem.query_offset + start;
}

// The same of a packed sequence, whose first key is at position 0. By default the last query meets the last key.
inline int64_t first_position_in_pack(const Problem& problem, int64_t sequence) {
  if (problem.query_start != nullptr) {
    return problem.query_start[sequence * problem.query_start_stride];
  }
  const auto length = [&](const int32_t* ends) { return int64_t{ends[sequence + 1]} - ends[sequence]; };
  return length(problem.cu_seqlens_k) - length(problem.cu_seqlens_q);
}

// The keys [low, high) that some query sees.
struct SeenKeys {
  int64_t low, high;

  bool contains(int64_t key) const { return low <= key && key < high; }
};

// Of the keys [first, end), by `count` queries from `position` on. key_padding_mask may hide more.
inline SeenKeys seen_keys(const Problem& problem, int64_t first, int64_t end, int64_t position, int64_t count) {
  const auto inside = [&](int64_t key) { return std::max(std::min(key, end), first); };
  const int64_t low = inside(position - problem.window);
  return {low, count == 0 ? low : inside(position + count + (problem.causal ? 0 : problem.window))};
}

// Calls visit(first, end, seen) for the keys of each row of the batch, or of each packed sequence of the only row. All
// keys of a segment are seen: queries and keys of segments have the same positions.
template <typename Visit>
inline void for_each_key_interval(const Problem& problem, int64_t batch, const Visit& visit) {
  if (problem.cu_seqlens_q == nullptr) {
    const int64_t end = problem.key_length;
    const SeenKeys seen = problem.segment_length < end
        ? SeenKeys{0, end}
        : seen_keys(problem, 0, end, first_position(problem, batch), problem.query_length);
    visit(0, end, seen);
    return;
  }
  for (int64_t index = 0; index < problem.num_sequences; ++index) {
    const int64_t first = problem.cu_seqlens_k[index], end = problem.cu_seqlens_k[index + 1];
    const int64_t count = problem.cu_seqlens_q[index + 1] - problem.cu_seqlens_q[index];
    visit(first, end, seen_keys(problem, first, end, first + first_position_in_pack(problem, index), count));
  }
}

inline bool hides_keys(const Problem& problem) {
  bool hides = false;
  for (int64_t batch = 0; batch < problem.batch_size; ++batch) {
    for_each_key_interval(problem, batch, [&](int64_t first, int64_t end, SeenKeys seen) {
      hides |= seen.low > first || seen.high < end;
    });
  }
  return hides;
}

constexpr int64_t round_up(int64_t count, int64_t step) {
  return (count + step - 1) / step * step;
}

// Few widths, since each needs another set of products. Those of bfloat16 sum over at least 32.
constexpr int64_t tile_queries(const Problem& problem) {
  const int64_t length = problem.query_length;
  return length <= 16 && !problem.native_products ? 16 : length <= 32 ? 32 : most_queries;
}

constexpr int64_t padded_keys(int64_t key_length) {
  return round_up(key_length, most_keys);
}

// In products of pairs, vectors of pairs must be full, too.
constexpr int64_t padded_dims(const Problem& problem) {
  return round_up(problem.head_dim, problem.native_products ? 32 : 16);
}

}  // namespace seqwarm
