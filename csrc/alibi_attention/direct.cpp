#include "direct.h"

#include "../calls/key.h"
#include "cpu/options.h"

#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/record_function.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/utils/pybind.h>

#include <optional>
#include <tuple>
#include <utility>

namespace py = pybind11;

namespace seqwarm {
namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;
using Maybe = std::optional<Tensor>;
using FourTensors = std::tuple<Tensor, Tensor, Tensor, Tensor>;

// The dispatcher's type of a number of the schema: an int there may be a symbol.
template <typename T>
struct InSchema {
  using type = T;
};
template <>
struct InSchema<int64_t> {
  using type = c10::SymInt;
};
template <>
struct InSchema<std::optional<int64_t>> {
  using type = std::optional<c10::SymInt>;
};
template <typename T>
using in_schema = typename InSchema<T>::type;

template <typename T>
T saved_as(const Tensor& tensor) {
  if constexpr (std::is_same_v<T, Maybe>) {
    return tensor.defined() ? Maybe(tensor) : std::nullopt;
  } else {
    return tensor;
  }
}

struct Dense {
  static constexpr const char* forward = "seqwarm::alibi_attention";
  static constexpr const char* backward = "seqwarm::alibi_attention_backward";
};
struct Varlen {
  static constexpr const char* forward = "seqwarm::alibi_attention_varlen";
  static constexpr const char* backward = "seqwarm::alibi_attention_varlen_backward";
};
struct Native {
  static constexpr const char* name = "native";
};
struct Triton {  // Its kernels are in Python.
  static constexpr const char* name = "triton";
};

// A backend's operator that takes query, key, value and slopes, three tensors of which a `T` each may be None, `Numbers`,
// and another tensor or None.
template <typename Operator, typename Backend, typename T, typename... Numbers>
struct Attention : torch::autograd::Function<Attention<Operator, Backend, T, Numbers...>> {
  static constexpr bool is_traceable = true;
  static constexpr bool in_python = std::is_same_v<Backend, Triton>;
  static inline PyObject* python_forward = nullptr;
  static inline PyObject* python_backward = nullptr;

  static std::pair<Tensor, Tensor> call(
      const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& slopes, const T& first,
      const T& second, const Maybe& seed, Numbers... numbers, const Maybe& last) {
    // Autograd may also be excluded: the caller may be the implementation of an operator that has its own.
    const bool records = at::GradMode::is_enabled() &&
        !c10::impl::tls_is_dispatch_key_excluded(c10::DispatchKey::AutogradOther) &&
        (query.requires_grad() || key.requires_grad() || value.requires_grad() || slopes.requires_grad());
    if (records) {
      const variable_list outputs = Attention::apply(query, key, value, slopes, first, second, seed, numbers..., last);
      return {outputs[0], outputs[1]};
    }
    const FourTensors outputs = run(query, key, value, slopes, first, second, seed, numbers..., last);
    return {std::get<0>(outputs), std::get<1>(outputs)};
  }

  static variable_list forward(
      AutogradContext* context, const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& slopes,
      const T& first, const T& second, const Maybe& seed, Numbers... numbers, const Maybe& last) {
    auto [out, lse, log2_sum, ranges] = run(query, key, value, slopes, first, second, seed, numbers..., last);
    context->save_for_backward(
        {query, key, value, slopes, Maybe(first).value_or(Tensor()), Maybe(second).value_or(Tensor()),
         seed.value_or(Tensor()), out, lse, log2_sum, ranges, last.value_or(Tensor())});
    context->set_materialize_grads(false);  // no zeros for an lse that is not used
    c10::impl::GenericList saved_numbers(c10::AnyType::get());
    saved_numbers.reserve(sizeof...(Numbers));
    (saved_numbers.push_back(numbers), ...);
    context->saved_data["numbers"] = std::move(saved_numbers);
    return {out, lse};
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const variable_list saved = context->get_saved_variables();
    const Tensor& out = saved[7];
    const Tensor grad_out = gradients[0].defined() ? gradients[0] : at::zeros_like(out);
    const bool slopes_need_grad = context->needs_input_grad(3);
    const auto numbers = context->saved_data["numbers"].toList();
    FourTensors results = [&]<size_t... indices>(std::index_sequence<indices...>) {
      return run_backward(
          grad_out, saved_as<Maybe>(gradients[1]), out, saved[8], saved[9], saved[10], slopes_need_grad, saved[0],
          saved[1], saved[2], saved[3], saved_as<T>(saved[4]), saved_as<T>(saved[5]), saved_as<Maybe>(saved[6]),
          numbers.get(indices).template to<Numbers>()..., saved_as<Maybe>(saved[11]));
    }(std::index_sequence_for<Numbers...>());
    variable_list inputs(8 + sizeof...(Numbers));
    std::tie(inputs[0], inputs[1], inputs[2], inputs[3]) = std::move(results);
    if (!slopes_need_grad) {
      inputs[3] = Tensor();
    }
    return inputs;
  }

