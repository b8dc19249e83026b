// Host side of seqwarm::resize_batch: checks the arguments, allocates outputs, describes tensors as bytes.

#include "call.h"

#include <ATen/ops/scalar_tensor.h>
#include <c10/util/Exception.h>

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
  TORCH_CHECK_VALUE(false, "resize_batch: unknown rule '", name, "'");
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
  TORCH_CHECK_VALUE(
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
  TORCH_CHECK_VALUE(number >= 0 && number <= 3, "resize_batch: unknown kind ", number);
  return static_cast<Kind>(number);
}

const at::Tensor& any_tensor(const ResizeArguments& arguments) {
  TORCH_CHECK_VALUE(
      !arguments.inputs.empty() || arguments.attention_mask.has_value(), "resize_batch: inputs must not be empty");
  return arguments.inputs.empty() ? *arguments.attention_mask : arguments.inputs[0];
}

std::vector<int64_t> output_shape(const ResizePlan& plan, const at::Tensor& input, Kind kind) {
  if (kind == Kind::Row) {
    return {plan.new_rows};
  }
  std::vector<int64_t> shape = input.sizes().vec();
  shape[0] = plan.new_rows;
  shape[1] = plan.new_length;
  if (kind == Kind::Square) {
    shape[2] = plan.new_length;
  }
  return shape;
}

void check_input(const ResizePlan& plan, const at::Tensor& input, Kind kind, const c10::Device& device) {
  const at::IntArrayRef sizes = input.sizes();
  bool fits = !sizes.empty() && sizes[0] == plan.batch_size;
  if (kind == Kind::Row) {
    fits = fits && sizes.size() == 1 && plan.batch_size * plan.line == plan.tokens;
  } else {
    fits = fits && sizes.size() >= 2 && sizes[1] == plan.source_length;
  }
  if (kind == Kind::Square) {
    fits = fits && sizes.size() == 3 && sizes[2] == plan.source_length && plan.line == plan.new_length;
  }
  TORCH_CHECK_VALUE(
      fits, "resize_batch: an input of shape ", sizes, " and kind ", static_cast<int>(kind), " does not fit batch_size ",
      plan.batch_size, ", source_length ", plan.source_length, " and the rule");
  // A device can read pinned host memory directly.
  const bool readable = input.device() == device || (device.is_cuda() && input.is_cpu() && input.is_pinned());
  TORCH_CHECK_VALUE(readable, "resize_batch: all tensors must be on ", device, ", got one on ", input.device());
}

void check_arguments(const ResizePlan& plan, const ResizeArguments& arguments, const c10::Device& device) {
  const size_t count = arguments.inputs.size();
  TORCH_CHECK_VALUE(
      arguments.kinds.size() == count && arguments.fill_values.size() == count,
      "resize_batch: there must be a kind and a fill value for each of the ", count, " inputs");
  for (size_t index = 0; index < count; ++index) {
    check_input(plan, arguments.inputs[index], kind_of(arguments.kinds[index]), device);
  }
  if (arguments.attention_mask.has_value()) {
    check_input(plan, *arguments.attention_mask, Kind::Sequence, device);
    TORCH_CHECK_VALUE(arguments.attention_mask->dim() == 2, "resize_batch: attention_mask must have two dimensions");
  }
  TORCH_CHECK_VALUE(
      !plan.skips_padding || arguments.attention_mask.has_value(), "resize_batch: rule '", arguments.rule,
      "' needs an attention_mask");
}

void check_output(const at::Tensor& output, at::IntArrayRef shape, at::ScalarType dtype, const c10::Device& device) {
  TORCH_CHECK_VALUE(
      output.sizes() == shape && output.scalar_type() == dtype && output.device() == device && output.is_contiguous(),
      "resize_batch: an output must be a contiguous ", dtype, " tensor of shape ", shape, " on ", device, ", got ",
      output.scalar_type(), " ", output.sizes(), " on ", output.device(),
      output.is_contiguous() ? "" : ", not contiguous");
}

struct Features {
  int64_t count;
  int64_t stride;  // in elements
};

