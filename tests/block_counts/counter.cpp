// Counts the basic blocks that a build with -fsanitize-coverage=trace-pc executes: work, without the noise of time.

#include <atomic>
#include <cstdint>

namespace {
std::atomic<int64_t> blocks{0};
}

extern "C" {

__attribute__((visibility("default"))) void __sanitizer_cov_trace_pc() {
  blocks.fetch_add(1, std::memory_order_relaxed);
}

__attribute__((visibility("default"))) int64_t seqwarm_work() {
  return blocks.load();
}
}