 private:
  static FourTensors run(
      const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& slopes, const T& first,
      const T& second, const Maybe& seed, Numbers... numbers, const Maybe& last) {
    using Call = FourTensors(
        const Tensor&, const Tensor&, const Tensor&, const Tensor&, const T&, const T&, const Maybe&,
        in_schema<Numbers>..., const Maybe&);
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    if constexpr (in_python) {
      RECORD_FUNCTION(Operator::forward, {});
      return call_python(python_forward, query, key, value, slopes, first, second, seed, numbers..., last);
    } else {
      static const auto handle = find<Call>(Operator::forward);
      return handle.call(query, key, value, slopes, first, second, seed, numbers..., last);
    }
  }

  // The operator refuses to be differentiated again, with an autograd of its own. It costs time only where a second
  // derivative is asked for.
  static FourTensors run_backward(
      const Tensor& grad_out, const Maybe& grad_lse, const Tensor& out, const Tensor& lse, const Tensor& log2_sum,
      const Tensor& ranges, bool slopes_need_grad, const Tensor& query, const Tensor& key, const Tensor& value,
      const Tensor& slopes, const T& first, const T& second, const Maybe& seed, Numbers... numbers, const Maybe& last) {
    using Call = FourTensors(
        const Tensor&, const Maybe&, const Tensor&, const Tensor&, const Tensor&, const Tensor&, bool, const Tensor&,
        const Tensor&, const Tensor&, const Tensor&, const T&, const T&, const Maybe&, in_schema<Numbers>...,
        const Maybe&);
    const bool differentiates = at::GradMode::is_enabled();
    const c10::impl::ExcludeDispatchKeyGuard below_autograd(
        differentiates ? c10::DispatchKeySet() : c10::autograd_dispatch_keyset_with_ADInplaceOrView);
    if constexpr (in_python) {
      const bool is_known = is_plain(grad_out) && (!grad_lse.has_value() || is_plain(*grad_lse));
      if (is_known && !differentiates && is_plain_state()) {
        RECORD_FUNCTION(Operator::backward, {});
        return call_python(
            python_backward, grad_out, grad_lse, out, lse, log2_sum, ranges, slopes_need_grad, query, key, value, slopes,
            first, second, seed, numbers..., last);
      }
    }
    static const auto handle = find<Call>(Operator::backward);
    return handle.call(
        grad_out, grad_lse, out, lse, log2_sum, ranges, slopes_need_grad, query, key, value, slopes, first, second, seed,
        numbers..., last);
  }

  template <typename Call>
  static auto find(const char* name) {
    return c10::Dispatcher::singleton().findSchemaOrThrow(name, Backend::name).template typed<Call>();
  }

  template <typename... Arguments>
  static FourTensors call_python(PyObject* function, const Arguments&... arguments) {
    const py::gil_scoped_acquire gil;
    return py::handle(function)(arguments...).template cast<FourTensors>();
  }
};

using MaybeInt = std::optional<int64_t>;
template <typename Backend>
using DenseAttention = Attention<Dense, Backend, Maybe, int64_t, bool, double, MaybeInt, MaybeInt, double, double>;
template <typename Backend>
using VarlenAttention = Attention<Varlen, Backend, Tensor, int64_t, int64_t, bool, double, MaybeInt, double, double>;

template <typename Operator>
py::cpp_function with_python_kernels(py::function forward, py::function backward) {
  Operator::python_forward = forward.release().ptr();
  Operator::python_backward = backward.release().ptr();
  return torch::wrap_pybind_function(&Operator::call);
}

}  // namespace

void define_direct_calls(py::module_& module) {
  module.def(
      "alibi_attention", torch::wrap_pybind_function_no_gil(&DenseAttention<Native>::call),
      "The operator's out and lse, for a checked call.");
  module.def(
      "alibi_attention_varlen", torch::wrap_pybind_function_no_gil(&VarlenAttention<Native>::call),
      "Likewise, of packed sequences.");
  module.def(
      "alibi_attention_in_python", &with_python_kernels<DenseAttention<Triton>>,
      "The same function for the Triton backend, whose kernels are Python functions: forward and backward.");
  module.def(
      "alibi_attention_varlen_in_python", &with_python_kernels<VarlenAttention<Triton>>,
      "Likewise, of packed sequences.");
  module.def("check_packing", torch::wrap_pybind_function(&check_packing), "Checks of values: validation.py");
}

}  // namespace seqwarm
