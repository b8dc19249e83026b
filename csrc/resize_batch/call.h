// A call of seqwarm::resize_batch: how new rows are cut, and the tensors as bytes. ops/resize_batch/schema.py documents
// the arguments, ops/resize_batch/reference.py defines the results.
//
// All rules are the same copy, up to two details: each source row yields a *line* of tokens, and the concatenated lines
// are the new batch. A line is the first L tokens of the row (truncate), its first floor(S / L) L (reshape_drop), all S
// (flatten), or ceil(S / L) L. In the last case, slots beyond the row are filled (reshape_pad), or the last new row
// holds the row's last L tokens (reshape_overlap). The details: truncate_valid and truncate_keep_last cut a row
// from its first valid token on, and the latter may take another token last.

#pragma once

#include "../torch.h"

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

namespace seqwarm {

enum class Kind : int32_t { Row, Sequence, Label, Square };  // the numbers of schema.py

struct ResizePlan {
  int64_t batch_size;
  int64_t source_length;
  int64_t new_length;  // 1 to source_length
  int64_t new_rows;
  int64_t tokens;  // new_rows * new_length
  int64_t line;
  int64_t last_start;  // position in a line of its last new row
  int64_t moved_by;    // how far back the tokens of that new row are, if it overlaps
  bool pads;
  bool overlaps;
  bool skips_padding;  // rows that begin with masked tokens are cut from a later position on
  bool keeps_last;
};

// The source of the token at a position of a line.
struct Source {
  int64_t position;  // source_length or more: the slot has no source token
  bool repeated;     // an earlier new row holds the token
};

inline Source source_of(const ResizePlan& plan, int64_t position) {
  if (!plan.overlaps || position < plan.last_start) {
    return {position, false};
  }
  return {position - plan.moved_by, position - plan.moved_by < plan.last_start};
}

inline bool is_filled(const ResizePlan& plan, Kind kind, const Source& source) {
  return source.position >= plan.source_length || (kind == Kind::Label && source.repeated);
}

// The attention mask. Strides are in bytes.
struct MaskView {
  const char* data;  // null: all tokens are valid
  int64_t row_stride;
  int64_t position_stride;
  int32_t item_size;
  uint64_t value_bits = ~uint64_t{0};  // without the sign bit of floating-point numbers, since -0.0 counts as zero

  bool valid(int64_t row, int64_t position) const {
    return (item(row, position) & value_bits) != 0;
  }

  // The bits of an item. Not zero without a mask.
  uint64_t item(int64_t row, int64_t position) const {
    if (data == nullptr) {
      return ~uint64_t{0};
    }
    const char* address = data + row * row_stride + position * position_stride;
    switch (item_size) {
      case 1:
        return *reinterpret_cast<const uint8_t*>(address);
      case 2:
        return *reinterpret_cast<const uint16_t*>(address);
      case 4:
        return *reinterpret_cast<const uint32_t*>(address);
      default:
        return *reinterpret_cast<const uint64_t*>(address);
    }
  }
};

// One tensor of the batch, as bytes. A token is `token_items` items. Strides are those of the input, in bytes. The
// output is contiguous.
struct ResizeEntry {
  char fill[16];  // the item
  const char* input;
  char* output;
  int64_t row_stride;
  int64_t position_stride;
  int64_t item_stride;
  int64_t token_items;  // Square: new_length, since the items are the columns of the mask
  int32_t item_size;    // 1, 2, 4, 8 or 16
  Kind kind;
};

struct InfoOutput {
  int32_t* valid_lengths = nullptr;
  int64_t* position_ids = nullptr;
  int64_t* num_valid_tokens = nullptr;  // null without return_info; the other two are also null for a batch of no rows
};

// A checked call.
struct ResizeCall {
  ResizePlan plan;
  MaskView mask;
  InfoOutput info;
  std::vector<ResizeEntry> entries;  // without empty tensors
  std::vector<Tensor> kept;  // keeps the memory of inputs and of their copies alive
};

struct ResizeArguments {
  Tensors inputs;
  const std::optional<Tensor>& attention_mask;
  int64_t batch_size;
  int64_t source_length;
  int64_t new_length;
  std::string_view rule;
  Integers kinds;
  Numbers fill_values;
  bool return_info;
};

std::vector<Tensor> allocate_outputs(const ResizeArguments& arguments);
ResizeCall describe_call(const ResizeArguments& arguments, Tensors outputs);

}  // namespace seqwarm
