// From a problem's dtypes to template arguments.

#pragma once

#include "problem.h"
#include "short_sequences.h"

#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

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

// Calls function(T(), products) with the dtype of the inputs and how short tiles are multiplied.
template <typename Function>
inline void with_short_types(const Problem& problem, const Function& function) {
  with_products(problem.short_products, [&](auto products) {
    if constexpr (std::is_same_v<decltype(products), FloatProducts>) {
      with_input_type(problem, [&](auto input) { function(input, products); });
    } else {
      function(c10::BFloat16(), products);
    }
  });
}

}  // namespace CPU_CAPABILITY
}  // namespace seqwarm
