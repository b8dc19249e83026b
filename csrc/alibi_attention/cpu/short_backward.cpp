// Backward of short sequences, with rows of gradients as in short_forward.cpp:
//
//     S = K · Qᵀ     P = exp(S − lse)     dP = V · dOᵀ     dS = P ∘ (dP − delta + dlse)     delta = Σ P ∘ dP
//     dV += P · dO        dK += scale · dS · Q        dQ = scale · dSᵀ · K        dslope = −Σ dS ∘ distance

#include "kernels.h"
#include "short_products.h"
#include "short_rows.h"
#include "short_scores.h"
#include "short_tile.h"
#include "types.h"

namespace seqwarm {
inline namespace CPU_CAPABILITY {
namespace {

// T is the dtype of the inputs.
template <typename T, typename Products>
class ShortBackward {
  using P = typename Products::Element;
  static constexpr int64_t width = Products::width, most = Products::most;

 public:
  ShortBackward(const Problem& problem, Arena& arena)
      : problem_(problem),
        dims_(padded_dims(problem)),
        tile_(problem),
        query_rows_(arena, problem),
        grad_out_rows_(arena, problem),
        key_rows_(arena, problem),
        value_rows_(arena, problem),
        query_(arena.take<P>(width * dims_)),
        grad_out_(arena.take<P>(width * dims_)),
        spare_(arena.take<P>(width * dims_)),
        rows_(arena.take<float>(width * dims_)),
        weight_scores_(arena),
        grad_score_scores_(arena),
        weights_(weight_scores_.data()),
        grad_scores_(grad_score_scores_.data()),
        keep_(arena.take<float>(problem.dropout.active ? most * width : 0)),
        grad_key_(arena.take<float>(most * dims_)),
        grad_value_(arena.take<float>(most * dims_)) {}

  void run(const BackwardInputs& inputs, const BackwardOutputs& outputs, const ShortItem& item) {
    fetch_queries<T>(problem_, problem_.query, item);
    fetch_keys<T>(problem_, problem_.key, item);
    fetch_keys<T>(problem_, problem_.value, item);
    fetch_queries<T>(problem_, inputs.grad_out, item);
    tile_.place(item.group);
    for (int64_t key_head = item.first_head; key_head < item.last_head; ++key_head) {
      run_head(inputs, outputs, key_head);
    }
  }

 private:
  void run_head(const BackwardInputs& inputs, const BackwardOutputs& outputs, int64_t key_head) {
    key_rows_.open_keys(problem_.key, tile_, key_head);
    key_rows_.make_right_keys(tile_);
    value_rows_.open_keys(problem_.value, tile_, key_head);
    const int64_t group_size = problem_.num_heads / problem_.num_key_heads;
    for (int64_t head = key_head * group_size; head < (key_head + 1) * group_size; ++head) {
      is_first_head_ = head == key_head * group_size;
      tile_.set_head(head);
      query_rows_.open_queries(problem_.query, tile_, true);
      grad_out_rows_.open_queries(inputs.grad_out, tile_, true);
      tile_.for_each_piece([&](const ShortPiece& piece) { differentiate(inputs, outputs, piece); });
    }
    store_key_gradient(outputs.grad_key, grad_key_, key_head);
    store_key_gradient(outputs.grad_value, grad_value_, key_head);
  }

  void differentiate(const BackwardInputs& inputs, const BackwardOutputs& outputs, const ShortPiece& piece) {
    load_sums(inputs, piece);
    query_rows_.transpose_piece(tile_, piece, query_, spare_);
    grad_out_rows_.transpose_piece(tile_, piece, grad_out_, spare_);
    tile_.for_each_span(piece, [&](const Span& span) {
      const int64_t first = span.column - piece.column;
      key_rows_.multiply_keys(span, first, query_, weights_);
      value_rows_.multiply_keys(span, first, grad_out_, grad_scores_);
    });
    if (problem_.dropout.active) {
      keep_short(problem_, tile_, piece, problem_.dropout.inverse_keep, keep_);
    }
    for_each_group(0, width, [&](auto vectors, int64_t lane) {
      this->template differentiate_scores<vectors.value>(piece, lane, outputs.slope_rows != nullptr);
    });
    weight_scores_.set(piece);
    grad_score_scores_.set(piece);
    tile_.for_each_span(piece, [&](const Span& span) { add_up(outputs, piece, span); });
  }

  void load_sums(const BackwardInputs& inputs, const ShortPiece& piece) {
    std::fill_n(log2_sum_, width, infinity);  // gives weights of 0
    std::fill_n(grad_lse_, width, 0.f);
    tile_.for_each_span(piece, [&](const Span& span) {
      for (int64_t index = 0; index < span.width; ++index) {
        const int64_t place = tile_.place_of(span, index), lane = span.column - piece.column + index;
        if (tile_.sees(span.column + index) && inputs.lse[place] != -infinity) {
          log2_sum_[lane] = inputs.log2_sum[place];
          grad_lse_[lane] = inputs.grad_lse == nullptr ? 0 : inputs.grad_lse[place];
        }
      }
    });
  }

  // Turns products with keys into weights, and products with values into gradients of scores, times the scale.
  template <int vectors>
  void differentiate_scores(const ShortPiece& piece, int64_t lane, bool with_slopes) {
    const BiasedScores<vectors, true> biased(piece.biases, lane);
    const bool dropping = problem_.dropout.active;
    for (int v = 0; v < vectors; ++v) {
      const int64_t first = lane + v * lanes;
      const Vec zero = Vec::loadu(log2_sum_ + first), grad_lse = Vec::loadu(grad_lse_ + first);
      const Vec center = Vec::loadu(piece.biases.center + first);
      Vec delta(0.f), sum(0.f), sum_distant(0.f), mean_distance(0.f);
      for (int64_t key = 0; key < piece.num_keys; ++key) {
        const int64_t place = key * width + first;
        const Vec weight = exp2(biased(Vec::loadu(weights_ + place), key, v) - zero);
        Vec grad_weight = Vec::loadu(grad_scores_ + place);
        if (dropping) {
          grad_weight = grad_weight * Vec::loadu(keep_ + place);
        }
        // With the keys of another sequence, products may be NaN and `keep_` is not set.
        grad_weight = Vec::blendv(grad_weight, Vec(0.f), weight == Vec(0.f));
        delta = at::vec::fmadd(weight, grad_weight, delta);
        weight.store(weights_ + place);
        grad_weight.store(grad_scores_ + place);
      }
      for (int64_t key = 0; key < piece.num_keys; ++key) {
        const int64_t place = key * width + first;
        const Vec weight = Vec::loadu(weights_ + place);
        // In this order, a query's only key leaves exactly the gradient of lse.
        const Vec grad_score = weight * (Vec::loadu(grad_scores_ + place) - delta + grad_lse);
        if (with_slopes) {
          const Vec distance = (center - Vec(static_cast<float>(key))).abs();
          sum = sum + grad_score;
          sum_distant = at::vec::fmadd(grad_score, distance, sum_distant);
          mean_distance = at::vec::fmadd(weight, distance, mean_distance);
        }
        (dropping ? weight * Vec::loadu(keep_ + place) : weight).store(weights_ + place);
        (grad_score * Vec(problem_.scale)).store(grad_scores_ + place);
      }
      // Exact score gradients sum to the gradient of lse. Their difference is rounding, which enters the sum times the
      // mean distance.
      (sum_distant - (sum - grad_lse) * mean_distance).store(grad_slope_ + first);
    }
  }

  void add_up(const BackwardOutputs& outputs, const ShortPiece& piece, const Span& span) {
    const int64_t first = span.column - piece.column;
    const bool starts = is_first_head_ && span.query == span.sequence->first_query;
    if (starts) {
      clear_other_keys(span);
    }
    multiply_short(
        span.num_keys, dims_, span.width, weight_scores_.by_key(span, first), grad_out_rows_.right_queries(span),
        grad_value_ + span.place * dims_, dims_, !starts);
    multiply_short(
        span.num_keys, dims_, span.width, grad_score_scores_.by_key(span, first), query_rows_.right_queries(span),
        grad_key_ + span.place * dims_, dims_, !starts);
    multiply_short(
        span.width, dims_, span.num_keys, grad_score_scores_.by_query(span, first), key_rows_.right_keys(span), rows_,
        dims_, false);
    for (int64_t index = 0; index < span.width; ++index) {
      const int64_t column = span.column + index;
      if (!tile_.sees(column)) {
        std::fill_n(rows_ + index * dims_, dims_, 0.f);
      }
      if (outputs.slope_rows != nullptr) {
        const float from_beyond = tile_.beyond(column) * grad_lse_[first + index];
        outputs.slope_rows[tile_.place_of(span, index)] =
            tile_.sees(column) ? -grad_slope_[first + index] - from_beyond : 0.f;
      }
    }
    store_rows<T, Products>(
        problem_, rows_, outputs.grad_query, span.sequence->batch, tile_.head(), span.query, span.width);
  }

  // Zeros for the keys of a sequence outside its first span, with which the sums start.
  void clear_other_keys(const Span& span) {
    const int64_t begin = span.place - (span.key - span.sequence->first_key), end = span.place + span.num_keys;
    const int64_t last = begin + round_up(span.sequence->num_keys, Products::step);
    for (float* sums : {grad_key_, grad_value_}) {
      std::fill(sums + begin * dims_, sums + span.place * dims_, 0.f);
      std::fill(sums + end * dims_, sums + last * dims_, 0.f);
    }
  }

  void store_key_gradient(const Strided& tensor, const float* sums, int64_t key_head) const {
    for (const Sequence* sequence = tile_.group().begin; sequence != tile_.group().end; ++sequence) {
      if (sequence->num_queries > 0) {
        store_rows<T, Products>(
            problem_, sums, tensor, sequence->batch, key_head, sequence->first_key, sequence->num_keys);
      } else {
        for (int64_t key = 0; key < sequence->num_keys; ++key) {
          std::fill_n(tensor.row<T>(sequence->batch, key_head, sequence->first_key + key), problem_.head_dim, T(0));
        }
      }
      sums += round_up(sequence->num_keys, Products::step) * dims_;
    }
  }

  const Problem& problem_;
  const int64_t dims_;
  ShortTile<Products> tile_;
  ShortRows<T, Products> query_rows_;
  ShortRows<T, Products> grad_out_rows_;
  ShortRows<T, Products> key_rows_;
  ShortRows<T, Products> value_rows_;
  P* query_;  // (dims, queries)
  P* grad_out_;
  P* spare_;
  float* rows_;
  ShortScores<Products> weight_scores_;
  ShortScores<Products> grad_score_scores_;
  float* weights_;  // (keys, queries), the scores' own
  float* grad_scores_;
  float* keep_;
  float* grad_key_;  // (keys, dims)
  float* grad_value_;
  bool is_first_head_;  // of those that share keys
  float log2_sum_[width];
  float grad_lse_[width];
  float grad_slope_[width];
};

}  // namespace

int64_t short_backward_bytes(const Problem& problem) {
  Arena arena(nullptr);
  with_short_types(problem, [&](auto input, auto products) {
    ShortBackward<decltype(input), decltype(products)>(problem, arena);
  });
  return arena.used();
}

void short_backward(
    const Problem& problem, const BackwardInputs& inputs, const BackwardOutputs& outputs, NextShortItem next,
    char* scratch) {
  with_short_types(problem, [&](auto input, auto products) {
    Arena arena(scratch);
    [[maybe_unused]] const Registers<decltype(products)> registers;
    ShortBackward<decltype(input), decltype(products)> backward(problem, arena);
    for (ShortItem item; next(item);) {
      backward.run(inputs, outputs, item);
    }
    finish_streams();
  });
}

}  // namespace CPU_CAPABILITY
}  // namespace seqwarm
