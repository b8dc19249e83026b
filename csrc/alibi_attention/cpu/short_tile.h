// A group of short sequences: its queries are the columns of a tile. All keys of a query are in one piece, so the
// softmax needs no running sums. Sequences share the vectors of the tile, but products over keys or over queries stay within one
// sequence: NaN in one must not reach another.

#pragma once

#include "dropout.h"
#include "problem.h"
#include "scores.h"
#include "short_sequences.h"
#include "simd.h"

#include <cmath>

namespace seqwarm {
inline namespace CPU_CAPABILITY {

// Neighboring columns of one sequence in one piece, and the keys that any of them sees.
struct Span {
  const Sequence* sequence;
  int64_t column;     // of the tile
  int64_t width;
  int64_t query;      // token of the first column
  int64_t key;        // token of the first key
  int64_t num_keys;   // a multiple of the step, which may end after the sequence
  int64_t place;      // of that key among the keys of the tile
  int64_t score_row;  // of that key in the piece
};

// A piece: neighboring columns and the keys that any of them sees, sequence by sequence.
struct ShortPiece {
  int64_t column;
  int64_t first_span, last_span;
  int64_t num_keys;
  Biases biases;
};

// Whether key_padding_mask hides a key.
inline bool is_masked(const Problem& problem, const Sequence& sequence, int64_t token) {
  const bool* mask = problem.key_padding_mask;
  return mask != nullptr && !mask[sequence.batch * problem.mask_batch + token * problem.mask_key];
}

template <typename Products>
class ShortTile {
  static constexpr int64_t step = Products::step;

 public:
  static constexpr int64_t width = Products::width, most = Products::most;

  explicit ShortTile(const Problem& problem) : problem_(problem) {}

  // Places the columns of a group, unless they are in place already.
  void place(const Group& group) {
    if (group.begin == group_.begin) {
      return;
    }
    group_ = group;
    num_columns_ = num_keys_ = num_spans_ = num_pieces_ = 0;
    all_see_ = has_no_gap_ = true;
    for (const Sequence* sequence = group.begin; sequence != group.end; ++sequence) {
      for (int64_t query = 0; query < round_up(sequence->num_queries, step); ++query) {
        add_column(*sequence, query);
      }
      num_keys_ += round_up(sequence->num_keys, step);
      has_no_gap_ &= sequence->num_queries % step == 0 && sequence->num_keys % step == 0;
    }
    for (int64_t index = 0; index < num_pieces_; ++index) {
      finish(pieces_[index]);
    }
  }

  void set_head(int64_t head) {
    head_ = head;
    for (int64_t index = 0; index < num_pieces_; ++index) {
      ShortPiece& piece = pieces_[index];
      for_each_span(piece, [&](const Span& span) {
        if (span.num_keys > 0) {  // tokens after the last packed sequence have no keys and no slope
          const int64_t row = span.sequence->slope_row;
          const float slope = problem_.slopes[row * problem_.slope_batch + head * problem_.slope_head];
          std::fill_n(piece.biases.slope2 + span.column - piece.column, span.width, in_base_2(slope));
        }
      });
    }
  }

  template <typename Visit>
  void for_each_span(const ShortPiece& piece, const Visit& visit) const {
    for (int64_t index = piece.first_span; index < piece.last_span; ++index) {
      visit(spans_[index]);
    }
  }

  template <typename Visit>
  void for_each_piece(const Visit& visit) const {
    for (int64_t index = 0; index < num_pieces_; ++index) {
      visit(pieces_[index]);
    }
  }

  // Index of a query in tensors shaped as lse.
  int64_t place_of(const Span& span, int64_t index) const {
    return (span.sequence->batch * problem_.num_heads + head_) * problem_.query_length + span.query + index;
  }

  bool sees(int64_t column) const { return low_[column] < high_[column]; }
  bool all_see() const { return all_see_; }
  bool has_no_gap() const { return has_no_gap_; }
  float beyond(int64_t column) const { return beyond_[column]; }
  int64_t head() const { return head_; }
  const Group& group() const { return group_; }

 private:
  void add_column(const Sequence& sequence, int64_t query) {
    const int64_t column = num_columns_++;
    if (column % width == 0) {
      pieces_[num_pieces_].column = column;
      pieces_[num_pieces_++].first_span = num_spans_;
    }
    if (column % width == 0 || query == 0) {
      spans_[num_spans_++] = {&sequence, column, 0, sequence.first_query + query, sequence.num_keys, 0, num_keys_, 0};
    }
    if (query >= sequence.num_queries) {  // a gap
      return;
    }
    const int64_t position = sequence.position + query;
    const auto inside = [&](int64_t key) { return std::clamp<int64_t>(key, 0, sequence.num_keys); };
    low_[column] = inside(position - problem_.window);
    high_[column] = inside(position + (problem_.causal ? 1 : problem_.window + 1));
    while (sees(column) && is_masked(problem_, sequence, sequence.first_key + low_[column])) {
      ++low_[column];
    }
    center_[column] = std::clamp<int64_t>(position, 0, std::max<int64_t>(sequence.num_keys - 1, 0));
    beyond_[column] = static_cast<float>(std::abs(position - center_[column]));
    Span& span = spans_[num_spans_ - 1];
    ++span.width;
    if (!sees(column)) {
      all_see_ = false;
      return;
    }
    // Until `finish`, `key` counts from the sequence's first key, and num_keys is the end.
    span.key = std::min(span.key, low_[column]);
    span.num_keys = std::max(span.num_keys, high_[column]);
  }

  void finish(ShortPiece& piece) {
    const bool is_last = piece.column + width >= num_columns_;
    piece.last_span = is_last ? num_spans_ : (&piece + 1)->first_span;
    piece.num_keys = 0;
    Biases& biases = piece.biases;
    biases.scale2 = problem_.scale * log2_e;
    const auto clear = [](float* values) { std::fill(values, values + width, 0.f); };
    clear(biases.slope2), clear(biases.low), clear(biases.high), clear(biases.center);
    for (int64_t index = piece.first_span; index < piece.last_span; ++index) {
      Span& span = spans_[index];
      const int64_t end = round_up(span.num_keys, step), present = span.sequence->num_keys;
      span.key = span.key / step * step;
      span.num_keys = std::max<int64_t>(end - span.key, 0);
      span.score_row = piece.num_keys;
      for (int64_t column = span.column; column < span.column + span.width; ++column) {
        const int64_t lane = column - piece.column, shift = span.score_row - span.key;
        biases.low[lane] = static_cast<float>(sees(column) ? low_[column] + shift : 0);
        biases.high[lane] = static_cast<float>(sees(column) ? high_[column] + shift : 0);
        biases.center[lane] = static_cast<float>(center_[column] + shift);
      }
      const int64_t first = span.key;
      span.place += first;
      span.key += span.sequence->first_key;
      for (int64_t key = 0; key < span.num_keys; ++key) {
        const bool hidden = first + key >= present || is_masked(problem_, *span.sequence, span.key + key);
        biases.of_key[piece.num_keys++] = hidden ? -infinity : 0.f;
      }
    }
  }

  const Problem& problem_;
  Group group_{};
  int64_t head_;
  int64_t num_columns_, num_keys_, num_spans_, num_pieces_;
  bool all_see_, has_no_gap_;
  Span spans_[most];
  ShortPiece pieces_[most / width];
  // Of the keys of the query's sequence:
  int64_t low_[most], high_[most], center_[most];
  float beyond_[most];
};

// (keys, width): `kept_value` where dropout keeps a weight, else 0.
template <typename Products>
inline void keep_short(
    const Problem& problem, const ShortTile<Products>& tile, const ShortPiece& piece, float kept_value, float* keep) {
  if (!tile.has_no_gap()) {
    std::fill_n(keep, piece.num_keys * tile.width, 0.f);
  }
  tile.for_each_span(piece, [&](const Span& span) {
    const int64_t row = span.sequence->batch * problem.num_heads + tile.head();
    for (int64_t index = 0; index < span.width; ++index) {
      keep_column(
          problem.dropout, kept_value, row, span.query + index, span.key, span.num_keys, tile.width,
          keep + span.score_row * tile.width + span.column - piece.column + index);
    }
  });
}

}  // namespace CPU_CAPABILITY
}  // namespace seqwarm
