#pragma once

namespace cub {

template <typename T, int threads>
class BlockScan {
 public:
  struct TempStorage {
    T values[threads];
  };

  explicit BlockScan(TempStorage& storage) : values_(storage.values) {}

  void ExclusiveSum(T value, T& sum_before, T& sum) {
    values_[threadIdx.x] = value;
    __syncthreads();
    sum_before = sum = 0;
    for (unsigned int thread = 0; thread < threads; ++thread) {
      sum_before += thread < threadIdx.x ? values_[thread] : 0;
      sum += values_[thread];
    }
  }

 private:
  T* values_;
};

}  // namespace cub
