// seqwarm::resize_batch on the CPU: each new row is a few runs of successive source tokens.

#include "../resize_batch.h"

#include <ATen/Parallel.h>
#include <torch/library.h>

#include <cstring>

namespace seqwarm {
namespace {

// Below this many bytes for each thread, waking the threads costs more than they save.
constexpr int64_t bytes_per_task = 64 * 1024;

template <size_t size>
void copy_units(char* to, const char* from, int64_t stride, int64_t count) {
  for (int64_t index = 0; index < count; ++index) {
    std::memcpy(to + index * size, from + index * stride, size);
  }
}

// With stride 0 this fills.
void copy_strided(char* to, const char* from, int64_t stride, int64_t count, int32_t unit_size) {
  if (stride == unit_size) {
    std::memcpy(to, from, count * unit_size);
    return;
  }
  switch (unit_size) {
    case 1:
      return copy_units<1>(to, from, stride, count);
    case 2:
      return copy_units<2>(to, from, stride, count);
    case 4:
      return copy_units<4>(to, from, stride, count);
    case 8:
      return copy_units<8>(to, from, stride, count);
    default:
      return copy_units<16>(to, from, stride, count);
  }
}

// `count` successive tokens of a source row.
void copy_tokens(const ResizeEntry& entry, char* to, const char* from, int64_t count) {
  const int64_t units = entry.token_units;
  if (units == 1) {
    copy_strided(to, from, entry.position_stride, count, entry.unit_size);
  } else if (entry.position_stride == units * entry.unit_stride) {
    copy_strided(to, from, entry.unit_stride, count * units, entry.unit_size);
  } else {
    for (int64_t token = 0; token < count; ++token) {
      copy_strided(
          to + token * units * entry.unit_size, from + token * entry.position_stride, entry.unit_stride, units,
          entry.unit_size);
    }
  }
}

// One position of a mask over pairs of tokens: `columns` are cut as its rows are.
void copy_columns(
    const ResizePlan& plan, const ResizeEntry& entry, char* to, const char* from, int64_t last_valid) {
  const int64_t last = plan.new_length - 1;
  const int64_t last_position = last_valid >= plan.new_length ? last_valid : last;
  copy_strided(to, from, entry.unit_stride, last, entry.unit_size);
  std::memcpy(to + last * entry.unit_size, from + last_position * entry.unit_stride, entry.unit_size);
}

// Call visit(slot, count, source) for each run of slots with successive positions of one source row, or with none.
template <typename Visit>
void for_each_run(const ResizePlan& plan, const NewRow& new_row, int64_t last_valid, const Visit& visit) {
  for (int64_t slot = 0; slot < plan.new_length;) {
    const Source source = source_of(plan, new_row, slot, last_valid);
    int64_t count = plan.new_length - slot;
    if (source.position < plan.source_length) {
      count = std::min(count, plan.source_length - source.position);
    }
    if (source.repeated) {
      count = std::min(count, new_row.repeated_below - source.position);
    }
    if (last_valid >= plan.new_length && slot < plan.new_length - 1) {
      count = std::min(count, plan.new_length - 1 - slot);
    }
    visit(slot, count, source);
    slot += count;
  }
}

void resize_row(
    const ResizePlan& plan, const ResizeEntry& entry, int64_t index, const NewRow& new_row, int64_t last_valid) {
  char* output = entry.output + index * entry.row_units * entry.unit_size;
  if (entry.kind == Kind::Row) {
    std::memcpy(output, entry.input + new_row.source_row * entry.row_stride, entry.unit_size);
    return;
  }
  const int64_t token_size = entry.token_units * entry.unit_size;
  for_each_run(plan, new_row, last_valid, [&](int64_t slot, int64_t count, const Source& source) {
    char* to = output + slot * token_size;
    const char* from = entry.input + source.row * entry.row_stride + source.position * entry.position_stride;
    if (is_filled(plan, entry.kind, source)) {
      copy_strided(to, entry.fill, 0, count * entry.token_units, entry.unit_size);
    } else if (entry.kind == Kind::Square) {
      for (int64_t token = 0; token < count; ++token) {
        copy_columns(plan, entry, to + token * token_size, from + token * entry.position_stride, last_valid);
      }
    } else {
      copy_tokens(entry, to, from, count);
    }
  });
}

void write_info(const ResizeCall& call, int64_t index, const NewRow& new_row, int64_t last_valid) {
  const ResizePlan& plan = call.plan;
  int64_t* position_ids = call.info.position_ids + index * plan.new_length;
  int64_t valid_before = 0;
  for_each_run(plan, new_row, last_valid, [&](int64_t slot, int64_t count, const Source& source) {
    const bool has_tokens = source.position < plan.source_length;
    for (int64_t step = 0; step < count; ++step) {
      const bool valid = has_tokens && call.mask.valid(source.row, source.position + step);
      position_ids[slot + step] = valid ? valid_before : 0;
      valid_before += valid;
    }
  });
  call.info.valid_lengths[index] = static_cast<int32_t>(valid_before);
}

int64_t last_valid_if_cut(const ResizeCall& call, int64_t source_row) {
  if (call.plan.rule != Rule::TruncateKeepLast) {
    return -1;
  }
  for (int64_t position = call.plan.source_length - 1; position >= call.plan.new_length; --position) {
    if (call.mask.valid(source_row, position)) {
      return position;
    }
  }
  return -1;
}

void run(const ResizeCall& call) {
  const ResizePlan& plan = call.plan;
  const bool wants_info = call.info.num_valid_tokens != nullptr;
  int64_t bytes_per_row = wants_info ? plan.new_length * static_cast<int64_t>(sizeof(int64_t)) : 0;
  for (const ResizeEntry& entry : call.entries) {
    bytes_per_row += entry.row_units * entry.unit_size;
  }
  const int64_t rows_per_task = bytes_per_task / std::max<int64_t>(bytes_per_row, 1) + 1;
  at::parallel_for(0, plan.new_rows, rows_per_task, [&](int64_t begin, int64_t end) {
    for (int64_t index = begin; index < end; ++index) {
      const NewRow new_row = new_row_of(plan, index);
      const int64_t last_valid = last_valid_if_cut(call, new_row.source_row);
      for (const ResizeEntry& entry : call.entries) {
        resize_row(plan, entry, index, new_row, last_valid);
      }
      if (wants_info) {
        write_info(call, index, new_row, last_valid);
      }
    }
  });
  if (wants_info) {
    int64_t total = 0;
    for (int64_t index = 0; index < plan.new_rows; ++index) {
      total += call.info.valid_lengths[index];
    }
    *call.info.num_valid_tokens = total;
  }
}

TORCH_LIBRARY_IMPL(seqwarm, CPU, library) {
  library.impl("resize_batch.native", TORCH_FN(resize_batch<run>));
  library.impl("resize_batch_out.native", TORCH_FN(resize_batch_out<run>));
}

}  // namespace
}  // namespace seqwarm
