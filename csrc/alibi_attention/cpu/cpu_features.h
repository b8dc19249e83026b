// What this CPU has, under the limits that libtorch and oneDNN read from the environment.

#pragma once

namespace seqwarm {

enum class CpuCapability { Default, AVX2, AVX512, SVE256 };

// That libtorch's own kernels use here: at::get_cpu_capability, which PyTorch's stable ABI lacks.
CpuCapability cpu_capability();

bool has_avx512_bf16();

// Whether there is AMX for bfloat16, and the system lets this process use it. It must be asked for.
bool start_amx();

}  // namespace seqwarm
