// seqwarm::alibi_attention and its varlen form on the CPU, with their backward: from tensors to kernels, on several
// threads.
//
// Threads take items from a queue, so none waits for another. The result of an item does not depend on the thread that
// computes it. Only the number of chunks of a key head, and so the order in which its gradients are summed, depends on
// the number of threads.

#include "../../memory/large_memory.h"
#include "cpu_features.h"
#include "kernels.h"
#include "options.h"
#include "problem.h"
#include "products.h"
#include "short_sequences.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <optional>
#include <tuple>

namespace seqwarm {
namespace {

using FourTensors = std::tuple<Tensor, Tensor, Tensor, Tensor>;

// With fewer visible keys, finding keys to skip costs more than it saves.
constexpr int64_t min_keys_to_skip = 128;
// With fewer multiplications per thread, waking the threads costs more than they save.
constexpr double least_work = 1 << 18;

const Kernels& kernels() {
  switch (cpu_capability()) {
#ifdef SEQWARM_X86
    case CpuCapability::AVX512:
      return kernels_AVX512;
    case CpuCapability::AVX2:
      return kernels_AVX2;
#endif
#ifdef SEQWARM_SVE256
    case CpuCapability::SVE256:
      return kernels_SVE256;
#endif
    default:
      return kernels_DEFAULT;
  }
}

InputType input_type(ScalarType dtype) {
  return dtype == ScalarType::Float ? InputType::Float : dtype == ScalarType::Half ? InputType::Half : InputType::BFloat16;
}

Tensor with_dense_rows(const Tensor& tensor) {
  return tensor.size(-1) <= 1 || tensor.stride(-1) == 1 ? tensor : as_contiguous(tensor);
}

Strided strided(const Tensor& tensor) {
  void* data = const_cast<void*>(tensor.const_data_ptr());
  if (tensor.dim() == 4) {
    return {data, tensor.stride(0), tensor.stride(1), tensor.stride(2)};
  }
  return {data, 0, tensor.stride(1), tensor.stride(0)};
}

// schema.py: allocate_like
Tensor allocate_like(const Tensor& tensor) {
  const bool tokens_outside = tensor.dim() == 4 && tensor.stride(1) < tensor.stride(2);
  std::vector<int64_t> strides = row_major_strides(tensor.sizes());
  if (tokens_outside) {
    const int64_t num_heads = std::max<int64_t>(tensor.size(1), 1), head_dim = std::max<int64_t>(tensor.size(3), 1);
    strides[1] = head_dim;
    strides[2] = num_heads * head_dim;
  }
  const Tensor result = empty_strided(tensor.sizes(), strides, tensor.scalar_type());
  advise_large_pages(result.mutable_data_ptr(), num_bytes(result));
  return result;
}

// Owns the tensors that a problem points into.
struct Inputs {
  Tensor query, key, value, slopes;
  std::optional<Tensor> query_start, key_padding_mask, key_norm_bound;
  Tensor dropout_offsets, cu_seqlens_q, cu_seqlens_k;

