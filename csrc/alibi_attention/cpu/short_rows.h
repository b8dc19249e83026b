// The rows of a short tile: tokens of one head as operands of products, and rows of results.

#pragma once

#include "short_products.h"
#include "short_tile.h"

#include <cstring>

namespace seqwarm {
inline namespace CPU_CAPABILITY {

// The tokens of one head as rows of padded_dims elements: their own memory where that is possible, else a copy with
// zeros in the gaps. T is the dtype of the tensor.
template <typename T, typename Products>
class ShortRows {
  using P = typename Products::Element;
  using Tile = ShortTile<Products>;
  static constexpr int64_t width = Products::width, most = Products::most, step = Products::step;

 public:
  ShortRows(Arena& arena, const Problem& problem)
      : problem_(problem),
        dims_(padded_dims(problem)),
        fits_(std::is_same_v<T, P> && dims_ == problem.head_dim),
        copy_(arena.take<P>(most * dims_)),
        pairs_(arena.take<P>(pair_of<P> == 1 ? 0 : most * dims_)) {}

  // The keys of a tile. Those that no query sees become zeros: they may hold NaN, and 0 · NaN is not 0. Spans end with
  // keys that are seen, but for steps of several keys.
  void open_keys(const Strided& tensor, const Tile& tile, int64_t key_head) {
    const bool hides = step > 1 && problem_.hides_keys;
    open(tensor, key_head, tile.has_no_gap() && problem_.key_padding_mask == nullptr && !hides);
    P* row = copy_;
    for (const Sequence* sequence = tile.group().begin; !in_place_ && sequence != tile.group().end; ++sequence) {
      for (int64_t key = 0; key < round_up(sequence->num_keys, step); ++key, row += dims_) {
        const int64_t token = sequence->first_key + key;
        const bool skip = key >= sequence->num_keys || is_masked(problem_, *sequence, token) ||
            (hides && !seen_keys(problem_, 0, sequence->num_keys, sequence->position, sequence->num_queries).contains(key));
        copy_row(sequence->batch, token, skip, row);
      }
    }
  }

  // The queries of a tile. Those that see no key become zeros with `clear`: sums over queries include them.
  void open_queries(const Strided& tensor, const Tile& tile, bool clear) {
    open(tensor, tile.head(), tile.has_no_gap() && (tile.all_see() || !clear));
    tile.for_each_piece([&](const ShortPiece& piece) {
      tile.for_each_span(piece, [&](const Span& span) {
        for (int64_t index = 0; !in_place_ && index < round_up(span.width, step); ++index) {
          const bool skip = index >= span.width || (clear && !tile.sees(span.column + index));
          copy_row(span.sequence->batch, span.query + index, skip, copy_ + (span.column + index) * dims_);
        }
      });
    });
  }

  Rows<P> keys(const Span& span) const {
    return in_place_ ? own(span.sequence->batch, span.key) : Rows<P>{copy_ + span.place * dims_, dims_};
  }

  Rows<P> queries(const Span& span) const {
    return in_place_ ? own(span.sequence->batch, span.query) : Rows<P>{copy_ + span.column * dims_, dims_};
  }

  // The queries of a span as the right side of products, until the next call.
  Rows<P> right_queries(const Span& span) const {
    return right_of_rows(Products(), queries(span), round_up(span.width, step), dims_, pairs_);
  }

  // Once for the pieces and heads that read the same keys with `right_keys`.
  void make_right_keys(const Tile& tile) const {
    int64_t place = 0;
    for (const Sequence* sequence = tile.group().begin; pair_of<P> > 1 && sequence != tile.group().end; ++sequence) {
      const Rows<P> copied{copy_ + place * dims_, dims_};
      const Rows<P> rows = in_place_ ? own(sequence->batch, sequence->first_key) : copied;
      const int64_t count = round_up(sequence->num_keys, step);
      right_of_rows(Products(), rows, count, dims_, pairs_ + place * dims_);
      place += count;
    }
  }

  Rows<P> right_keys(const Span& span) const {
    return pair_of<P> == 1 ? keys(span) : Rows<P>{pairs_ + span.place * dims_, dims_};
  }

  // products (keys, width) = the keys of a span · columns (padded_dims, width), at the span's rows. `first` is the span's
  // first column in the piece. Float products leave out the vectors without columns of the span.
  void multiply_keys(const Span& span, int64_t first, const P* columns, float* products) const {
    constexpr bool all = pair_of<P> == 2 || lanes == width;
    const int64_t begin = all ? 0 : first / lanes * lanes, end = all ? width : round_up(first + span.width, lanes);
    multiply_short(
        span.num_keys, end - begin, dims_, left_of_rows(Products(), keys(span)), Rows<P>{columns + begin, width},
        products + span.score_row * width + begin, width, false);
  }

  // (padded_dims, width): the queries of a piece as columns. Those after the last span may hold anything: products over
  // queries stay inside a span. `spare` has room for as many elements.
  void transpose_piece(const Tile& tile, const ShortPiece& piece, P* columns, P* spare) const {
    Rows<P> rows{spare, dims_};
    int64_t present = 0;
    tile.for_each_span(piece, [&](const Span& span) {
      const Rows<P> found = queries(span);
      const int64_t count = round_up(span.width, step);  // a copy has zeros after the span
      if (count == width) {
        rows = found;
        return;
      }
      for (int64_t index = 0; index < count; ++index, ++present) {
        copy_row_of(found.data + index * found.ld, spare + present * dims_);
      }
    });
    right_from_transpose(rows, columns, width, dims_);
  }

 private:
  void open(const Strided& tensor, int64_t head, bool complete) {
    tensor_ = &tensor;
    head_ = head;
    in_place_ = fits_ && complete && tensor.token % pair_of<P> == 0;
  }

  void copy_row(int64_t batch, int64_t token, bool skip, P* row) const {
    if (skip) {
      std::fill_n(row, dims_, P(0));
    } else {
      load_row(tensor_->row<const T>(batch, head_, token), row, problem_.head_dim, dims_);
    }
  }

  // In pieces of a size that needs no call: padded_dims is a multiple of it.
  void copy_row_of(const P* from, P* to) const {
    constexpr int64_t at_once = 64 / sizeof(P);
    for (int64_t dim = 0; dim < dims_; dim += at_once) {
      std::memcpy(to + dim, from + dim, sizeof(P) * at_once);
    }
  }

  Rows<P> own(int64_t batch, int64_t token) const {
    if constexpr (std::is_same_v<T, P>) {
      return {tensor_->row<const T>(batch, head_, token), tensor_->token};
    } else {
      return {};
    }
  }

  const Problem& problem_;
  const int64_t dims_;
  const bool fits_;
  P* copy_;
  P* pairs_;
  const Strided* tensor_;
  int64_t head_;
  bool in_place_;
};

struct Dim {
  int64_t start, size, stride;
};

// Reads rows in the order of memory, in which CPUs read ahead, to have them in caches. Products take the first elements
// of many rows at a time.
template <typename T>
inline void fetch_rows(const T* first, Dim heads, Dim tokens, int64_t head_dim) {
  const bool tokens_first = tokens.stride > heads.stride;
  const Dim outer = tokens_first ? tokens : heads, inner = tokens_first ? heads : tokens;
  for (int64_t index = outer.start; index < outer.start + outer.size; ++index) {
    for (int64_t other = inner.start; other < inner.start + inner.size; ++other) {
      const T* row = first + index * outer.stride + other * inner.stride;
      for (int64_t dim = 0; dim < head_dim; dim += 64 / sizeof(T)) {
        static_cast<void>(*reinterpret_cast<const volatile char*>(row + dim));
      }
    }
  }
}

template <typename T>
inline void fetch_queries(const Problem& problem, const Strided& tensor, const ShortItem& item) {
  const int64_t group_size = problem.num_heads / problem.num_key_heads;
  const Dim heads{item.first_head * group_size, (item.last_head - item.first_head) * group_size, tensor.head};
  for (const Sequence* sequence = item.group.begin; sequence != item.group.end; ++sequence) {
    const Dim tokens{sequence->first_query, sequence->num_queries, tensor.token};
    fetch_rows(tensor.row<const T>(sequence->batch, 0, 0), heads, tokens, problem.head_dim);
  }
}

template <typename T>
inline void fetch_keys(const Problem& problem, const Strided& tensor, const ShortItem& item) {
  const Dim heads{item.first_head, item.last_head - item.first_head, tensor.head};
  for (const Sequence* sequence = item.group.begin; sequence != item.group.end; ++sequence) {
    const Dim tokens{sequence->first_key, sequence->num_keys, tensor.token};
    fetch_rows(tensor.row<const T>(sequence->batch, 0, 0), heads, tokens, problem.head_dim);
  }
}

// Writes the first floats of padded_dims as a row of a result, in the dtype of the tensor. Streams whole cache lines: a
// store into a cache would read the line from memory first.
template <typename Products, typename T>
inline void store_row(const Problem& problem, const float* sums, T* row) {
  const int64_t head_dim = problem.head_dim;
  [[maybe_unused]] const bool streams = problem.streams && head_dim % (64 / static_cast<int64_t>(sizeof(T))) == 0 &&
      reinterpret_cast<uintptr_t>(row) % 64 == 0;
  if constexpr (!std::is_same_v<Products, FloatProducts>) {
    streams ? stream_rounded_row(sums, head_dim, row) : round_row(sums, head_dim, row);
  } else if constexpr (std::is_same_v<T, float>) {
    streams ? stream_row(sums, row, head_dim) : copy_row(sums, row, head_dim);
  } else {
    load_row(sums, row, head_dim, head_dim);
  }
}

// Writes `count` rows of padded_dims floats to neighboring tokens.
template <typename T, typename Products>
inline void store_rows(
    const Problem& problem, const float* sums, const Strided& tensor, int64_t batch, int64_t head, int64_t token,
    int64_t count) {
  for (int64_t row = 0; row < count; ++row) {
    store_row<Products>(problem, sums + row * padded_dims(problem), tensor.row<T>(batch, head, token + row));
  }
}

}  // namespace CPU_CAPABILITY
}  // namespace seqwarm
