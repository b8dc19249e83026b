// The keys and values of one head, in the memory order that products need.

#pragma once

#include "problem.h"
#include "simd.h"

namespace seqwarm {
inline namespace CPU_CAPABILITY {

// `count` rows of padded_dims elements from token `first`: the original memory if it is complete, else a copy in
// `copy`. Rows that `missing` marks become zeros.
template <typename T, typename P, typename Missing>
inline Rows<P> rows_of(
    const Problem& problem, const Strided& tensor, int64_t batch, int64_t head, int64_t first, int64_t count, P* copy,
    const Missing& missing) {
  const int64_t dims = padded_dims(problem);
  bool in_place = std::is_same_v<T, P> && dims == problem.head_dim && tensor.token % pair_of<P> == 0;
  for (int64_t row = 0; in_place && row < count; ++row) {
    in_place = !missing(first + row);
  }
  if constexpr (std::is_same_v<T, P>) {
    if (in_place) {
      return {tensor.row<const T>(batch, head, first), tensor.token};
    }
  }
  for (int64_t row = 0; row < count; ++row) {
    P* to = copy + row * dims;
    if (missing(first + row)) {
      std::fill_n(to, dims, P(0));
    } else {
      load_row(tensor.row<const T>(batch, head, first + row), to, problem.head_dim, dims);
    }
  }
  return {copy, dims};
}

// Key or value in blocks of most_keys tokens. A block is packed at its first use, unless its memory can be read
// directly. Holds as many blocks as neighboring queries can see. A new block replaces the old block of its slot. Hidden
// keys and keys past the end are zeros: they may hold NaN, and 0 · NaN is not 0.
template <typename T, typename P>
class PackedBlocks {
 public:
  enum class Order { Rows, Columns };  // (keys, dims), or (dims, keys)

  PackedBlocks(Arena& arena, const Problem& problem, Order order)
      : problem_(problem), order_(order), dims_(padded_dims(problem)), num_slots_(count_slots(problem)) {
    blocks_ = arena.take<P>(num_slots_ * most_keys * dims_);
    held_ = arena.take<Held>(num_slots_);
    if (order == Order::Columns) {
      rows_ = arena.take<P>(most_keys * dims_);
      if constexpr (!std::is_same_v<P, float>) {
        pairs_ = arena.take<P>(most_keys * dims_);
      }
    }
  }

  void open(const Strided& tensor, int64_t batch, int64_t key_head, const float* hidden) {
    tensor_ = &tensor;
    batch_ = batch;
    key_head_ = key_head;
    hidden_ = hidden;
    std::fill(held_, held_ + num_slots_, Held{-1, {}});
  }

  // The rows from `key` to the end of its block.
  Rows<P> from(int64_t key) {
    const int64_t block = key / most_keys;
    Held& held = held_[block % num_slots_];
    if (held.block != block) {
      held = {block, pack(block, blocks_ + block % num_slots_ * most_keys * dims_)};
    }
    return {held.rows.data + key % most_keys * (order_ == Order::Rows ? held.rows.ld : 1), held.rows.ld};
  }

 private:
  struct Held {
    int64_t block;
    Rows<P> rows;
  };

  static int64_t count_slots(const Problem& problem) {
    const int64_t all = padded_keys(problem.key_length) / most_keys;
    const int64_t in_sight = (problem.widest_view + most_queries) / most_keys + 2;
    return std::min(all, in_sight);
  }

  Rows<P> pack(int64_t block, P* slot) {
    const auto missing = [&](int64_t key) {
      return key >= problem_.used_keys || (hidden_ != nullptr && hidden_[key] != 0);
    };
    const int64_t first = block * most_keys;
    const int64_t count = std::min(most_keys, round_up(problem_.used_keys - first, key_step));
    const Rows<P> rows = rows_of<T>(
        problem_, *tensor_, batch_, key_head_, first, count, order_ == Order::Rows ? slot : rows_, missing);
    if (order_ == Order::Rows) {
      return rows;
    }
    left_from_transpose(rows, slot, most_keys, dims_, count, pairs_);
    return {slot, most_keys};
  }

  const Problem& problem_;
  const Order order_;
  const int64_t dims_;
  const int64_t num_slots_;
  P* blocks_;
  Held* held_;
  P* rows_ = nullptr;
  P* pairs_ = nullptr;
  const Strided* tensor_ = nullptr;
  int64_t batch_;
  int64_t key_head_;
  const float* hidden_ = nullptr;
};

// For each key 0, or -inf where key_padding_mask hides the key or no query sees it. Null where there are none of these.
class HiddenKeys {
 public:
  HiddenKeys(Arena& arena, const Problem& problem)
      : any_(problem.key_padding_mask != nullptr || problem.hides_keys),
        hidden_(arena.take<float>(any_ ? padded_keys(problem.key_length) : 0)) {}

  const float* open(const Problem& problem, int64_t batch) {
    if (!any_) {
      return nullptr;
    }
    std::fill(hidden_, hidden_ + padded_keys(problem.key_length), -infinity);
    for_each_key_interval(problem, batch, [&](int64_t, int64_t, SeenKeys seen) {
      std::fill(hidden_ + seen.low, hidden_ + seen.high, 0.f);
    });
    const bool* mask = problem.key_padding_mask + batch * problem.mask_batch;
    for (int64_t key = 0; problem.key_padding_mask != nullptr && key < problem.key_length; ++key) {
      hidden_[key] = mask[key * problem.mask_key] ? hidden_[key] : -infinity;
    }
    return hidden_;
  }

 private:
  const bool any_;
  float* hidden_;
};

// Whether all keys of [begin, end) are hidden, so that the tile adds nothing.
inline bool all_hidden(const float* hidden, int64_t begin, int64_t end) {
  return hidden != nullptr && std::all_of(hidden + begin, hidden + end, [](float bias) { return bias != 0; });
}

}  // namespace CPU_CAPABILITY
}  // namespace seqwarm
