// seqwarm::moment_statistics on the CPU: all tensors of all lists in one pass, cut into chunks that threads share.
// moment_statistics/schema.py documents the arguments, moment_statistics/reference.py defines the results.
//
// The sums and maxima of all chunks are combined in the chunks' order, so the bits of the result do not depend on the
// number of threads. For float, 16 numbers are added pairwise as float, in four rounds; all further sums are double. No
// number is negative, so the relative error of a round is at most 2^-24, like that of a root or a square, and the
// relative error of a total is at most 5 * 2^-24.

#include "../torch.h"

#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

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
  const Tensor* tensor;
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
  const Item* items = static_cast<const Item*>(chunk.tensor->const_data_ptr()) + chunk.begin;
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
    case ScalarType::Float:
      return reduce<float>(chunk);
    case ScalarType::BFloat16:
      return reduce<c10::BFloat16>(chunk);
    case ScalarType::Half:
      return reduce<c10::Half>(chunk);
    default:
      return reduce<double>(chunk);
  }
}

bool is_complex(ScalarType dtype) {
  return dtype == ScalarType::ComplexHalf || dtype == ScalarType::ComplexFloat || dtype == ScalarType::ComplexDouble;
}

// Whether the elements are memory without gaps, in any order.
bool is_dense(const Tensor& tensor) {
  if (tensor.is_contiguous()) {
    return true;
  }
  std::vector<std::pair<int64_t, int64_t>> dims;  // stride, size
  for (int64_t dim = 0; dim < tensor.dim(); ++dim) {
    if (tensor.size(dim) != 1) {
      dims.emplace_back(tensor.stride(dim), tensor.size(dim));
    }
  }
  std::sort(dims.begin(), dims.end());
  int64_t expected = 1;
  for (const auto& [stride, size] : dims) {
    if (stride != expected) {
      return false;
    }
    expected *= size;
  }
  return true;
}

// The tensor as real numbers of a supported type, in memory without gaps but in any order.
Tensor as_read(const Tensor& tensor) {
  SEQWARM_CHECK_VALUE(tensor.is_cpu(), "moment_statistics: all tensors must be on cpu, got ", tensor.device());
  Tensor real = is_complex(tensor.scalar_type()) ? as_real(tensor) : tensor;
  const ScalarType type = real.scalar_type();
  if (type != ScalarType::Float && type != ScalarType::BFloat16 && type != ScalarType::Half && type != ScalarType::Double) {
    real = to_dtype(real, ScalarType::Float);
  }
  return is_dense(real) ? real : as_contiguous(real);
}

void add_chunks(Tensors tensors, Kind kind, std::vector<Tensor>& read, std::vector<Chunk>& chunks) {
  for (const Tensor& tensor : tensors) {
    read.push_back(as_read(tensor));
    const int64_t count = read.back().numel();
    for (int64_t begin = 0; begin < count; begin += chunk_elements) {
      chunks.push_back({&read.back(), begin, std::min(begin + chunk_elements, count), kind});
    }
  }
}

Tensor moment_statistics(Tensors momentum, Tensors second_moment, Tensors gradients) {
  std::vector<Tensor> read;
  read.reserve(momentum.size() + second_moment.size() + gradients.size());  // no reallocation: chunks point into `read`
  std::vector<Chunk> chunks;
  add_chunks(second_moment, Kind::Variance, read, chunks);
  add_chunks(momentum, Kind::Momentum, read, chunks);
  add_chunks(gradients, Kind::Gradient, read, chunks);

  std::vector<Partial> partials(chunks.size());
  parallel_for(0, static_cast<int64_t>(chunks.size()), chunks_per_task, [&](int64_t begin, int64_t end) {
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
  const Tensor result = empty(std::array<int64_t, 1>{5}, ScalarType::Double);
  double* numbers = result.mutable_data_ptr<double>();
  for (int kind = 0; kind < 2; ++kind) {
    const Partial& of_kind = whole[kind];
    numbers[2 * kind] = of_kind.total;
    numbers[2 * kind + 1] = std::isnan(of_kind.total) ? of_kind.total : of_kind.largest;
  }
  numbers[4] = whole[static_cast<int>(Kind::Gradient)].total;
  return result;
}

SEQWARM_LIBRARY(CPU, library) {
  library.impl("moment_statistics.native", SEQWARM_KERNEL(moment_statistics));
}

}  // namespace
}  // namespace seqwarm
