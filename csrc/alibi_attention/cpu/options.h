// The operators' options, as schema.py lists them, and the checks of their values.

#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>

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
};

// validation.py: check_packing. Nothing is read unless the tensors are on a CPU.
void check_packing(
    const at::Tensor& query, const at::Tensor& key, const at::Tensor& cu_seqlens_q, const at::Tensor& cu_seqlens_k,
    int64_t max_seqlen_q, int64_t max_seqlen_k);

// validation.py: check_values, and the shapes on which reads depend, for operators that are called without its checks.
void check_values(
    const DenseOptions& options, const at::Tensor& query, const at::Tensor& key, const at::Tensor& slopes);
void check_values(
    const VarlenOptions& options, const at::Tensor& query, const at::Tensor& key, const at::Tensor& slopes);

}  // namespace seqwarm
