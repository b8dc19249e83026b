// seqwarm::alibi_attention and its varlen form for Python, without the operator's autograd, which is in Python.

#pragma once

#include <pybind11/pybind11.h>

namespace seqwarm {

void define_direct_calls(pybind11::module_& module);

}  // namespace seqwarm
