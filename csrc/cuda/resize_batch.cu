// seqwarm::resize_batch on CUDA devices: one launch for all tensors of a batch and their info.
//
// Grid: (new row, tensor, part of the tensor's new row); the info of a row has a block of its own. The tensors
// are described by value in the kernel's parameters, so a launch needs no memory and no copy to the device.

#include "../resize_batch.h"

#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include <cub/block/block_scan.cuh>
#include <limits>

namespace seqwarm {
namespace {

constexpr int threads = 128;
constexpr int units_per_thread = 4;  // loads in flight before the first store
constexpr int64_t units_per_step = threads * units_per_thread;
constexpr size_t max_entries = 32;  // more tensors take another launch
constexpr int64_t max_parts = 65535;  // of a grid's third dimension

struct Launch {
  ResizePlan plan;
  MaskView mask;
  InfoOutput info;
  unsigned int entry_count;
  ResizeEntry entries[max_entries];
};
static_assert(sizeof(Launch) <= 4096, "the parameters of a kernel have 4 KiB");

// The last valid position of a source row if it is cut, else -1. All threads of the block take part.
__device__ int64_t last_valid_if_cut(const Launch& launch, int64_t source_row) {
  __shared__ long long last;
  if (threadIdx.x == 0) {
    last = -1;
  }
  __syncthreads();
  long long last_seen = -1;
  for (int64_t position = launch.plan.new_length + threadIdx.x; position < launch.plan.source_length;
       position += threads) {
    if (launch.mask.valid(source_row, position)) {
      last_seen = position;
    }
  }
  if (last_seen >= 0) {
    atomicMax(&last, last_seen);
  }
  __syncthreads();
  return last;
}

template <typename Unit>
__device__ Unit load_unit(
    const ResizePlan& plan, const ResizeEntry& entry, const NewRow& new_row, int64_t last_valid, int64_t index) {
  const int64_t slot = entry.token_units == 1 ? index : index / entry.token_units;
  int64_t unit = index - slot * entry.token_units;
  const Source source = source_of(plan, new_row, slot, last_valid);
  if (is_filled(plan, entry.kind, source)) {
    return *reinterpret_cast<const Unit*>(entry.fill);
  }
  if (entry.kind == Kind::Square) {
    unit = source_of(plan, new_row, unit, last_valid).position;
  }
  return *reinterpret_cast<const Unit*>(
      entry.input + source.row * entry.row_stride + source.position * entry.position_stride +
      unit * entry.unit_stride);
}

template <typename Unit>
__device__ void copy_part(
    const ResizePlan& plan, const ResizeEntry& entry, const NewRow& new_row, int64_t last_valid, int64_t begin,
    int64_t end) {
  Unit* output = reinterpret_cast<Unit*>(entry.output) + blockIdx.x * entry.row_units;
  for (int64_t first = begin + threadIdx.x; first < end; first += units_per_step) {
    Unit units[units_per_thread];
#pragma unroll
    for (int step = 0; step < units_per_thread; ++step) {
      const int64_t index = first + step * threads;
      if (index < end) {
        units[step] = load_unit<Unit>(plan, entry, new_row, last_valid, index);
      }
    }
#pragma unroll
    for (int step = 0; step < units_per_thread; ++step) {
      const int64_t index = first + step * threads;
      if (index < end) {
        output[index] = units[step];
      }
    }
  }
}

__device__ void resize_part(const Launch& launch, const ResizeEntry& entry, const NewRow& new_row) {
  const ResizePlan& plan = launch.plan;
  const int64_t steps = (entry.row_units + units_per_step - 1) / units_per_step;
  const int64_t steps_per_part = (steps + gridDim.z - 1) / gridDim.z;
  const int64_t begin = blockIdx.z * steps_per_part * units_per_step;
  const int64_t past = begin + steps_per_part * units_per_step;
  const int64_t end = past < entry.row_units ? past : entry.row_units;
  if (begin >= end) {
    return;
  }
  // Only the last slot, or the last column of a mask over pairs, depends on it: most parts need not read the mask.
  const bool has_last = entry.kind == Kind::Square || end > (plan.new_length - 1) * entry.token_units;
  const bool needs_last = plan.rule == Rule::TruncateKeepLast && entry.kind != Kind::Row && has_last;
  const int64_t last_valid = needs_last ? last_valid_if_cut(launch, new_row.source_row) : -1;
  switch (entry.unit_size) {
    case 1:
      return copy_part<uint8_t>(plan, entry, new_row, last_valid, begin, end);
    case 2:
      return copy_part<uint16_t>(plan, entry, new_row, last_valid, begin, end);
    case 4:
      return copy_part<uint32_t>(plan, entry, new_row, last_valid, begin, end);
    case 8:
      return copy_part<uint64_t>(plan, entry, new_row, last_valid, begin, end);
    default:
      return copy_part<uint4>(plan, entry, new_row, last_valid, begin, end);
  }
}

// One block for the whole row.
__device__ void write_info(const Launch& launch, const NewRow& new_row) {
  using Scan = cub::BlockScan<int, threads>;
  __shared__ typename Scan::TempStorage storage;
  const ResizePlan& plan = launch.plan;
  const int64_t last_valid =
      plan.rule == Rule::TruncateKeepLast ? last_valid_if_cut(launch, new_row.source_row) : -1;
  int64_t* position_ids = launch.info.position_ids + blockIdx.x * plan.new_length;
  int valid_before = 0;
  for (int64_t first = 0; first < plan.new_length; first += threads) {
    const int64_t slot = first + threadIdx.x;
    int valid = 0;
    if (slot < plan.new_length) {
      const Source source = source_of(plan, new_row, slot, last_valid);
      valid = source.position < plan.source_length && launch.mask.valid(source.row, source.position);
    }
    int valid_before_here = 0;
    int valid_in_block = 0;
    Scan(storage).ExclusiveSum(valid, valid_before_here, valid_in_block);
    if (slot < plan.new_length) {
      position_ids[slot] = valid ? valid_before + valid_before_here : 0;
    }
    valid_before += valid_in_block;
    __syncthreads();  // the storage is used again
  }
  if (threadIdx.x == 0) {
    launch.info.valid_lengths[blockIdx.x] = valid_before;
    // Sums of integers do not depend on their order.
    atomicAdd(reinterpret_cast<unsigned long long*>(launch.info.num_valid_tokens), valid_before);
  }
}

__global__ void __launch_bounds__(threads) resize_kernel(const __grid_constant__ Launch launch) {
  const NewRow new_row = new_row_of(launch.plan, blockIdx.x);
  if (blockIdx.y < launch.entry_count) {
    resize_part(launch, launch.entries[blockIdx.y], new_row);
  } else if (blockIdx.z == 0) {
    write_info(launch, new_row);
  }
}

void run(const ResizeCall& call) {
  const c10::cuda::CUDAGuard guard(call.device);
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream();
  bool wants_info = call.info.num_valid_tokens != nullptr;
  if (wants_info) {
    C10_CUDA_CHECK(cudaMemsetAsync(call.info.num_valid_tokens, 0, sizeof(int64_t), stream));
  }
  if (call.plan.new_rows == 0) {
    return;
  }
  TORCH_CHECK_VALUE(
      call.plan.new_rows <= std::numeric_limits<int32_t>::max(), "resize_batch: ", call.plan.new_rows,
      " new rows are more than a CUDA grid holds");
  for (size_t first = 0; first < call.entries.size() || wants_info; first += max_entries) {
    Launch launch{call.plan, call.mask, call.info, 0, {}};
    int64_t parts = 1;
    for (size_t index = first; index < std::min(first + max_entries, call.entries.size()); ++index) {
      const ResizeEntry& entry = call.entries[index];
      launch.entries[launch.entry_count++] = entry;
      parts = std::max(parts, (entry.row_units + units_per_step - 1) / units_per_step);
    }
    const dim3 grid(
        static_cast<unsigned int>(call.plan.new_rows), launch.entry_count + (wants_info ? 1 : 0),
        static_cast<unsigned int>(std::min(parts, max_parts)));
    resize_kernel<<<grid, threads, 0, stream>>>(launch);
    C10_CUDA_KERNEL_LAUNCH_CHECK();
    wants_info = false;  // the first launch writes it
  }
}

TORCH_LIBRARY_IMPL(seqwarm, CUDA, library) {
  library.impl("resize_batch.native", TORCH_FN(resize_batch<run>));
  library.impl("resize_batch_out.native", TORCH_FN(resize_batch_out<run>));
}

}  // namespace
}  // namespace seqwarm
