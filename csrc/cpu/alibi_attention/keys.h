// The keys and values of one head, in the order that products read them.

#pragma once

#include "problem.h"
#include "simd.h"

namespace seqwarm {
inline namespace CPU_CAPABILITY {

// One of key or value in blocks of most_keys tokens, each packed when first asked for. Holds as many blocks as
// neighbouring queries can see; a block that finds its place taken replaces the other. Masked keys and those past the
// end are zeros: what stands there may be NaN, and 0 · NaN is not 0.
template <typename T, typename P>
class PackedBlocks {
 public:
  enum class Order { Rows, Columns };  // (keys, dims), or (dims, keys)

  PackedBlocks(Arena& arena, const Problem& problem, Order order)
      : problem_(problem), order_(order), dims_(padded_dims(problem)), num_slots_(count_slots(problem)) {
    blocks_ = arena.take<P>(num_slots_ * most_keys * dims_);
    held_ = arena.take<int64_t>(num_slots_);
    if (order == Order::Columns) {
      rows_ = arena.take<P>(most_keys * dims_);
      pairs_ = arena.take<P>(pair_of<P> == 1 ? 0 : most_keys * dims_);
    }
  }

  void open(const Strided& tensor, int64_t batch, int64_t key_head, const float* hidden) {
    tensor_ = &tensor;
    batch_ = batch;
    key_head_ = key_head;
    hidden_ = hidden;
    std::fill(held_, held_ + num_slots_, -1);
  }

  // From `key` on, to the end of its block. Rows: ld is padded_dims; columns: most_keys.
  const P* from(int64_t key) {
    const int64_t block = key / most_keys;
    P* slot = blocks_ + block % num_slots_ * most_keys * dims_;
    if (held_[block % num_slots_] != block) {
      held_[block % num_slots_] = block;
      pack(block, slot);
    }
    return slot + key % most_keys * (order_ == Order::Rows ? dims_ : 1);
  }

 private:
  static int64_t count_slots(const Problem& problem) {
    const int64_t all = padded_keys(problem.key_length) / most_keys;
    const int64_t in_sight = (problem.widest_view + most_queries) / most_keys + 2;
    return std::min(all, in_sight);
  }

  void pack(int64_t block, P* slot) {
    P* rows = order_ == Order::Rows ? slot : rows_;
    for (int64_t index = 0; index < most_keys; ++index) {
      const int64_t key = block * most_keys + index;
      const bool hide = key >= problem_.used_keys || (hidden_ != nullptr && hidden_[key] != 0);
      const int64_t count = hide ? 0 : problem_.head_dim;
      load_row(tensor_->row<const T>(batch_, key_head_, hide ? 0 : key), rows + index * dims_, count, dims_);
    }
    if (order_ == Order::Columns) {
      left_from_transpose(rows, slot, most_keys, most_keys, dims_, pairs_);
    }
  }

  const Problem& problem_;
  const Order order_;
  const int64_t dims_;
  const int64_t num_slots_;
  P* blocks_;
  int64_t* held_;
  P* rows_ = nullptr;
  P* pairs_ = nullptr;
  const Strided* tensor_ = nullptr;
  int64_t batch_ = 0;
  int64_t key_head_ = 0;
  const float* hidden_ = nullptr;
};

// For each key 0, or -inf where key_padding_mask hides it; null where there is no mask.
class HiddenKeys {
 public:
  HiddenKeys(Arena& arena, const Problem& problem)
      : hidden_(arena.take<float>(problem.key_padding_mask == nullptr ? 0 : padded_keys(problem.key_length))) {}

  const float* open(const Problem& problem, int64_t batch) {
    if (problem.key_padding_mask == nullptr) {
      return nullptr;
    }
    const bool* mask = problem.key_padding_mask + batch * problem.mask_batch;
    for (int64_t key = 0; key < padded_keys(problem.key_length); ++key) {
      hidden_[key] = key < problem.key_length && mask[key * problem.mask_key] ? 0.f : -infinity;
    }
    return hidden_;
  }

 private:
  float* hidden_;
};

// Whether all of [begin, end) are hidden: such a tile adds nothing.
inline bool all_hidden(const float* hidden, int64_t begin, int64_t end) {
  return hidden != nullptr && std::all_of(hidden + begin, hidden + end, [](float bias) { return bias != 0; });
}

// Cuts [begin, end), multiples of key_step, into tiles that lie in one block each; nearest to `begin` first, or to
// `end` where `backwards`.
template <typename Visit>
inline void for_each_tile(int64_t begin, int64_t end, bool backwards, const Visit& visit) {
  while (begin < end) {
    if (backwards) {
      const int64_t start = std::max((end - 1) / most_keys * most_keys, begin);
      visit(start, end);
      end = start;
    } else {
      const int64_t stop = std::min(begin / most_keys * most_keys + most_keys, end);
      visit(begin, stop);
      begin = stop;
    }
  }
}

}  // namespace CPU_CAPABILITY
}  // namespace seqwarm
