// Forward: a tile of queries against tiles of keys, with a running softmax.
//
// Scores have keys as rows and queries as columns, so a vector holds neighboring queries: maxima, sums and rescaling
// need no operation across lanes, and the weights are the right side of the next product without a transpose.
//
//     S (keys, queries) = K · Qᵀ        O (dims, queries) += Vᵀ · exp(S)

#include "dropout.h"
#include "kernels.h"
#include "keys.h"
#include "problem.h"
#include "products.h"
#include "queries.h"
#include "reach.h"
#include "scores.h"
#include "simd.h"
#include "types.h"

namespace seqwarm {
inline namespace CPU_CAPABILITY {
namespace {

// T is the dtype of the inputs, P the dtype of the products.
template <typename T, typename P>
class Forward {
  using Keys = PackedBlocks<T, P>;

 public:
  Forward(const Problem& problem, Arena& arena)
      : problem_(problem),
        width_(tile_queries(problem)),
        dims_(padded_dims(problem)),
        keys_(arena, problem, Keys::Order::Rows),
        values_(arena, problem, Keys::Order::Columns),
        hidden_keys_(arena, problem),
        norms_(arena, problem),
        query_rows_(arena.take<P>(width_ * dims_)),
        query_(arena.take<P>(width_ * dims_)),
        scores_(arena.take<float>(most_keys * width_)),
        spare_(arena.take<float>(most_keys * width_)),
        weights_(arena.take<P>(pair_of<P> == 1 ? 0 : most_keys * width_)),
        keep_(arena.take<float>(problem.dropout.active ? most_keys * width_ : 0)),
        out_(arena.take<float>(dims_ * width_)),
        out_rows_(arena.take<float>(dims_ * width_)) {}

  void run(const ForwardOutputs& outputs, const Item& item) {
    hidden_ = hidden_keys_.open(problem_, item.batch);
    keys_.open(problem_.key, item.batch, item.key_head, hidden_);
    values_.open(problem_.value, item.batch, item.key_head, hidden_);
    norms_.open(item.batch, item.key_head, hidden_);
    const int64_t group_size = problem_.num_heads / problem_.num_key_heads;
    const int64_t num_tiles = (problem_.query_length + width_ - 1) / width_;
    for (int64_t index = item.chunk; index < group_size * num_tiles; index += item.num_chunks) {
      const int64_t head = item.key_head * group_size + index % group_size;
      tile_ = place_queries(problem_, item.batch, head, index / group_size * width_);
      attend();
      store(outputs);
    }
  }

 private:
  void attend() {
    std::fill(largest_, largest_ + width_, -infinity);
    std::fill(total_, total_ + width_, 0.f);
    std::fill(out_, out_ + dims_ * width_, 0.f);
    if (!tile_.any) {
      return;
    }
    load_queries();
    const int64_t first = tile_.first_low / key_step * key_step;
    const int64_t last = round_up(tile_.last_high, key_step);
    begin_ = tile_.first_nearest / key_step * key_step;
    end_ = round_up(tile_.last_nearest + 1, key_step);
    visit(begin_, end_, false);
    std::fill(first_reached_, first_reached_ + 2, first);
    std::fill(last_reached_, last_reached_ + 2, last);
    if (problem_.reach) {
      // The first query of a causal tile has seen one key so far. A few more keys give a better bound of its sum. For
      // steep slopes these keys are out of reach already.
      if (tile_.first_slope2 * most_queries < 64) {
        extend(std::max(first, begin_ - most_queries), std::min(last, end_ + most_queries));
      }
      find_reach(first, last);
    }
    extend(std::min(first_reached_[0], first_reached_[1]), std::max(last_reached_[0], last_reached_[1]));
  }

  // Visits the keys of [begin, end) that were not visited yet.
  void extend(int64_t begin, int64_t end) {
    visit(begin, begin_, true);
    begin_ = begin;
    visit(end_, end, false);
    end_ = end;
  }

  // For each range_block of queries, the keys to visit among the keys [begin, end) that some query sees.
  void find_reach(int64_t begin, int64_t end) {
    const float log2_tolerance = problem_.log2_tolerance;
    const Reach left(problem_, norms_.largest(begin, begin_), log2_tolerance);
    const Reach right(problem_, norms_.largest(end_, end), log2_tolerance);
    for (int64_t column = 0; column < width_; column += range_block) {
      int64_t first = begin_, last = end_;
      for (int64_t query = column; query < std::min(column + range_block, width_); ++query) {
        if (tile_.sees[query]) {
          const float norm = query_norms_[query], slope2 = tile_.slope2[query];
          const float known = largest_[query] + std::log2(total_[query]);
          if (begin < begin_) {
            first = std::min(first, tile_.center[query] - left.distance(norm, slope2, known));
          }
          if (end > end_) {
            last = std::max(last, tile_.center[query] + right.distance(norm, slope2, known) + 1);
          }
        }
      }
      first_reached_[column / range_block] = std::max(begin, first / key_step * key_step);
      last_reached_[column / range_block] = std::min(end, round_up(last, key_step));
    }
    for (int64_t column = 0; column < width_; column += range_block) {
      narrow(tile_, column, first_reached_[column / range_block], last_reached_[column / range_block]);
    }
  }

  void load_queries() {
    const auto missing = [&](int64_t token) { return token >= problem_.query_length; };
    const Rows<P> rows =
        rows_of<T>(problem_, problem_.query, tile_.batch, tile_.head, tile_.start, width_, query_rows_, missing);
    right_from_transpose(rows, query_, width_, dims_);
    for (int64_t column = 0; problem_.reach && column < width_; ++column) {
      if (tile_.sees[column]) {
        const T* row = problem_.query.row<const T>(tile_.batch, tile_.head, tile_.start + column);
        query_norms_[column] = std::sqrt(norms_.squared_norm(row));
      }
    }
  }

  void visit(int64_t begin, int64_t end, bool backwards) {
    for_each_piece(tile_, hidden_, begin, end, backwards, [&](const Piece& piece) { attend_piece(piece); });
  }

  void attend_piece(const Piece& piece) {
    const int64_t num_keys = piece.num_keys(), last_column = piece.column + piece.width;
    multiply_rows(keys_.from(piece.begin), query_, scores_, spare_, piece, width_, dims_);
    set_biases(biases_, problem_, tile_, piece, hidden_);
    if (problem_.dropout.active) {
      keep_tile(problem_.dropout, 1.f, tile_.row, tile_.start, piece.begin, num_keys, width_, keep_);
    }
    for_each_group(piece.column, last_column, [&](auto vectors, int64_t lane) {
      with_mask(biases_.side, [&](auto masked) { this->template softmax_weights<vectors.value, masked.value>(lane, num_keys); });
    });
    const P* weights;
    if constexpr (std::is_same_v<P, float>) {
      weights = scores_;
    } else {
      round_to_pairs(
          scores_ + piece.column, num_keys, piece.width, width_, nullptr, weights_ + 2 * piece.column);
      weights = weights_;
    }
    const Rows<P> values = values_.from(piece.begin);
    multiply(
        dims_, piece.width, num_keys, values.data, values.ld, weights + piece.column * pair_of<P>, width_,
        out_ + piece.column, width_, true);
  }

  // Turns products into weights relative to the largest score so far, and rescales the earlier sums.
  template <int vectors, bool masked>
  void softmax_weights(int64_t lane, int64_t num_keys) {
    const BiasedScores<vectors, masked> biased(biases_, lane);
    Vec largest[vectors], zero[vectors], decay[vectors], total[vectors];
    for (int v = 0; v < vectors; ++v) {
      largest[v] = Vec(-infinity);
      total[v] = Vec(0.f);
    }
    const int64_t ld = width_;  // a local: the compiler would reload a member after every store
    float* row = scores_ + lane;
    for (int64_t key = 0; key < num_keys; ++key, row += ld) {
#pragma GCC unroll 4
      for (int v = 0; v < vectors; ++v) {
        const Vec score = biased(Vec::loadu(row + v * lanes), key, v);
        score.store(row + v * lanes);
        largest[v] = at::vec::clamp_min(score, largest[v]);  // may drop a NaN, which the weight keeps
      }
    }
    for (int v = 0; v < vectors; ++v) {
      const Vec shift = Vec::loadu(biases_.shift + lane + v * lanes);
      const Vec before = Vec::loadu(largest_ + lane + v * lanes);
      const Vec after = at::vec::clamp_min(largest[v] - shift, before);
      zero[v] = Vec::blendv(after + shift, Vec(0.f), after == Vec(-infinity));
      decay[v] = Vec::blendv(exp2(before - after), Vec(1.f), before == Vec(-infinity));  // nothing to rescale
      after.store(largest_ + lane + v * lanes);
    }
    row = scores_ + lane;
    for (int64_t key = 0; key < num_keys; ++key, row += ld) {
#pragma GCC unroll 4
      for (int v = 0; v < vectors; ++v) {
        const Vec weight = exp2(Vec::loadu(row + v * lanes) - zero[v]);
        total[v] = total[v] + weight;
        weight.store(row + v * lanes);
      }
    }
    for (int64_t key = 0; problem_.dropout.active && key < num_keys; ++key) {
      for (int v = 0; v < vectors; ++v) {
        float* place = scores_ + lane + key * width_ + v * lanes;
        (Vec::loadu(place) * Vec::loadu(keep_ + key * width_ + lane + v * lanes)).store(place);
      }
    }
    for (int v = 0; v < vectors; ++v) {
      float* sum = total_ + lane + v * lanes;
      at::vec::fmadd(Vec::loadu(sum), decay[v], total[v]).store(sum);
      rescale(lane + v * lanes, decay[v]);
    }
  }

  void rescale(int64_t lane, Vec decay) {
    float factors[lanes];
    decay.store(factors);
    if (std::all_of(factors, factors + lanes, [](float factor) { return factor == 1; })) {
      return;
    }
    for (int64_t dim = 0; dim < dims_; ++dim) {
      float* place = out_ + dim * width_ + lane;
      (Vec::loadu(place) * decay).store(place);
    }
  }

  void store(const ForwardOutputs& outputs) {
    float factors[most_queries];
    const int64_t present = std::min(width_, problem_.query_length - tile_.start);
    for (int64_t column = 0; column < width_; ++column) {
      const bool empty = !tile_.sees[column] || total_[column] == 0;  // false for NaN, which must reach the output
      factors[column] = empty ? 0.f : problem_.dropout.inverse_keep / total_[column];
      if (column < present) {
        const float log2_sum = empty ? -infinity : largest_[column] + std::log2(total_[column]);
        const int64_t place = tile_.row * problem_.query_length + tile_.start + column;
        outputs.log2_sum[place] = log2_sum;
        outputs.lse[place] =
            empty ? -infinity : (log2_sum - tile_.slope2[column] * tile_.beyond[column]) * ln_2;
      }
    }
    store_ranges(outputs);
    store_rows(outputs, factors, present);
  }

  void store_ranges(const ForwardOutputs& outputs) const {
    const int64_t num_ranges = (problem_.query_length + range_block - 1) / range_block;
    const int64_t first = tile_.start / range_block;
    const int64_t last = std::min(first + std::max<int64_t>(width_ / range_block, 1), num_ranges);
    for (int64_t index = first; index < last; ++index) {
      int32_t* range = outputs.ranges + (tile_.row * num_ranges + index) * 2;
      const int64_t place = index - first;
      range[0] = static_cast<int32_t>(tile_.any ? first_reached_[place] : 0);
      range[1] = static_cast<int32_t>(tile_.any ? std::min(last_reached_[place], problem_.key_length) : 0);
    }
  }

  void store_rows(const ForwardOutputs& outputs, const float* factors, int64_t present) {
    for (int64_t dim = 0; dim < dims_; ++dim) {
      for (int64_t lane = 0; lane < width_; lane += lanes) {
        float* place = out_ + dim * width_ + lane;
        const Vec factor = Vec::loadu(factors + lane);
        // A factor of 0 marks a query that saw no key. Its sum may still be NaN.
        Vec::blendv(Vec::loadu(place) * factor, Vec(0.f), factor == Vec(0.f)).store(place);
      }
    }
    store_transposed<T>(problem_, out_, outputs.out, tile_, present, out_rows_);
  }

  const Problem& problem_;
  const int64_t width_;
  const int64_t dims_;
  Keys keys_;
  Keys values_;
  HiddenKeys hidden_keys_;
  KeyNorms<T> norms_;
  P* query_rows_;
  P* query_;  // right side of products
  float* scores_;
  float* spare_;
  P* weights_;
  float* keep_;
  float* out_;
  float* out_rows_;
  const float* hidden_ = nullptr;
  QueryTile tile_;
  Biases biases_;
  int64_t begin_, end_;  // the keys visited
  int64_t first_reached_[2], last_reached_[2];  // the keys to visit, for each range_block of queries
  float largest_[most_queries];     // largest score of each query, with distances from its center
  float total_[most_queries];       // sum of weights, relative to the largest score
  float query_norms_[most_queries];
};

}  // namespace

int64_t forward_bytes(const Problem& problem) {
  Arena arena(nullptr);
  with_types(problem, [&](auto input, auto product) { Forward<decltype(input), decltype(product)>(problem, arena); });
  return arena.used();
}

void forward(const Problem& problem, const ForwardOutputs& outputs, const Item& item, char* scratch) {
  Arena arena(scratch);
  with_types(problem, [&](auto input, auto product) {
    Forward<decltype(input), decltype(product)>(problem, arena).run(outputs, item);
  });
}

}  // namespace CPU_CAPABILITY
}  // namespace seqwarm
