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
        rounded_(arena.take<c10::BFloat16>(most * width)),
        pairs_(arena.take<c10::BFloat16>(most * width)) {}

  float* data() const { return scores_; }

  // Rounds the scores, which may change until then.
  void set(const ShortPiece& piece) { round_to_pairs(scores_, piece.num_keys, width, width, rounded_, pairs_); }

  PairMatrix by_key(const Span& span, int64_t column) const {
    return {rounded_ + span.score_row * width + column, width / 2, 1};
  }

  PairMatrix by_query(const Span& span, int64_t column) const {
    return {pairs_ + span.score_row * width + 2 * column, 1, width};
  }

 private:
  float* scores_;
  c10::BFloat16* rounded_;
  c10::BFloat16* pairs_;  // (keys / 2, queries, 2)
};

template <int64_t size>
class ShortScores<TileProducts<size>> {
  static constexpr int64_t width = TileProducts<size>::width, most = TileProducts<size>::most;

 public:
  explicit ShortScores(Arena& arena)
      : scores_(arena.take<float>(most * width)),
        rounded_(arena.take<c10::BFloat16>(most * width)),
        pairs_(arena.take<c10::BFloat16>(round_up(most, 32) * width)),
        by_query_(arena.take<c10::BFloat16>(round_up(most, 32) * width)) {}

  float* data() const { return scores_; }

  // Rounds the scores, which may change until then.
  void set(const ShortPiece& piece) {
    round_to_pairs(scores_, piece.num_keys, width, width, rounded_, pairs_);
    ld_ = round_up(piece.num_keys, 32);
    transpose(pairs_, width, by_query_, ld_ / 2, ld_ / 2, width);
  }

  TileMatrix<size> by_key(const Span& span, int64_t column) const {
    return {rounded_ + span.score_row * width + column, width};
  }

  TileMatrix<size> by_query(const Span& span, int64_t column) const {
    return {by_query_ + column * ld_ + span.score_row, ld_};
  }

 private:
  float* scores_;
  c10::BFloat16* rounded_;
  c10::BFloat16* pairs_;     // (keys / 2, queries, 2)
  c10::BFloat16* by_query_;  // (queries, keys), whose rows are multiples of 32, as transposes write them
  int64_t ld_ = 0;
};

}  // namespace CPU_CAPABILITY
}  // namespace seqwarm
