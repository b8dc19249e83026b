// Checks the arguments, allocates outputs, describes tensors as bytes.

#include "call.h"

#include "../memory/large_memory.h"

#include <array>
#include <cstring>
#include <utility>

namespace seqwarm {
namespace {

enum class Rule { Truncate, TruncateValid, TruncateKeepLast, ReshapeDrop, ReshapePad, ReshapeOverlap, Flatten };

constexpr std::array<std::pair<std::string_view, Rule>, 7> rules{{
    {"truncate", Rule::Truncate},
    {"truncate_valid", Rule::TruncateValid},
    {"truncate_keep_last", Rule::TruncateKeepLast},
    {"reshape_drop", Rule::ReshapeDrop},
    {"reshape_pad", Rule::ReshapePad},
    {"reshape_overlap", Rule::ReshapeOverlap},
    {"flatten", Rule::Flatten},
}};

Rule rule_named(std::string_view name) {
  for (const auto& [known, rule] : rules) {
    if (known == name) {
      return rule;
    }
  }
  SEQWARM_CHECK_VALUE(false, "resize_batch: unknown rule '", name, "'");
}

int64_t line_of(Rule rule, int64_t source_length, int64_t new_length) {
  switch (rule) {
    case Rule::Truncate:
    case Rule::TruncateValid:
    case Rule::TruncateKeepLast:
      return new_length;
    case Rule::ReshapeDrop:
      return source_length / new_length * new_length;
    case Rule::Flatten:
      return source_length;
    default:
      return (source_length + new_length - 1) / new_length * new_length;
  }
}

ResizePlan plan_of(const ResizeArguments& arguments) {
  SEQWARM_CHECK_VALUE(
      arguments.batch_size >= 0 && arguments.source_length >= 1 && arguments.new_length >= 1,
      "resize_batch: batch_size must be at least 0, source_length and new_length at least 1, got ",
      arguments.batch_size, ", ", arguments.source_length, " and ", arguments.new_length);
  const Rule rule = rule_named(arguments.rule);
  ResizePlan plan{};
  plan.batch_size = arguments.batch_size;
  plan.source_length = arguments.source_length;
  plan.new_length = std::min(arguments.new_length, arguments.source_length);
  plan.line = line_of(rule, plan.source_length, plan.new_length);
  plan.new_rows = plan.batch_size * plan.line / plan.new_length;
  plan.tokens = plan.new_rows * plan.new_length;
  plan.last_start = plan.line - plan.new_length;
  plan.moved_by = plan.line - plan.source_length;
  plan.pads = rule == Rule::ReshapePad;
  plan.overlaps = rule == Rule::ReshapeOverlap;
  plan.keeps_last = rule == Rule::TruncateKeepLast;
  plan.skips_padding = rule == Rule::TruncateValid || plan.keeps_last;
  return plan;
}

Kind kind_of(int64_t number) {
  SEQWARM_CHECK_VALUE(number >= 0 && number <= 3, "resize_batch: unknown kind ", number);
  return static_cast<Kind>(number);
}

std::vector<int64_t> output_shape(const ResizePlan& plan, const Tensor& input, Kind kind) {
  if (kind == Kind::Row) {
    return {plan.new_rows};
  }
  const Sizes sizes = input.sizes();
  std::vector<int64_t> shape(sizes.begin(), sizes.end());
  shape[0] = plan.new_rows;
  shape[1] = plan.new_length;
  if (kind == Kind::Square) {
    shape[2] = plan.new_length;
  }
  return shape;
}

void check_input(const ResizePlan& plan, const Tensor& input, Kind kind) {
  const Sizes sizes = input.sizes();
  bool fits = !sizes.empty() && sizes[0] == plan.batch_size;
  if (kind == Kind::Row) {
    fits = fits && sizes.size() == 1 && plan.batch_size * plan.line == plan.tokens;
  } else {
    fits = fits && sizes.size() >= 2 && sizes[1] == plan.source_length;
  }
  if (kind == Kind::Square) {
    fits = fits && sizes.size() == 3 && sizes[2] == plan.source_length && plan.line == plan.new_length;
  }
  SEQWARM_CHECK_VALUE(
      fits, "resize_batch: an input of shape ", sizes, " and kind ", static_cast<int>(kind), " does not fit batch_size ",
      plan.batch_size, ", source_length ", plan.source_length, " and the rule");
  SEQWARM_CHECK_VALUE(input.is_cpu(), "resize_batch: all tensors must be in host memory");
}

void check_arguments(const ResizePlan& plan, const ResizeArguments& arguments) {
  const size_t count = arguments.inputs.size();
  SEQWARM_CHECK_VALUE(
      arguments.kinds.size() == count && arguments.fill_values.size() == count,
      "resize_batch: there must be a kind and a fill value for each of the ", count, " inputs");
  for (size_t index = 0; index < count; ++index) {
    check_input(plan, arguments.inputs[index], kind_of(arguments.kinds[index]));
  }
  if (arguments.attention_mask.has_value()) {
    check_input(plan, *arguments.attention_mask, Kind::Sequence);
    SEQWARM_CHECK_VALUE(arguments.attention_mask->dim() == 2, "resize_batch: attention_mask must have two dimensions");
  }
  SEQWARM_CHECK_VALUE(
      !plan.skips_padding || arguments.attention_mask.has_value(), "resize_batch: rule '", arguments.rule,
      "' needs an attention_mask");
}

void check_output(const Tensor& output, Sizes shape, ScalarType dtype) {
  SEQWARM_CHECK_VALUE(
      is_equal(output.sizes(), shape) && output.scalar_type() == dtype && output.is_cpu() && output.is_contiguous(),
      "resize_batch: an output must be a contiguous ", dtype, " tensor of shape ", shape, " in host memory, got ",
      output.scalar_type(), " ", output.sizes(), output.is_contiguous() ? "" : ", not contiguous");
}

struct Features {
  int64_t count;
  int64_t stride;  // in elements
};

// The feature dimensions of (B, S, features...) as one dimension, if they share one stride.
std::optional<Features> collapse_features(const Tensor& input) {
  Features features{1, 1};
  for (int64_t dim = input.dim() - 1; dim >= 2; --dim) {
    const int64_t size = input.size(dim);
    if (size == 1) {
      continue;
    }
    if (features.count == 1) {
      features.stride = input.stride(dim);
    } else if (input.stride(dim) != features.count * features.stride) {
      return std::nullopt;
    }
    features.count *= size;
  }
  return features;
}

bool may_fill(const ResizePlan& plan, Kind kind) {
  return (plan.pads && kind != Kind::Row) || (plan.overlaps && kind == Kind::Label);
}

void set_fill(ResizeEntry& entry, double fill_value, ScalarType dtype) {
  const Tensor item = item_of(fill_value, dtype);
  std::memcpy(entry.fill, item.const_data_ptr(), entry.item_size);
}

// Replaces `input` by a contiguous copy if its features do not share one stride.
ResizeEntry describe_entry(
    const ResizePlan& plan, Tensor& input, const Tensor& output, Kind kind, double fill_value) {
  Features features{1, 1};
  if (kind == Kind::Square) {
    features = {plan.new_length, input.stride(2)};
  } else if (kind != Kind::Row) {
    std::optional<Features> collapsed = collapse_features(input);
    if (!collapsed.has_value()) {
      input = as_contiguous(input);
      collapsed = collapse_features(input);
    }
    features = *collapsed;
  }
  const auto item_size = static_cast<int64_t>(input.element_size());
  ResizeEntry entry{};
  entry.input = static_cast<const char*>(input.const_data_ptr());
  entry.output = static_cast<char*>(output.mutable_data_ptr());
  entry.row_stride = input.stride(0) * item_size;
  entry.position_stride = kind == Kind::Row ? 0 : input.stride(1) * item_size;
  entry.item_stride = features.stride * item_size;
  entry.token_items = features.count;
  entry.item_size = static_cast<int32_t>(item_size);
  entry.kind = kind;
  if (may_fill(plan, kind)) {
    set_fill(entry, fill_value, input.scalar_type());
  }
  return entry;
}

uint64_t value_bits_of(ScalarType dtype) {
  switch (dtype) {
    case ScalarType::Half:
    case ScalarType::BFloat16:
      return 0x7fff;
    case ScalarType::Float:
      return 0x7fffffff;
    case ScalarType::Double:
      return 0x7fffffffffffffff;
    default:
      return ~uint64_t{0};
  }
}

// The last three outputs.
InfoOutput describe_info(const ResizePlan& plan, Tensors outputs) {
  const Tensor &lengths = outputs[outputs.size() - 3], &positions = outputs[outputs.size() - 2];
  const Tensor& count = outputs[outputs.size() - 1];
  check_output(lengths, {plan.new_rows}, ScalarType::Int);
  check_output(positions, {plan.new_rows, plan.new_length}, ScalarType::Long);
  check_output(count, {}, ScalarType::Long);
  return {
      lengths.mutable_data_ptr<int32_t>(), positions.mutable_data_ptr<int64_t>(), count.mutable_data_ptr<int64_t>()};
}

// Replaces `mask` by booleans if its bits do not show whether an item is zero.
MaskView describe_mask(Tensor& mask) {
  const ScalarType dtype = mask.scalar_type();
  const bool bits_suffice = is_integral(dtype) || value_bits_of(dtype) != ~uint64_t{0};
  if (!bits_suffice) {
    mask = to_dtype(mask, ScalarType::Bool);
  }
  const auto item_size = static_cast<int64_t>(mask.element_size());
  return {
      static_cast<const char*>(mask.const_data_ptr()), mask.stride(0) * item_size, mask.stride(1) * item_size,
      static_cast<int32_t>(item_size), value_bits_of(mask.scalar_type())};
}

}  // namespace

std::vector<Tensor> allocate_outputs(const ResizeArguments& arguments) {
  const ResizePlan plan = plan_of(arguments);
  check_arguments(plan, arguments);
  std::vector<Tensor> outputs;
  for (size_t index = 0; index < arguments.inputs.size(); ++index) {
    const Tensor& input = arguments.inputs[index];
    outputs.push_back(empty_large(output_shape(plan, input, kind_of(arguments.kinds[index])), input.scalar_type()));
  }
  if (arguments.return_info) {
    outputs.push_back(empty_large({plan.new_rows}, ScalarType::Int));
    outputs.push_back(empty_large({plan.new_rows, plan.new_length}, ScalarType::Long));
    outputs.push_back(empty_large({}, ScalarType::Long));
  }
  return outputs;
}

ResizeCall describe_call(const ResizeArguments& arguments, Tensors outputs) {
  const ResizePlan plan = plan_of(arguments);
  check_arguments(plan, arguments);
  const size_t count = arguments.inputs.size();
  SEQWARM_CHECK_VALUE(
      outputs.size() == count + (arguments.return_info ? 3 : 0), "resize_batch: there must be an output for each of the ",
      count, " inputs", arguments.return_info ? " and three for the info" : "", ", got ", outputs.size());

  ResizeCall call{plan, {}, {}, {}, {}};
  for (size_t index = 0; index < count; ++index) {
    Tensor input = arguments.inputs[index];
    const Kind kind = kind_of(arguments.kinds[index]);
    const Tensor& output = outputs[index];
    check_output(output, output_shape(plan, input, kind), input.scalar_type());
    if (output.numel() == 0) {
      continue;
    }
    call.entries.push_back(describe_entry(plan, input, output, kind, arguments.fill_values[index]));
    call.kept.push_back(std::move(input));
  }
  if (arguments.attention_mask.has_value()) {
    Tensor mask = *arguments.attention_mask;
    call.mask = describe_mask(mask);
    call.kept.push_back(std::move(mask));
  }
  if (arguments.return_info) {
    call.info = describe_info(plan, outputs);
  }
  return call;
}

}  // namespace seqwarm
