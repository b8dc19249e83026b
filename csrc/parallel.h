// Loops on several threads.

#pragma once

#include "torch.h"

#include <algorithm>
#include <cstdint>

namespace seqwarm {

// To read one position of a mask takes as long as to move this many bytes.
constexpr int64_t bytes_per_position = 32;

// Calls run(begin, end) for parts of [first, last), each element of which moves `bytes`. With fewer bytes for a thread
// than bytes_per_part, waking the threads costs more than they save.
template <typename Run>
void for_each_part(int64_t first, int64_t last, int64_t bytes, const Run& run) {
  constexpr int64_t bytes_per_part = 512 * 1024;
  parallel_for(first, last, bytes_per_part / std::max<int64_t>(bytes, 1) + 1, run);
}

}  // namespace seqwarm
