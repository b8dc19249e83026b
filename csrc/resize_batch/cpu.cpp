// seqwarm::resize_batch on the CPU. Each line of the new batch is a few runs of consecutive source tokens.

#include "call.h"

#include "../parallel.h"

#include <cstring>
#include <numeric>

namespace seqwarm {
namespace {

// Consecutive tokens of a source row, and the index of the first one in the new batch.
struct Run {
  int64_t new_token;
  int64_t row;
  Source source;
  int64_t count;
};

// Under truncate, the source positions of the first and the last token of each new row. Empty where they are 0 and
// new_length - 1 in every row.
struct Cuts {
  std::vector<int64_t> first;
  std::vector<int64_t> last;

  int64_t first_of(int64_t row) const {
    return first.empty() ? 0 : first[row];
  }
};

// The first valid position of each row, or an earlier one where fewer than new_length tokens follow. 0 without one.
std::vector<int64_t> first_positions(const ResizeCall& call) {
  const ResizePlan& plan = call.plan;
  const int64_t rows = plan.skips_padding && plan.new_length < plan.source_length ? plan.batch_size : 0;
  int64_t begin_valid = 0;
  while (begin_valid < rows && call.mask.valid(begin_valid, 0)) {
    ++begin_valid;
  }
  if (begin_valid == rows) {
    return {};
  }
  std::vector<int64_t> positions(rows);
  for_each_part(begin_valid, rows, bytes_per_position * plan.source_length, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      int64_t position = 0;
      while (position < plan.source_length && !call.mask.valid(row, position)) {
        ++position;
      }
      positions[row] = position == plan.source_length ? 0 : std::min(position, plan.source_length - plan.new_length);
    }
  });
  return positions;
}

// Under truncate_keep_last: the last valid position of each row if it is cut, else the last position that is kept.
std::vector<int64_t> last_positions(const ResizeCall& call, const Cuts& cuts) {
  const ResizePlan& plan = call.plan;
  std::vector<int64_t> positions(plan.keeps_last ? plan.batch_size : 0);
  const int64_t bytes = bytes_per_position * (plan.source_length - plan.new_length);
  for_each_part(0, static_cast<int64_t>(positions.size()), bytes, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const int64_t end_of_row = cuts.first_of(row) + plan.new_length;
      int64_t position = plan.source_length - 1;
      while (position >= end_of_row && !call.mask.valid(row, position)) {
        --position;
      }
      positions[row] = position;
    }
  });
  return positions;
}

// Calls visit(run) for the runs of the new tokens [begin, end).
template <typename Visit>
void for_each_run(const ResizePlan& plan, const Cuts& cuts, int64_t begin, int64_t end, const Visit& visit) {
  for (int64_t token = begin; token < end;) {
    const int64_t row = token / plan.line;
    const int64_t position = token % plan.line;
    Source source = source_of(plan, position);
    int64_t count = std::min(end - token, plan.line - position);
    const auto stop_at = [&](int64_t boundary) {
      if (position < boundary) {
        count = std::min(count, boundary - position);
      }
    };
    if (plan.pads) {
      stop_at(plan.source_length);
    }
    if (plan.overlaps) {
      stop_at(plan.last_start);
      stop_at(plan.last_start + plan.moved_by);
    }
    source.position += cuts.first_of(row);
    if (plan.keeps_last) {
      stop_at(plan.new_length - 1);
      if (position == plan.new_length - 1) {
        source.position = cuts.last[row];
      }
    }
    visit(Run{token, row, source, count});
    token += count;
  }
}

template <size_t size>
void copy_items(char* to, const char* from, int64_t stride, int64_t count) {
  for (int64_t index = 0; index < count; ++index) {
    std::memcpy(to + index * size, from + index * stride, size);
  }
}

// With stride 0 this fills.
void copy_strided(char* to, const char* from, int64_t stride, int64_t count, int32_t item_size) {
  if (stride == item_size) {
    std::memcpy(to, from, count * item_size);
    return;
  }
  switch (item_size) {
    case 1:
      return copy_items<1>(to, from, stride, count);
    case 2:
      return copy_items<2>(to, from, stride, count);
    case 4:
      return copy_items<4>(to, from, stride, count);
    case 8:
      return copy_items<8>(to, from, stride, count);
    default:
      return copy_items<16>(to, from, stride, count);
  }
}

void copy_tokens(const ResizeEntry& entry, char* to, const char* from, int64_t count) {
  const int64_t items = entry.token_items;
  if (items == 1) {
    copy_strided(to, from, entry.position_stride, count, entry.item_size);
  } else if (entry.position_stride == items * entry.item_stride) {
    copy_strided(to, from, entry.item_stride, count * items, entry.item_size);
  } else {
    for (int64_t token = 0; token < count; ++token) {
      copy_strided(
          to + token * items * entry.item_size, from + token * entry.position_stride, entry.item_stride, items,
          entry.item_size);
    }
  }
}

// A mask over pairs of tokens: columns are cut like rows.
void copy_pairs(
    const ResizeEntry& entry, char* to, const char* from, int64_t count, int64_t first_column, int64_t last_column) {
  const int64_t last = entry.token_items - 1;
  for (int64_t token = 0; token < count; ++token) {
    copy_strided(to, from + first_column * entry.item_stride, entry.item_stride, last, entry.item_size);
    std::memcpy(to + last * entry.item_size, from + last_column * entry.item_stride, entry.item_size);
    to += entry.token_items * entry.item_size;
    from += entry.position_stride;
  }
}