  Inputs(const Tensor& query_, const Tensor& key_, const Tensor& value_, const Tensor& slopes_)
      : query(with_dense_rows(query_)),
        key(with_dense_rows(key_)),
        value(with_dense_rows(value_)),
        slopes(to_dtype(slopes_, ScalarType::Float)) {}
};

// Smaller results stay in caches, where what comes next finds them.
constexpr int64_t least_streamed_bytes = 1 << 19;

void set_common(
    Problem& problem, Inputs& inputs, const std::optional<Tensor>& dropout_seed, bool causal, double scale,
    std::optional<int64_t> window, double dropout_p, double skip_tolerance) {
  const bool packed = inputs.query.dim() == 3;
  const int64_t heads = 1, tokens = packed ? 0 : 2;
  problem.input_type = input_type(inputs.query.scalar_type());
  problem.native_products = inputs.query.scalar_type() == ScalarType::BFloat16 && multiplies_bfloat16();
  problem.query = strided(inputs.query);
  problem.key = strided(inputs.key);
  problem.value = strided(inputs.value);
  problem.slopes = inputs.slopes.const_data_ptr<float>();
  problem.slope_batch = inputs.slopes.dim() == 1 ? 0 : inputs.slopes.stride(0);
  problem.slope_head = inputs.slopes.stride(-1);
  problem.batch_size = packed ? 1 : inputs.query.size(0);
  problem.num_heads = inputs.query.size(heads);
  problem.num_key_heads = inputs.key.size(heads);
  problem.query_length = inputs.query.size(tokens);
  problem.key_length = inputs.key.size(tokens);
  problem.used_keys = problem.key_length;
  problem.head_dim = inputs.query.size(-1);
  problem.segment_length = unbounded;
  problem.window = std::min(window.value_or(unbounded), unbounded);
  problem.causal = causal;
  problem.scale = static_cast<float>(scale);
  problem.log2_tolerance = static_cast<float>(std::log2(skip_tolerance * (causal ? 1.0 : 0.5)));
  problem.streams = num_bytes(inputs.query) >= least_streamed_bytes;
  problem.dropout.active = dropout_seed.has_value();
  if (dropout_seed && dropout_seed->dim() > 0) {
    inputs.dropout_offsets = as_contiguous(*dropout_seed);
    problem.dropout.head_offsets = inputs.dropout_offsets.const_data_ptr<int64_t>();
  } else if (dropout_seed) {
    problem.dropout.seed = static_cast<uint64_t>(*dropout_seed->const_data_ptr<int64_t>());
  }
  problem.dropout.threshold = static_cast<uint32_t>(dropout_p * 4294967296.0);
  problem.dropout.inverse_keep = static_cast<float>(1 / (1 - dropout_p));
}

void set_positions(Problem& problem, Inputs& inputs, const std::optional<Tensor>& query_start) {
  if (query_start) {
    inputs.query_start = to_dtype(*query_start, ScalarType::Long);
    problem.query_start = inputs.query_start->const_data_ptr<int64_t>();
    problem.query_start_stride = inputs.query_start->numel() > 1 ? inputs.query_start->stride(0) : 0;
  }
}

int64_t longest_of(const Problem& problem) {
  if (problem.cu_seqlens_q == nullptr) {
    return std::min(std::max(problem.query_length, problem.key_length), problem.segment_length);
  }
  int64_t longest = 0;
  for (int64_t index = 0; index < problem.num_sequences; ++index) {
    for (const int32_t* ends : {problem.cu_seqlens_q, problem.cu_seqlens_k}) {
      longest = std::max<int64_t>(longest, ends[index + 1] - ends[index]);
    }
  }
  return longest;
}

// What follows from where sequences lie, which the rest describes.
void set_views(Problem& problem, double skip_tolerance) {
  const int64_t in_window = problem.causal ? problem.window + 1 : 2 * problem.window + 1;
  problem.hides_keys = hides_keys(problem);
  problem.longest = longest_of(problem);
  problem.widest_view = std::min({problem.key_length, problem.longest, in_window});
  problem.reach = skip_tolerance > 0 && problem.widest_view >= min_keys_to_skip;
}

Problem describe(Inputs& inputs, const DenseOptions& options) {
  Problem problem{};
  set_common(
      problem, inputs, options.dropout_seed, options.causal, options.scale, options.window, options.dropout_p,
      options.skip_tolerance);
  problem.query_offset = options.query_offset;
  set_positions(problem, inputs, options.query_start);
  if (options.key_padding_mask) {
    inputs.key_padding_mask = options.key_padding_mask;
    problem.key_padding_mask = static_cast<const bool*>(inputs.key_padding_mask->const_data_ptr());
    problem.mask_batch = inputs.key_padding_mask->stride(0);
    problem.mask_key = inputs.key_padding_mask->stride(1);
  }
  if (options.key_norm_bound) {
    inputs.key_norm_bound = options.key_norm_bound;
    problem.key_norm_bound = inputs.key_norm_bound->const_data_ptr<float>();
    problem.bound_batch = inputs.key_norm_bound->stride(0);
    problem.bound_head = inputs.key_norm_bound->stride(1);
  }
  problem.segment_length = std::min(options.segment_length.value_or(unbounded), unbounded);
  set_views(problem, options.skip_tolerance);
  return problem;
}

Problem describe(Inputs& inputs, const VarlenOptions& options) {
  Problem problem{};
  set_common(
      problem, inputs, options.dropout_seed, options.causal, options.scale, options.window, options.dropout_p,
      options.skip_tolerance);
  inputs.cu_seqlens_q = as_contiguous(options.cu_seqlens_q);
  inputs.cu_seqlens_k = as_contiguous(options.cu_seqlens_k);
  problem.cu_seqlens_q = inputs.cu_seqlens_q.const_data_ptr<int32_t>();
  problem.cu_seqlens_k = inputs.cu_seqlens_k.const_data_ptr<int32_t>();
  problem.num_sequences = inputs.cu_seqlens_q.numel() - 1;
  set_positions(problem, inputs, options.query_start);
  problem.used_keys = problem.cu_seqlens_k[problem.num_sequences];
  set_views(problem, options.skip_tolerance);
  return problem;
}

int64_t usable_threads(const Problem& problem) {
  const double work = static_cast<double>(problem.batch_size * problem.num_heads * problem.query_length) *
      static_cast<double>(problem.widest_view * problem.head_dim);
  const auto worthwhile = static_cast<int64_t>(std::min(work / least_work, 1e6));
  return std::clamp<int64_t>(worthwhile, 1, num_threads());
}

// The number of parts that the queries of a key head are cut into, so that every thread has items.
int64_t count_chunks(const Problem& problem, int64_t threads, int64_t items_of_each) {
  const int64_t heads = std::max<int64_t>(problem.batch_size * problem.num_key_heads, 1);
  const int64_t width = tile_queries(problem);
  const int64_t tiles = problem.num_heads / problem.num_key_heads * ((problem.query_length + width - 1) / width);
  const int64_t wanted = threads == 1 ? 1 : (items_of_each * threads + heads - 1) / heads;
  return std::clamp<int64_t>(wanted, 1, std::max<int64_t>(tiles, 1));
}

// With more bytes, scratch memory is returned after each call.
constexpr int64_t most_kept_bytes = 1 << 20;

// Memory for this thread, aligned to a cache line. A little of it is kept for the next call: to allocate it takes longer
// than the work on a short row.
class Scratch {
 public:
  explicit Scratch(int64_t bytes) {
    thread_local Tensor kept;
    if (kept.defined() && kept.numel() >= bytes) {
      memory_ = kept;
      return;
    }
    memory_ = empty(std::array{bytes}, ScalarType::Byte);  // which torch aligns to 64 bytes
    if (bytes <= most_kept_bytes) {
      kept = memory_;
    }
  }

