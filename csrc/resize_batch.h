// What the CPU and the CUDA implementation of seqwarm::resize_batch share: the index map from the slots of new
// rows to source tokens, and the description of a call. resize_batch/schema.py says what the arguments mean,
// resize_batch/reference.py what the results are.

#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Scalar.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

#ifdef __CUDACC__
#define SEQWARM_HOST_DEVICE __host__ __device__
#else
#define SEQWARM_HOST_DEVICE
#endif

namespace seqwarm {

enum class Rule : int32_t { Truncate, TruncateKeepLast, ReshapeDrop, ReshapePad, ReshapeOverlap, Flatten };

enum class Kind : int32_t { Row, Sequence, Label, Square };  // the numbers of schema.py

struct ResizePlan {
  Rule rule;
  int64_t batch_size;
  int64_t source_length;
  int64_t new_length;  // 1 to source_length
  int64_t chunks;      // new rows for each source row; not used by Flatten
  int64_t new_rows;
};

// Where a new row begins.
struct NewRow {
  int64_t source_row;
  int64_t first_position;
  int64_t repeated_below;  // tokens before this position stand in an earlier new row already
};

SEQWARM_HOST_DEVICE inline NewRow new_row_of(const ResizePlan& plan, int64_t index) {
  if (plan.rule == Rule::Flatten) {
    const int64_t token = index * plan.new_length;
    return {token / plan.source_length, token % plan.source_length, 0};
  }
  const int64_t start = index % plan.chunks * plan.new_length;
  const int64_t last_start = plan.source_length - plan.new_length;
  const bool moved = plan.rule == Rule::ReshapeOverlap && start > last_start;
  return {index / plan.chunks, moved ? last_start : start, start};
}

// Where one slot takes its token from.
struct Source {
  int64_t row;
  int64_t position;  // at or beyond source_length: there is no such token
  bool repeated;
};

// `last_valid`: under TruncateKeepLast the row's last valid position if that is cut, in all other cases -1.
SEQWARM_HOST_DEVICE inline Source source_of(
    const ResizePlan& plan, const NewRow& new_row, int64_t slot, int64_t last_valid) {
  int64_t row = new_row.source_row;
  int64_t position = new_row.first_position + slot;
  if (plan.rule == Rule::Flatten && position >= plan.source_length) {  // once at most: new_length <= source_length
    row += 1;
    position -= plan.source_length;
  }
  if (slot == plan.new_length - 1 && last_valid >= plan.new_length) {
    position = last_valid;
  }
  return {row, position, position < new_row.repeated_below};
}

SEQWARM_HOST_DEVICE inline bool is_filled(const ResizePlan& plan, Kind kind, const Source& source) {
  return source.position >= plan.source_length || (kind == Kind::Label && source.repeated);
}

// The attention mask. Strides are in bytes.
struct MaskView {
  const char* data;  // null: all tokens are valid
  int64_t row_stride;
  int64_t position_stride;
  int32_t item_size;
  uint64_t value_bits;  // all bits but the sign of a floating-point number, since -0.0 counts as zero

  SEQWARM_HOST_DEVICE bool valid(int64_t row, int64_t position) const {
    if (data == nullptr) {
      return true;
    }
    const char* item = data + row * row_stride + position * position_stride;
    switch (item_size) {
      case 1:
        return (*reinterpret_cast<const uint8_t*>(item) & value_bits) != 0;
      case 2:
        return (*reinterpret_cast<const uint16_t*>(item) & value_bits) != 0;
      case 4:
        return (*reinterpret_cast<const uint32_t*>(item) & value_bits) != 0;
      default:
        return (*reinterpret_cast<const uint64_t*>(item) & value_bits) != 0;
    }
  }
};

// One tensor of the batch, as bytes. A token is `token_units` units of `unit_size` bytes; strides are in bytes
// and those of the input; the output is contiguous.
struct ResizeEntry {
  alignas(16) char fill[16];  // one unit
  const char* input;
  char* output;
  int64_t row_stride;
  int64_t position_stride;
  int64_t unit_stride;
  int64_t token_units;  // Square: new_length, the units are the columns of the mask
  int64_t row_units;    // units in a new row
  int32_t unit_size;    // 1, 2, 4, 8 or 16
  Kind kind;
};

struct InfoOutput {
  int32_t* valid_lengths = nullptr;
  int64_t* position_ids = nullptr;
  int64_t* num_valid_tokens = nullptr;  // null: no info wanted; the others are null for a batch of no rows as well
};

// A checked call.
struct ResizeCall {
  ResizePlan plan;
  MaskView mask;
  InfoOutput info;
  std::vector<ResizeEntry> entries;  // of the tensors that are not empty
  c10::Device device;
  std::vector<at::Tensor> copies;  // of inputs that one stride for each dimension does not describe
};

struct ResizeArguments {
  at::TensorList inputs;
  const std::optional<at::Tensor>& attention_mask;
  int64_t batch_size;
  int64_t source_length;
  int64_t new_length;
  std::string_view rule;
  at::IntArrayRef kinds;
  at::ArrayRef<at::Scalar> fill_values;
  bool return_info;
};

std::vector<at::Tensor> allocate_outputs(const ResizeArguments& arguments);
ResizeCall describe_call(const ResizeArguments& arguments, at::TensorList outputs);

// The two operators of a device, given the function that runs a call there.
template <void (*run)(const ResizeCall&)>
void resize_batch_out(
    at::TensorList inputs, const std::optional<at::Tensor>& attention_mask, int64_t batch_size, int64_t source_length,
    int64_t new_length, std::string_view rule, at::IntArrayRef kinds, at::ArrayRef<at::Scalar> fill_values,
    bool return_info, at::TensorList outputs) {
  run(describe_call(
      {inputs, attention_mask, batch_size, source_length, new_length, rule, kinds, fill_values, return_info}, outputs));
}

template <void (*run)(const ResizeCall&)>
std::vector<at::Tensor> resize_batch(
    at::TensorList inputs, const std::optional<at::Tensor>& attention_mask, int64_t batch_size, int64_t source_length,
    int64_t new_length, std::string_view rule, at::IntArrayRef kinds, at::ArrayRef<at::Scalar> fill_values,
    bool return_info) {
  const ResizeArguments arguments{
      inputs, attention_mask, batch_size, source_length, new_length, rule, kinds, fill_values, return_info};
  std::vector<at::Tensor> outputs = allocate_outputs(arguments);
  run(describe_call(arguments, outputs));
  return outputs;
}

}  // namespace seqwarm
