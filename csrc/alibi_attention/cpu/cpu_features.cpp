#include "cpu_features.h"

#include <cstdlib>
#include <string_view>

#ifdef SEQWARM_X86
#include <cpuid.h>
#endif
#ifdef __linux__
#include <sys/auxv.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace seqwarm {

#ifdef SEQWARM_X86

namespace {

CpuCapability best_capability() {
  const char* limit = std::getenv("ATEN_CPU_CAPABILITY");
  const std::string_view most = limit == nullptr ? "avx512" : limit;
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && most != "default";
  if (avx2 && most != "avx2" && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
    return CpuCapability::AVX512;
  }
  return avx2 ? CpuCapability::AVX2 : CpuCapability::Default;
}

// A bit of leaf 7 of cpuid.
bool leaf_7_has(unsigned subleaf, bool in_edx, unsigned bit) {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  return __get_cpuid_count(7, subleaf, &eax, &ebx, &ecx, &edx) != 0 && ((in_edx ? edx : eax) >> bit & 1) != 0;
}

}  // namespace

CpuCapability cpu_capability() {
  static const CpuCapability capability = best_capability();
  return capability;
}

bool has_avx512_bf16() {
  const bool enabled = __builtin_cpu_supports("avx512f");  // asks the system, too
  return enabled && cpu_capability() != CpuCapability::Default && leaf_7_has(1, false, 5);
}

bool start_amx() {
#ifdef __linux__
  constexpr int request_permission = 0x1023, tile_data = 18;
  const bool found = leaf_7_has(0, true, 22) && leaf_7_has(0, true, 24);  // bfloat16, tiles
  return found && syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
#else
  return false;
#endif
}

#else

CpuCapability cpu_capability() {
#ifdef SEQWARM_SVE256
  static const bool found = [] {
    const char* limit = std::getenv("ATEN_CPU_CAPABILITY");
    const int bytes = prctl(PR_SVE_GET_VL) & PR_SVE_VL_LEN_MASK;  // negative without SVE, which the mask makes large
    return (limit == nullptr || std::string_view(limit) != "default") && (getauxval(AT_HWCAP2) & HWCAP2_BF16) != 0 &&
        bytes == 32;
  }();
  return found ? CpuCapability::SVE256 : CpuCapability::Default;
#else
  return CpuCapability::Default;
#endif
}

bool has_avx512_bf16() { return false; }
bool start_amx() { return false; }

#endif

}  // namespace seqwarm
