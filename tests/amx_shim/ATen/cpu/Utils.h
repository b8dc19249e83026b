// A CPU with AMX. The functions have no symbols, so that other files of the extension call libtorch's.

#pragma once

#include <ATen/core/ivalue.h>

#include <string>
#include <unordered_map>

namespace at::cpu {

static inline std::unordered_map<std::string, c10::IValue> get_cpu_capabilities() {
  return {{"amx_bf16", true}};
}

static inline bool init_amx() {
  return true;
}

}  // namespace at::cpu
