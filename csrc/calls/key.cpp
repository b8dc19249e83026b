#include "key.h"

#include <ATen/PythonTorchFunctionTLS.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/python_variable.h>

#include <string>
#include <string_view>

namespace py = pybind11;

namespace seqwarm {
namespace {

constexpr uintptr_t alignment = 16;  // of blocks that kernels may load at once

using c10::DispatchKey;
using c10::DispatchKeySet;

const DispatchKeySet plain_keys = DispatchKeySet(DispatchKey::CPU) | DispatchKeySet(DispatchKey::CUDA) |
    DispatchKeySet(DispatchKey::AutogradCPU) | DispatchKeySet(DispatchKey::AutogradCUDA) |
    DispatchKeySet(DispatchKey::ADInplaceOrView) | c10::autocast_dispatch_keyset;

template <typename T>
void append(std::string& key, const T* values, size_t count) {
  key.append(reinterpret_cast<const char*>(values), count * sizeof(T));
}

template <typename T>
void append(std::string& key, char type, T value) {
  key.push_back(type);
  append(key, &value, 1);
}

bool append_tensor(std::string& key, const at::Tensor& tensor) {
  if (!is_plain(tensor)) {
    return false;
  }
  const auto address = reinterpret_cast<uintptr_t>(tensor.const_data_ptr());
  append(key, 'T', tensor.key_set().raw_repr());
  append(key, 'd', tensor.scalar_type());
  append(key, 'i', tensor.device().index());
  append(key, 'a', address % alignment == 0);
  append(key, 'n', tensor.dim());
  append(key, tensor.sizes().data(), tensor.dim());
  append(key, tensor.strides().data(), tensor.dim());
  return true;
}

bool append_argument(std::string& key, PyObject* argument) {
  if (argument == Py_None) {
    key.push_back('N');
  } else if (THPVariable_CheckExact(argument)) {  // a Tensor or a Parameter
    return append_tensor(key, THPVariable_Unpack(argument));
  } else if (PyBool_Check(argument)) {
    append(key, 'B', argument == Py_True);
  } else if (PyLong_CheckExact(argument)) {
    int overflow = 0;
    append(key, 'I', PyLong_AsLongLongAndOverflow(argument, &overflow));
    return overflow == 0;
  } else if (PyFloat_CheckExact(argument)) {
    append(key, 'F', PyFloat_AS_DOUBLE(argument));
  } else if (PyUnicode_CheckExact(argument)) {
    Py_ssize_t size = 0;
    const char* text = PyUnicode_AsUTF8AndSize(argument, &size);
    if (text == nullptr) {  // a part of a surrogate pair
      PyErr_Clear();
      return false;
    }
    append(key, 'S', size);
    append(key, text, size);
  } else {
    return false;
  }
  return true;
}

}  // namespace

bool is_plain_state() {
  const c10::impl::LocalDispatchKeySet local = c10::impl::tls_local_dispatch_key_set();
  const DispatchKeySet expected =
      c10::autocast_dispatch_keyset | c10::autograd_dispatch_keyset_with_ADInplaceOrView;
  const DispatchKeySet included = local.included_ - c10::default_included_set - c10::autocast_dispatch_keyset;
  // Which keys that no plain tensor has are excluded does not matter, and differs between versions of PyTorch.
  const DispatchKeySet excluded = (local.excluded_ & plain_keys) - expected;
  return included.empty() && excluded.empty() && !at::impl::torch_function_mode_enabled();
}

bool is_plain(const at::Tensor& tensor) {
  return plain_keys.isSupersetOf(tensor.key_set()) && !tensor._fw_grad(/*level=*/0).defined();
}

std::optional<py::bytes> call_key(const py::args& arguments) {
  if (!is_plain_state()) {
    return std::nullopt;
  }
  std::string key;
  key.reserve(1024);
  for (const py::handle argument : arguments) {
    if (!append_argument(key, argument.ptr())) {
      return std::nullopt;
    }
  }
  return py::bytes(key);
}

}  // namespace seqwarm