  char* data() const { return static_cast<char*>(memory_.mutable_data_ptr()); }

 private:
  Tensor memory_;
};

void use_products(ShortProducts products, Problem& problem) {
  problem.short_products = products;
  problem.native_products = products != ShortProducts::Float;
}

// Calls run(next, scratch) on every thread. An item has all heads of a group, as long as threads have several groups:
// neighboring heads are neighbors in memory.
template <typename Run>
void for_each_short_item(
    const Problem& problem, const ShortSequences& sequences, int64_t threads, int64_t scratch_bytes, const Run& run) {
  const auto num_groups = static_cast<int64_t>(sequences.groups.size()), num_heads = problem.num_key_heads;
  const int64_t parts = num_groups >= 2 * threads ? 1 : num_heads, heads_each = num_heads / parts;
  std::atomic<int64_t> start{0};
  parallel_for(0, std::min(threads, num_groups * parts), 1, [&](int64_t, int64_t) {
    const Scratch scratch(scratch_bytes);
    const auto next = [&](ShortItem& item) {
      const int64_t index = start++;
      if (index >= num_groups * parts) {
        return false;
      }
      const int64_t first_head = index % parts * heads_each;
      item = {sequences.groups[index / parts], first_head, first_head + heads_each};
      return true;
    };
    run(next, scratch.data());
  });
}

void decode(const Problem& problem, const ForwardOutputs& outputs, int64_t threads) {
  const DecodeItems items(problem);
  const Tensor memory = empty(std::array{Partials::count(problem)}, ScalarType::Float);
  const Partials partials(problem, memory.mutable_data_ptr<float>());
  std::atomic<int64_t> start{0};
  parallel_for(0, std::min(threads, items.count()), 1, [&](int64_t, int64_t) {
    const Scratch scratch(kernels().decode_forward_bytes(problem));
    const auto next = [&](DecodeItem& item) {
      const int64_t index = start++;
      item = items[index];
      return index < items.count();
    };
    kernels().decode_forward(problem, outputs, partials, next, scratch.data());
  });
  const int64_t num_rows = problem.batch_size * problem.num_heads * problem.query_length;
  parallel_for(0, num_rows, (num_rows + threads - 1) / threads, [&](int64_t first, int64_t last) {
    for (int64_t row = first; row < last; ++row) {
      kernels().merge_chunks(problem, outputs, partials, row);
    }
  });
}

// Products of this thread are configured while it lives.
struct Multiplying {
  Multiplying() { start_multiplying(); }
  ~Multiplying() { finish_multiplying(); }
};

// Calls run(item, scratch) for every item. The last heads have the flattest slopes, take longest, and come first.
template <typename Run>
void for_each_item(const Problem& problem, int64_t threads, int64_t num_chunks, int64_t scratch_bytes, const Run& run) {
  const int64_t num_items = problem.batch_size * problem.num_key_heads * num_chunks;
  const int64_t num_workers = std::min(threads, num_items);
  std::atomic<int64_t> next{0};
  parallel_for(0, num_workers, 1, [&](int64_t, int64_t) {
    const Scratch scratch(scratch_bytes);
    const Multiplying multiplying;
    for (int64_t index = next++; index < num_items; index = next++) {
      const int64_t head = index / num_chunks / problem.batch_size;
      run(Item{
              index / num_chunks % problem.batch_size, problem.num_key_heads - 1 - head, index % num_chunks,
              num_chunks},
          scratch.data());
    }
  });
}

// All keys.
void fill_ranges(const Tensor& ranges, int64_t key_length) {
  int32_t* range = ranges.mutable_data_ptr<int32_t>();
  for (int64_t index = 0; index < ranges.numel(); index += 2) {
    range[index] = 0;
    range[index + 1] = static_cast<int32_t>(key_length);
  }
}

template <typename Options>
FourTensors forward(
    const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& slopes, const Options& options) {
  check_inputs(options, query, key, value, slopes);
  const Tensor out = allocate_like(query);
  const Tensor lse = empty(rows_of(query), ScalarType::Float);
  const Tensor log2_sum = empty(rows_of(query), ScalarType::Float);
  const Tensor ranges = empty(range_rows_of(query), ScalarType::Int);
  if (query.numel() > 0) {
    Inputs inputs(query, key, value, slopes);
    Problem problem = describe(inputs, options);
    const ForwardOutputs outputs{
        strided(out), lse.mutable_data_ptr<float>(), log2_sum.mutable_data_ptr<float>(), ranges.mutable_data_ptr<int32_t>()};
    const int64_t threads = usable_threads(problem);
    if (const ShortSequences sequences = short_sequences_of(problem); !sequences.groups.empty()) {
      use_products(sequences.products, problem);
      fill_ranges(ranges, problem.key_length);
      for_each_short_item(
          problem, sequences, threads, kernels().short_forward_bytes(problem),
          [&](NextShortItem next, char* scratch) { kernels().short_forward(problem, outputs, next, scratch); });
    } else if (is_decoding(problem)) {
      decode(problem, outputs, threads);
    } else {
      for_each_item(
          problem, threads, count_chunks(problem, threads, 4), kernels().forward_bytes(problem),
          [&](const Item& item, char* scratch) { kernels().forward(problem, outputs, item, scratch); });
    }
  }
  return {out, lse, log2_sum, ranges};
}

// Sums the contributions of queries to the slopes' shape. One thread computes each sum, in order.
Tensor sum_slopes(const Tensor& slope_rows, const Problem& problem, const Tensor& slopes) {
  const int64_t length = problem.query_length, num_heads = problem.num_heads;
  const bool packed = problem.cu_seqlens_q != nullptr;
  const int64_t num_sums = slopes.dim() == 1 ? 1 : slopes.size(0);  // for each head
  const int64_t batches = packed ? num_sums : problem.batch_size;
  const Tensor sums = empty(slopes.sizes(), ScalarType::Double);
  double* sum = sums.mutable_data_ptr<double>();
  std::fill_n(sum, num_sums * num_heads, 0.0);
  const float* parts = slope_rows.const_data_ptr<float>();
  parallel_for(0, num_heads, 1, [&](int64_t first, int64_t last) {
    for (int64_t head = first; head < last; ++head) {
      for (int64_t batch = 0; batch < batches; ++batch) {
        const bool by_sequence = packed && slopes.dim() == 2;
        const int64_t begin = by_sequence ? problem.cu_seqlens_q[batch] : 0;
        const int64_t end = by_sequence ? problem.cu_seqlens_q[batch + 1] : length;
        const float* row = parts + ((packed ? 0 : batch) * num_heads + head) * length;
        double& total = sum[(num_sums == 1 ? 0 : batch) * num_heads + head];
        for (int64_t token = begin; token < end; ++token) {
          total += row[token];
        }
      }
    }
  });
  return to_dtype(sums, slopes.scalar_type());
}

template <typename Options>
FourTensors backward(
    const Tensor& grad_out_, const std::optional<Tensor>& grad_lse_, const Tensor& out_, const Tensor& lse_,
    const Tensor& log2_sum_, const Tensor& ranges_, bool slopes_need_grad, const Tensor& query, const Tensor& key,
    const Tensor& value, const Tensor& slopes, const Options& options) {
  check_inputs(options, query, key, value, slopes);
  check_saved(query, grad_out_, grad_lse_, out_, lse_, log2_sum_, ranges_);
  const Tensor grad_query = allocate_like(query), grad_key = allocate_like(key), grad_value = allocate_like(value);
  const Tensor grad_out = with_dense_rows(grad_out_), out = with_dense_rows(out_);
  const Tensor grad_lse = grad_lse_.has_value() ? as_contiguous(*grad_lse_) : Tensor();
  const Tensor lse = as_contiguous(lse_), log2_sum = as_contiguous(log2_sum_), ranges = as_contiguous(ranges_);
  const Tensor slope_rows = slopes_need_grad ? empty(lse.sizes(), ScalarType::Float) : Tensor();
  Inputs tensors(query, key, value, slopes);
  Problem problem = describe(tensors, options);
  const int64_t threads = usable_threads(problem);
  const ShortSequences sequences = short_sequences_of(problem);
  const bool is_short = !sequences.groups.empty();
  const int64_t num_chunks = count_chunks(problem, threads, 2);  // each chunk has gradients of all keys of its head
  const bool chunked = num_chunks > 1 && !is_short;
  const int64_t num_items = problem.batch_size * problem.num_key_heads * num_chunks;
  const int64_t num_partial = num_items * 2 * round_up(problem.key_length, key_step) * padded_dims(problem);
  const Tensor partial = empty(std::array{chunked ? num_partial : 0}, ScalarType::Float);
  const BackwardInputs inputs{
      strided(grad_out), strided(out), grad_lse.defined() ? grad_lse.const_data_ptr<float>() : nullptr,
      lse.const_data_ptr<float>(), log2_sum.const_data_ptr<float>(), ranges.const_data_ptr<int32_t>()};
  const BackwardOutputs outputs{
      strided(grad_query), strided(grad_key), strided(grad_value),
      slopes_need_grad ? slope_rows.mutable_data_ptr<float>() : nullptr, partial.mutable_data_ptr<float>()};
  if (is_short) {
    use_products(sequences.products, problem);
    for_each_short_item(
        problem, sequences, threads, kernels().short_backward_bytes(problem),
        [&](NextShortItem next, char* scratch) { kernels().short_backward(problem, inputs, outputs, next, scratch); });
  } else {
    for_each_item(
        problem, threads, num_chunks, kernels().backward_bytes(problem, chunked),
        [&](const Item& item, char* scratch) { kernels().backward(problem, inputs, outputs, item, scratch); });
  }
  if (chunked) {
    parallel_for(0, problem.batch_size * problem.num_key_heads, 1, [&](int64_t first, int64_t last) {
      for (int64_t index = first; index < last; ++index) {
        kernels().sum_chunks(
            problem, outputs, Item{index / problem.num_key_heads, index % problem.num_key_heads, 0, num_chunks});
      }
    });
  }
  const Tensor grad_slopes =
      slopes_need_grad ? sum_slopes(slope_rows, problem, slopes) : empty(std::array<int64_t, 1>{0}, slopes.scalar_type());
  return {grad_query, grad_key, grad_value, grad_slopes};
}

// The operators, with their options as schema.py lists them.
template <typename Options, typename... Arguments>
struct Operator {
  static FourTensors run(
      const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& slopes, Arguments... arguments) {
    return forward(query, key, value, slopes, Options{arguments...});
  }

