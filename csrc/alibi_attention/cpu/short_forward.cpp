// Forward of short sequences. Rows of the output are queries, so that each sums over the keys of its own sequence:
//
//     S (keys, queries) = K · Qᵀ        O (queries, dims) = softmax(S)ᵀ · V

#include "kernels.h"
#include "short_products.h"
#include "short_rows.h"
#include "short_scores.h"
#include "short_tile.h"
#include "types.h"

namespace seqwarm {
inline namespace CPU_CAPABILITY {
namespace {

// Of normal positive numbers, 0, infinity and NaN. Vec::log2 calls a symbol of libtorch that no stable ABI has.
inline Vec log2_of(Vec x) {
  // x = mantissa · 2^exponent, with a mantissa from sqrt(1/2) to sqrt(2)
  const Ints bits = at::vec::cast<int32_t>(x), shift(23);
  const Ints exponent = (bits - Ints(0x3f3504f3)) >> shift;
  const Vec mantissa = at::vec::cast<float>(bits - (exponent << shift));
  // log(mantissa) = 2 atanh(ratio)
  const Vec ratio = (mantissa - Vec(1.f)) / (mantissa + Vec(1.f)), square = ratio * ratio;
  Vec series(1.f / 9);
  for (const float term : {1.f / 7, 1.f / 5, 1.f / 3, 1.f}) {
    series = at::vec::fmadd(series, square, Vec(term));
  }
  const Vec magic(12582912.f);  // 1.5 · 2^23: its last bits count by ones
  const Vec whole = at::vec::cast<float>(at::vec::cast<int32_t>(magic) + exponent) - magic;
  const Vec result = at::vec::fmadd(ratio * series, Vec(2.885390081777927f), whole);  // 2 / log(2)
  return Vec::blendv(Vec::blendv(x, result, x < Vec(infinity)), Vec(-infinity), x == Vec(0.f));
}

// T is the dtype of the inputs.
template <typename T, typename Products>
class ShortForward {
  using P = typename Products::Element;
  static constexpr int64_t width = Products::width, most = Products::most;

 public:
  ShortForward(const Problem& problem, Arena& arena)
      : problem_(problem),
        dims_(padded_dims(problem)),
        tile_(problem),
        query_rows_(arena, problem),
        key_rows_(arena, problem),
        value_rows_(arena, problem),
        query_(arena.take<P>(width * dims_)),
        spare_(arena.take<P>(width * dims_)),
        rows_(arena.take<float>(width * dims_)),
        scores_(arena),
        weights_(scores_.data()),
        keep_(arena.take<float>(problem.dropout.active ? most * width : 0)) {}

  void run(const ForwardOutputs& outputs, const ShortItem& item) {
    fetch_queries<T>(problem_, problem_.query, item);
    fetch_keys<T>(problem_, problem_.key, item);
    fetch_keys<T>(problem_, problem_.value, item);
    tile_.place(item.group);
    for (int64_t key_head = item.first_head; key_head < item.last_head; ++key_head) {
      run_head(outputs, key_head);
    }
  }

 private:
  void run_head(const ForwardOutputs& outputs, int64_t key_head) {
    key_rows_.open_keys(problem_.key, tile_, key_head);
    value_rows_.open_keys(problem_.value, tile_, key_head);
    value_rows_.make_right_keys(tile_);
    const int64_t group_size = problem_.num_heads / problem_.num_key_heads;
    for (int64_t head = key_head * group_size; head < (key_head + 1) * group_size; ++head) {
      tile_.set_head(head);
      query_rows_.open_queries(problem_.query, tile_, false);
      tile_.for_each_piece([&](const ShortPiece& piece) { attend(outputs, piece); });
    }
  }

  void attend(const ForwardOutputs& outputs, const ShortPiece& piece) {
    query_rows_.transpose_piece(tile_, piece, query_, spare_);
    tile_.for_each_span(piece, [&](const Span& span) {
      key_rows_.multiply_keys(span, span.column - piece.column, query_, weights_);
    });
    if (problem_.dropout.active) {
      keep_short(problem_, tile_, piece, problem_.dropout.inverse_keep, keep_);
    }
    for_each_group(0, width, [&](auto vectors, int64_t lane) {
      this->template softmax<vectors.value>(piece, lane);
    });
    scores_.set(piece);
    tile_.for_each_span(piece, [&](const Span& span) { store(outputs, piece, span); });
  }

  template <int vectors>
  void softmax(const ShortPiece& piece, int64_t lane) {
    const BiasedScores<vectors, true> biased(piece.biases, lane);
    Vec largest[vectors], total[vectors];
    for (int v = 0; v < vectors; ++v) {
      largest[v] = Vec(-infinity);
      total[v] = Vec(0.f);
    }
    float* row = weights_ + lane;
    for (int64_t key = 0; key < piece.num_keys; ++key, row += width) {
      for (int v = 0; v < vectors; ++v) {
        const Vec score = biased(Vec::loadu(row + v * lanes), key, v);
        score.store(row + v * lanes);
        largest[v] = at::vec::clamp_min(score, largest[v]);  // may drop a NaN, which the weight keeps
      }
    }
    for (int v = 0; v < vectors; ++v) {
      largest[v] = Vec::blendv(largest[v], Vec(0.f), largest[v] == Vec(-infinity));
    }
    row = weights_ + lane;
    for (int64_t key = 0; key < piece.num_keys; ++key, row += width) {
      for (int v = 0; v < vectors; ++v) {
        const Vec weight = exp2(Vec::loadu(row + v * lanes) - largest[v]);
        total[v] = total[v] + weight;
        weight.store(row + v * lanes);
      }
    }
    for (int v = 0; v < vectors; ++v) {
      (largest[v] + log2_of(total[v])).store(log2_sum_ + lane + v * lanes);  // -inf without keys
      total[v] = Vec(1.f) / total[v];
    }
    row = weights_ + lane;
    for (int64_t key = 0; key < piece.num_keys; ++key, row += width) {
      for (int v = 0; v < vectors; ++v) {
        Vec weight = Vec::loadu(row + v * lanes) * total[v];
        if (problem_.dropout.active) {
          weight = weight * Vec::loadu(keep_ + (row - weights_) + v * lanes);
        }
        weight.store(row + v * lanes);
      }
    }
  }

  void store(const ForwardOutputs& outputs, const ShortPiece& piece, const Span& span) {
    const int64_t first = span.column - piece.column;
    multiply_short(
        span.width, dims_, span.num_keys, scores_.by_query(span, first), value_rows_.right_keys(span), rows_, dims_,
        false);
    for (int64_t index = 0; index < span.width; ++index) {
      const float log2_sum = tile_.sees(span.column + index) ? log2_sum_[first + index] : -infinity;
      const bool empty = log2_sum == -infinity;  // false for NaN, which must reach the output
      if (empty) {
        std::fill_n(rows_ + index * dims_, dims_, 0.f);
      }
      const float slope2 = piece.biases.slope2[first + index];
      const int64_t place = tile_.place_of(span, index);
      outputs.log2_sum[place] = log2_sum;
      outputs.lse[place] = empty ? -infinity : (log2_sum - slope2 * tile_.beyond(span.column + index)) * ln_2;
    }
    store_rows<T, Products>(
        problem_, rows_, outputs.out, span.sequence->batch, tile_.head(), span.query, span.width);
  }

  const Problem& problem_;
  const int64_t dims_;
  ShortTile<Products> tile_;
  ShortRows<T, Products> query_rows_;
  ShortRows<T, Products> key_rows_;
  ShortRows<T, Products> value_rows_;
  P* query_;  // (dims, queries)
  P* spare_;
  float* rows_;
  ShortScores<Products> scores_;
  float* weights_;  // (keys, queries), the scores' own
  float* keep_;
  float log2_sum_[width];
};

}  // namespace

int64_t short_forward_bytes(const Problem& problem) {
  Arena arena(nullptr);
  with_short_types(problem, [&](auto input, auto products) {
    ShortForward<decltype(input), decltype(products)>(problem, arena);
  });
  return arena.used();
}

void short_forward(const Problem& problem, const ForwardOutputs& outputs, NextShortItem next, char* scratch) {
  with_short_types(problem, [&](auto input, auto products) {
    Arena arena(scratch);
    [[maybe_unused]] const Registers<decltype(products)> registers;
    ShortForward<decltype(input), decltype(products)> forward(problem, arena);
    for (ShortItem item; next(item);) {
      forward.run(outputs, item);
    }
    finish_streams();
  });
}

}  // namespace CPU_CAPABILITY
}  // namespace seqwarm
