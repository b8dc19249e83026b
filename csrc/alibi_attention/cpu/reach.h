// The reach of a query: the distance beyond which all keys together weigh less than the tolerance.
// docs/kernels/skipping.md has the proof, and triton_reach.py the same formula. In base 2, with a = |q| · max|k| · |scale| · log2(e), slope m > 0
// and a softmax sum of at least 2^L,
//
//   d = (a - L - log2(1 - 2^-m) - t) / m

#pragma once

#include "queries.h"

namespace seqwarm {
inline namespace CPU_CAPABILITY {

// The largest squared norm of the keys in each block of most_keys. It is found when first asked for, since attention to
// these keys follows, which then finds them in caches.
template <typename T>
class KeyNorms {
 public:
  KeyNorms(Arena& arena, const Problem& problem)
      : problem_(problem), norms_(arena.take<float>(padded_keys(problem.key_length) / most_keys)) {}

  void open(int64_t batch, int64_t key_head, const float* hidden) {
    batch_ = batch;
    key_head_ = key_head;
    hidden_ = hidden;
    std::fill(norms_, norms_ + padded_keys(problem_.key_length) / most_keys, unknown);
  }

  // The largest norm of the keys in the blocks that overlap [begin, end).
  float largest(int64_t begin, int64_t end) const {
    float largest = 0;
    for (int64_t block = begin / most_keys; block * most_keys < end; ++block) {
      if (norms_[block] == unknown) {
        norms_[block] = find(block);
      }
      largest = std::max(largest, norms_[block]);
    }
    return std::sqrt(largest);
  }

  float squared_norm(const T* vector) const { return dot(vector, vector, problem_.head_dim); }

 private:
  static constexpr float unknown = -1;

  float find(int64_t block) const {
    float largest = 0;
    const int64_t first = block * most_keys, end = std::min(first + most_keys, problem_.used_keys);
    for (int64_t key = first; key < end; ++key) {
      if (hidden_ == nullptr || hidden_[key] == 0) {
        largest = larger(largest, squared_norm(problem_.key.row<const T>(batch_, key_head_, key)));
      }
    }
    return largest;
  }

  // NaN counts as infinite, so that its block is visited.
  static float larger(float largest, float norm) {
    return std::isnan(norm) ? infinity : std::max(largest, norm);
  }

  const Problem& problem_;
  float* norms_;
  int64_t batch_;
  int64_t key_head_;
  const float* hidden_ = nullptr;
};

class Reach {
 public:
  Reach(const Problem& problem, float key_norm, float log2_tolerance)
      : most_(key_norm * std::abs(problem.scale * log2_e) * relative_margin), log2_tolerance_(log2_tolerance) {}

  // The reach of one query, or `unbounded` where no finite bound holds. `known` is L.
  int64_t distance(float query_norm, float slope2, float known) const {
    if (slope2 != slope2_) {  // most queries share one slope
      slope2_ = slope2;
      log2_tail_ = std::log2(-std::expm1(-slope2 * ln_2));
    }
    const float most = query_norm * most_ + absolute_margin;
    const float distance = (most - known - log2_tail_ - log2_tolerance_) / slope2;
    // A NaN compares false.
    return slope2 > 0 && distance < 1e9f ? static_cast<int64_t>(std::max(std::ceil(distance), 0.f)) : unbounded;
  }

 private:
  // Margins for rounding: relative for norms and products, absolute for sums in base 2.
  static constexpr float relative_margin = 1 + 0x1p-9f;
  static constexpr float absolute_margin = 0x1p-4f;

  const float most_;
  const float log2_tolerance_;
  mutable float slope2_ = std::numeric_limits<float>::quiet_NaN();  // no slope equals it
  mutable float log2_tail_ = 0;
};

}  // namespace CPU_CAPABILITY
}  // namespace seqwarm
