#pragma once

#include <c10/util/Exception.h>

#define C10_CUDA_CHECK(expression) TORCH_INTERNAL_ASSERT((expression) == cudaSuccess)
