#include "options.h"

#include "problem.h"

#include <c10/util/Exception.h>

#include <algorithm>

namespace seqwarm {
namespace {

// `side` is q or k, and `tensor` has the tokens.
void check_sequences(
    char side, const at::Tensor& cu_seqlens, const at::Tensor& tensor, const char* tensor_name, int64_t max_seqlen) {
  const auto ends = cu_seqlens.accessor<int32_t, 1>();
  const int64_t last = ends.size(0) - 1, num_tokens = tensor.size(0);
  TORCH_CHECK_VALUE(ends[0] == 0, "cu_seqlens_", side, " must start with 0, got ", ends[0]);
  int64_t longest = 0;
  for (int64_t index = 1; index <= last; ++index) {
    const int64_t start = ends[index - 1], end = ends[index];
    TORCH_CHECK_VALUE(start <= end, "cu_seqlens_", side, " must not decrease, got ", end, " after ", start);
    longest = std::max(longest, end - start);
  }
  TORCH_CHECK_VALUE(
      ends[last] <= num_tokens, "cu_seqlens_", side, " must end within the ", num_tokens, " tokens of ", tensor_name,
      ", got ", ends[last]);
  TORCH_CHECK_VALUE(
      longest <= max_seqlen, "max_seqlen_", side, " must be at least ", longest,
      ", the length of the longest sequence, got ", max_seqlen);
}

void check_slopes(const at::Tensor& slopes, int64_t rows, int64_t num_heads) {
  const bool fits = slopes.dim() == 1 || (slopes.dim() == 2 && slopes.size(0) == rows);
  TORCH_CHECK_VALUE(
      fits && slopes.size(-1) == num_heads, "slopes must be (", num_heads, ",) or (", rows, ", ", num_heads, "), got ",
      slopes.sizes());
}

}  // namespace

void check_packing(
    const at::Tensor& query, const at::Tensor& key, const at::Tensor& cu_seqlens_q, const at::Tensor& cu_seqlens_k,
    int64_t max_seqlen_q, int64_t max_seqlen_k) {
  if (query.is_cpu()) {
    TORCH_CHECK_VALUE(
        cu_seqlens_q.dim() == 1 && cu_seqlens_q.numel() > 0 && cu_seqlens_k.sizes() == cu_seqlens_q.sizes(),
        "cu_seqlens_q and cu_seqlens_k must have the same shape (sequences + 1,), got ", cu_seqlens_q.sizes(), " and ",
        cu_seqlens_k.sizes());
    check_sequences('q', cu_seqlens_q, query, "query", max_seqlen_q);
    check_sequences('k', cu_seqlens_k, key, "key", max_seqlen_k);
  }
}

void check_values(
    const DenseOptions& options, const at::Tensor& query, const at::Tensor& /*key*/, const at::Tensor& slopes) {
  check_slopes(slopes, query.size(0), query.size(1));
  if (!options.query_start) {
    return;
  }
  const int64_t count = options.query_start->numel();
  TORCH_CHECK_VALUE(
      count == 1 || count == query.size(0), "query_start must have one entry, or one for each of the ", query.size(0),
      " rows, got ", count);
  if (options.query_start->scalar_type() != at::kLong) {
    return;
  }
  const auto starts = options.query_start->accessor<int64_t, 1>();
  for (int64_t row = 0; row < starts.size(0); ++row) {
    TORCH_CHECK_VALUE(
        -farthest_position <= starts[row] && starts[row] <= farthest_position,
        "query_start must be from -2**60 to 2**60, got ", starts[row]);
  }
}

void check_values(
    const VarlenOptions& options, const at::Tensor& query, const at::Tensor& key, const at::Tensor& slopes) {
  check_packing(
      query, key, options.cu_seqlens_q, options.cu_seqlens_k, options.max_seqlen_q, options.max_seqlen_k);
  check_slopes(slopes, options.cu_seqlens_q.numel() - 1, query.size(1));
}

}  // namespace seqwarm
