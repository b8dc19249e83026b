// Scores of a piece (keys, queries), which products take as their left side: by key as they are, by query transposed.

#pragma once

#include "short_products.h"
#include "short_tile.h"

namespace seqwarm {
inline namespace CPU_CAPABILITY {

// `column` of by_key and by_query is the span's first column in the piece.
template <typename Products>
class ShortScores;

template <>
class ShortScores<FloatProducts> {
  static constexpr int64_t width = FloatProducts::width;

 public:
  explicit ShortScores(Arena& arena) : scores_(arena.take<float>(FloatProducts::most * width)) {}

  float* data() const { return scores_; }
  void set(const ShortPiece&) {}

  Matrix by_key(const Span& span, int64_t column) const {
    return {scores_ + span.score_row * width + column, width, 1};
  }

  Matrix by_query(const Span& span, int64_t column) const {
    return {scores_ + span.score_row * width + column, 1, width};
  }

 private:
  float* scores_;
};

template <>
class ShortScores<PairProducts> {
  static constexpr int64_t width = PairProducts::width, most = PairProducts::most;

 public:
  explicit ShortScores(Arena& arena)
      : scores_(arena.take<float>(most * width)),
        pairs_of_queries_(arena.take<c10::BFloat16>(most * width)),
        pairs_of_keys_(arena.take<c10::BFloat16>(most * width)) {}

  float* data() const { return scores_; }

  // Rounds the scores, which may change until then.
  void set(const ShortPiece& piece) {
    round_to_pairs(scores_, piece.num_keys, pairs_of_queries_, pairs_of_keys_);
  }

  PairMatrix by_key(const Span& span, int64_t column) const {
    return {pairs_of_queries_ + span.score_row * width + column, width / 2, 1};
  }

  PairMatrix by_query(const Span& span, int64_t column) const {
    return {pairs_of_keys_ + span.score_row * width + 2 * column, 1, width};
  }

 private:
  float* scores_;
  c10::BFloat16* pairs_of_queries_;  // (keys, queries / 2, 2)
  c10::BFloat16* pairs_of_keys_;     // (keys / 2, queries, 2)
};

// A piece has one span, which starts at row 0 and column 0.
template <>
class ShortScores<TileProducts> {
  static constexpr int64_t width = TileProducts::width, most = TileProducts::most;

 public:
  explicit ShortScores(Arena& arena)
      : scores_(arena.take<float>(most * width)),
        by_key_(arena.take<c10::BFloat16>(most * width)),
        pairs_(arena.take<c10::BFloat16>(most * width)),
        by_query_(arena.take<c10::BFloat16>(most * width)) {}

  float* data() const { return scores_; }

  // Rounds the scores, which may change until then.
  void set(const ShortPiece& piece) {
    num_keys_ = piece.num_keys;
    round_to_right(scores_, pairs_, num_keys_, 0, width, width);
    transpose(pairs_, width, by_query_, num_keys_ / 2, num_keys_ / 2, width);
    at::vec::convert(scores_, by_key_, num_keys_ * width);
  }

  Rows<c10::BFloat16> by_key(const Span&, int64_t) const { return {by_key_, width}; }
  Rows<c10::BFloat16> by_query(const Span&, int64_t) const { return {by_query_, num_keys_}; }

 private:
  float* scores_;
  c10::BFloat16* by_key_;
  c10::BFloat16* pairs_;
  c10::BFloat16* by_query_;
  int64_t num_keys_ = 0;
};

}  // namespace CPU_CAPABILITY
}  // namespace seqwarm
