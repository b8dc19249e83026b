// The kernels of forward.cpp and backward.cpp. Both files are compiled once for each kind of CPU, in separate
// namespaces.

#pragma once

#include "decode.h"
#include "problem.h"
#include "short_sequences.h"

#include <functional>

namespace seqwarm {

// Writes the next item of the calling thread, or returns false.
using NextShortItem = const std::function<bool(ShortItem&)>&;
using NextDecodeItem = const std::function<bool(DecodeItem&)>&;  // likewise

// `scratch` belongs to the calling thread, is aligned to 64 bytes, and has the size that the _bytes function returns.
struct Kernels {
  int64_t (*forward_bytes)(const Problem&);
  void (*forward)(const Problem&, const ForwardOutputs&, const Item&, char* scratch);
  int64_t (*backward_bytes)(const Problem&, bool chunked);
  void (*backward)(const Problem&, const BackwardInputs&, const BackwardOutputs&, const Item&, char* scratch);
  // Sums the partial gradients of all chunks of a key head, in order.
  void (*sum_chunks)(const Problem&, const BackwardOutputs&, const Item& first);
  int64_t (*short_forward_bytes)(const Problem&);
  void (*short_forward)(const Problem&, const ForwardOutputs&, NextShortItem, char* scratch);
  int64_t (*short_backward_bytes)(const Problem&);
  void (*short_backward)(const Problem&, const BackwardInputs&, const BackwardOutputs&, NextShortItem, char* scratch);
  int64_t (*decode_forward_bytes)(const Problem&);
  void (*decode_forward)(const Problem&, const ForwardOutputs&, const Partials&, NextDecodeItem, char* scratch);
  // Of one row of (batch, head, query).
  void (*merge_chunks)(const Problem&, const ForwardOutputs&, const Partials&, int64_t row);
};

extern const Kernels kernels_DEFAULT;
#ifdef SEQWARM_X86
extern const Kernels kernels_AVX2;
extern const Kernels kernels_AVX512;
#endif
#ifdef SEQWARM_SVE256
extern const Kernels kernels_SVE256;
#endif

#ifdef CPU_CAPABILITY
inline namespace CPU_CAPABILITY {

int64_t forward_bytes(const Problem& problem);
void forward(const Problem& problem, const ForwardOutputs& outputs, const Item& item, char* scratch);
int64_t backward_bytes(const Problem& problem, bool chunked);
void backward(
    const Problem& problem, const BackwardInputs& inputs, const BackwardOutputs& outputs, const Item& item,
    char* scratch);
void sum_chunks(const Problem& problem, const BackwardOutputs& outputs, const Item& first);
int64_t short_forward_bytes(const Problem& problem);
void short_forward(const Problem& problem, const ForwardOutputs& outputs, NextShortItem next, char* scratch);
int64_t short_backward_bytes(const Problem& problem);
void short_backward(
    const Problem& problem, const BackwardInputs& inputs, const BackwardOutputs& outputs, NextShortItem next,
    char* scratch);
int64_t decode_forward_bytes(const Problem& problem);
void decode_forward(
    const Problem& problem, const ForwardOutputs& outputs, const Partials& partials, NextDecodeItem next,
    char* scratch);
void merge_chunks(const Problem& problem, const ForwardOutputs& outputs, const Partials& partials, int64_t row);

}  // namespace CPU_CAPABILITY
#endif

}  // namespace seqwarm
