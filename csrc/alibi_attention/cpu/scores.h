// The scores of a tile of queries against a tile of keys: their pieces and their bias.

#pragma once

#include "keys.h"
#include "problem.h"
#include "products.h"
#include "queries.h"
#include "simd.h"

namespace seqwarm {
inline namespace CPU_CAPABILITY {

// How scores get their bias. Masked works for any tile. Left and Right need tiles in which every query sees every key,
// on one side of every center. There the bias is linear and, up to a constant for each query, the same for all queries.
enum class Side { Masked, Left, Right };

// A part of a tile's scores: the keys [begin, end), and `width` columns of queries from `column`.
struct Piece {
  int64_t begin;
  int64_t end;
  int64_t column;
  int64_t width;
  bool seen_by_all;  // each of these queries sees either all of the keys or none at all,
  float slope2;      // so they belong to one sequence, with one slope

  int64_t num_keys() const { return end - begin; }
};

// Products sum this many dims at a time: several short float32 sums round less than a long one.
constexpr int64_t dims_at_once = 128;

// products = rows (keys, dims) · right, for the piece's columns of both; `ld` counts all columns. `spare` is as large
// as `products`.
template <typename P>
inline void multiply_rows(
    Rows<P> rows, const P* right, float* products, float* spare, const Piece& piece, int64_t ld, int64_t dims) {
  const auto multiply_dims = [&](int64_t dim, float* target) {
    multiply(
        piece.num_keys(), piece.width, std::min(dims - dim, dims_at_once), rows.data + dim, rows.ld,
        right + dim * ld + piece.column * pair_of<P>, ld, target + piece.column, ld, false);
  };
  multiply_dims(0, products);
  for (int64_t dim = dims_at_once; dim < dims; dim += dims_at_once) {
    multiply_dims(dim, spare);
    for (int64_t key = 0; key < piece.num_keys(); ++key) {
      for (int64_t place = key * ld + piece.column; place < key * ld + piece.column + piece.width; place += lanes) {
        (Vec::loadu(products + place) + Vec::loadu(spare + place)).store(products + place);
      }
    }
  }
}

// Whether every query sees every key of [begin, end).
inline bool sees_all(const QueryTile& tile, int64_t begin, int64_t end) {
  return tile.last_low <= begin && tile.first_high >= end;
}

// Whether linear biases, which count from the reference, stay precise. Large ones matter where the nearest keys may not
// have the largest weights. Beyond 1e30 differences of biases may not be finite.
inline bool is_linear_precise(const Problem& problem, const QueryTile& tile, const Piece& piece) {
  const int64_t first = std::min(piece.begin, tile.first_center), last = std::max(piece.end, tile.last_center);
  const auto distance = static_cast<float>(std::max(tile.reference - first, last - tile.reference));
  const bool large_matter = piece.slope2 < 0 || problem.key_padding_mask != nullptr;
  return std::abs(piece.slope2) * distance <= (large_matter ? 4096.f : 1e30f);
}

inline Side side_of(const Problem& problem, const QueryTile& tile, const Piece& piece) {
  if (!piece.seen_by_all || !is_linear_precise(problem, tile, piece)) {
    return Side::Masked;
  }
  if (piece.end - 1 <= tile.first_center) {
    return Side::Left;
  }
  return piece.begin >= tile.last_center ? Side::Right : Side::Masked;
}

// The piece of the keys [begin, end), with the columns that see any of them.
inline Piece piece_of(const QueryTile& tile, int64_t begin, int64_t end) {
  if (sees_all(tile, begin, end)) {
    return {begin, end, 0, tile.width, true, tile.first_slope2};
  }
  constexpr int64_t step = 32;  // narrower products cost more than they save
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

// Cuts [begin, end), multiples of key_step, into pieces that lie in one block of keys each, from `begin` to `end`, or
// in reverse if `backwards`. Pieces are small where some queries do not see every key: next to the diagonal and where
// short segments meet, many scores are left out.
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

// The bias of a tile of keys, in the form that vectors are loaded from.
struct Biases {
  Side side;
  float scale2;
  float of_key[most_keys];    // the linear bias, 0 for Masked; -inf where key_padding_mask hides a key
  float shift[most_queries];  // difference between a query's scores with linear bias and its true scores
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
  biases.side = side_of(problem, tile, piece);
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

// Scores with bias, in base 2, for `vectors` vectors of columns.
template <int vectors, bool masked>
class BiasedScores {
 public:
  BiasedScores(const Biases& biases, int64_t lane) : biases_(biases), scale2_(biases.scale2) {
    if constexpr (masked) {
      for (int v = 0; v < vectors; ++v) {
        minus_slope2_[v] = Vec::loadu(biases.slope2 + lane + v * lanes).neg();
        low_[v] = Vec::loadu(biases.low + lane + v * lanes);
        high_[v] = Vec::loadu(biases.high + lane + v * lanes);
        center_[v] = Vec::loadu(biases.center + lane + v * lanes);
      }
    }
  }

  // From products of key `key`, counted from the first key of the tile.
  Vec operator()(Vec product, int64_t key, int v) const {
    if constexpr (masked) {
      if (biases_.of_key[key] == -infinity) {
        return Vec(-infinity);  // also where the query holds NaN
      }
      const Vec index(static_cast<float>(key));
      const Vec distance = (center_[v] - index).abs(), visible = (index >= low_[v]) & (index < high_[v]);
      const Vec score = at::vec::fmadd(minus_slope2_[v], distance, product * scale2_);  // as in decoding
      return Vec::blendv(Vec(-infinity), score, visible);
    } else {
      return at::vec::fmadd(product, scale2_, Vec(biases_.of_key[key]));
    }
  }

 private:
  const Biases& biases_;
  const Vec scale2_;
  Vec minus_slope2_[vectors], low_[vectors], high_[vectors], center_[vectors];
};

// Calls visit with std::true_type if masked, else with std::false_type.
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
