// What decides how a call is checked and run, as one value that can be compared.

#pragma once

#include <pybind11/pybind11.h>

#include <optional>

namespace seqwarm {

// Of tensors: shape, strides, dtype, device and alignment. Of None, bool, int, float and str: type and value. Of a dict of
// tensors: the same of its names and tensors, in order. Nothing if another argument is among them, a tensor is not a plain
// one (a subclass, or inside of a functorch transform), or a mode of PyTorch could change what the call does.
std::optional<pybind11::bytes> call_kind(const pybind11::args& arguments);

}  // namespace seqwarm
