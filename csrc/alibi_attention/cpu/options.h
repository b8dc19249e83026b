// The operators' options, as schema.py lists them, and the checks of their values.

#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <vector>

namespace seqwarm {

struct DenseOptions {
  std::optional<at::Tensor> query_start, key_padding_mask, dropout_seed;
  int64_t query_offset;
  bool causal;
  double scale;
  std::optional<int64_t> segment_length, window;
  double dropout_p, skip_tolerance;
  std::optional<at::Tensor> key_norm_bound;
};

struct VarlenOptions {
  at::Tensor cu_seqlens_q, cu_seqlens_k;
  std::optional<at::Tensor> dropout_seed;
  int64_t max_seqlen_q, max_seqlen_k;
  bool causal;
  double scale;
  std::optional<int64_t> window;
  double dropout_p, skip_tolerance;
  std::optional<at::Tensor> query_start;
};

// validation.py: check_packing. Nothing is read unless the tensors are on a CPU.
void check_packing(
    const at::Tensor& query, const at::Tensor& key, const at::Tensor& cu_seqlens_q, const at::Tensor& cu_seqlens_k,
    int64_t max_seqlen_q, int64_t max_seqlen_k);

// The checks of values of validation.py, and of all else from which the kernels compute addresses: an operator may be
// called without the checks of the public functions. The dispatcher checks devices.
void check_inputs(
    const DenseOptions& options, const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
    const at::Tensor& slopes);
void check_inputs(
    const VarlenOptions& options, const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
    const at::Tensor& slopes);

// The shape of lse.
std::vector<int64_t> rows_of(const at::Tensor& query);
// The shape of `ranges`.
std::vector<int64_t> range_rows_of(const at::Tensor& query);

// The same of the tensors that backward gets besides.
void check_saved(
    const at::Tensor& query, const at::Tensor& grad_out, const std::optional<at::Tensor>& grad_lse,
    const at::Tensor& out, const at::Tensor& lse, const at::Tensor& log2_sum, const at::Tensor& ranges);

}  // namespace seqwarm
