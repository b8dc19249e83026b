// From a problem's dtypes to template arguments.

#pragma once

#include "problem.h"

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

namespace seqwarm {
inline namespace CPU_CAPABILITY {

// Calls function(T(), P()) with the dtype of the inputs and the dtype of the products.
template <typename Function>
inline void with_types(const Problem& problem, const Function& function) {
  if (problem.input_type == InputType::Float) {
    function(float(), float());
  } else if (problem.input_type == InputType::Half) {
    function(c10::Half(), float());
  } else if (problem.native_products) {
    function(c10::BFloat16(), c10::BFloat16());
  } else {
    function(c10::BFloat16(), float());
  }
}

}  // namespace CPU_CAPABILITY
}  // namespace seqwarm