// The feature dimensions of (B, S, features...) as one dimension, if they share one stride.
std::optional<Features> collapse_features(const at::Tensor& input) {
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

// Number of bytes that may be copied at once: items of one token, or of successive tokens that are never cut apart.
int32_t group_size_of(const ResizePlan& plan, const ResizeEntry& entry) {
  if (entry.kind == Kind::Row || (plan.keeps_last && entry.kind == Kind::Square)) {
    return entry.item_size;
  }
  const int64_t token_size = entry.token_items * entry.item_size;
  const bool dense = entry.token_items == 1 || entry.item_stride == entry.item_size;
  auto aligned = int64_t{16} | entry.row_stride | static_cast<int64_t>(reinterpret_cast<uintptr_t>(entry.input)) |
                 static_cast<int64_t>(reinterpret_cast<uintptr_t>(entry.output));
  if (dense && entry.position_stride == token_size && !plan.keeps_last) {
    aligned |= token_size * plan.new_length | token_size * plan.source_length;
  } else if (entry.item_stride == entry.item_size) {
    aligned |= token_size | entry.position_stride;
  } else {
    return entry.item_size;
  }
  return std::max(entry.item_size, static_cast<int32_t>(aligned & -aligned));
}

bool may_fill(const ResizePlan& plan, Kind kind) {
  return (plan.pads && kind != Kind::Row) || (plan.overlaps && kind == Kind::Label);
}

void set_fill(ResizeEntry& entry, const at::Scalar& fill_value, at::ScalarType dtype) {
  const at::Tensor item = at::scalar_tensor(fill_value, at::TensorOptions(dtype).device(at::kCPU));
  for (int32_t offset = 0; offset < 16; offset += entry.item_size) {
    std::memcpy(entry.fill + offset, item.const_data_ptr(), entry.item_size);
  }
}

// Replaces `input` by a contiguous copy if its features do not share one stride.
ResizeEntry describe_entry(
    const ResizePlan& plan, at::Tensor& input, const at::Tensor& output, Kind kind, const at::Scalar& fill_value) {
  Features features{1, 1};
  if (kind == Kind::Square) {
    features = {plan.new_length, input.stride(2)};
  } else if (kind != Kind::Row) {
    std::optional<Features> collapsed = collapse_features(input);
    if (!collapsed.has_value()) {
      TORCH_CHECK_VALUE(
          input.device() == output.device(), "resize_batch: features of a tensor in pinned memory must be contiguous, ",
          "got strides ", input.strides());
      input = input.contiguous();
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
  entry.group_size = group_size_of(plan, entry);
  if (may_fill(plan, kind)) {
    set_fill(entry, fill_value, input.scalar_type());
  }
  return entry;
}

uint64_t value_bits_of(at::ScalarType dtype) {
  switch (dtype) {
    case at::kHalf:
    case at::kBFloat16:
      return 0x7fff;
    case at::kFloat:
      return 0x7fffffff;
    case at::kDouble:
      return 0x7fffffffffffffff;
    default:
      return ~uint64_t{0};
  }
}

InfoOutput describe_info(const ResizePlan& plan, at::TensorList outputs, const c10::Device& device) {
  check_output(outputs[0], {plan.new_rows}, at::kInt, device);
  check_output(outputs[1], {plan.new_rows, plan.new_length}, at::kLong, device);
  check_output(outputs[2], {}, at::kLong, device);
  return {
      outputs[0].mutable_data_ptr<int32_t>(), outputs[1].mutable_data_ptr<int64_t>(),
      outputs[2].mutable_data_ptr<int64_t>()};
}

// Replaces `mask` by a comparison with zero if its bits do not show whether an item is zero.
MaskView describe_mask(at::Tensor& mask, const c10::Device& device) {
  const at::ScalarType dtype = mask.scalar_type();
  const bool bits_suffice = at::isIntegralType(dtype, /*includeBool=*/true) || value_bits_of(dtype) != ~uint64_t{0};
  if (!bits_suffice) {
    TORCH_CHECK_VALUE(mask.device() == device, "resize_batch: a mask in pinned memory cannot be ", dtype);
    mask = mask.ne(0);
  }
  const auto item_size = static_cast<int64_t>(mask.element_size());
  return {
      static_cast<const char*>(mask.const_data_ptr()), mask.stride(0) * item_size, mask.stride(1) * item_size,
      static_cast<int32_t>(item_size), value_bits_of(mask.scalar_type())};
}

}  // namespace

std::vector<at::Tensor> allocate_outputs(const ResizeArguments& arguments, Allocate allocate) {
  const ResizePlan plan = plan_of(arguments);
  check_arguments(plan, arguments, any_tensor(arguments).device());
  std::vector<at::Tensor> outputs;
  for (size_t index = 0; index < arguments.inputs.size(); ++index) {
    const at::Tensor& input = arguments.inputs[index];
    outputs.push_back(allocate(output_shape(plan, input, kind_of(arguments.kinds[index])), input.scalar_type(), input));
  }
  if (arguments.return_info) {
    const at::Tensor& like = any_tensor(arguments);
    outputs.push_back(allocate({plan.new_rows}, at::kInt, like));
    outputs.push_back(allocate({plan.new_rows, plan.new_length}, at::kLong, like));
    outputs.push_back(allocate({}, at::kLong, like));
  }
  return outputs;
}

ResizeCall describe_call(const ResizeArguments& arguments, at::TensorList outputs) {
  const ResizePlan plan = plan_of(arguments);
  const c10::Device device = (outputs.empty() ? any_tensor(arguments) : outputs[0]).device();
  check_arguments(plan, arguments, device);
  const size_t count = arguments.inputs.size();
  TORCH_CHECK_VALUE(
      outputs.size() == count + (arguments.return_info ? 3 : 0), "resize_batch: there must be an output for each of the ",
      count, " inputs", arguments.return_info ? " and three for the info" : "", ", got ", outputs.size());

  ResizeCall call{plan, {}, {}, {}, device, {}};
  for (size_t index = 0; index < count; ++index) {
    at::Tensor input = arguments.inputs[index];
    const Kind kind = kind_of(arguments.kinds[index]);
    const at::Tensor& output = outputs[index];
    check_output(output, output_shape(plan, input, kind), input.scalar_type(), device);
    if (output.numel() == 0) {
      continue;
    }
    call.entries.push_back(describe_entry(plan, input, output, kind, arguments.fill_values[index]));
    call.kept.push_back(std::move(input));
  }
  if (arguments.attention_mask.has_value()) {
    at::Tensor mask = *arguments.attention_mask;
    call.mask = describe_mask(mask, device);
    call.kept.push_back(std::move(mask));
  }
  if (arguments.return_info) {
    call.info = describe_info(plan, outputs.slice(count), device);
  }
  return call;
}

}  // namespace seqwarm
