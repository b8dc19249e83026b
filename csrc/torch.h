// What the CPU's operators use of PyTorch, in two kinds.
//
// With SEQWARM_STABLE it is PyTorch's stable ABI: one library serves every torch from 2.11 on. Without it, it is ATen: the
// module serves the torch that it was built with, and the dispatcher reaches its kernels sooner.

#pragma once

#ifdef SEQWARM_STABLE
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <stdexcept>
#else
#include <ATen/ATen.h>
#include <torch/csrc/stable/ops.h>
#include <torch/library.h>
#endif

#include <algorithm>
#include <array>
#include <cstdint>
#include <sstream>
#include <string>
#include <vector>

namespace seqwarm {

using ScalarType = c10::ScalarType;

#ifdef SEQWARM_STABLE

namespace stable = torch::stable;
using stable::Device;
using stable::Tensor;
using Sizes = torch::headeronly::IntHeaderOnlyArrayRef;
// Lists in the signatures of operators.
using Tensors = const std::vector<Tensor>&;
using Integers = const std::vector<int64_t>&;
using Numbers = const std::vector<double>&;

// In Python a ValueError, and with torch 2.15 a RuntimeError.
[[noreturn]] inline void raise_value(const std::string& message) { throw std::invalid_argument(message); }
[[noreturn]] inline void raise_type(const std::string& message) { throw std::invalid_argument(message); }

inline size_t item_size(ScalarType dtype) {
  return aoti_torch_dtype_element_size(stable::detail::to<int32_t>(stable::detail::from(dtype)));
}

inline Tensor empty_strided(Sizes sizes, Sizes strides, ScalarType dtype) {
  AtenTensorHandle tensor;
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(
      static_cast<int64_t>(sizes.size()), sizes.data(), strides.data(),
      stable::detail::to<int32_t>(stable::detail::from(dtype)), aoti_torch_device_type_cpu(), -1, &tensor));
  return Tensor(tensor);
}

// A tensor in memory that `release` frees.
template <typename Release>
Tensor tensor_in(void* data, Sizes sizes, Sizes strides, ScalarType dtype, Release release) {
  return stable::from_blob(
      data, sizes, strides, Device(torch::headeronly::DeviceType::CPU), dtype,
      [release](void*) { release(); });
}

// A number as a tensor without dimensions.
inline Tensor item_of(double number, ScalarType dtype) { return stable::full({}, number, dtype); }

inline Tensor as_contiguous(const Tensor& tensor) {
  return tensor.is_contiguous() ? tensor : stable::contiguous(tensor);
}

inline Tensor to_dtype(const Tensor& tensor, ScalarType dtype) {
  return tensor.scalar_type() == dtype ? tensor : stable::to(tensor, dtype);
}

inline Tensor as_real(const Tensor& tensor) {
  std::array<StableIValue, 1> stack{stable::detail::from(tensor)};
  TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("aten::view_as_real", "", stack.data(), TORCH_ABI_VERSION));
  return stable::detail::to<Tensor>(stack[0]);
}

#define SEQWARM_LIBRARY(device, library) STABLE_TORCH_LIBRARY_IMPL(seqwarm, device, library)
#define SEQWARM_KERNEL(function) TORCH_BOX(&function)

#else

using at::Tensor;
using Sizes = at::IntArrayRef;
using Tensors = at::TensorList;
using Integers = at::IntArrayRef;
using Numbers = at::ArrayRef<double>;

[[noreturn]] inline void raise_value(const std::string& message) { C10_THROW_ERROR(ValueError, message); }
[[noreturn]] inline void raise_type(const std::string& message) { C10_THROW_ERROR(TypeError, message); }

inline size_t item_size(ScalarType dtype) { return c10::elementSize(dtype); }

inline Tensor empty_strided(Sizes sizes, Sizes strides, ScalarType dtype) {
  return at::empty_strided(sizes, strides, at::TensorOptions(dtype).device(at::kCPU));
}

template <typename Release>
Tensor tensor_in(void* data, Sizes sizes, Sizes strides, ScalarType dtype, Release release) {
  return at::from_blob(
      data, sizes, strides, [release](void*) { release(); }, at::TensorOptions(dtype).device(at::kCPU));
}

inline Tensor item_of(double number, ScalarType dtype) {
  return at::scalar_tensor(number, at::TensorOptions(dtype).device(at::kCPU));
}

inline Tensor as_contiguous(const Tensor& tensor) { return tensor.contiguous(); }
inline Tensor to_dtype(const Tensor& tensor, ScalarType dtype) { return tensor.to(dtype); }
inline Tensor as_real(const Tensor& tensor) { return at::view_as_real(tensor); }

#define SEQWARM_LIBRARY(device, library) TORCH_LIBRARY_IMPL(seqwarm, device, library)
#define SEQWARM_KERNEL(function) TORCH_FN((function))

#endif

// libtorch's threads: the compiler needs no OpenMP, which would bring threads of its own.
using torch::stable::parallel_for;

inline int64_t num_threads() { return torch::stable::get_num_threads(); }

inline bool is_integral(ScalarType dtype) {  // bool, too
  switch (dtype) {
    case ScalarType::Bool:
    case ScalarType::Byte:
    case ScalarType::Char:
    case ScalarType::Short:
    case ScalarType::Int:
    case ScalarType::Long:
    case ScalarType::UInt16:
    case ScalarType::UInt32:
    case ScalarType::UInt64:
      return true;
    default:
      return false;
  }
}

inline bool is_equal(Sizes left, Sizes right) {
  return left.size() == right.size() && std::equal(left.begin(), left.end(), right.begin());
}

inline std::vector<int64_t> row_major_strides(Sizes sizes) {
  std::vector<int64_t> strides(sizes.size());
  int64_t stride = 1;
  for (size_t dim = sizes.size(); dim-- > 0;) {
    strides[dim] = stride;
    stride *= std::max<int64_t>(sizes[dim], 1);
  }
  return strides;
}

inline Tensor empty(Sizes sizes, ScalarType dtype) { return empty_strided(sizes, row_major_strides(sizes), dtype); }

inline int64_t num_bytes(const Tensor& tensor) {
  return tensor.numel() * static_cast<int64_t>(item_size(tensor.scalar_type()));
}

inline void print(std::ostream& stream, Sizes sizes) {
  stream << '[';
  for (size_t dim = 0; dim < sizes.size(); ++dim) {
    stream << (dim == 0 ? "" : ", ") << sizes[dim];
  }
  stream << ']';
}

#ifdef SEQWARM_STABLE
inline void print(std::ostream& stream, const Device& device) { stream << (device.is_cpu() ? "cpu" : "another device"); }
#endif

template <typename Part>
void print(std::ostream& stream, const Part& part) {
  stream << part;
}

template <typename... Parts>
std::string text(const Parts&... parts) {
  std::ostringstream stream;
  (print(stream, parts), ...);
  return stream.str();
}

#define SEQWARM_CHECK_VALUE(condition, ...) \
  if (condition) [[likely]] {               \
  } else                                    \
    ::seqwarm::raise_value(::seqwarm::text(__VA_ARGS__))

#define SEQWARM_CHECK_TYPE(condition, ...) \
  if (condition) [[likely]] {              \
  } else                                   \
    ::seqwarm::raise_type(::seqwarm::text(__VA_ARGS__))

}  // namespace seqwarm
