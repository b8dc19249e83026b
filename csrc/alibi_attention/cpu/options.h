// The operators' options, as schema.py lists them, and the checks of their values.

#pragma once

#include "../../torch.h"

#include <cstdint>
#include <optional>
#include <vector>

namespace seqwarm {

struct DenseOptions {
  std::optional<Tensor> query_start, key_padding_mask, dropout_seed;
  int64_t query_offset;
  bool causal;
  double scale;
  std::optional<int64_t> segment_length, window;
  double dropout_p, skip_tolerance;
  std::optional<Tensor> key_norm_bound;
};

struct VarlenOptions {
  Tensor cu_seqlens_q, cu_seqlens_k;
  std::optional<Tensor> dropout_seed;
  int64_t max_seqlen_q, max_seqlen_k;
  bool causal;
  double scale;
  std::optional<int64_t> window;
  double dropout_p, skip_tolerance;
  std::optional<Tensor> query_start;
};

// validation.py: check_packing. Nothing is read unless the tensors are on a CPU.
void check_packing(
    const Tensor& query, const Tensor& key, const Tensor& cu_seqlens_q, const Tensor& cu_seqlens_k,
    int64_t max_seqlen_q, int64_t max_seqlen_k);

// The checks of values of validation.py, and of all else from which the kernels compute addresses: an operator may be
// called without the checks of the public functions. The dispatcher checks devices.
void check_inputs(
    const DenseOptions& options, const Tensor& query, const Tensor& key, const Tensor& value,
    const Tensor& slopes);
void check_inputs(
    const VarlenOptions& options, const Tensor& query, const Tensor& key, const Tensor& value,
    const Tensor& slopes);

// The shape of lse.
std::vector<int64_t> rows_of(const Tensor& query);
// The shape of `ranges`.
std::vector<int64_t> range_rows_of(const Tensor& query);

// The same of the tensors that backward gets besides.
void check_saved(
    const Tensor& query, const Tensor& grad_out, const std::optional<Tensor>& grad_lse,
    const Tensor& out, const Tensor& lse, const Tensor& log2_sum, const Tensor& ranges);

}  // namespace seqwarm
