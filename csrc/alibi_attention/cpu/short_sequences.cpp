#include "short_sequences.h"

#include "tile_products.h"

#include <algorithm>
#include <array>

namespace seqwarm {
namespace {

// Up to this length, tiles of AMX take longer than pairs: most of their rows are empty.
constexpr int64_t longest_in_pairs = 6;

std::vector<Sequence> segments_of_rows(const Problem& problem) {
  std::vector<Sequence> sequences;
  const int64_t length = std::max(problem.query_length, problem.key_length);
  const int64_t step = std::min(length, problem.segment_length);
  for (int64_t row = 0; row < problem.batch_size; ++row) {
    for (int64_t first = 0; first < length; first += step) {
      const auto count = [&](int64_t all) { return std::clamp<int64_t>(all - first, 0, step); };
      sequences.push_back(
          {row, row, first, count(problem.query_length), first, count(problem.key_length),
           first_position(problem, row)});
    }
  }
  return sequences;
}

// Tokens that belong to no sequence become sequences without keys or without queries, of at most `most` tokens.
std::vector<Sequence> packed_sequences(const Problem& problem, int64_t most) {
  std::vector<Sequence> sequences;
  int64_t query = 0, key = 0;
  for (int64_t index = 1; index <= problem.num_sequences; ++index) {
    const int64_t last_query = problem.cu_seqlens_q[index], last_key = problem.cu_seqlens_k[index];
    const int64_t num_queries = last_query - query, num_keys = last_key - key;
    const int64_t position = first_position_in_pack(problem, index - 1);
    sequences.push_back({0, index - 1, query, num_queries, key, num_keys, position});
    query = last_query;
    key = last_key;
  }
  for (; query < problem.query_length; query += most) {
    sequences.push_back({0, 0, query, std::min(most, problem.query_length - query), 0, 0, 0});
  }
  for (; key < problem.key_length; key += most) {
    sequences.push_back({0, 0, 0, 0, key, std::min(most, problem.key_length - key), 0});
  }
  return sequences;
}

ShortProducts products_for(const Problem& problem) {
  const int64_t longest = problem.longest;
  if (!problem.native_products) {
    return ShortProducts::Float;
  }
  if (longest <= longest_in_pairs || !multiplies_tiles()) {
    return ShortProducts::Pairs;
  }
  return longest <= 8 ? ShortProducts::Tiles8 : longest <= 16 ? ShortProducts::Tiles16 : ShortProducts::Tiles32;
}

}  // namespace

ShortSequences short_sequences_of(const Problem& problem) {
  ShortSequences found;
  found.products = products_for(problem);
  const auto [step, width, most] = with_products(
      found.products, [](auto products) { return std::array{products.step, products.width, products.most}; });
  if (problem.longest > most) {
    return found;
  }
  found.sequences = problem.cu_seqlens_q == nullptr ? segments_of_rows(problem) : packed_sequences(problem, most);
  int64_t queries = 0, keys = 0;
  for (const Sequence& sequence : found.sequences) {
    const int64_t more_queries = round_up(sequence.num_queries, step), more_keys = round_up(sequence.num_keys, step);
    if (found.groups.empty() || queries + more_queries > width || keys + more_keys > most) {
      found.groups.push_back({&sequence, &sequence});
      queries = keys = 0;
    }
    queries += more_queries;
    keys += more_keys;
    found.groups.back().end = &sequence + 1;
  }
  return found;
}

}  // namespace seqwarm
