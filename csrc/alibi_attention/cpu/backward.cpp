// Backward: a tile of queries against the tiles of keys that forward attended, as in forward.cpp with keys as rows:
//
//     S = K · Qᵀ     P = exp(S − lse)     dP = V · dOᵀ     dS = P ∘ (dP − delta)     delta = Σ dO ∘ O − dlse
//     dV += P · dO        dK += scale · dS · Q        dQᵀ += scale · Kᵀ · dS        dslope = −Σ dS ∘ distance
//
// Five products: a thread owns all queries of its keys, so it sums dK and dV alone, in a fixed order.

#include "dropout.h"
#include "kernels.h"
#include "keys.h"
#include "problem.h"
#include "products.h"
#include "queries.h"
#include "scores.h"
#include "simd.h"
#include "types.h"

namespace seqwarm {
inline namespace CPU_CAPABILITY {
namespace {

int64_t partial_size(const Problem& problem) {
  return round_up(problem.key_length, key_step) * padded_dims(problem);
}

// The partial gradients of an item, first of the key, then of the value.
float* partial_of(const Problem& problem, const BackwardOutputs& outputs, const Item& item) {
  const int64_t index = (item.batch * problem.num_key_heads + item.key_head) * item.num_chunks + item.chunk;
  return outputs.partial + index * 2 * partial_size(problem);
}

// The number of keys whose gradients an item sums at a time: for a chunk all, else as many as the queries of a tile may
// see. The sums of a key are at its index modulo this number.
int64_t held_keys(const Problem& problem, bool chunked) {
  const int64_t all = round_up(problem.key_length, key_step);
  const bool packed = problem.cu_seqlens_q != nullptr;
  const int32_t *ends_q = problem.cu_seqlens_q, *ends_k = problem.cu_seqlens_k;
  if (chunked || (packed && !std::equal(ends_q, ends_q + problem.num_sequences + 1, ends_k))) {
    return all;
  }
  // Those of the first and of the last query, which may be in two segments or packed sequences.
  const int64_t seen = 2 * (packed ? problem.longest : problem.widest_view) + most_queries;
  return std::min(all, round_up(seen + 2 * key_step, most_keys));
}

template <typename T>
void store_key_gradients(
    const Problem& problem, const BackwardOutputs& outputs, const Item& item, int64_t first, int64_t end,
    float* grad_key, const float* grad_value) {
  const int64_t dims = padded_dims(problem);
  for (int64_t key = first; key < end; ++key, grad_key += dims, grad_value += dims) {
    for (int64_t dim = 0; dim < dims; dim += lanes) {
      (Vec::loadu(grad_key + dim) * Vec(problem.scale)).store(grad_key + dim);
    }
    load_row(grad_key, outputs.grad_key.row<T>(item.batch, item.key_head, key), problem.head_dim, problem.head_dim);
    load_row(grad_value, outputs.grad_value.row<T>(item.batch, item.key_head, key), problem.head_dim, problem.head_dim);
  }
}

// T is the dtype of the inputs, P the dtype of the products.
template <typename T, typename P>
class Backward {
  using Keys = PackedBlocks<T, P>;

  // A tile of query or grad_out, as the right side of products.
  struct Operand {
    P* copy;
    P* pairs;
    P* transposed;
    Rows<P> rows;  // also the right side of products for float; other dtypes use `pairs`

    Operand(Arena& arena, int64_t size)
        : copy(arena.take<P>(size)),
          pairs(pair_of<P> == 1 ? nullptr : arena.take<P>(size)),
          transposed(arena.take<P>(size)) {}
  };

 public:
  Backward(const Problem& problem, Arena& arena, bool chunked)
      : problem_(problem),
        width_(tile_queries(problem)),
        dims_(padded_dims(problem)),
        keys_(arena, problem, Keys::Order::Rows),
        key_columns_(arena, problem, Keys::Order::Columns),
        values_(arena, problem, Keys::Order::Rows),
        hidden_keys_(arena, problem),
        query_(arena, width_ * dims_),
        grad_out_(arena, width_ * dims_),
        weights_(arena.take<float>(most_keys * width_)),
        grad_scores_(arena.take<float>(most_keys * width_)),
        spare_(arena.take<float>(most_keys * width_)),
        left_weights_(arena.take<P>(pair_of<P> == 1 ? 0 : most_keys * width_)),
        left_grad_scores_(arena.take<P>(pair_of<P> == 1 ? 0 : most_keys * width_)),
        right_grad_scores_(arena.take<P>(pair_of<P> == 1 ? 0 : most_keys * width_)),
        keep_(arena.take<float>(problem.dropout.active ? most_keys * width_ : 0)),
        grad_query_(arena.take<float>(dims_ * width_)),
        grad_query_rows_(arena.take<float>(dims_ * width_)),
        held_keys_(held_keys(problem, chunked)),
        sums_(arena.take<float>(chunked ? 0 : 2 * held_keys_ * dims_)) {}

  void run(const BackwardInputs& inputs, const BackwardOutputs& outputs, const Item& item) {
    hidden_ = hidden_keys_.open(problem_, item.batch);
    keys_.open(problem_.key, item.batch, item.key_head, hidden_);
    key_columns_.open(problem_.key, item.batch, item.key_head, hidden_);
    values_.open(problem_.value, item.batch, item.key_head, hidden_);
    grad_key_ = item.num_chunks == 1 ? sums_ : partial_of(problem_, outputs, item);
    grad_value_ = grad_key_ + held_keys_ * dims_;
    std::fill(grad_key_, grad_key_ + 2 * held_keys_ * dims_, 0.f);
    stored_ = 0;
    with_slopes_ = outputs.slope_rows != nullptr;
    const int64_t group_size = problem_.num_heads / problem_.num_key_heads;
    const int64_t num_tiles = (problem_.query_length + width_ - 1) / width_;
    // All heads of a tile before the next tile, so that its keys are not needed again.
    for (int64_t index = item.chunk; index < group_size * num_tiles; index += item.num_chunks) {
      const int64_t head = item.key_head * group_size + index % group_size;
      tile_ = place_queries(problem_, item.batch, head, index / group_size * width_);
      store_keys(outputs, item, tile_.any ? tile_.first_low / key_step * key_step : 0);
      differentiate(inputs);
      store(outputs);
    }
    store_keys(outputs, item, problem_.key_length);
  }

 private:
  // Stores the gradients of the keys before `end`, which no later tile sees, and clears their sums for other keys.
  void store_keys(const BackwardOutputs& outputs, const Item& item, int64_t end) {
    for (; item.num_chunks == 1 && stored_ < end; stored_ += key_step) {
      const int64_t last = std::min(stored_ + key_step, problem_.key_length);
      float* grad_key = grad_key_ + stored_ % held_keys_ * dims_;
      float* grad_value = grad_value_ + stored_ % held_keys_ * dims_;
      store_key_gradients<T>(problem_, outputs, item, stored_, last, grad_key, grad_value);
      std::fill_n(grad_key, key_step * dims_, 0.f);
      std::fill_n(grad_value, key_step * dims_, 0.f);
    }
  }

  void differentiate(const BackwardInputs& inputs) {
    slope_terms_ = {};
    if (tile_.any) {
      load_rows(inputs);
    }
    std::fill(grad_query_, grad_query_ + dims_ * width_, 0.f);
    if (!tile_.any) {
      return;
    }
    int64_t begin = problem_.key_length, end = 0;
    const int64_t num_ranges = (problem_.query_length + range_block - 1) / range_block;
    for (int64_t column = 0; column < width_ && tile_.start + column < problem_.query_length; column += range_block) {
      const int32_t* range = inputs.ranges + (tile_.row * num_ranges + (tile_.start + column) / range_block) * 2;
      narrow(tile_, column, range[0], range[1]);
      begin = std::min<int64_t>(begin, range[0]);
      end = std::max<int64_t>(end, range[1]);
    }
    begin = std::max<int64_t>(begin, 0);  // an operator that is called directly may get any numbers
    end = std::min(end, problem_.used_keys);
    for_each_piece(
        tile_, hidden_, begin / key_step * key_step, round_up(end, key_step), false,
        [&](const Piece& piece) { differentiate_piece(piece); });
  }

  void load_rows(const BackwardInputs& inputs) {
    const int64_t first = tile_.row * problem_.query_length + tile_.start;
    for (int64_t column = 0; column < width_; ++column) {
      tile_.sees[column] = tile_.sees[column] && inputs.lse[first + column] != -infinity;  // or all its keys are masked
    }
    load(query_, problem_.query);
    load(grad_out_, inputs.grad_out);
    set_delta(inputs);
    for (int64_t column = 0; column < width_; ++column) {
      const int64_t place = first + column;
      log2_sum_[column] = infinity;  // gives weights of 0
      grad_lse_[column] = 0;
      if (tile_.sees[column]) {
        log2_sum_[column] = inputs.log2_sum[place];
        grad_lse_[column] = inputs.grad_lse == nullptr ? 0 : inputs.grad_lse[place];
        delta_[column] -= grad_lse_[column];
      }
    }
  }

  // Σ dO ∘ O, for float in the order in which products sum dP. For a query that sees one key, or whose weight is almost
  // all on one key, dP = delta, and its gradient is only the rounding error of the difference.
  void set_delta(const BackwardInputs& inputs) {
    if constexpr (std::is_same_v<P, float>) {
      right_from_transpose(rows_of_tile(inputs.out, grad_query_rows_), grad_query_, width_, dims_);
      std::fill(delta_, delta_ + width_, 0.f);
      for (int64_t first = 0; first < dims_; first += dims_at_once) {
        float sum[most_queries] = {};
        for (int64_t dim = first; dim < std::min(first + dims_at_once, dims_); ++dim) {
          const float* out = grad_query_ + dim * width_;
          const float* grad_out = grad_out_.transposed + dim * width_;
          for (int64_t column = 0; column < width_; ++column) {
            sum[column] = std::fma(out[column], grad_out[column], sum[column]);
          }
        }
        for (int64_t column = 0; column < width_; ++column) {
          delta_[column] += sum[column];
        }
      }
    } else {
      for (int64_t column = 0; column < width_; ++column) {
        const auto row = [&](const Strided& tensor) {
          return tensor.row<const T>(tile_.batch, tile_.head, tile_.start + column);
        };
        delta_[column] = tile_.sees[column] ? dot(row(inputs.out), row(inputs.grad_out), problem_.head_dim) : 0.f;
      }
    }
  }

  // Zeros replace queries that see no key: they may hold NaN, and sums over queries include them.
  Rows<P> rows_of_tile(const Strided& tensor, P* copy) const {
    const auto missing = [&](int64_t token) { return !tile_.sees[token - tile_.start]; };
    return rows_of<T>(problem_, tensor, tile_.batch, tile_.head, tile_.start, width_, copy, missing);
  }

  void load(Operand& operand, const Strided& tensor) {
    operand.rows = rows_of_tile(tensor, operand.copy);
    right_from_transpose(operand.rows, operand.transposed, width_, dims_);
    if constexpr (!std::is_same_v<P, float>) {
      pair_rows(operand.rows.data, operand.rows.ld, operand.pairs, width_, dims_);
      operand.rows = {operand.pairs, dims_};
    }
  }

  void differentiate_piece(const Piece& piece) {
    const int64_t num_keys = piece.num_keys();
    multiply_rows(keys_.from(piece.begin), query_.transposed, weights_, spare_, piece, width_, dims_);
    multiply_rows(values_.from(piece.begin), grad_out_.transposed, grad_scores_, spare_, piece, width_, dims_);
    set_biases(biases_, problem_, tile_, piece, hidden_);
    if (problem_.dropout.active) {
      const float kept_value = problem_.dropout.inverse_keep;
      keep_tile(problem_.dropout, kept_value, tile_.row, tile_.start, piece.begin, num_keys, width_, keep_);
    }
    for_each_group(piece.column, piece.column + piece.width, [&](auto vectors, int64_t lane) {
      with_mask(biases_.side, [&](auto masked) {
        this->template differentiate_scores<vectors.value, masked.value>(lane, num_keys);
      });
    });
    add_up(piece, operands(num_keys));
  }

  // Turns products with keys into weights, and products with values into gradients of scores.
  template <int vectors, bool masked>
  void differentiate_scores(int64_t lane, int64_t num_keys) {
    const BiasedScores<vectors, masked> biased(biases_, lane);
    Vec zero[vectors], delta[vectors], center[vectors];
    Vec sum[vectors], sum_distant[vectors], mean_distance[vectors];
    for (int v = 0; v < vectors; ++v) {
      const int64_t first = lane + v * lanes;
      zero[v] = Vec::loadu(log2_sum_ + first) + Vec::loadu(biases_.shift + first);
      delta[v] = Vec::loadu(delta_ + first);
      sum[v] = sum_distant[v] = mean_distance[v] = Vec(0.f);
      center[v] = Vec::loadu(biases_.center + first);
    }
    const bool dropping = problem_.dropout.active;
    for (int64_t key = 0; key < num_keys; ++key) {
      for (int v = 0; v < vectors; ++v) {
        const int64_t place = key * width_ + lane + v * lanes;
        Vec weight = exp2(biased(Vec::loadu(weights_ + place), key, v) - zero[v]);
        Vec grad_weight = Vec::loadu(grad_scores_ + place);
        const Vec keep = dropping ? Vec::loadu(keep_ + place) : Vec(1.f);
        if (dropping) {
          grad_weight = grad_weight * keep;
        }
        const Vec grad_score = weight * (grad_weight - delta[v]);
        if (with_slopes_) {
          const Vec distance = (center[v] - Vec(static_cast<float>(key))).abs();
          sum[v] = sum[v] + grad_score;
          sum_distant[v] = at::vec::fmadd(grad_score, distance, sum_distant[v]);
          mean_distance[v] = at::vec::fmadd(weight, distance, mean_distance[v]);
        }
        (dropping ? weight * keep : weight).store(weights_ + place);
        grad_score.store(grad_scores_ + place);
      }
    }
    for (int v = 0; with_slopes_ && v < vectors; ++v) {
      const int64_t first = lane + v * lanes;
      add_to(slope_terms_.sum + first, sum[v]);
      add_to(slope_terms_.sum_distant + first, sum_distant[v]);
      add_to(slope_terms_.mean_distance + first, mean_distance[v]);
    }
  }

  static void add_to(float* place, Vec term) { (Vec::loadu(place) + term).store(place); }

  // A query's contribution to the gradient of the slopes. Exact score gradients sum to the gradient of lse. Their
  // difference is the rounding of delta, which enters the sum times the mean distance and is subtracted here.
  float grad_slope(int64_t column) const {
    const float surplus = slope_terms_.sum[column] - grad_lse_[column];
    const float from_center = slope_terms_.sum_distant[column] - surplus * slope_terms_.mean_distance[column];
    return -from_center - tile_.beyond[column] * grad_lse_[column];
  }

  struct Operands {
    const P* weights;  // left
    const P* left;     // gradients of scores
    const P* right;
  };

  Operands operands(int64_t num_keys) {
    if constexpr (std::is_same_v<P, float>) {
      return {weights_, grad_scores_, grad_scores_};
    } else {
      round_row(weights_, num_keys * width_, left_weights_);
      round_to_pairs(grad_scores_, num_keys, width_, width_, left_grad_scores_, right_grad_scores_);
      return {left_weights_, left_grad_scores_, right_grad_scores_};
    }
  }

  void add_up(const Piece& piece, const Operands& scores) {
    const int64_t num_keys = piece.num_keys(), column = piece.column;
    const int64_t place = piece.begin % held_keys_ * dims_;
    float* grad_key = grad_key_ + place;
    float* grad_value = grad_value_ + place;
    const Rows<P> grad_out = grad_out_.rows, query = query_.rows, keys = key_columns_.from(piece.begin);
    multiply(
        num_keys, dims_, piece.width, scores.weights + column, width_, grad_out.data + column * grad_out.ld,
        grad_out.ld, grad_value, dims_, true);
    multiply(
        num_keys, dims_, piece.width, scores.left + column, width_, query.data + column * query.ld, query.ld, grad_key,
        dims_, true);
    multiply(
        dims_, piece.width, num_keys, keys.data, keys.ld, scores.right + column * pair_of<P>, width_,
        grad_query_ + column, width_, true);
  }

  void store(const BackwardOutputs& outputs) {
    for (int64_t index = 0; index < dims_ * width_; index += lanes) {
      (Vec::loadu(grad_query_ + index) * Vec(problem_.scale)).store(grad_query_ + index);
    }
    const int64_t present = std::min(width_, problem_.query_length - tile_.start);
    for (int64_t column = 0; column < present; ++column) {
      for (int64_t dim = 0; !tile_.sees[column] && dim < dims_; ++dim) {
        grad_query_[dim * width_ + column] = 0;  // a value that is NaN makes it NaN
      }
    }
    store_transposed<T>(problem_, grad_query_, outputs.grad_query, tile_, present, grad_query_rows_);
    for (int64_t column = 0; with_slopes_ && column < present; ++column) {
      outputs.slope_rows[tile_.row * problem_.query_length + tile_.start + column] =
          tile_.sees[column] ? grad_slope(column) : 0.f;
    }
  }

  const Problem& problem_;
  const int64_t width_;
  const int64_t dims_;
  Keys keys_;
  Keys key_columns_;
  Keys values_;
  HiddenKeys hidden_keys_;
  Operand query_;
  Operand grad_out_;
  float* weights_;
  float* grad_scores_;
  float* spare_;
  P* left_weights_;
  P* left_grad_scores_;
  P* right_grad_scores_;
  float* keep_;
  float* grad_query_;
  float* grad_query_rows_;
  const int64_t held_keys_;
  float* sums_;
  int64_t stored_;  // the gradients of the keys before this are stored
  float* grad_key_ = nullptr;
  float* grad_value_ = nullptr;
  const float* hidden_ = nullptr;
  bool with_slopes_ = false;
  QueryTile tile_;
  Biases biases_;
  float log2_sum_[most_queries];
  float delta_[most_queries];
  float grad_lse_[most_queries];
  // Over the keys of each query:
  struct SlopeTerms {
    float sum[most_queries];            // Σ dS
    float sum_distant[most_queries];    // Σ dS ∘ distance
    float mean_distance[most_queries];  // Σ P ∘ distance
  } slope_terms_;
};

}  // namespace

int64_t backward_bytes(const Problem& problem, bool chunked) {
  Arena arena(nullptr);
  with_types(problem, [&](auto input, auto product) {
    Backward<decltype(input), decltype(product)>(problem, arena, chunked);
  });
  return arena.used();
}

void backward(
    const Problem& problem, const BackwardInputs& inputs, const BackwardOutputs& outputs, const Item& item,
    char* scratch) {
  Arena arena(scratch);
  with_types(problem, [&](auto input, auto product) {
    Backward<decltype(input), decltype(product)>(problem, arena, item.num_chunks > 1).run(inputs, outputs, item);
  });
}

void sum_chunks(const Problem& problem, const BackwardOutputs& outputs, const Item& item) {
  const int64_t size = 2 * partial_size(problem);
  float* sums = partial_of(problem, outputs, item);
  for (int64_t chunk = 1; chunk < item.num_chunks; ++chunk) {
    for (int64_t index = 0; index < size; index += lanes) {
      (Vec::loadu(sums + index) + Vec::loadu(sums + chunk * size + index)).store(sums + index);
    }
  }
  with_types(problem, [&](auto input, auto) {
    store_key_gradients<decltype(input)>(
        problem, outputs, item, 0, problem.key_length, sums, sums + partial_size(problem));
  });
}

}  // namespace CPU_CAPABILITY
}  // namespace seqwarm