  static FourTensors run_backward(
      const Tensor& grad_out, const std::optional<Tensor>& grad_lse, const Tensor& out, const Tensor& lse,
      const Tensor& log2_sum, const Tensor& ranges, bool slopes_need_grad, const Tensor& query, const Tensor& key,
      const Tensor& value, const Tensor& slopes, Arguments... arguments) {
    return backward(
        grad_out, grad_lse, out, lse, log2_sum, ranges, slopes_need_grad, query, key, value, slopes,
        Options{arguments...});
  }
};

using MaybeTensor = const std::optional<Tensor>&;
using MaybeInt = std::optional<int64_t>;
using Dense = Operator<
    DenseOptions, MaybeTensor, MaybeTensor, MaybeTensor, int64_t, bool, double, MaybeInt, MaybeInt, double, double, MaybeTensor>;
using Varlen = Operator<
    VarlenOptions, const Tensor&, const Tensor&, MaybeTensor, int64_t, int64_t, bool, double, MaybeInt, double, double,
    MaybeTensor>;

}  // namespace

SEQWARM_LIBRARY(CPU, library) {
  library.impl("alibi_attention.native", SEQWARM_KERNEL(Dense::run));
  library.impl("alibi_attention_varlen.native", SEQWARM_KERNEL(Varlen::run));
  library.impl("alibi_attention_backward.native", SEQWARM_KERNEL(Dense::run_backward));
  library.impl("alibi_attention_varlen_backward.native", SEQWARM_KERNEL(Varlen::run_backward));
}

}  // namespace seqwarm
