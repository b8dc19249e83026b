// Large results are new memory for every call, which the system hands out page by page when it is written. Large pages
// take nearly all of that time away: a third of attention over segments of 16 tokens.

#pragma once

#include <ATen/core/Tensor.h>

#ifdef __linux__
#include <sys/mman.h>
#endif

#include <cstdint>

namespace seqwarm {

inline void advise_large_pages([[maybe_unused]] const at::Tensor& tensor) {
#ifdef __linux__
  constexpr uintptr_t page = 2 << 20;
  const auto begin = (reinterpret_cast<uintptr_t>(tensor.data_ptr()) + page - 1) / page * page;
  const auto end = (reinterpret_cast<uintptr_t>(tensor.data_ptr()) + tensor.nbytes()) / page * page;
  if (begin < end) {
    madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);  // an advice: that it fails does not matter
  }
#endif
}

}  // namespace seqwarm
