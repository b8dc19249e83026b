// What decides how a call is checked and run, as one value that can be compared.

#pragma once

#include <ATen/core/Tensor.h>
#include <pybind11/pybind11.h>

#include <optional>

namespace seqwarm {

// Of tensors: shape, strides, dtype, device and alignment. Of None, bool, int, float and str: type and value. Nothing if
// another argument is among them, a tensor is not a plain one (a subclass, a dual tensor, or inside of a functorch
// transform), or a mode of PyTorch could change what the call does.
std::optional<pybind11::bytes> call_key(const pybind11::args& arguments);

// Whether no dispatch or torch-function mode, tracing or functorch transform is active. Autocast may be, and autograd may
// be excluded.
bool is_plain_state();

// Whether the tensor is dense, on a CPU or a GPU, not of a subclass, and without a tangent.
bool is_plain(const at::Tensor& tensor);

}  // namespace seqwarm
