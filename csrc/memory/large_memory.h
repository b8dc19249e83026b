// Memory for large results that are allocated anew at every step.
//
// The system provides new memory page by page when it is first written, which costs several times what copying a batch
// does, and takes it back when a result is freed.

#pragma once

#include <c10/core/Allocator.h>

#include <cstddef>

namespace seqwarm {

// Keeps freed memory for the next result of about that size, on large pages. Kept memory and memory in use together
// never exceed the most that was in use at once. Small results come from torch's own allocator.
c10::Allocator& large_memory();

// Asks the system for large pages for the whole pages inside this memory. Attention over segments of 16 tokens saves a
// third of its time.
void advise_large_pages(void* data, size_t bytes);

}  // namespace seqwarm
