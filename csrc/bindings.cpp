// The Python module for one torch. Importing it registers the operators' kernels. Their schemas are defined in
// Python (seqwarm_kernels/ops). The module itself reports what it was built with, and has a shorter way to a kernel for
// calls that were checked.

#include "alibi_attention/cpu/products.h"
#include "alibi_attention/direct.h"
#include "calls/key.h"

#include <ATen/ops/empty_strided.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

#include <vector>

namespace py = pybind11;

namespace {

py::dict build_info() {
  py::dict info;
  info["torch"] = SEQWARM_TORCH_VERSION;
  info["compiler"] = SEQWARM_COMPILER;
  return info;
}

std::vector<at::Tensor> allocate(const std::vector<at::Tensor>& shells, at::Device device) {
  std::vector<at::Tensor> tensors;
  tensors.reserve(shells.size());
  for (const at::Tensor& shell : shells) {
    tensors.push_back(at::empty_strided(shell.sizes(), shell.strides(), shell.options().device(device)));
  }
  return tensors;
}

}  // namespace

PYBIND11_MODULE(SEQWARM_MODULE, module) {
  module.def("build_info", &build_info, "The torch and the compiler that this module was built with.");
  module.def(
      "bfloat16_instructions", &seqwarm::bfloat16_instructions,
      "The CPU's instructions that multiply bfloat16, AMX or AVX512-BF16, or None where float32's do.");
  module.def("call_key", &seqwarm::call_key, "The key of a call with these arguments, or None.");
  module.def(
      "allocate", torch::wrap_pybind_function(&allocate),
      "Uninitialized tensors on a device, of the shapes, strides and dtypes of other tensors.");
  seqwarm::define_direct_calls(module);
}
