// A tile of queries, and the keys that each query sees.
//
// All rules that hide keys (causal, window, segments, packed sequences, the ends of a tensor, reach) become one
// interval [low, high) of keys for each query, and one center: the key at distance zero, or the nearest key of the
// interval if that key lies outside.

#pragma once

#include "problem.h"
#include "simd.h"

#include <cmath>

namespace seqwarm {
inline namespace CPU_CAPABILITY {

struct QueryTile {
  int64_t batch;
  int64_t head;
  int64_t start;
  int64_t width;  // columns of the tile; columns past the last query see no key
  int64_t row;    // index of batch and head
  int64_t low[most_queries];
  int64_t high[most_queries];
  int64_t center[most_queries];
  float beyond[most_queries];  // distance from position to center; all keys are that much farther away
  float slope2[most_queries];  // in base 2
  bool sees[most_queries];     // in backward not if all keys of the query are masked
  // Over the queries that see a key:
  bool any;
  int64_t first_low, last_low, first_high, last_high, first_center, last_center;
  int64_t first_nearest, last_nearest;  // the visible keys next to the centers
  float first_slope2;
  int64_t reference;    // linear biases count from this key, so that they are small where weights are large
};

namespace detail {

// The keys [first, end) of a query's sequence or segment, and its position.
struct Place {
  int64_t sequence, first, end, position;
};

inline Place place_in_pack(const Problem& problem, int64_t token) {
  const int32_t* ends = problem.cu_seqlens_q + 1;
  const int64_t sequence = std::upper_bound(ends, ends + problem.num_sequences, token) - ends;
  if (sequence == problem.num_sequences) {
    return {0, 0, 0, 0};
  }
  const int64_t first = problem.cu_seqlens_k[sequence], end = problem.cu_seqlens_k[sequence + 1];
  const int64_t place = token - problem.cu_seqlens_q[sequence];
  return {sequence, first, end, first + first_position_in_pack(problem, sequence) + place};
}

inline Place place_in_row(const Problem& problem, int64_t batch, int64_t token) {
  const int64_t first = token / problem.segment_length * problem.segment_length;
  const int64_t end = std::min(first + problem.segment_length, problem.key_length);
  return {batch, first, end, token + first_position(problem, batch)};
}

}  // namespace detail

// The keys [low, high) that a query sees, and the rest of a column of QueryTile.
struct QueryView {
  int64_t low, high, center;
  float beyond, slope2;

  bool sees() const { return low < high; }
  int64_t nearest() const { return std::clamp(center, low, high - 1); }
};

inline QueryView view_of(const Problem& problem, int64_t batch, int64_t head, int64_t token) {
  const bool packed = problem.cu_seqlens_q != nullptr;
  const detail::Place place = token >= problem.query_length ? detail::Place{0, 0, 0, 0}
      : packed ? detail::place_in_pack(problem, token)
               : detail::place_in_row(problem, batch, token);
  const auto inside = [&](int64_t key) { return std::max(std::min(key, place.end), place.first); };
  QueryView view;
  view.low = inside(place.position - problem.window);
  view.high = inside(place.position + (problem.causal ? 1 : problem.window + 1));
  view.center = std::max(std::min(place.position, place.end - 1), place.first);
  view.beyond = static_cast<float>(std::abs(place.position - view.center));
  view.slope2 =
      view.sees() ? in_base_2(problem.slopes[place.sequence * problem.slope_batch + head * problem.slope_head]) : 0;
  return view;
}

inline void place_query(const Problem& problem, QueryTile& tile, int64_t column) {
  const QueryView view = view_of(problem, tile.batch, tile.head, tile.start + column);
  const int64_t low = view.low, high = view.high, center = view.center;
  const float slope2 = view.slope2;
  tile.low[column] = low;
  tile.high[column] = high;
  tile.center[column] = center;
  tile.beyond[column] = view.beyond;
  tile.slope2[column] = slope2;
  tile.sees[column] = view.sees();
  if (!view.sees()) {
    return;
  }
  const int64_t nearest = view.nearest();
  if (!tile.any) {
    tile.any = true;
    tile.first_low = tile.last_low = low;
    tile.first_high = tile.last_high = high;
    tile.first_center = tile.last_center = center;
    tile.first_nearest = tile.last_nearest = nearest;
    tile.first_slope2 = slope2;
    return;
  }
  tile.first_low = std::min(tile.first_low, low);
  tile.last_low = std::max(tile.last_low, low);
  tile.first_high = std::min(tile.first_high, high);
  tile.last_high = std::max(tile.last_high, high);
  tile.first_center = std::min(tile.first_center, center);
  tile.last_center = std::max(tile.last_center, center);
  tile.first_nearest = std::min(tile.first_nearest, nearest);
  tile.last_nearest = std::max(tile.last_nearest, nearest);
}

inline QueryTile place_queries(const Problem& problem, int64_t batch, int64_t head, int64_t start) {
  QueryTile tile;
  tile.batch = batch;
  tile.head = head;
  tile.start = start;
  tile.width = tile_queries(problem);
  tile.row = batch * problem.num_heads + head;
  tile.any = false;
  for (int64_t column = 0; column < tile.width; ++column) {
    place_query(problem, tile, column);
  }
  tile.reference = tile.any ? tile.first_nearest : 0;
  return tile;
}

// Hides the keys outside of [begin, end), which are out of reach, from the range_block columns that start at `column`.
inline void narrow(QueryTile& tile, int64_t column, int64_t begin, int64_t end) {
  for (const int64_t last = std::min(column + range_block, tile.width); column < last; ++column) {
    if (tile.sees[column]) {
      tile.low[column] = std::max(tile.low[column], begin);
      tile.high[column] = std::min(tile.high[column], end);
      tile.last_low = std::max(tile.last_low, tile.low[column]);
      tile.first_high = std::min(tile.first_high, tile.high[column]);
    }
  }
}

// Writes the first `present` columns of (padded_dims, width) as rows. `rows` has room for all columns.
template <typename T>
inline void store_transposed(
    const Problem& problem, const float* columns, const Strided& tensor, const QueryTile& tile, int64_t present,
    float* rows) {
  const int64_t dims = padded_dims(problem);
  T* first = tensor.row<T>(tile.batch, tile.head, tile.start);
  if constexpr (std::is_same_v<T, float>) {
    if (present == tile.width && dims == problem.head_dim) {
      transpose(columns, tile.width, first, tensor.token, dims, tile.width);
      return;
    }
  }
  transpose(columns, tile.width, rows, dims, dims, tile.width);
  for (int64_t column = 0; column < present; ++column) {
    load_row(rows + column * dims, first + column * tensor.token, problem.head_dim, problem.head_dim);
  }
}

}  // namespace CPU_CAPABILITY
}  // namespace seqwarm
