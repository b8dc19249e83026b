// seqwarm::alibi_attention and its varlen form for Python, past the dispatcher, with an autograd in C++.

#pragma once

#include <pybind11/pybind11.h>

namespace seqwarm {

void define_direct_calls(pybind11::module_& module);

}  // namespace seqwarm
