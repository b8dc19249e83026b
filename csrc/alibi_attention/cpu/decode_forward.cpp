// Forward of few queries over many keys. Keys and values are read once, in place. All scores of a chunk come first, so
// its softmax needs no rescaling, and values whose weights provably do not matter are not read.

#include "decode.h"
#include "dropout.h"
#include "kernels.h"
#include "queries.h"
#include "reach.h"
#include "short_products.h"
#include "simd.h"
#include "types.h"

namespace seqwarm {
inline namespace CPU_CAPABILITY {
namespace {

constexpr int64_t block_keys = 32;  // values are skipped in blocks of this size
constexpr int64_t most_blocks = decode_chunk / block_keys;
constexpr int64_t near_keys = 64;  // keys next to the queries, whose weights bound the whole sum from below
constexpr int64_t keys_at_once = 4;
constexpr int64_t keys_ahead = 32;  // how far rows are prefetched: they may lie far apart
constexpr int64_t rows_at_once = lanes == 16 ? 4 : 2;  // with keys_at_once: as many sums as fit into registers

// A query of a head.
struct Row {
  int64_t index;  // of (batch, head, query)
  int64_t head;
  int64_t token;
  QueryView view;  // narrowed to the keys in reach
  float known;     // log2 of a lower bound of its sum of weights
};

inline float sum_of(Vec values) {
  return at::vec::vec_reduce_all<float>([](const Vec& left, const Vec& right) { return left + right; }, values);
}

inline float largest_of(Vec values) {
  return at::vec::vec_reduce_all<float>(
      [](const Vec& left, const Vec& right) { return at::vec::maximum(left, right); }, values);
}

// The sums of `count` vectors: a tree of sums of neighboring lanes.
template <int64_t count>
inline Vec sum_each(const float* vectors) {
  if constexpr (count == 1) {
    return Vec::loadu(vectors);
  } else {
    const auto [even, odd] =
        at::vec::deinterleave2(sum_each<count / 2>(vectors), sum_each<count / 2>(vectors + count / 2 * lanes));
    return even + odd;
  }
}

template <typename T>
class DecodeForward {
 public:
  DecodeForward(const Problem& problem, Arena& arena)
      : problem_(problem),
        dims_(padded_dims(problem)),
        whole_dims_(problem.head_dim / lanes * lanes),
        query_(arena.take<float>(most_decode_rows * dims_)),
        scores_(arena.take<float>(most_decode_rows * decode_chunk)),
        sums_(arena.take<float>(most_decode_rows * lanes * lanes)),
        keep_(arena.take<float>(problem.dropout.active ? decode_chunk : 0)),
        tail_(arena.take<float>(block_keys * lanes)) {}

  void run(const ForwardOutputs& outputs, const Partials& partials, const DecodeItem& item) {
    if (item.batch != batch_ || item.first_head != first_head_) {
      open(item);
    }
    if (item.chunk == 0) {
      store_ranges(outputs);
    }
    int64_t begin = problem_.key_length, end = 0;
    for (int64_t row = 0; row < num_rows_; ++row) {
      partials.total(rows_[row].index, item.chunk) = 0;
      if (rows_[row].view.sees()) {
        begin = std::min(begin, rows_[row].view.low);
        end = std::max(end, rows_[row].view.high);
      }
    }
    begin = std::max(begin, item.chunk * decode_chunk);
    end = std::min(end, (item.chunk + 1) * decode_chunk);
    if (begin < end) {
      score_keys(begin, end);
      for (int64_t row = 0; row < num_rows_; ++row) {
        weigh(partials, item.chunk, row, begin, end);
      }
      add_values(partials, item.chunk, begin, end);
    }
  }

 private:
  void open(const DecodeItem& item) {
    batch_ = item.batch;
    first_head_ = item.first_head;
    num_heads_ = item.num_heads;
    key_head_ = item.first_head / (problem_.num_heads / problem_.num_key_heads);
    num_rows_ = item.num_heads * problem_.query_length;
    int64_t first_nearest = problem_.key_length, last_nearest = -1, low = problem_.key_length, high = 0;
    for (int64_t index = 0; index < num_rows_; ++index) {
      Row& row = rows_[index];
      row.head = first_head_ + index / problem_.query_length;
      row.token = index % problem_.query_length;
      row.index = (batch_ * problem_.num_heads + row.head) * problem_.query_length + row.token;
      row.view = view_of(problem_, batch_, row.head, row.token);
      row.known = -infinity;
      load_row(
          problem_.query.row<const T>(batch_, row.head, row.token), query_ + index * dims_, problem_.head_dim, dims_);
      if (row.view.sees()) {
        low = std::min(low, row.view.low);
        high = std::max(high, row.view.high);
        first_nearest = std::min(first_nearest, row.view.nearest());
        last_nearest = std::max(last_nearest, row.view.nearest());
      }
    }
    if (problem_.reach && low < high) {
      const int64_t begin = std::max(low, std::min(first_nearest, last_nearest + 1 - near_keys));
      const int64_t end = std::min({high, begin + decode_chunk, std::max(last_nearest + 1, begin + near_keys)});
      score_keys(begin, end);
      for (int64_t row = 0; row < num_rows_; ++row) {
        rows_[row].known = log2_sum_of(row, end - begin);
      }
      if (problem_.key_norm_bound != nullptr) {
        for (int64_t head = 0; head < num_heads_; ++head) {
          narrow_head(head, begin, end);
        }
      }
    }
  }

  // Of the scores of `count` keys.
  float log2_sum_of(int64_t row, int64_t count) const {
    const float* scores = scores_ + row * decode_chunk;
    const float largest = *std::max_element(scores, scores + count);
    float total = 0;
    for (int64_t key = 0; key < count; ++key) {
      total += std::exp2(scores[key] - largest);
    }
    return largest + std::log2(total);  // NaN without a visible key: it bounds nothing
  }

  // Hides the keys that are out of reach of all queries of a head. [begin, end) stays.
  void narrow_head(int64_t head, int64_t begin, int64_t end) {
    const float bound =
        problem_.key_norm_bound[batch_ * problem_.bound_batch + key_head_ * problem_.bound_head];
    const Reach reach(problem_, bound, problem_.log2_tolerance - 1);  // the other half is left for values
    for (int64_t index = head * problem_.query_length; index < (head + 1) * problem_.query_length; ++index) {
      const Row& row = rows_[index];
      if (row.view.sees()) {
        const float norm = std::sqrt(dot(query_ + index * dims_, query_ + index * dims_, dims_));
        const int64_t distance = reach.distance(norm, row.view.slope2, row.known);
        begin = std::min(begin, row.view.center - distance);
        end = std::max(end, row.view.center + distance + 1);
      }
    }
    begin = begin / key_step * key_step;
    end = round_up(end, key_step);
    for (int64_t index = head * problem_.query_length; index < (head + 1) * problem_.query_length; ++index) {
      QueryView& view = rows_[index].view;
      if (view.sees()) {
        view.low = std::max(view.low, begin);
        view.high = std::min(view.high, end);
      }
    }
  }

  // scores_[row][key - begin], -inf where a query does not see a key and up to the end of a block.
  void score_keys(int64_t begin, int64_t end) {
    const int64_t padded = round_up(end - begin, block_keys), first = problem_.key_padding_mask ? 0 : padded - block_keys;
    for (int64_t row = 0; row < num_rows_; ++row) {
      std::fill(scores_ + row * decode_chunk + first, scores_ + row * decode_chunk + padded, -infinity);
    }
    for_each_run(begin, end, [&](int64_t from, int64_t to) {
      for (; from < to; from += lanes) {
        prefetch(problem_.key, from + keys_ahead, std::min(from + keys_ahead + lanes, end));
        score_vector(from, std::min(lanes, to - from), scores_ + from - begin);
      }
    });
  }

  // Neighboring keys, at most `lanes`, that key_padding_mask does not hide.
  void score_vector(int64_t first, int64_t count, float* scores) {
    const T* keys = problem_.key.row<const T>(batch_, key_head_, first);
    for (int64_t key = 0; key < count;) {
      const bool several = key + keys_at_once <= count;
      const T* at = keys + key * problem_.key.token;
      if (several) {
        multiply_keys<keys_at_once>(at, key);
      } else {
        multiply_keys<1>(at, key);
      }
      key += several ? keys_at_once : 1;
    }
    const Vec scale2(problem_.scale * log2_e), index = Vec::arange(0.f, 1.f);
    for (int64_t row = 0; row < num_rows_; ++row) {
      const QueryView& view = rows_[row].view;
      const auto relative = [&](int64_t key) { return static_cast<float>(key - first); };
      const Vec product = sum_each<lanes>(sums_ + row * lanes * lanes);
      const Vec distance = (Vec(relative(view.center)) - index).abs();
      Vec score = at::vec::fmadd(Vec(-view.slope2), distance, product * scale2);  // rounds the large term once
      if (view.low > first || view.high < first + count) {
        const Vec visible = (index >= Vec(relative(view.low))) & (index < Vec(relative(view.high)));
        score = Vec::blendv(Vec(-infinity), score, visible);
      }
      score.store(scores + row * decode_chunk, static_cast<int>(count));
    }
  }

  // sums_[row][place + i] = the parts of q · k of neighboring keys, still to be summed.
  template <int keys>
  void multiply_keys(const T* key, int64_t place) {
    int64_t row = 0;
    for (; row + rows_at_once <= num_rows_; row += rows_at_once) {
      multiply_block_of<rows_at_once, keys>(key, row, place);
    }
    for (; row < num_rows_; ++row) {
      multiply_block_of<1, keys>(key, row, place);
    }
  }

  template <int rows, int keys>
  void multiply_block_of(const T* key, int64_t row, int64_t place) {
    const int64_t step = problem_.key.token, tail = problem_.head_dim - whole_dims_;
    Vec sums[rows][keys];
    const auto add = [&](const Vec(&loaded)[keys], int64_t dim) {
#pragma GCC unroll 4
      for (int i = 0; i < rows; ++i) {
        const Vec query = Vec::loadu(query_ + (row + i) * dims_ + dim);
#pragma GCC unroll 4
        for (int k = 0; k < keys; ++k) {
          sums[i][k] = at::vec::fmadd(query, loaded[k], sums[i][k]);
        }
      }
    };
#pragma GCC unroll 4
    for (int i = 0; i < rows; ++i) {
#pragma GCC unroll 4
      for (int k = 0; k < keys; ++k) {
        sums[i][k] = Vec(0.f);
      }
    }
    for (int64_t dim = 0; dim < whole_dims_; dim += lanes) {
      Vec loaded[keys];
#pragma GCC unroll 4
      for (int k = 0; k < keys; ++k) {
        loaded[k] = load_floats(key + k * step + dim);
      }
      add(loaded, dim);
    }
    if (tail > 0) {
      Vec loaded[keys];
      for (int k = 0; k < keys; ++k) {
        float floats[lanes];
        load_row(key + k * step + whole_dims_, floats, tail, lanes);
        loaded[k] = Vec::loadu(floats);
      }
      add(loaded, whole_dims_);
    }
#pragma GCC unroll 4
    for (int i = 0; i < rows; ++i) {
#pragma GCC unroll 4
      for (int k = 0; k < keys; ++k) {
        sums[i][k].store(sums_ + ((row + i) * lanes + place + k) * lanes);
      }
    }
  }

  // Turns the scores of a row into weights relative to the largest one, and marks the blocks that matter.
  void weigh(const Partials& partials, int64_t chunk, int64_t index, int64_t begin, int64_t end) {
    Row& row = rows_[index];
    float* scores = scores_ + index * decode_chunk;
    const int64_t num_blocks = (end - begin + block_keys - 1) / block_keys;
    float of_block[most_blocks], largest = -infinity;
    for (int64_t block = 0; block < num_blocks; ++block) {
      Vec found(-infinity);
      for (int64_t key = block * block_keys; key < (block + 1) * block_keys; key += lanes) {
        found = at::vec::clamp_min(Vec::loadu(scores + key), found);  // may drop a NaN, which the weight keeps
      }
      of_block[block] = largest_of(found);
      largest = std::max(largest, of_block[block]);
    }
    const Vec zero(largest == -infinity ? 0.f : largest);
    Vec sum(0.f);
    for (int64_t key = 0; key < num_blocks * block_keys; key += lanes) {
      const Vec weight = exp2(Vec::loadu(scores + key) - zero);
      sum = sum + weight;
      weight.store(scores + key);
    }
    const float total = sum_of(sum);
    partials.largest(row.index, chunk) = largest;
    partials.total(row.index, chunk) = total;
    const float least = least_score(std::max(largest + std::log2(total), row.known));
    for (int64_t block = 0; block < num_blocks; ++block) {
      matters_[block][index] = of_block[block] >= least;  // large scores may round to it
    }
    if (problem_.dropout.active) {
      const int64_t head = batch_ * problem_.num_heads + row.head;
      keep_column(problem_.dropout, 1.f, head, row.token, begin, end - begin, 1, keep_);
      for (int64_t key = 0; key < end - begin; ++key) {
        scores[key] *= keep_[key];
      }
    }
  }

  // All keys with scores up to this one weigh at most half of the tolerance together. -inf where nothing is known.
  float least_score(float known) const {
    if (!problem_.reach || !(known < infinity)) {
      return -infinity;
    }
    constexpr float margin = 0x1p-4f;  // for rounding, as in reach.h
    return known + problem_.log2_tolerance - 1 - std::log2(static_cast<float>(problem_.widest_view)) - margin;
  }

  void add_values(const Partials& partials, int64_t chunk, int64_t begin, int64_t end) {
    for (int64_t row = 0; row < num_rows_; ++row) {
      float* out = partials.out(rows_[row].index, chunk);
      std::fill(out, out + dims_, 0.f);
    }
    const Rows<float> out{partials.out(rows_[0].index, chunk), partials.step()};
    for (int64_t from = begin; from < end; from += block_keys) {
      const bool* matters = matters_[(from - begin) / block_keys];
      const bool* first = std::find(matters, matters + num_rows_, true);
      if (first == matters + num_rows_) {
        continue;
      }
      prefetch(problem_.value, from + keys_ahead, std::min(from + keys_ahead + block_keys, end));
      for_each_run(from, std::min(from + block_keys, end), [&](int64_t run, int64_t stop) {
        add_run(run, stop, scores_ + run - begin, matters, out);
      });
    }
  }

  // Adds values to the rows that need them. A row that does not see all keys goes alone: 0 · NaN is not 0.
  void add_run(int64_t begin, int64_t end, const float* weights, const bool* matters, Rows<float> out) {
    const auto whole = [&](int64_t row) {
      return matters[row] && rows_[row].view.low <= begin && rows_[row].view.high >= end;
    };
    for (int64_t row = 0; row < num_rows_;) {
      int64_t last = row + 1;
      int64_t from = begin, to = end;
      if (whole(row)) {
        for (; last < num_rows_ && whole(last); ++last) {
        }
      } else {
        from = std::max(from, rows_[row].view.low);
        to = matters[row] ? std::min(to, rows_[row].view.high) : from;
      }
      if (from < to) {
        multiply_values(row, last - row, from, to, weights + row * decode_chunk + from - begin, out);
      }
      row = last;
    }
  }

  void multiply_values(
      int64_t row, int64_t num_rows, int64_t begin, int64_t end, const float* weights, Rows<float> out) {
    const T* values = problem_.value.row<const T>(batch_, key_head_, begin);
    const int64_t num_keys = end - begin, step = problem_.value.token, tail = problem_.head_dim - whole_dims_;
    const Matrix left{weights, decode_chunk, 1};
    float* sums = const_cast<float*>(out.data) + row * out.ld;
    multiply_short(num_rows, whole_dims_, num_keys, left, Rows<T>{values, step}, sums, out.ld, true);
    if (tail > 0) {
      for (int64_t key = 0; key < num_keys; ++key) {
        load_row(values + key * step + whole_dims_, tail_ + key * lanes, tail, lanes);
      }
      multiply_short(num_rows, lanes, num_keys, left, Rows<float>{tail_, lanes}, sums + whole_dims_, out.ld, true);
    }
  }

  void prefetch(const Strided& tensor, int64_t begin, int64_t end) const {
    for (; begin < end; ++begin) {
      const char* row = reinterpret_cast<const char*>(tensor.row<const T>(batch_, key_head_, begin));
      for (int64_t byte = 0; byte < problem_.head_dim * static_cast<int64_t>(sizeof(T)); byte += 64) {
        __builtin_prefetch(row + byte);
      }
    }
  }

  // Calls visit(first, last) for the parts of [begin, end) that key_padding_mask does not hide.
  template <typename Visit>
  void for_each_run(int64_t begin, int64_t end, const Visit& visit) const {
    if (problem_.key_padding_mask == nullptr) {
      visit(begin, end);
      return;
    }
    const bool* mask = problem_.key_padding_mask + batch_ * problem_.mask_batch;
    while (begin < end) {
      for (; begin < end && !mask[begin * problem_.mask_key]; ++begin) {
      }
      int64_t last = begin;
      for (; last < end && mask[last * problem_.mask_key]; ++last) {
      }
      if (begin < last) {
        visit(begin, last);
      }
      begin = last;
    }
  }

  // One range for each head: most_decode_queries are fewer than range_block.
  void store_ranges(const ForwardOutputs& outputs) const {
    for (int64_t head = 0; head < num_heads_; ++head) {
      int64_t low = problem_.key_length, high = 0;
      for (int64_t index = head * problem_.query_length; index < (head + 1) * problem_.query_length; ++index) {
        if (rows_[index].view.sees()) {
          low = std::min(low, rows_[index].view.low);
          high = std::max(high, rows_[index].view.high);
        }
      }
      int32_t* range = outputs.ranges + (batch_ * problem_.num_heads + first_head_ + head) * 2;
      range[0] = static_cast<int32_t>(low < high ? low / key_step * key_step : 0);
      range[1] = static_cast<int32_t>(low < high ? std::min(round_up(high, key_step), problem_.key_length) : 0);
    }
  }

  const Problem& problem_;
  const int64_t dims_;
  const int64_t whole_dims_;  // in whole vectors
  float* query_;
  float* scores_;  // or weights
  float* sums_;
  float* keep_;
  float* tail_;
  int64_t batch_ = -1, first_head_ = -1, key_head_ = 0, num_heads_ = 0, num_rows_ = 0;
  Row rows_[most_decode_rows];
  bool matters_[most_blocks][most_decode_rows];
};

}  // namespace

int64_t decode_forward_bytes(const Problem& problem) {
  Arena arena(nullptr);
  with_input_type(problem, [&](auto input) { DecodeForward<decltype(input)>(problem, arena); });
  return arena.used();
}

void decode_forward(
    const Problem& problem, const ForwardOutputs& outputs, const Partials& partials, NextDecodeItem next,
    char* scratch) {
  with_input_type(problem, [&](auto input) {
    Arena arena(scratch);
    DecodeForward<decltype(input)> forward(problem, arena);
    for (DecodeItem item; next(item);) {
      forward.run(outputs, partials, item);
    }
  });
}

void merge_chunks(const Problem& problem, const ForwardOutputs& outputs, const Partials& partials, int64_t row) {
  const int64_t token = row % problem.query_length, head = row / problem.query_length % problem.num_heads;
  const int64_t batch = row / problem.query_length / problem.num_heads;
  float largest = -infinity, total = 0, sums[256] = {};
  for (int64_t chunk = 0; chunk < partials.num_chunks; ++chunk) {
    if (partials.total(row, chunk) != 0) {
      largest = std::max(largest, partials.largest(row, chunk));
    }
  }
  for (int64_t chunk = 0; chunk < partials.num_chunks; ++chunk) {
    if (partials.total(row, chunk) != 0) {  // true for NaN, which must reach the output
      const float own = partials.largest(row, chunk);
      const float factor = own == largest ? 1.f : std::exp2(own - largest);
      total += partials.total(row, chunk) * factor;
      for (int64_t dim = 0; dim < partials.dims; dim += lanes) {
        const Vec part = Vec::loadu(partials.out(row, chunk) + dim);
        at::vec::fmadd(part, Vec(factor), Vec::loadu(sums + dim)).store(sums + dim);
      }
    }
  }
  const QueryView view = view_of(problem, batch, head, token);
  const bool empty = total == 0;
  const float inverse = empty ? 0.f : problem.dropout.inverse_keep / total;
  for (int64_t dim = 0; dim < partials.dims; dim += lanes) {
    (Vec::loadu(sums + dim) * Vec(inverse)).store(sums + dim);
  }
  const float log2_sum = empty ? -infinity : largest + std::log2(total);
  outputs.log2_sum[row] = log2_sum;
  outputs.lse[row] = empty ? -infinity : (log2_sum - view.slope2 * view.beyond) * ln_2;
  with_input_type(problem, [&](auto input) {
    load_row(sums, outputs.out.row<decltype(input)>(batch, head, token), problem.head_dim, problem.head_dim);
  });
}

}  // namespace CPU_CAPABILITY
}  // namespace seqwarm
