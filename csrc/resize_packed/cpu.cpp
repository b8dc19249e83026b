// seqwarm::resize_packed on the CPU. A piece is a run of consecutive source tokens. ops/resize_packed/schema.py documents
// the arguments, ops/resize_packed/reference.py defines the results.

#include "../memory/large_memory.h"
#include "../parallel.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <numeric>
#include <optional>
#include <utility>
#include <vector>

namespace seqwarm {
namespace {

enum class PackedKind : int64_t { Sequence, Token, Label, Position, Index };  // the numbers of schema.py

// The rows of the table of pieces.
struct Pieces {
  int64_t count;
  int64_t tokens;  // in the new batch
  const int64_t* first;
  const int64_t* source;
  const int64_t* start;
  const int64_t* sequence;
  const int64_t* repeated;

  int64_t end(int64_t piece) const {
    return piece + 1 < count ? first[piece + 1] : tokens;
  }

  // The piece of a new token: the last one that begins there or before. Pieces without tokens come before it.
  int64_t of(int64_t token) const {
    return std::upper_bound(first, first + count, token) - first - 1;
  }
};

// One tensor of the batch, contiguous.
struct Entry {
  PackedKind kind;
  Tensor input;
  Tensor output;
  Tensor fill;  // the item of a repeated label
  int64_t token_bytes;
};

Pieces describe_pieces(const Tensor& table, int64_t new_tokens) {
  SEQWARM_CHECK_VALUE(
      table.dim() == 2 && table.size(0) == 5 && table.scalar_type() == ScalarType::Long && table.is_contiguous(),
      "resize_packed: pieces must be a contiguous int64 tensor (5, pieces), got ", table.scalar_type(), " ",
      table.sizes());
  const int64_t count = table.size(1);
  const auto* rows = table.const_data_ptr<int64_t>();
  return {count, new_tokens, rows, rows + count, rows + 2 * count, rows + 3 * count, rows + 4 * count};
}

// Every token that a piece takes must be one of the `tokens` old ones, and every sequence one of the `sequences`.
void check_pieces(const Pieces& pieces, int64_t tokens, int64_t sequences) {
  bool fits = pieces.count == 0 ? pieces.tokens == 0 : pieces.first[0] == 0;
  for (int64_t piece = 0; piece < pieces.count; ++piece) {
    const int64_t length = pieces.end(piece) - pieces.first[piece];
    fits = fits && length >= 0 && pieces.source[piece] >= 0 && pieces.source[piece] <= tokens - length &&
           pieces.start[piece] >= 0 && pieces.start[piece] <= tokens - length && pieces.sequence[piece] >= 0 &&
           pieces.sequence[piece] < sequences && pieces.repeated[piece] >= 0 && pieces.repeated[piece] <= length;
  }
  SEQWARM_CHECK_VALUE(
      fits, "resize_packed: pieces must be parts of ", tokens, " tokens and ", sequences, " sequences, with ",
      pieces.tokens, " tokens in all");
}

Entry describe_entry(const Pieces& pieces, const Tensor& input, int64_t number, double fill_value) {
  SEQWARM_CHECK_VALUE(number >= 0 && number <= 4, "resize_packed: unknown kind ", number);
  const auto kind = static_cast<PackedKind>(number);
  SEQWARM_CHECK_VALUE(
      input.is_cpu() && input.dim() >= 1 && (kind != PackedKind::Sequence || input.dim() == 1),
      "resize_packed: an input must be (sequences,) or (tokens, features...) in host memory, got ", input.sizes(), " on ",
      input.device());
  SEQWARM_CHECK_TYPE(
      kind != PackedKind::Index || is_integral(input.scalar_type()),
      "resize_packed: an input of sequence numbers must have integers, got ", input.scalar_type());
  const Sizes sizes = input.sizes();
  std::vector<int64_t> shape(sizes.begin(), sizes.end());
  shape[0] = kind == PackedKind::Sequence ? pieces.count : pieces.tokens;
  Entry entry{kind, as_contiguous(input), empty_large(shape, input.scalar_type()), {}, 0};
  entry.token_bytes = static_cast<int64_t>(input.element_size());
  for (size_t dim = 1; dim < sizes.size(); ++dim) {
    entry.token_bytes *= sizes[dim];
  }
  if (kind == PackedKind::Label) {
    entry.fill = item_of(fill_value, input.scalar_type());
  }
  return entry;
}

void fill(char* to, const Tensor& item, int64_t bytes) {
  const auto size = static_cast<int64_t>(item.element_size());
  for (int64_t offset = 0; offset < bytes; offset += size) {
    std::memcpy(to + offset, item.const_data_ptr(), size);
  }
}

template <typename Item>
void fill_items(char* to, int64_t piece, int64_t bytes) {
  std::fill_n(reinterpret_cast<Item*>(to), bytes / static_cast<int64_t>(sizeof(Item)), static_cast<Item>(piece));
}

// Of signed and of unsigned integers.
void fill_index(char* to, int64_t piece, int64_t bytes, size_t item_size) {
  switch (item_size) {
    case 1:
      return fill_items<int8_t>(to, piece, bytes);
    case 2:
      return fill_items<int16_t>(to, piece, bytes);
    case 4:
      return fill_items<int32_t>(to, piece, bytes);
    default:
      return fill_items<int64_t>(to, piece, bytes);
  }
}

// Writes the new tokens [begin, end), which belong to one piece.
void copy_run(const Pieces& pieces, const Entry& entry, int64_t piece, int64_t begin, int64_t end) {
  const int64_t slot = begin - pieces.first[piece];
  char* to = static_cast<char*>(entry.output.mutable_data_ptr()) + begin * entry.token_bytes;
  if (entry.kind == PackedKind::Index) {
    fill_index(to, piece, (end - begin) * entry.token_bytes, entry.output.element_size());
    return;
  }
  const int64_t from = (entry.kind == PackedKind::Position ? pieces.start : pieces.source)[piece] + slot;
  const char* input = static_cast<const char*>(entry.input.const_data_ptr());
  std::memcpy(to, input + from * entry.token_bytes, (end - begin) * entry.token_bytes);
  if (entry.kind == PackedKind::Label) {
    fill(to, entry.fill, (std::min(pieces.first[piece] + pieces.repeated[piece], end) - begin) * entry.token_bytes);
  }
}

void copy_range(const Pieces& pieces, const std::vector<Entry>& entries, int64_t begin, int64_t end) {
  for (const Entry& entry : entries) {
    if (entry.kind == PackedKind::Sequence || entry.token_bytes == 0) {
      continue;
    }
    int64_t piece = pieces.of(begin);
    for (int64_t token = begin; token < end; ++piece) {
      const int64_t stop = std::min(end, pieces.end(piece));
      copy_run(pieces, entry, piece, token, stop);
      token = stop;
    }
  }
}

void copy_sequences(const Pieces& pieces, const Entry& entry) {
  auto* to = static_cast<char*>(entry.output.mutable_data_ptr());
  const auto* from = static_cast<const char*>(entry.input.const_data_ptr());
  for (int64_t piece = 0; piece < pieces.count; ++piece) {
    std::memcpy(to + piece * entry.token_bytes, from + pieces.sequence[piece] * entry.token_bytes, entry.token_bytes);
  }
}

std::vector<Tensor> info_of(const Pieces& pieces, const std::optional<Tensor>& attention_mask) {
  std::vector<Tensor> info{
      empty_large({pieces.count}, ScalarType::Int), empty_large({pieces.tokens}, ScalarType::Long),
      empty_large({}, ScalarType::Long)};
  const Tensor valid = attention_mask.has_value() ? as_contiguous(to_dtype(*attention_mask, ScalarType::Bool)) : Tensor();
  const bool* is_valid = valid.defined() ? static_cast<const bool*>(valid.const_data_ptr()) : nullptr;
  auto* lengths = info[0].mutable_data_ptr<int32_t>();
  auto* positions = info[1].mutable_data_ptr<int64_t>();
  const int64_t bytes = bytes_per_position * pieces.tokens / std::max<int64_t>(pieces.count, 1);
  for_each_part(0, pieces.count, bytes, [&](int64_t begin, int64_t end) {
    for (int64_t piece = begin; piece < end; ++piece) {
      const int64_t moved_by = pieces.source[piece] - pieces.first[piece];
      int64_t valid_before = 0;
      for (int64_t token = pieces.first[piece]; token < pieces.end(piece); ++token) {
        const bool counts = is_valid == nullptr || is_valid[token + moved_by];
        positions[token] = counts ? valid_before : 0;
        valid_before += counts;
      }
      lengths[piece] = static_cast<int32_t>(valid_before);
    }
  });
  *info[2].mutable_data_ptr<int64_t>() = std::accumulate(lengths, lengths + pieces.count, int64_t{0});
  return info;
}

// (N, T): the sizes that the inputs tell. A size that none tells is as large as any piece needs.
std::pair<int64_t, int64_t> sizes_of(
    Tensors inputs, Integers kinds, const std::optional<Tensor>& attention_mask) {
  int64_t sequences = std::numeric_limits<int64_t>::max();
  int64_t tokens = std::numeric_limits<int64_t>::max();
  for (size_t index = 0; index < inputs.size(); ++index) {
    const int64_t size = inputs[index].dim() == 0 ? 0 : inputs[index].size(0);
    int64_t& least = static_cast<PackedKind>(kinds[index]) == PackedKind::Sequence ? sequences : tokens;
    least = std::min(least, size);
  }
  if (attention_mask.has_value()) {
    tokens = std::min(tokens, attention_mask->numel());
  }
  return {sequences, tokens};
}

std::vector<Tensor> resize_packed(
    Tensors inputs, const std::optional<Tensor>& attention_mask, const Tensor& table, int64_t new_tokens,
    Integers kinds, Numbers fill_values, bool return_info) {
  SEQWARM_CHECK_VALUE(
      kinds.size() == inputs.size() && fill_values.size() == inputs.size(),
      "resize_packed: there must be a kind and a fill value for each of the ", inputs.size(), " inputs");
  SEQWARM_CHECK_VALUE(
      table.is_cpu() && (!attention_mask.has_value() || attention_mask->is_cpu()),
      "resize_packed: pieces and attention_mask must be in host memory, as the inputs are");
  const Pieces pieces = describe_pieces(table, new_tokens);
  const auto [sequences, tokens] = sizes_of(inputs, kinds, attention_mask);
  check_pieces(pieces, tokens, sequences);

  std::vector<Entry> entries;
  std::vector<Tensor> outputs;
  int64_t bytes_per_token = 0;
  for (size_t index = 0; index < inputs.size(); ++index) {
    entries.push_back(describe_entry(pieces, inputs[index], kinds[index], fill_values[index]));
    outputs.push_back(entries.back().output);
    bytes_per_token += entries.back().token_bytes;
    if (entries.back().kind == PackedKind::Sequence) {
      copy_sequences(pieces, entries.back());
    }
  }
  for_each_part(0, new_tokens, bytes_per_token, [&](int64_t begin, int64_t end) {
    copy_range(pieces, entries, begin, end);
  });
  if (return_info) {
    std::vector<Tensor> info = info_of(pieces, attention_mask);
    outputs.insert(outputs.end(), info.begin(), info.end());
  }
  return outputs;
}

SEQWARM_LIBRARY(CPU, library) {
  library.impl("resize_packed.native", SEQWARM_KERNEL(resize_packed));
}

}  // namespace
}  // namespace seqwarm
