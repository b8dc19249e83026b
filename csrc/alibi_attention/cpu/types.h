// From a problem's dtypes to template arguments.

#pragma once

#include "problem.h"

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

namespace seqwarm {
inline namespace CPU_CAPABILITY {

// Calls function(T()) with the dtype of the inputs.
template <typename Function>
inline void with_input_type(const Problem& problem, const Function& function) {
  if (problem.input_type == InputType::Float) {
    function(float());
  } else if (problem.input_type == InputType::Half) {
    function(c10::Half());
  } else {
    function(c10::BFloat16());
  }
}

// Calls function(T(), P()) with the dtype of the inputs and the dtype of the products.
template <typename Function>
inline void with_types(const Problem& problem, const Function& function) {
  if (problem.native_products) {
    function(c10::BFloat16(), c10::BFloat16());
  } else {
    with_input_type(problem, [&](auto input) { function(input, float()); });
  }
}

}  // namespace CPU_CAPABILITY
}  // namespace seqwarm
