// Memory for large results that are made anew at every step.
//
// The system hands out new memory page by page when it is first written, which costs several times what copying a batch
// does, and takes it back when a result is freed. Here it is kept for the next result of about that size, on large
// pages. What is kept and what is in use are together never more than what was in use at once.

#pragma once

#include <c10/core/Allocator.h>

namespace seqwarm {

// Serves small results from torch's own allocator.
c10::Allocator& large_memory();

}  // namespace seqwarm
