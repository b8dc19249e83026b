// A tile of queries: who sees whom.
//
// Everything that hides keys (causal, window, segments, packed sequences, the ends of a tensor, what is out of reach)
// becomes one interval [low, high) of keys for each query, and one center: the key at distance zero, or the nearest one if
// that lies outside.

#pragma once

#include "keys.h"
#include "problem.h"
#include "simd.h"

#include <cmath>

namespace seqwarm {
inline namespace CPU_CAPABILITY {

// How the scores of a tile of keys get their bias. MASKED holds for any; the others where every query sees every key,
// on one side of every center: there it is linear, and a row constant apart the same for all queries.
enum class Side { Masked, Left, Right };

struct QueryTile {
  int64_t batch;
  int64_t head;
  int64_t start;
  int64_t width;  // columns of the tile; those past the last query see nothing
  int64_t row;    // of batch and head
  int64_t low[most_queries];
  int64_t high[most_queries];
  int64_t center[most_queries];
  float beyond[most_queries];  // from position to center: all keys are that much farther away
  float slope2[most_queries];  // in base 2
  bool sees[most_queries];
  // Over the queries that see some key:
  bool any;
  int64_t first_low, last_low, first_high, last_high, first_center, last_center;
  int64_t first_nearest, last_nearest;  // keys: the visible one next to each center
  float first_slope2;
  int64_t reference;    // the key that linear biases are counted from, so that they are small where weights are not
};

namespace detail {

// For a query: the keys [first, end) of its sequence or segment, and its position.
struct Place {
  int64_t sequence, first, end, position;
};

inline Place place_in_pack(const Problem& problem, int64_t token) {
  const int32_t* ends = problem.cu_seqlens_q + 1;
  const int64_t sequence = std::upper_bound(ends, ends + problem.num_sequences, token) - ends;
  if (sequence == problem.num_sequences) {
    return {0, 0, 0, 0};
  }
  const auto key_at = [&](int64_t index) {
    return std::clamp<int64_t>(problem.cu_seqlens_k[index], 0, problem.key_length);
  };
  const int64_t end = key_at(sequence + 1);
  return {sequence, std::min(key_at(sequence), end), end, token - ends[sequence] + end};
}

inline Place place_in_row(const Problem& problem, int64_t batch, int64_t token) {
  const int64_t first = token / problem.segment_length * problem.segment_length;
  int64_t position = token + problem.query_offset;
  if (problem.query_start != nullptr) {
    position += problem.query_start[batch * problem.query_start_stride];
  }
  return {batch, first, std::min(first + problem.segment_length, problem.key_length), position};
}

}  // namespace detail

inline void place_query(const Problem& problem, QueryTile& tile, int64_t column) {
  const int64_t token = tile.start + column;
  const bool packed = problem.cu_seqlens_q != nullptr;
  const detail::Place place = token >= problem.query_length ? detail::Place{0, 0, 0, 0}
      : packed ? detail::place_in_pack(problem, token)
               : detail::place_in_row(problem, tile.batch, token);
  const auto inside = [&](int64_t key) { return std::max(std::min(key, place.end), place.first); };
  const int64_t low = inside(place.position - problem.window);
  const int64_t high = inside(place.position + (problem.causal ? 1 : problem.window + 1));
  const int64_t center = std::max(std::min(place.position, place.end - 1), place.first);
  tile.low[column] = low;
  tile.high[column] = high;
  tile.center[column] = center;
  tile.beyond[column] = static_cast<float>(std::abs(place.position - center));
  tile.sees[column] = low < high;
  tile.slope2[column] = 0;
  if (low >= high) {
    return;
  }
  const float slope2 = log2_e * problem.slopes[place.sequence * problem.slope_batch + tile.head * problem.slope_head];
  const int64_t nearest = std::clamp(center, low, high - 1);
  tile.slope2[column] = slope2;
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
  tile.width = tile_queries(problem.query_length);
  tile.row = batch * problem.num_heads + head;
  tile.any = false;
  for (int64_t column = 0; column < tile.width; ++column) {
    place_query(problem, tile, column);
  }
  tile.reference = tile.any ? tile.first_nearest : 0;
  return tile;
}

// Leaves out, for the range_block columns from `column` on, the keys outside [begin, end), which are out of reach.
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

// Whether every query sees every key of [begin, end).
inline bool sees_all(const QueryTile& tile, int64_t begin, int64_t end) {
  return tile.last_low <= begin && tile.first_high >= end;
}

inline Side side_of(const QueryTile& tile, const Piece& piece) {
  if (!piece.seen_by_all) {
    return Side::Masked;
  }
  if (piece.end - 1 <= tile.first_center) {
    return Side::Left;
  }
  return piece.begin >= tile.last_center ? Side::Right : Side::Masked;
}

// The keys of [begin, end), with the columns that see any of them.
inline Piece piece_of(const QueryTile& tile, int64_t begin, int64_t end) {
  if (sees_all(tile, begin, end)) {
    return {begin, end, 0, tile.width, true, tile.first_slope2};
  }
  constexpr int64_t step = 32;  // narrower products are slower than what they save
  int64_t first = tile.width, last = 0;
  for (int64_t column = 0; column < tile.width; ++column) {
    if (std::max(tile.low[column], begin) < std::min(tile.high[column], end)) {
      first = std::min(first, column);
      last = column + 1;
    }
  }
  first = first / step * step;
  last = std::min(round_up(last, step), tile.width);
  bool seen_by_all = true;
  float slope2 = 0;
  for (int64_t column = first; column < last; ++column) {
    if (tile.sees[column]) {
      seen_by_all &= tile.low[column] <= begin && tile.high[column] >= end;
      slope2 = tile.slope2[column];
    }
  }
  return {begin, end, first, std::max<int64_t>(last - first, 0), seen_by_all, slope2};
}

// Cuts [begin, end), multiples of key_step, into pieces that lie in one block of keys each; nearest to `begin` first, or
// to `end` where `backwards`. Where not every query sees every key they are small: next to the diagonal, and where short
// segments meet, much is left out.
template <typename Visit>
inline void for_each_piece(
    const QueryTile& tile, const float* hidden, int64_t begin, int64_t end, bool backwards, const Visit& visit) {
  while (begin < end) {
    int64_t first = backwards ? std::max((end - 1) / most_keys * most_keys, begin) : begin;
    int64_t last = backwards ? end : std::min(begin / most_keys * most_keys + most_keys, end);
    if (!sees_all(tile, first, last)) {
      first = backwards ? last - key_step : first;
      last = first + key_step;
    }
    (backwards ? end : begin) = backwards ? first : last;
    const Piece piece = piece_of(tile, first, last);
    if (piece.width > 0 && !all_hidden(hidden, first, last)) {
      visit(piece);
    }
  }
}

// What the scores of a tile of keys need, as vectors are loaded from it.
struct Biases {
  Side side;
  float scale2;
  float of_key[most_keys];    // the linear bias, 0 for Masked; -inf where key_padding_mask hides a key
  float shift[most_queries];  // what linear biases leave out of a query's true scores
  float slope2[most_queries];
  // Relative to the first key:
  float low[most_queries];
  float high[most_queries];
  float center[most_queries];
};

// `hidden`: for each key 0 or -inf, or null.
inline void set_biases(
    Biases& biases, const Problem& problem, const QueryTile& tile, const Piece& piece, const float* hidden) {
  const int64_t begin = piece.begin, end = piece.end;
  biases.side = side_of(tile, piece);
  biases.scale2 = problem.scale * log2_e;
  const float slope2 = biases.side == Side::Masked ? 0.f : biases.side == Side::Left ? piece.slope2 : -piece.slope2;
  for (int64_t key = begin; key < end; ++key) {
    biases.of_key[key - begin] =
        slope2 * static_cast<float>(key - tile.reference) + (hidden == nullptr ? 0.f : hidden[key]);
  }
  for (int64_t column = 0; column < tile.width; ++column) {
    biases.shift[column] = slope2 * static_cast<float>(tile.center[column] - tile.reference);
    biases.center[column] = static_cast<float>(tile.center[column] - begin);
  }
  const auto relative = [&](int64_t key) { return std::clamp<int64_t>(key - begin, 0, end - begin); };
  for (int64_t column = 0; biases.side == Side::Masked && column < tile.width; ++column) {
    biases.slope2[column] = tile.slope2[column];
    biases.low[column] = static_cast<float>(relative(tile.low[column]));
    biases.high[column] = static_cast<float>(relative(tile.high[column]));
  }
}

// Scores with their bias, in base 2, for `vectors` vectors of columns.
template <int vectors, bool masked>
class BiasedScores {
 public:
  BiasedScores(const Biases& biases, int64_t lane) : biases_(biases), scale2_(biases.scale2) {
    if constexpr (masked) {
      for (int v = 0; v < vectors; ++v) {
        slope2_[v] = Vec::loadu(biases.slope2 + lane + v * lanes);
        low_[v] = Vec::loadu(biases.low + lane + v * lanes);
        high_[v] = Vec::loadu(biases.high + lane + v * lanes);
        center_[v] = Vec::loadu(biases.center + lane + v * lanes);
      }
    }
  }

  // From products of key `key`, counted from the tile's first.
  Vec operator()(Vec product, int64_t key, int v) const {
    if constexpr (masked) {
      const Vec index(static_cast<float>(key));
      const Vec bias = Vec(biases_.of_key[key]) - slope2_[v] * (center_[v] - index).abs();
      const Vec visible = (index >= low_[v]) & (index < high_[v]);
      return Vec::blendv(Vec(-infinity), at::vec::fmadd(product, scale2_, bias), visible);
    } else {
      return at::vec::fmadd(product, scale2_, Vec(biases_.of_key[key]));
    }
  }



 private:
  const Biases& biases_;
  const Vec scale2_;
  Vec slope2_[vectors], low_[vectors], high_[vectors], center_[vectors];
};

// Writes the tile's first `present` columns of (padded_dims, width) as rows. `rows` has room for all.
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

// Calls visit with masked (std::true_type) or not.
template <typename Visit>
inline void with_mask(Side side, const Visit& visit) {
  if (side == Side::Masked) {
    visit(std::true_type());
  } else {
    visit(std::false_type());
  }
}

}  // namespace CPU_CAPABILITY
}  // namespace seqwarm
