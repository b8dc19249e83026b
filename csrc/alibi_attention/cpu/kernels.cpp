#include "kernels.h"

#define SEQWARM_JOIN(left, right) left##right
#define SEQWARM_KERNELS(capability) SEQWARM_JOIN(kernels_, capability)

namespace seqwarm {

const Kernels SEQWARM_KERNELS(CPU_CAPABILITY) = {
    forward_bytes,        forward,        backward_bytes,       backward,       sum_chunks,
    short_forward_bytes,  short_forward,  short_backward_bytes, short_backward,
    decode_forward_bytes, decode_forward, merge_chunks};

}  // namespace seqwarm