void copy_run(const ResizeCall& call, const ResizeEntry& entry, const Cuts& cuts, const Run& run) {
  const int64_t token_size = entry.token_items * entry.item_size;
  char* to = entry.output + run.new_token * token_size;
  const char* from =
      entry.input + run.row * entry.row_stride + run.source.position * entry.position_stride;
  if (is_filled(call.plan, entry.kind, run.source)) {
    copy_strided(to, entry.fill, 0, run.count * entry.token_items, entry.item_size);
  } else if (entry.kind == Kind::Square) {
    const int64_t first = cuts.first_of(run.row);
    copy_pairs(
        entry, to, from, run.count, first, cuts.last.empty() ? first + entry.token_items - 1 : cuts.last[run.row]);
  } else {
    copy_tokens(entry, to, from, run.count);
  }
}

// Writes the new tokens [begin, end) of one tensor.
void copy_range(const ResizeCall& call, const ResizeEntry& entry, const Cuts& cuts, int64_t begin, int64_t end) {
  const ResizePlan& plan = call.plan;
  const bool is_one_stream = plan.line == plan.source_length && !plan.keeps_last &&
                             entry.row_stride == plan.source_length * entry.position_stride;
  if (is_one_stream && entry.kind != Kind::Square) {
    const int64_t token_size = entry.token_items * entry.item_size;
    copy_tokens(entry, entry.output + begin * token_size, entry.input + begin * entry.position_stride, end - begin);
  } else {
    for_each_run(plan, cuts, begin, end, [&](const Run& run) { copy_run(call, entry, cuts, run); });
  }
}

void write_info(const ResizeCall& call, const Cuts& cuts, int64_t new_row) {
  const ResizePlan& plan = call.plan;
  const int64_t first = new_row * plan.new_length;
  const MaskView mask = call.mask;  // a copy, which the writes below cannot change as far as the compiler knows
  int64_t valid_before = 0;
  for_each_run(plan, cuts, first, first + plan.new_length, [&](const Run& run) {
    const bool has_tokens = run.source.position < plan.source_length;
    int64_t* position_ids = call.info.position_ids + run.new_token;
    for (int64_t step = 0; step < run.count; ++step) {
      const bool valid = has_tokens && mask.valid(run.row, run.source.position + step);
      position_ids[step] = valid ? valid_before : 0;
      valid_before += valid;
    }
  });
  call.info.valid_lengths[new_row] = static_cast<int32_t>(valid_before);
}

void copy_rows(const ResizeCall& call, const ResizeEntry& entry) {
  for (int64_t new_row = 0; new_row < call.plan.new_rows; ++new_row) {
    const int64_t row = new_row * call.plan.new_length / call.plan.line;
    std::memcpy(entry.output + new_row * entry.item_size, entry.input + row * entry.row_stride, entry.item_size);
  }
}

void run(const ResizeCall& call) {
  const ResizePlan& plan = call.plan;
  Cuts cuts{first_positions(call), {}};
  cuts.last = last_positions(call, cuts);
  std::vector<const ResizeEntry*> entries;
  int64_t bytes_per_token = 0;
  for (const ResizeEntry& entry : call.entries) {
    if (entry.kind == Kind::Row) {
      copy_rows(call, entry);
    } else {
      entries.push_back(&entry);
      bytes_per_token += entry.token_items * entry.item_size;
    }
  }
  for_each_part(0, plan.tokens, bytes_per_token, [&](int64_t begin, int64_t end) {
    for (const ResizeEntry* entry : entries) {
      copy_range(call, *entry, cuts, begin, end);
    }
  });
  if (call.info.num_valid_tokens != nullptr) {
    for_each_part(0, plan.new_rows, bytes_per_position * plan.new_length, [&](int64_t begin, int64_t end) {
      for (int64_t new_row = begin; new_row < end; ++new_row) {
        write_info(call, cuts, new_row);
      }
    });
    const int32_t* lengths = call.info.valid_lengths;
    *call.info.num_valid_tokens = std::accumulate(lengths, lengths + plan.new_rows, int64_t{0});
  }
}

void resize_batch_out(
    Tensors inputs, const std::optional<Tensor>& attention_mask, int64_t batch_size, int64_t source_length,
    int64_t new_length, std::string_view rule, Integers kinds, Numbers fill_values, bool return_info, Tensors outputs) {
  run(describe_call(
      {inputs, attention_mask, batch_size, source_length, new_length, rule, kinds, fill_values, return_info}, outputs));
}

std::vector<Tensor> resize_batch(
    Tensors inputs, const std::optional<Tensor>& attention_mask, int64_t batch_size, int64_t source_length,
    int64_t new_length, std::string_view rule, Integers kinds, Numbers fill_values, bool return_info) {
  const ResizeArguments arguments{
      inputs, attention_mask, batch_size, source_length, new_length, rule, kinds, fill_values, return_info};
  const std::vector<Tensor> outputs = allocate_outputs(arguments);
  run(describe_call(arguments, outputs));
  return outputs;
}

SEQWARM_LIBRARY(CPU, library) {
  library.impl("resize_batch.native", SEQWARM_KERNEL(resize_batch));
  library.impl("resize_batch_out.native", SEQWARM_KERNEL(resize_batch_out));
}

}  // namespace
}  // namespace seqwarm
