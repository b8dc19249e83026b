#include "direct.h"

#include "call.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/slice.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

#include <string>
#include <utility>

namespace py = pybind11;

namespace seqwarm {
namespace {

using Tensors = std::vector<at::Tensor>;
using MaybeTensor = std::optional<at::Tensor>;

// What the checks found out for batches of one kind.
struct CheckedCall {
  std::string rule;
  int64_t batch_size;
  int64_t source_length;
  std::vector<py::object> names;  // of the tensors that are resized
  std::vector<int64_t> kinds;
  std::vector<at::Scalar> fill_values;
  py::object mask_name;  // or None
  bool copy;
};

bool any_row_begins_masked(at::Tensor mask) {
  const MaskView view = describe_mask(mask, mask.device());
  for (int64_t row = 0; row < mask.size(0); ++row) {
    if (!view.valid(row, 0)) {
      return true;
    }
  }
  return false;
}

// Views of the first tokens. Nothing if a row may begin with padding.
std::optional<Tensors> views(const CheckedCall& call, const Tensors& tensors, const MaybeTensor& mask, int64_t length) {
  if (call.rule == "truncate_valid" && length < call.source_length && (mask->is_cuda() || any_row_begins_masked(*mask))) {
    return std::nullopt;
  }
  Tensors results;
  results.reserve(tensors.size());
  for (size_t index = 0; index < tensors.size(); ++index) {
    const bool has_tokens = static_cast<Kind>(call.kinds[index]) != Kind::Row;
    results.push_back(has_tokens ? at::slice(tensors[index], 1, 0, length) : tensors[index]);
  }
  return results;
}

// New tensors. Nothing if a tensor requires a gradient, which a copy does not carry.
std::optional<Tensors> copies(const CheckedCall& call, const Tensors& tensors, const MaybeTensor& mask, int64_t length) {
  using Call = Tensors(
      at::TensorList, const MaybeTensor&, c10::SymInt, c10::SymInt, c10::SymInt, std::string_view, at::IntArrayRef,
      at::ArrayRef<at::Scalar>, bool);
  static const auto handle =
      c10::Dispatcher::singleton().findSchemaOrThrow("seqwarm::resize_batch", "native").typed<Call>();
  if (at::GradMode::is_enabled()) {
    for (const at::Tensor& tensor : tensors) {
      if (tensor.requires_grad()) {
        return std::nullopt;
      }
    }
  }
  const py::gil_scoped_release no_gil;
  return handle.call(
      tensors, mask, call.batch_size, call.source_length, length, call.rule, call.kinds, call.fill_values,
      /*return_info=*/false);
}

// The new batch. None if the call has to take the longer way, which also knows the errors.
std::optional<py::dict> resize(const CheckedCall& call, const py::dict& batch, const py::handle& seq_len) {
  int overflow = 0;
  const int64_t wanted = PyLong_CheckExact(seq_len.ptr()) ? PyLong_AsLongLongAndOverflow(seq_len.ptr(), &overflow) : 0;
  if (wanted < 1 || overflow != 0) {
    return std::nullopt;
  }
  const int64_t length = std::min(wanted, call.source_length);
  Tensors tensors;
  tensors.reserve(call.names.size());
  for (const py::object& name : call.names) {
    tensors.push_back(batch[name].cast<at::Tensor>());
  }
  const MaybeTensor mask = call.mask_name.is_none() ? MaybeTensor() : batch[call.mask_name].cast<at::Tensor>();
  std::optional<Tensors> results = (call.copy ? copies : views)(call, tensors, mask, length);
  if (!results.has_value()) {
    return std::nullopt;
  }
  auto new_batch = py::reinterpret_steal<py::dict>(PyDict_Copy(batch.ptr()));
  for (size_t index = 0; index < tensors.size(); ++index) {
    new_batch[call.names[index]] = py::cast(std::move((*results)[index]));
  }
  return new_batch;
}

py::cpp_function resize_call(
    std::string rule, int64_t batch_size, int64_t source_length, std::vector<py::object> names,
    std::vector<int64_t> kinds, const std::vector<int64_t>& fill_values, py::object mask_name, bool copy) {
  CheckedCall call{
      std::move(rule), batch_size, source_length, std::move(names), std::move(kinds),
      {fill_values.begin(), fill_values.end()}, std::move(mask_name), copy};
  return torch::wrap_pybind_function([call = std::move(call)](const py::dict& batch, const py::handle& seq_len) {
    return resize(call, batch, seq_len);
  });
}

}  // namespace

void define_direct_resize(py::module_& module) {
  module.def(
      "resize_call", &resize_call,
      "A checked call, as a function of a batch and a length. It returns the new batch, or None where it does not serve.");
}

}  // namespace seqwarm
