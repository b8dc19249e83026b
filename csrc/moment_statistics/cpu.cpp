// seqwarm::moment_statistics on the CPU: all tensors of all lists in one pass, cut into chunks that threads share.
// moment_statistics/schema.py documents the arguments, moment_statistics/reference.py defines the results.
//
// The sums and maxima of all chunks are combined in the chunks' order, so the bits of the result do not depend on the
// number of threads. For float, 16 numbers are added pairwise as float, in four rounds; all further sums are double. No
// number is negative, so the relative error of a round is at most 2^-24, like that of a root or a square, and the
// relative error of a total is at most 5 * 2^-24.

#include <ATen/ops/empty.h>
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/view_as_real.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Exception.h>
#include <c10/util/Half.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <type_traits>
#include <vector>

namespace seqwarm {
namespace {

constexpr int lanes = 16;  // number of partial sums of a block, which are added up as double
constexpr int64_t block = 256;
constexpr int64_t chunk_elements = 64 * block;
// Minimum number of chunks for a thread. Fewer chunks are not worth waking a thread.
constexpr int64_t chunks_per_task = 8;

enum class Kind { Variance, Momentum, Gradient };

struct Partial {
  double total = 0;
  double largest = 0;
};

struct Chunk {
  const at::Tensor* tensor;
  int64_t begin;
  int64_t end;
  Kind kind;
};

template <Kind kind, typename Wide>
inline Wide size_of(Wide value) {
  if constexpr (kind == Kind::Variance) {
    return std::sqrt(value);
  } else if constexpr (kind == Kind::Momentum) {
    return std::abs(value);
  } else {
    return value * value;
  }
}

// Adds the first `width` numbers into the first `lanes` of them. Loop lengths are constant, so compilers vectorize.
template <int width, typename Wide>
inline void fold(Wide* numbers) {
  if constexpr (width > lanes) {
    for (int index = 0; index < width / 2; ++index) {
      numbers[index] += numbers[index + width / 2];
    }
    fold<width / 2>(numbers);
  }
}

template <Kind kind, typename Item>
Partial reduce(const Item* items, int64_t count) {
  using Wide = std::conditional_t<std::is_same_v<Item, double>, double, float>;
  Wide largest[block] = {};
  Wide sizes[block];
  double total = 0;
  for (int64_t begin = 0; begin < count; begin += block) {
    const int here = static_cast<int>(std::min(block, count - begin));
    for (int index = 0; index < here; ++index) {
      sizes[index] = size_of<kind>(static_cast<Wide>(items[begin + index]));
    }
    std::fill(sizes + here, sizes + block, Wide(0));
    for (int index = 0; index < block; ++index) {
      largest[index] = std::max(largest[index], sizes[index]);  // not NaN; the sum keeps it
    }
    fold<block>(sizes);
    for (int lane = 0; lane < lanes; ++lane) {
      total += sizes[lane];
    }
  }
  return {total, static_cast<double>(*std::max_element(largest, largest + block))};
}

template <typename Item>
Partial reduce(const Chunk& chunk) {
  const Item* items = chunk.tensor->const_data_ptr<Item>() + chunk.begin;
  const int64_t count = chunk.end - chunk.begin;
  switch (chunk.kind) {
    case Kind::Variance:
      return reduce<Kind::Variance>(items, count);
    case Kind::Momentum:
      return reduce<Kind::Momentum>(items, count);
    default:
      return reduce<Kind::Gradient>(items, count);
  }
}

Partial reduce(const Chunk& chunk) {
  switch (chunk.tensor->scalar_type()) {
    case at::kFloat:
      return reduce<float>(chunk);
    case at::kBFloat16:
      return reduce<c10::BFloat16>(chunk);
    case at::kHalf:
      return reduce<c10::Half>(chunk);
    default:
      return reduce<double>(chunk);
  }
}

// The tensor as real numbers of a supported type, in memory without gaps but in any order.
at::Tensor as_read(const at::Tensor& tensor) {
  TORCH_CHECK_VALUE(tensor.device().is_cpu(), "moment_statistics: all tensors must be on cpu, got ", tensor.device());
  at::Tensor real = tensor.is_complex() ? at::view_as_real(tensor) : tensor;
  const at::ScalarType type = real.scalar_type();
  if (type != at::kFloat && type != at::kBFloat16 && type != at::kHalf && type != at::kDouble) {
    real = real.to(at::kFloat);
  }
  return real.is_non_overlapping_and_dense() ? real : real.contiguous();
}

void add_chunks(at::TensorList tensors, Kind kind, std::vector<at::Tensor>& read, std::vector<Chunk>& chunks) {
  for (const at::Tensor& tensor : tensors) {
    read.push_back(as_read(tensor));
    const int64_t count = read.back().numel();
    for (int64_t begin = 0; begin < count; begin += chunk_elements) {
      chunks.push_back({&read.back(), begin, std::min(begin + chunk_elements, count), kind});
    }
  }
}

at::Tensor moment_statistics(at::TensorList momentum, at::TensorList second_moment, at::TensorList gradients) {
  std::vector<at::Tensor> read;
  read.reserve(momentum.size() + second_moment.size() + gradients.size());  // no reallocation: chunks point into `read`
  std::vector<Chunk> chunks;
  add_chunks(second_moment, Kind::Variance, read, chunks);
  add_chunks(momentum, Kind::Momentum, read, chunks);
  add_chunks(gradients, Kind::Gradient, read, chunks);

  std::vector<Partial> partials(chunks.size());
  at::parallel_for(0, static_cast<int64_t>(chunks.size()), chunks_per_task, [&](int64_t begin, int64_t end) {
    for (int64_t index = begin; index < end; ++index) {
      partials[index] = reduce(chunks[index]);
    }
  });
  Partial whole[3];
  for (size_t index = 0; index < chunks.size(); ++index) {
    Partial& of_kind = whole[static_cast<int>(chunks[index].kind)];
    of_kind.total += partials[index].total;
    of_kind.largest = std::max(of_kind.largest, partials[index].largest);
  }
  const at::Tensor result = at::empty({5}, at::TensorOptions().dtype(at::kDouble));
  double* numbers = result.mutable_data_ptr<double>();
  for (int kind = 0; kind < 2; ++kind) {
    const Partial& of_kind = whole[kind];
    numbers[2 * kind] = of_kind.total;
    numbers[2 * kind + 1] = std::isnan(of_kind.total) ? of_kind.total : of_kind.largest;
  }
  numbers[4] = whole[static_cast<int>(Kind::Gradient)].total;
  return result;
}

TORCH_LIBRARY_IMPL(seqwarm, CPU, library) {
  library.impl("moment_statistics.native", TORCH_FN(moment_statistics));
}

}  // namespace
}  // namespace seqwarm
