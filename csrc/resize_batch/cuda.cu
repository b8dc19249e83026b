// seqwarm::resize_batch on CUDA devices: one launch for all tensors of a batch and their info.
//
// The kernel's parameters hold the descriptions of the tensors, so a launch needs no memory and no copy to the device.
// Blocks: the tiles of each tensor; then one block for the info of each new row; then, under truncate_valid and
// truncate_keep_last, one block for each row, which writes what the tiles leave out: a row that begins with masked
// tokens, or the last slot.

#include "call.h"

#include <ATen/ops/zeros.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include <cub/block/block_scan.cuh>
#include <limits>
#include <map>
#include <mutex>
#include <utility>

namespace seqwarm {
namespace {

constexpr int threads = 128;
constexpr int groups_per_thread = 8;  // loads in flight before the first store
constexpr int64_t groups_per_tile = threads * groups_per_thread;
// The running total also counts the rows that added to it, in units larger than any number of tokens.
constexpr unsigned long long ticket = 1ULL << 33;

struct Tensor {
  ResizeEntry entry;
  int64_t tiles;
  int64_t groups;
  uint32_t line_groups;
};

struct Task {
  ResizePlan plan;
  MaskView mask;
  InfoOutput info;
  unsigned long long* running_total;
  int32_t tensor_count;
};

// Kernel parameters may take 4 KiB, and 32 KiB from compute capability 7.0 on.
template <size_t capacity>
struct Launch {
  Task task;
  Tensor tensors[capacity];
};
constexpr size_t usual_capacity = 24;
constexpr size_t largest_capacity = 240;  // more tensors take another launch
static_assert(sizeof(Launch<usual_capacity>) <= 4096);
static_assert(sizeof(Launch<largest_capacity>) <= 32764);

// Whether the tiles leave a row out.
__device__ bool begins_masked(const Task& task, int64_t row) {
  return task.plan.skips_padding && !task.mask.valid(row, 0);
}

// The source position of the first token of a new row: the first valid one, or an earlier one where fewer than
// new_length tokens follow; 0 without one. Called by all threads of a block.
__device__ int64_t first_kept_position(const Task& task, int64_t row) {
  if (!begins_masked(task, row)) {
    return 0;
  }
  __shared__ long long first;
  if (threadIdx.x == 0) {
    first = task.plan.source_length;
  }
  __syncthreads();
  int64_t position = threadIdx.x;
  while (position < task.plan.source_length && !task.mask.valid(row, position)) {
    position += threads;
  }
  atomicMin(&first, static_cast<long long>(min(position, task.plan.source_length)));
  __syncthreads();
  return first == task.plan.source_length ? 0 : min(int64_t{first}, task.plan.source_length - task.plan.new_length);
}

// The last valid position of a row if it is cut, else the last position that is kept, given the first. Called by all
// threads of a block.
__device__ int64_t last_kept_position(const Task& task, int64_t row, int64_t first) {
  __shared__ long long last;
  const int64_t end = first + task.plan.new_length;
  if (threadIdx.x == 0) {
    last = end - 1;
  }
  __syncthreads();
  long long last_seen = -1;
  for (int64_t position = end + threadIdx.x; position < task.plan.source_length; position += threads) {
    if (task.mask.valid(row, position)) {
      last_seen = position;
    }
  }
  if (last_seen >= 0) {
    atomicMax(&last, last_seen);
  }
  __syncthreads();
  return last;
}

struct Place {
  const char* input;  // null: filled
  bool written;
};

__device__ Place place_of(const ResizePlan& plan, const ResizeEntry& entry, int64_t row, uint32_t item) {
  const auto token_items = static_cast<uint32_t>(entry.token_items);
  const uint32_t position = token_items == 1 ? item : item / token_items;
  const uint32_t column = item - position * token_items;
  const char* input = entry.input + row * entry.row_stride;
  if (entry.kind == Kind::Row) {
    return {input, true};
  }
  const Source source = source_of(plan, position);
  const bool left_out = plan.keeps_last && (position == plan.new_length - 1 ||
                                            (entry.kind == Kind::Square && column == plan.new_length - 1));
  if (is_filled(plan, entry.kind, source)) {
    return {nullptr, !left_out};
  }
  return {input + source.position * entry.position_stride + column * entry.item_stride, !left_out};
}

template <typename Group>
__device__ void copy_tile(const Task& task, const Tensor& tensor, int64_t tile) {
  const ResizeEntry& entry = tensor.entry;
  const int64_t first = tile * groups_per_tile;
  const int64_t first_row = first / tensor.line_groups;
  const auto first_within = static_cast<uint32_t>(first - first_row * tensor.line_groups);
  const uint32_t group_items = sizeof(Group) / entry.item_size;
  const Group fill = *reinterpret_cast<const Group*>(entry.fill);
  Group* output = reinterpret_cast<Group*>(entry.output) + first;
  Group groups[groups_per_thread];
  bool written[groups_per_thread];
#pragma unroll
  for (int step = 0; step < groups_per_thread; ++step) {
    const uint32_t index = step * threads + threadIdx.x;
    written[step] = first + index < tensor.groups;
    if (written[step]) {
      const uint32_t within = first_within + index;
      const uint32_t rows = within / tensor.line_groups;
      const Place place =
          place_of(task.plan, entry, first_row + rows, (within - rows * tensor.line_groups) * group_items);
      groups[step] = fill;
      if (place.input != nullptr) {  // also where nothing is written, so that no load waits for the mask
        groups[step] = __ldg(reinterpret_cast<const Group*>(place.input));
      }
      written[step] = place.written && (entry.kind == Kind::Row || !begins_masked(task, first_row + rows));
    }
  }
#pragma unroll
  for (int step = 0; step < groups_per_thread; ++step) {
    if (written[step]) {
      output[step * threads + threadIdx.x] = groups[step];
    }
  }
}

__device__ void copy_tile_of(const Task& task, const Tensor& tensor, int64_t tile) {
  switch (tensor.entry.group_size) {
    case 1:
      return copy_tile<uint8_t>(task, tensor, tile);
    case 2:
      return copy_tile<uint16_t>(task, tensor, tile);
    case 4:
      return copy_tile<uint32_t>(task, tensor, tile);
    case 8:
      return copy_tile<uint64_t>(task, tensor, tile);
    default:
      return copy_tile<uint4>(task, tensor, tile);
  }
}

__device__ void copy_item(char* to, const char* from, int32_t size) {
  switch (size) {
    case 1:
      *to = *from;
      return;
    case 2:
      *reinterpret_cast<uint16_t*>(to) = *reinterpret_cast<const uint16_t*>(from);
      return;
    case 4:
      *reinterpret_cast<uint32_t*>(to) = *reinterpret_cast<const uint32_t*>(from);
      return;
    case 8:
      *reinterpret_cast<uint64_t*>(to) = *reinterpret_cast<const uint64_t*>(from);
      return;
    default:  // complex128: only its halves are known to be aligned
      copy_item(to, from, 8);
      copy_item(to + 8, from + 8, 8);
  }
}

// Writes the last slot of one row, and the last column of a mask over pairs of tokens.
__device__ void copy_last_slot(const ResizePlan& plan, const ResizeEntry& entry, int64_t row, int64_t last) {
  const int64_t last_slot = plan.new_length - 1;
  const int64_t token_size = entry.token_items * entry.item_size;
  const char* input = entry.input + row * entry.row_stride;
  char* output = entry.output + row * plan.new_length * token_size;
  const bool pairs = entry.kind == Kind::Square;
  for (int64_t item = threadIdx.x; item < entry.token_items; item += threads) {
    const int64_t column = pairs && item == last_slot ? last : item;
    copy_item(
        output + last_slot * token_size + item * entry.item_size,
        input + last * entry.position_stride + column * entry.item_stride, entry.item_size);
    if (pairs && item != last_slot) {
      copy_item(
          output + item * token_size + last_slot * entry.item_size,
          input + item * entry.position_stride + last * entry.item_stride, entry.item_size);
    }
  }
}

// Writes one row, whose tokens come from `first` on, and from `last` for the last slot.
template <typename Group>
__device__ void copy_row(
    const ResizePlan& plan, const ResizeEntry& entry, int64_t row, int64_t first, int64_t last) {
  const bool pairs = entry.kind == Kind::Square;
  const int64_t last_slot = plan.new_length - 1;
  const int64_t group_items = sizeof(Group) / entry.item_size;
  const int64_t token_groups = entry.token_items / group_items;
  const char* input = entry.input + row * entry.row_stride;
  Group* output = reinterpret_cast<Group*>(entry.output) + row * plan.new_length * token_groups;
  for (int64_t index = threadIdx.x; index < plan.new_length * token_groups; index += threads) {
    const int64_t slot = index / token_groups;
    const int64_t item = (index - slot * token_groups) * group_items;
    const int64_t position = slot == last_slot ? last : first + slot;
    const int64_t column = !pairs ? item : item == last_slot ? last : first + item;
    output[index] =
        *reinterpret_cast<const Group*>(input + position * entry.position_stride + column * entry.item_stride);
  }
}

// A group must not span two tokens, since the first may be at any position.
__device__ void copy_row_of(
    const ResizePlan& plan, const ResizeEntry& entry, int64_t row, int64_t first, int64_t last) {
  const int64_t token_size = entry.token_items * entry.item_size;
  const int64_t alignment = token_size & -token_size;
  switch (entry.kind == Kind::Square ? entry.item_size : min(int64_t{entry.group_size}, alignment)) {
    case 1:
      return copy_row<uint8_t>(plan, entry, row, first, last);
    case 2:
      return copy_row<uint16_t>(plan, entry, row, first, last);
    case 4:
      return copy_row<uint32_t>(plan, entry, row, first, last);
    case 8:
      return copy_row<uint64_t>(plan, entry, row, first, last);
    default:
      return copy_row<uint4>(plan, entry, row, first, last);
  }
}

// The bits of the attention mask for a slot of a new row.
__device__ uint64_t mask_item(
    const Task& task, int64_t first_row, int64_t first_position, int64_t slot, int64_t kept_from, int64_t last) {
  const ResizePlan& plan = task.plan;
  int64_t row = first_row;
  int64_t position = first_position + slot;
  if (position >= plan.line) {  // a new row of flatten may reach into the next line, at most one
    row += 1;
    position -= plan.line;
  }
  position = source_of(plan, position).position + kept_from;
  position = plan.keeps_last && slot == plan.new_length - 1 ? last : position;
  return position < plan.source_length ? task.mask.item(row, position) : 0;
}

// One block for the whole row. Each step of a thread has a byte of its own, so one scan counts the valid slots of all
// steps, at most `threads` in a byte.
__device__ void write_info(const Task& task, int64_t new_row) {
  constexpr int steps = sizeof(uint64_t);  // loads in flight before the scan
  static_assert(threads < 256);
  using Scan = cub::BlockScan<uint64_t, threads>;
  __shared__ typename Scan::TempStorage storage;
  const ResizePlan& plan = task.plan;
  const int64_t first = new_row * plan.new_length;
  const int64_t first_row = first / plan.line;
  const int64_t first_position = first - first_row * plan.line;
  const int64_t kept_from = first_kept_position(task, first_row);
  const int64_t last = plan.keeps_last ? last_kept_position(task, first_row, kept_from) : -1;
  int valid_before = 0;
  for (int64_t start = 0; start < plan.new_length; start += steps * threads) {
    uint64_t items[steps];
#pragma unroll
    for (int step = 0; step < steps; ++step) {
      const int64_t slot = start + step * threads + threadIdx.x;
      items[step] = slot < plan.new_length ? mask_item(task, first_row, first_position, slot, kept_from, last) : 0;
    }
    uint64_t valid = 0;
#pragma unroll
    for (int step = 0; step < steps; ++step) {
      valid |= uint64_t{(items[step] & task.mask.value_bits) != 0} << (8 * step);
    }
    uint64_t valid_before_here = 0;
    uint64_t valid_in_block = 0;
    Scan(storage).ExclusiveSum(valid, valid_before_here, valid_in_block);
#pragma unroll
    for (int step = 0; step < steps; ++step) {
      const int64_t slot = start + step * threads + threadIdx.x;
      const auto count = [&](uint64_t counts) { return static_cast<int>(counts >> (8 * step) & 0xff); };
      if (slot < plan.new_length) {
        task.info.position_ids[first + slot] = count(valid) ? valid_before + count(valid_before_here) : 0;
      }
      valid_before += count(valid_in_block);
    }
    __syncthreads();  // the storage is used again
  }
  if (threadIdx.x == 0) {
    task.info.valid_lengths[new_row] = valid_before;
    // The block that adds last knows the total, and resets the running total to zero.
    const unsigned long long before = atomicAdd(task.running_total, ticket + valid_before);
    if (before / ticket == static_cast<unsigned long long>(plan.new_rows - 1)) {
      *task.info.num_valid_tokens = before % ticket + valid_before;
      atomicExch(task.running_total, 0);
    }
  }
}

// What the tiles leave out of one row.
__device__ void write_left_out(const Task& task, const Tensor* tensors, int64_t row) {
  const bool whole_row = begins_masked(task, row);
  if (!whole_row && !task.plan.keeps_last) {
    return;
  }
  const int64_t first = first_kept_position(task, row);
  const int64_t last = task.plan.keeps_last ? last_kept_position(task, row, first) : first + task.plan.new_length - 1;
  for (int32_t index = 0; index < task.tensor_count; ++index) {
    const ResizeEntry& entry = tensors[index].entry;
    if (entry.kind == Kind::Row) {
      continue;
    }
    if (whole_row) {
      copy_row_of(task.plan, entry, row, first, last);
    } else {
      copy_last_slot(task.plan, entry, row, last);
    }
  }
}

template <size_t capacity>
__global__ void __launch_bounds__(threads) resize_kernel(const __grid_constant__ Launch<capacity> launch) {
  const Task& task = launch.task;
  int64_t block = blockIdx.x;
  for (int32_t index = 0; index < task.tensor_count; ++index) {
    const Tensor& tensor = launch.tensors[index];
    if (block < tensor.tiles) {
      return copy_tile_of(task, tensor, block);
    }
    block -= tensor.tiles;
  }
  if (task.info.num_valid_tokens != nullptr) {
    if (block < task.plan.new_rows) {
      return write_info(task, block);
    }
    block -= task.plan.new_rows;
  }
  write_left_out(task, launch.tensors, block);
}

Tensor describe_tensor(const ResizePlan& plan, const ResizeEntry& entry) {
  const bool is_row = entry.kind == Kind::Row;
  const int64_t group_items = entry.group_size / entry.item_size;
  const int64_t line_groups = (is_row ? plan.line / plan.new_length : plan.line * entry.token_items) / group_items;
  const int64_t groups = (is_row ? plan.new_rows : plan.tokens * entry.token_items) / group_items;
  TORCH_CHECK_VALUE(
      line_groups * group_items <= std::numeric_limits<int32_t>::max() - groups_per_tile * 16,
      "resize_batch: a row of ", line_groups * group_items, " items is longer than the kernel's indices");
  return {entry, (groups + groups_per_tile - 1) / groups_per_tile, groups, static_cast<uint32_t>(line_groups)};
}

// A zero that the kernel resets to zero at its end. The launches of a stream share it, since they do not overlap.
at::Tensor running_total_of(const c10::Device& device, const c10::cuda::CUDAStream& stream) {
  const auto zero = [&] { return at::zeros({}, at::TensorOptions(at::kLong).device(device)); };
  if (c10::cuda::currentStreamCaptureStatusMayInitCtx() != c10::cuda::CaptureStatus::None) {
    return zero();  // a graph may be replayed on any stream
  }
  // Never freed: at exit, the device may be destroyed first.
  static auto* totals = new std::map<std::pair<c10::DeviceIndex, cudaStream_t>, at::Tensor>;
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  auto& total = (*totals)[{device.index(), stream.stream()}];
  if (!total.defined()) {
    total = zero();
  }
  return total;
}

template <size_t capacity>
void launch_kernel(const Task& task, c10::ArrayRef<ResizeEntry> entries, cudaStream_t stream) {
  Launch<capacity> launch{task, {}};
  int64_t blocks = (task.info.num_valid_tokens == nullptr ? 0 : task.plan.new_rows) +
                   (task.plan.skips_padding ? task.plan.new_rows : 0);
  for (const ResizeEntry& entry : entries) {
    const Tensor tensor = describe_tensor(task.plan, entry);
    launch.tensors[launch.task.tensor_count++] = tensor;
    blocks += tensor.tiles;
  }
  TORCH_CHECK_VALUE(
      blocks <= std::numeric_limits<int32_t>::max(), "resize_batch: ", blocks, " blocks are more than a CUDA grid holds");
  if (blocks == 0) {
    return;
  }
  void* arguments[] = {&launch};
  C10_CUDA_CHECK(
      cudaLaunchKernel(resize_kernel<capacity>, static_cast<unsigned int>(blocks), threads, arguments, 0, stream));
}

void run(const ResizeCall& call) {
  const c10::cuda::CUDAGuard guard(call.device);
  const c10::cuda::CUDAStream stream = c10::cuda::getCurrentCUDAStream();
  Task task{call.plan, call.mask, call.info, nullptr, 0};
  const bool wants_info = task.info.num_valid_tokens != nullptr;
  if (call.plan.new_rows == 0) {
    if (wants_info) {
      C10_CUDA_CHECK(cudaMemsetAsync(task.info.num_valid_tokens, 0, sizeof(int64_t), stream));
    }
    return;
  }
  at::Tensor running_total;
  if (wants_info) {
    TORCH_CHECK_VALUE(
        static_cast<unsigned long long>(call.plan.tokens) < ticket, "resize_batch: ", call.plan.tokens,
        " tokens are more than the info counts");
    running_total = running_total_of(call.device, stream);
    task.running_total = reinterpret_cast<unsigned long long*>(running_total.mutable_data_ptr<int64_t>());
  }
  c10::ArrayRef<ResizeEntry> left = call.entries;
  do {
    const c10::ArrayRef<ResizeEntry> now = left.slice(0, std::min(left.size(), largest_capacity));
    left = left.slice(now.size());
    if (now.size() <= usual_capacity) {
      launch_kernel<usual_capacity>(task, now, stream);
    } else {
      launch_kernel<largest_capacity>(task, now, stream);
    }
    task.info = {};  // the first launch writes it
  } while (!left.empty());
}

at::Tensor allocate(at::IntArrayRef shape, at::ScalarType dtype, const at::Tensor& like) {
  return like.new_empty(shape, dtype);
}

TORCH_LIBRARY_IMPL(seqwarm, CUDA, library) {
  library.impl("resize_batch.native", TORCH_FN((resize_batch<allocate, run>)));
  library.impl("resize_batch_out.native", TORCH_FN(resize_batch_out<run>));
}

}  // namespace

int oldest_cuda_capability() {
  constexpr int architectures[] = {__CUDA_ARCH_LIST__};  // 750 for capability 7.5, in ascending order
  return architectures[0] / 10;
}

}  // namespace seqwarm
