// Reads "a NUMBER SIZE" (allocate) and "f NUMBER" (free), and prints the counters of torch's allocator after each.

#include <iostream>
#include <unordered_map>

#include <c10/cuda/CUDACachingAllocator.h>

int main() {
  namespace allocator = c10::cuda::CUDACachingAllocator;
  allocator::init(1);
  std::unordered_map<long, void*> blocks;
  char action;
  long number, size;
  while (std::cin >> action >> number) {
    if (action == 'a') {
      std::cin >> size;
      blocks[number] = allocator::raw_alloc(size);
    } else {
      allocator::raw_delete(blocks.at(number));
    }
    const auto stats = allocator::getDeviceStats(0);
    std::cout << stats.num_device_alloc << ' ' << stats.reserved_bytes[0].current << ' '
              << stats.allocated_bytes[0].current << '\n';
  }
}
