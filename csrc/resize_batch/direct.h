// seqwarm::resize_batch for Python, past the Python parts of a call: from a dict of tensors to another.

#pragma once

#include <pybind11/pybind11.h>

namespace seqwarm {

void define_direct_resize(pybind11::module_& module);

}  // namespace seqwarm
