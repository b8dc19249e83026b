// The CUDA kernel of resize_batch for CPU tensors. It takes the place of the CPU's own.

#include "cuda.h"

#include "resize_batch/call.cpp"
#include "resize_batch/cuda.cu"

namespace seqwarm {
namespace {

std::vector<int64_t> group_sizes(
    at::TensorList inputs, const std::optional<at::Tensor>& attention_mask, int64_t batch_size, int64_t source_length,
    int64_t new_length, std::string_view rule, at::IntArrayRef kinds, Numbers fill_values,
    bool return_info, at::TensorList outputs) {
  std::vector<int64_t> sizes;
  for (const ResizeEntry& entry : describe_call(
           {inputs, attention_mask, batch_size, source_length, new_length, rule, kinds, fill_values, return_info},
           outputs).entries) {
    sizes.push_back(entry.group_size);
  }
  return sizes;
}

TORCH_LIBRARY_IMPL(seqwarm, CPU, library) {
  library.impl("resize_batch.native", TORCH_FN((resize_batch<allocate, run>)));
  library.impl("resize_batch_out.native", TORCH_FN(resize_batch_out<run>));
}

TORCH_LIBRARY(seqwarm_cuda_shim, library) {
  library.def(
      "group_sizes(Tensor[] inputs, Tensor? attention_mask, int batch_size, int source_length, int new_length, "
      "str rule, int[] kinds, float[] fill_values, bool return_info, Tensor[] outputs) -> int[]",
      group_sizes);
}

}  // namespace
}  // namespace seqwarm
