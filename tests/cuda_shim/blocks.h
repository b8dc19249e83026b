// Runs the blocks of a CUDA kernel on the CPU: several blocks at once, in shuffled order, each on a thread of its own.
// The threads of a block are fibers of that thread, and run in another order after each barrier.
//
// AddressSanitizer and UBSan see the kernel's accesses. ThreadSanitizer takes each fiber for a thread, so it reports two
// accesses without a barrier between them in whichever order they ran.

#pragma once

#include <functional>

namespace blocks {

struct Index {
  unsigned int x;
};

Index thread_index();
Index block_index();

/// Waits for the other threads of the block. Aborts if they have returned, or wait at another line.
void synchronize(int line);

void launch(unsigned int blocks, unsigned int threads, const std::function<void()>& kernel);

}  // namespace blocks
