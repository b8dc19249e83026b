// The rows of a short tile: tokens of one head as operands of products, and rows of results.

#pragma once

#include "short_products.h"
#include "short_tile.h"

#include <cstring>

namespace seqwarm {
inline namespace CPU_CAPABILITY {

// The tokens of one head as rows of padded_dims floats: their own memory where that is possible, else a copy.
template <typename T>
class ShortRows {
 public:
  ShortRows(Arena& arena, const Problem& problem)
      : problem_(problem),
        dims_(padded_dims(problem)),
        fits_(std::is_same_v<T, float> && dims_ == problem.head_dim),
        copy_(arena.take<float>(most_queries * dims_)) {}

  // The keys of a tile. Masked keys become zeros: they may hold NaN, and 0 · NaN is not 0.
  void open_keys(const Strided& tensor, const ShortTile& tile, int64_t key_head) {
    open(tensor, key_head, problem_.key_padding_mask == nullptr);
    float* row = copy_;
    for (const Sequence* sequence = tile.group().begin; !in_place_ && sequence != tile.group().end; ++sequence) {
      for (int64_t key = 0; key < sequence->num_keys; ++key, row += dims_) {
        const int64_t token = sequence->first_key + key;
        copy_row(sequence->batch, token, is_hidden(problem_, *sequence, token), row);
      }
    }
  }

  // The queries of a tile. Those that see no key become zeros with `clear`: sums over queries include them.
  void open_queries(const Strided& tensor, const ShortTile& tile, bool clear) {
    open(tensor, tile.head(), tile.all_see() || !clear);
    tile.for_each_piece([&](const ShortPiece& piece) {
      tile.for_each_span(piece, [&](const Span& span) {
        for (int64_t index = 0; !in_place_ && index < span.width; ++index) {
          const bool skip = clear && !tile.sees(span.column + index);
          copy_row(span.sequence->batch, span.query + index, skip, copy_ + (span.column + index) * dims_);
        }
      });
    });
  }

  Rows<float> keys(const Span& span) const {
    return in_place_ ? own(span.sequence->batch, span.key) : Rows<float>{copy_ + span.place * dims_, dims_};
  }

  Rows<float> queries(const Span& span) const {
    return in_place_ ? own(span.sequence->batch, span.query) : Rows<float>{copy_ + span.column * dims_, dims_};
  }

  // products (keys, piece_width) = the keys of a span · columns (padded_dims, piece_width), at the span's rows.
  void multiply_keys(const Span& span, const float* columns, float* products) const {
    const Rows<float> rows = keys(span);
    multiply_short(
        span.num_keys, piece_width, dims_, {rows.data, rows.ld, 1}, {columns, piece_width},
        products + span.score_row * piece_width, piece_width, false);
  }

  // (padded_dims, piece_width): the queries of a piece as columns. `spare` has room for as many floats.
  void transpose_piece(const ShortTile& tile, const ShortPiece& piece, float* columns, float* spare) const {
    Rows<float> rows{spare, dims_};
    int64_t present = 0;
    tile.for_each_span(piece, [&](const Span& span) {
      const Rows<float> found = queries(span);
      if (span.width == piece_width) {
        rows = found;
      }
      for (int64_t index = 0; span.width < piece_width && index < span.width; ++index, ++present) {
        std::memcpy(spare + present * dims_, found.data + index * found.ld, dims_ * sizeof(float));
      }
    });
    if (rows.data == spare) {
      std::memset(spare + present * dims_, 0, (piece_width - present) * dims_ * sizeof(float));
    }
    transpose(rows.data, rows.ld, columns, piece_width, piece_width, dims_);
  }

 private:
  void open(const Strided& tensor, int64_t head, bool complete) {
    tensor_ = &tensor;
    head_ = head;
    in_place_ = fits_ && complete;
  }

  void copy_row(int64_t batch, int64_t token, bool skip, float* row) const {
    load_row(tensor_->row<const T>(batch, head_, token), row, skip ? 0 : problem_.head_dim, dims_);
  }

  Rows<float> own(int64_t batch, int64_t token) const {
    if constexpr (std::is_same_v<T, float>) {
      return {tensor_->row<const float>(batch, head_, token), tensor_->token};
    } else {
      return {};
    }
  }

  const Problem& problem_;
  const int64_t dims_;
  const bool fits_;
  float* copy_;
  const Strided* tensor_ = nullptr;
  int64_t head_ = 0;
  bool in_place_ = false;
};

// Rows of results: the memory of the tensor itself where that is possible, else `copy`, from which `finish` writes.
template <typename T>
class ShortResult {
 public:
  ShortResult(const Problem& problem, const Strided& tensor, int64_t batch, int64_t head, int64_t token, float* copy)
      : problem_(problem), first_(tensor.row<T>(batch, head, token)), step_(tensor.token), copy_(copy) {}

  float* data() const {
    if constexpr (std::is_same_v<T, float>) {
      return in_place() ? first_ : copy_;
    } else {
      return copy_;
    }
  }

  int64_t ld() const { return in_place() ? step_ : padded_dims(problem_); }

  void finish(int64_t count) const {
    for (int64_t row = 0; !in_place() && row < count; ++row) {
      load_row(copy_ + row * padded_dims(problem_), first_ + row * step_, problem_.head_dim, problem_.head_dim);
    }
  }

 private:
  bool in_place() const { return std::is_same_v<T, float> && padded_dims(problem_) == problem_.head_dim; }

  const Problem& problem_;
  T* first_;
  int64_t step_;
  float* copy_;
};

}  // namespace CPU_CAPABILITY
}  // namespace seqwarm
