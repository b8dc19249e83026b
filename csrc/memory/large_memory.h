// Memory for large results, which are allocated in every step.
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

// Asks the system for large pages in this memory, since its first write is slow with small pages. Large pages remove
// nearly all of that time: a third of the time of attention over segments of 16 tokens.
void advise_large_pages(void* data, size_t bytes);

}  // namespace seqwarm
