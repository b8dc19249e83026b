// What nvcc defines in CUDA sources, for a C++ compiler.

#pragma once

#include "blocks.h"

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>

#define __CUDA_ARCH_LIST__ 0
#define __device__
#define __global__
#define __grid_constant__
#define __launch_bounds__(threads)
#define __shared__ static thread_local  // a thread of the CPU runs one block at a time
#define threadIdx ::blocks::thread_index()
#define blockIdx ::blocks::block_index()
#define __syncthreads() ::blocks::synchronize(__LINE__)

using std::max;
using std::min;

struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};

template <typename T>
T __ldg(const T* address) {
  return *address;
}

inline unsigned long long atomicAdd(unsigned long long* address, unsigned long long value) {
  return std::atomic_ref(*address).fetch_add(value, std::memory_order_relaxed);
}

inline unsigned long long atomicExch(unsigned long long* address, unsigned long long value) {
  return std::atomic_ref(*address).exchange(value, std::memory_order_relaxed);
}

template <typename Choose>
long long atomic_choice(long long* address, long long value, Choose choose) {
  const std::atomic_ref shared(*address);
  long long before = shared.load(std::memory_order_relaxed);
  while (!shared.compare_exchange_weak(before, choose(before, value), std::memory_order_relaxed)) {
  }
  return before;
}

inline long long atomicMin(long long* address, long long value) {
  return atomic_choice(address, value, [](long long a, long long b) { return min(a, b); });
}

inline long long atomicMax(long long* address, long long value) {
  return atomic_choice(address, value, [](long long a, long long b) { return max(a, b); });
}

using cudaStream_t = void*;
enum cudaError_t { cudaSuccess };

template <typename Argument>
cudaError_t cudaLaunchKernel(
    void (*kernel)(Argument), unsigned int blocks, unsigned int threads, void** arguments, size_t /*shared*/,
    cudaStream_t /*stream*/) {
  blocks::launch(blocks, threads, [&] { kernel(*static_cast<Argument*>(arguments[0])); });
  return cudaSuccess;
}

inline cudaError_t cudaMemsetAsync(void* address, int value, size_t size, cudaStream_t /*stream*/) {
  std::memset(address, value, size);
  return cudaSuccess;
}
