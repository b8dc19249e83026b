// Memory for large results, which are allocated in every step.
//
// The system provides new memory page by page when it is first written, which costs several times what copying a batch
// does, and takes it back when a result is freed.

#pragma once

#include "../torch.h"

#include <cstddef>

namespace seqwarm {

// An uninitialized contiguous tensor. Freed memory of a large one is kept for the next of about that size, on large pages.
// Kept memory and memory in use together never exceed the most that was in use at once.
Tensor empty_large(Sizes sizes, ScalarType dtype);

// Asks the system for large pages in this memory, since its first write is slow with small pages. Large pages remove
// nearly all of that time: a third of the time of attention over segments of 16 tokens.
void advise_large_pages(void* data, size_t bytes);

}  // namespace seqwarm
