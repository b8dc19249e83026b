#include "options.h"

#include "problem.h"

#include <algorithm>

namespace seqwarm {
namespace {

// `side` is q or k, and `tensor` has the tokens.
void check_sequences(
    char side, const Tensor& cu_seqlens, const Tensor& tensor, const char* tensor_name, int64_t max_seqlen) {
  const int32_t* ends = cu_seqlens.const_data_ptr<int32_t>();
  const int64_t last = cu_seqlens.numel() - 1, num_tokens = tensor.size(0);
  SEQWARM_CHECK_VALUE(ends[0] == 0, "cu_seqlens_", side, " must start with 0, got ", ends[0]);
  int64_t longest = 0;
  for (int64_t index = 1; index <= last; ++index) {
    const int64_t start = ends[index - 1], end = ends[index];
    SEQWARM_CHECK_VALUE(start <= end, "cu_seqlens_", side, " must not decrease, got ", end, " after ", start);
    longest = std::max(longest, end - start);
  }
  SEQWARM_CHECK_VALUE(
      ends[last] <= num_tokens, "cu_seqlens_", side, " must end within the ", num_tokens, " tokens of ", tensor_name,
      ", got ", ends[last]);
  SEQWARM_CHECK_VALUE(
      longest <= max_seqlen, "max_seqlen_", side, " must be at least ", longest,
      ", the length of the longest sequence, got ", max_seqlen);
}

constexpr int64_t most_dims = 256;  // of a head

void check_tensors(const Tensor& query, const Tensor& key, const Tensor& value, int64_t rank) {
  SEQWARM_CHECK_VALUE(
      query.dim() == rank && key.dim() == rank && is_equal(key.sizes(), value.sizes()), "query, key and value must have ", rank,
      " dimensions and key the shape of value, got ", query.sizes(), ", ", key.sizes(), " and ", value.sizes());
  const ScalarType dtype = query.scalar_type();
  SEQWARM_CHECK_TYPE(
      (dtype == ScalarType::Float || dtype == ScalarType::Half || dtype == ScalarType::BFloat16) && key.scalar_type() == dtype &&
          value.scalar_type() == dtype,
      "query, key and value must all be float32, float16 or bfloat16, got ", dtype, ", ", key.scalar_type(), " and ",
      value.scalar_type());
  const int64_t dims = query.size(-1), heads = query.size(1), key_heads = key.size(1);
  SEQWARM_CHECK_VALUE(
      1 <= dims && dims <= most_dims && key.size(-1) == dims, "query and key must have one head_dim from 1 to ",
      most_dims, ", got ", dims, " and ", key.size(-1));
  SEQWARM_CHECK_VALUE(
      key_heads > 0 && heads > 0 && heads % key_heads == 0,
      "the number of query heads must be a multiple of that of key heads, got ", heads, " and ", key_heads);
}

void check_slopes(const Tensor& slopes, int64_t rows, int64_t num_heads) {
  const bool fits = slopes.dim() == 1 || (slopes.dim() == 2 && slopes.size(0) == rows);
  SEQWARM_CHECK_VALUE(
      fits && slopes.size(-1) == num_heads, "slopes must be (", num_heads, ",) or (", rows, ", ", num_heads, "), got ",
      slopes.sizes());
}

void check_shape(const char* name, const Tensor& tensor, Sizes wanted) {
  SEQWARM_CHECK_VALUE(is_equal(tensor.sizes(), wanted), name, " must have the shape ", wanted, ", got ", tensor.sizes());
}

void check_shape(const char* name, const std::optional<Tensor>& tensor, Sizes wanted) {
  if (tensor) {
    check_shape(name, *tensor, wanted);
  }
}

// A seed has no dimensions, head offsets have those of `wanted`.
void check_seed(const std::optional<Tensor>& seed, Sizes wanted) {
  if (seed && seed->dim() > 0) {
    check_shape("dropout_seed", *seed, wanted);
  }
}

void check_at_least(const char* name, std::optional<int64_t> number, int64_t least) {
  SEQWARM_CHECK_VALUE(number.value_or(least) >= least, name, " must be at least ", least, ", got ", *number);
}

// `entries`: the number of rows or sequences, `which`.
void check_positions(const std::optional<Tensor>& query_start, int64_t entries, const char* which) {
  if (!query_start) {
    return;
  }
  SEQWARM_CHECK_VALUE(
      query_start->dim() == 1 && (query_start->numel() == 1 || query_start->numel() == entries),
      "query_start must have one entry, or one for each of the ", entries, " ", which, ", got ", query_start->numel());
  if (query_start->scalar_type() == ScalarType::Int) {
    return;
  }
  const auto* starts = query_start->const_data_ptr<int64_t>();
  const int64_t stride = query_start->stride(0);
  for (int64_t row = 0; row < query_start->numel(); ++row) {
    SEQWARM_CHECK_VALUE(
        -farthest_position <= starts[row * stride] && starts[row * stride] <= farthest_position,
        "query_start must be from -2**60 to 2**60, got ", starts[row * stride]);
  }
}

}  // namespace

void check_packing(
    const Tensor& query, const Tensor& key, const Tensor& cu_seqlens_q, const Tensor& cu_seqlens_k,
    int64_t max_seqlen_q, int64_t max_seqlen_k) {
  if (query.is_cpu()) {
    SEQWARM_CHECK_VALUE(
        cu_seqlens_q.dim() == 1 && cu_seqlens_q.numel() > 0 && is_equal(cu_seqlens_k.sizes(), cu_seqlens_q.sizes()),
        "cu_seqlens_q and cu_seqlens_k must have the same shape (sequences + 1,), got ", cu_seqlens_q.sizes(), " and ",
        cu_seqlens_k.sizes());
    check_sequences('q', as_contiguous(cu_seqlens_q), query, "query", max_seqlen_q);
    check_sequences('k', as_contiguous(cu_seqlens_k), key, "key", max_seqlen_k);
  }
}

void check_inputs(
    const DenseOptions& options, const Tensor& query, const Tensor& key, const Tensor& value,
    const Tensor& slopes) {
  check_tensors(query, key, value, 4);
  const int64_t batch_size = query.size(0), num_heads = query.size(1);
  SEQWARM_CHECK_VALUE(
      key.size(0) == batch_size, "key must have the query's batch size ", batch_size, ", got ", key.size(0));
  check_slopes(slopes, batch_size, num_heads);
  check_shape("key_padding_mask", options.key_padding_mask, {batch_size, key.size(2)});
  SEQWARM_CHECK_TYPE(
      !options.key_padding_mask || options.key_padding_mask->scalar_type() == ScalarType::Bool,
      "key_padding_mask must be bool, got ", options.key_padding_mask->scalar_type());
  check_shape("key_norm_bound", options.key_norm_bound, {batch_size, key.size(1)});
  check_seed(options.dropout_seed, {batch_size, num_heads, 4});
  check_at_least("segment_length", options.segment_length, 1);
  check_at_least("window", options.window, 0);
  check_positions(options.query_start, batch_size, "rows");
}

void check_inputs(
    const VarlenOptions& options, const Tensor& query, const Tensor& key, const Tensor& value,
    const Tensor& slopes) {
  check_tensors(query, key, value, 3);
  check_packing(
      query, key, options.cu_seqlens_q, options.cu_seqlens_k, options.max_seqlen_q, options.max_seqlen_k);
  const int64_t num_sequences = options.cu_seqlens_q.numel() - 1;
  check_slopes(slopes, num_sequences, query.size(1));
  check_seed(options.dropout_seed, {query.size(1), 4});
  check_at_least("window", options.window, 0);
  check_positions(options.query_start, num_sequences, "sequences");
}

std::vector<int64_t> rows_of(const Tensor& query) {
  const auto sizes = query.sizes();
  return query.dim() == 3 ? std::vector{sizes[1], sizes[0]} : std::vector{sizes[0], sizes[1], sizes[2]};
}

std::vector<int64_t> range_rows_of(const Tensor& query) {
  std::vector<int64_t> rows = rows_of(query);
  rows.back() = 2 * ((rows.back() + range_block - 1) / range_block);
  return rows;
}

void check_saved(
    const Tensor& query, const Tensor& grad_out, const std::optional<Tensor>& grad_lse,
    const Tensor& out, const Tensor& lse, const Tensor& log2_sum, const Tensor& ranges) {
  const ScalarType dtype = query.scalar_type();
  SEQWARM_CHECK_TYPE(
      grad_out.scalar_type() == dtype && out.scalar_type() == dtype, "grad_out and out must have the query's dtype ",
      dtype, ", got ", grad_out.scalar_type(), " and ", out.scalar_type());
  const std::vector<int64_t> rows = rows_of(query);
  check_shape("grad_out", grad_out, query.sizes());
  check_shape("out", out, query.sizes());
  check_shape("grad_lse", grad_lse, rows);
  check_shape("lse", lse, rows);
  check_shape("log2_sum", log2_sum, rows);
  check_shape("ranges", ranges, range_rows_of(query));
}

}  // namespace seqwarm
