#include "large_memory.h"

#ifdef __linux__
#include <pthread.h>
#include <sys/mman.h>
#endif

#include <algorithm>
#include <cstdint>
#include <mutex>
#include <stdexcept>
#include <vector>

namespace seqwarm {
namespace {

#ifdef __linux__

constexpr size_t large_page = 2 << 20;
constexpr size_t step = 64 << 10;  // block sizes below a large page are multiples of this
constexpr size_t smallest = 256 << 10;

struct Block {
  char* data;
  size_t size;
};

size_t rounded(size_t bytes) {
  const size_t unit = bytes < large_page ? step : large_page;
  return (bytes + unit - 1) / unit * unit;
}

class LargeMemory {
 public:
  // A child of a fork has no thread that would unlock the mutex.
  LargeMemory() {
    pthread_atfork(
        [] { instance().mutex_.lock(); }, [] { instance().mutex_.unlock(); }, [] { instance().mutex_.unlock(); });
  }

  static LargeMemory& instance() {
    static auto* memory = new LargeMemory;  // never freed: tensors may outlive static objects
    return *memory;
  }

  // A kept block that is at most a quarter too large, else a new block.
  Block take(size_t size) {
    const std::lock_guard lock(mutex_);
    auto best = kept_.end();
    for (auto block = kept_.begin(); block != kept_.end(); ++block) {
      const bool fits = block->size >= size && block->size <= size + size / 4;
      if (fits && (best == kept_.end() || block->size < best->size)) {
        best = block;
      }
    }
    Block block{nullptr, size};
    if (best != kept_.end()) {
      block = *best;
      kept_.erase(best);
      bytes_kept_ -= block.size;
    }
    const size_t used = bytes_used_ + block.size;
    release_surplus(used);
    if (block.data == nullptr) {
      block.data = map(block.size);
    }
    bytes_used_ = used;
    most_used_ = std::max(most_used_, used);
    return block;
  }

  void keep(const Block& block) {
    const std::lock_guard lock(mutex_);
    bytes_used_ -= block.size;
    bytes_kept_ += block.size;
    kept_.push_back(block);
    release_surplus(bytes_used_);
  }

 private:
  // Keeps no more than was once used, with `used` bytes in use. The oldest blocks go first.
  void release_surplus(size_t used) {
    const size_t most = std::max(most_used_, used);
    auto end = kept_.begin();
    for (; bytes_kept_ + used > most; ++end) {
      munmap(end->data, end->size);
      bytes_kept_ -= end->size;
    }
    kept_.erase(kept_.begin(), end);
  }

  static char* map(size_t size) {
    // One more large page, to start at a multiple of its size.
    void* mapped = mmap(nullptr, size + large_page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mapped == MAP_FAILED) {
      throw std::runtime_error(text("cannot allocate ", size, " bytes"));
    }
    auto* begin = static_cast<char*>(mapped);
    const size_t before = (large_page - reinterpret_cast<uintptr_t>(begin) % large_page) % large_page;
    if (before > 0) {
      munmap(begin, before);
    }
    munmap(begin + before + size, large_page - before);
    madvise(begin + before, size, MADV_HUGEPAGE);  // only advice: a failure does not matter
    return begin + before;
  }

  std::mutex mutex_;
  std::vector<Block> kept_;
  size_t bytes_kept_ = 0;
  size_t bytes_used_ = 0;
  size_t most_used_ = 0;
};

#endif

}  // namespace

Tensor empty_large(Sizes sizes, ScalarType dtype) {
#ifdef __linux__
  size_t bytes = item_size(dtype);
  for (const int64_t size : sizes) {
    bytes *= size;
  }
  if (bytes >= smallest) {
    const Block block = LargeMemory::instance().take(rounded(bytes));
    return tensor_in(block.data, sizes, row_major_strides(sizes), dtype, [block] { LargeMemory::instance().keep(block); });
  }
#endif
  return empty(sizes, dtype);
}

void advise_large_pages([[maybe_unused]] void* data, [[maybe_unused]] size_t bytes) {
#ifdef __linux__
  const auto begin = (reinterpret_cast<uintptr_t>(data) + large_page - 1) / large_page * large_page;
  const auto end = (reinterpret_cast<uintptr_t>(data) + bytes) / large_page * large_page;
  if (begin < end) {
    madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);  // only advice: a failure does not matter
  }
#endif
}

}  // namespace seqwarm
