// Compiled without sanitizers: what happens here must not look like a synchronization of the kernel's threads.

#include "blocks.h"

#include <ucontext.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <memory>
#include <numeric>
#include <random>
#include <thread>
#include <vector>

// Functions of ThreadSanitizer, null without it.
extern "C" {
[[gnu::weak]] void* __tsan_create_fiber(unsigned int flags);
[[gnu::weak]] void* __tsan_get_current_fiber();
[[gnu::weak]] void __tsan_switch_to_fiber(void* fiber, unsigned int flags);
[[gnu::weak]] void __tsan_acquire(void* address);
[[gnu::weak]] void __tsan_release(void* address);
}

namespace blocks {
namespace {

constexpr size_t blocks_at_once = 3;
constexpr size_t stack_size = 128 * 1024;
constexpr int returned = -1;
constexpr unsigned int synchronizes = 0, without_synchronizing = 1;  // flags of __tsan_switch_to_fiber
const bool under_tsan = __tsan_create_fiber != nullptr;

struct Fiber {
  ucontext_t context;
  std::unique_ptr<char[]> stack;
  void* tsan;
  int line;  // of the barrier where it waits
};

// Runs one block at a time: a thread of the CPU in each launch, and fibers that live on.
class Multiprocessor {
 public:
  // The one of this thread. Not inlined, since a fiber is on another thread in the next launch.
  [[gnu::noinline]] static Multiprocessor& current() {
    return *current_;
  }

  void begin_launch(const std::function<void()>& kernel, unsigned int threads, unsigned int seed) {
    current_ = this;
    kernel_ = &kernel;
    random_.seed(seed);
    if (under_tsan) {
      own_.tsan = __tsan_get_current_fiber();
    }
    while (fibers_.size() < threads) {
      add_fiber();
    }
    order_.resize(threads);
    std::iota(order_.begin(), order_.end(), 0);
  }

  void run(unsigned int block) {
    block_ = block;
    do {
      run_to_next_barrier();
    } while (fibers_[0].line != returned);
  }

  // Called by a fiber. What it wrote is visible to the other fibers when they go on.
  void wait_at(int line) {
    Fiber& fiber = fibers_[thread_];
    fiber.line = line;
    if (under_tsan) {
      __tsan_release(this);
    }
    switch_to(fiber, own_, without_synchronizing);
  }

  unsigned int block_ = 0;
  unsigned int thread_ = 0;

 private:
  static void switch_to(Fiber& from, Fiber& to, unsigned int flags) {
    if (under_tsan) {
      __tsan_switch_to_fiber(to.tsan, flags);
    }
    swapcontext(&from.context, &to.context);
  }

  [[noreturn]] static void run_kernels() {
    while (true) {
      (*current().kernel_)();
      current().wait_at(returned);
    }
  }

  void add_fiber() {
    Fiber& fiber = fibers_.emplace_back();
    fiber.stack.reset(new char[stack_size]);
    fiber.tsan = under_tsan ? __tsan_create_fiber(0) : nullptr;
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.get();
    fiber.context.uc_stack.ss_size = stack_size;
    makecontext(&fiber.context, run_kernels, 0);
  }

  void run_to_next_barrier() {
    std::shuffle(order_.begin(), order_.end(), random_);
    for (const unsigned int thread : order_) {
      thread_ = thread;
      switch_to(own_, fibers_[thread], synchronizes);
    }
    if (under_tsan) {
      __tsan_acquire(this);
    }
    for (const unsigned int thread : order_) {
      if (fibers_[thread].line != fibers_[0].line) {
        std::fprintf(
            stderr, "block %u: thread 0 waits at line %d, thread %u at line %d (%d: it has returned)\n", block_,
            fibers_[0].line, thread, fibers_[thread].line, returned);
        std::abort();
      }
    }
  }

  static thread_local Multiprocessor* current_;
  const std::function<void()>* kernel_ = nullptr;
  Fiber own_{};
  std::deque<Fiber> fibers_;
  std::vector<unsigned int> order_;
  std::mt19937 random_;
};

thread_local Multiprocessor* Multiprocessor::current_ = nullptr;

}  // namespace

Index thread_index() {
  return {Multiprocessor::current().thread_};
}

Index block_index() {
  return {Multiprocessor::current().block_};
}

void synchronize(int line) {
  Multiprocessor::current().wait_at(line);
}

void launch(unsigned int blocks, unsigned int threads, const std::function<void()>& kernel) {
  static auto& processors = *new std::array<Multiprocessor, blocks_at_once>;  // never freed: its fibers never end
  static std::mt19937 random;
  std::vector<unsigned int> order(blocks);
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin(), order.end(), random);
  std::atomic<unsigned int> next{0};
  std::vector<std::jthread> running;
  for (Multiprocessor& processor : processors) {
    running.emplace_back([&, seed = random()] {
      processor.begin_launch(kernel, threads, seed);
      for (unsigned int place = next++; place < blocks; place = next++) {
        processor.run(order[place]);
      }
    });
  }
}

}  // namespace blocks
