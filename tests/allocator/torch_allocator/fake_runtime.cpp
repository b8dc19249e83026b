// The functions of the CUDA runtime that torch's caching allocator calls, for one device without memory.

#include <cstddef>
#include <cstring>
#include <driver_types.h>

static size_t next_address = size_t(1) << 40;

extern "C" {
int cudaGetDeviceCount(int* count) { *count = 1; return 0; }
int cudaGetDevice(int* device) { *device = 0; return 0; }
int cudaSetDevice(int) { return 0; }
int cudaGetLastError() { return 0; }
int cudaGetDeviceProperties(cudaDeviceProp* properties, int) {
  std::memset(properties, 0, sizeof(*properties));
  return 0;
}
int cudaDeviceGetStreamPriorityRange(int* least, int* greatest) { *least = *greatest = 0; return 0; }
int cudaStreamIsCapturing(void*, int* capturing) { *capturing = 0; return 0; }
int cudaThreadExchangeStreamCaptureMode(int*) { return 0; }
int cudaMemGetInfo(size_t* free, size_t* total) { *free = *total = size_t(1) << 40; return 0; }
int cudaMalloc(void** address, size_t size) {
  *address = reinterpret_cast<void*>(next_address);
  next_address += size;
  return 0;
}
}
