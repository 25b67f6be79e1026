#include "cuda_device.hpp"

#include <dlfcn.h>

#include <cerrno>

#include "failure.hpp"

namespace rose::cuda {

Device::Device(const std::string& library, int ordinal) : name_("device " + std::to_string(ordinal)) {
  load(library);
  ROSE_CUDA(*this, cuInit, (0), library);
  find_device(ordinal);
  ROSE_CUDA(*this, cuMemGetAllocationGranularity,
            (&granularity_, &allocation_, CU_MEM_ALLOC_GRANULARITY_MINIMUM), "");
}

Device::~Device() {
  if (!is_usable() || context_ == nullptr) return;
  if (stream_ != nullptr && calls_.cuCtxPushCurrent(context_) == CUDA_SUCCESS) {
    calls_.cuStreamDestroy(stream_);
    CUcontext popped = nullptr;
    calls_.cuCtxPopCurrent(&popped);
  }
  calls_.cuDevicePrimaryCtxRelease(device_);
}

// Torch uses the primary context too; without our own hold it could go while slabs are mapped.
CUcontext Device::context() const {
  std::call_once(has_context_, [&] { ROSE_CUDA(*this, cuDevicePrimaryCtxRetain, (&context_, device_), ""); });
  return context_;
}

CUstream Device::stream() const {
  std::call_once(has_stream_,
                 [&] { ROSE_CUDA(*this, cuStreamCreate, (&stream_, CU_STREAM_NON_BLOCKING), ""); });
  return stream_;
}

std::size_t Device::free_bytes() const {
  require_usable();
  CUcontext context = nullptr;
  ROSE_CUDA(*this, cuDevicePrimaryCtxRetain, (&context, device_), "");
  std::size_t free = 0, total = 0;
  CUresult result = calls_.cuCtxPushCurrent(context);
  if (result == CUDA_SUCCESS) {
    result = calls_.cuMemGetInfo(&free, &total);
    calls_.cuCtxPopCurrent(&context);
  }
  calls_.cuDevicePrimaryCtxRelease(device_);
  check(result, "cuMemGetInfo", "");
  return free;
}

void Device::require_usable() const {
  if (!is_usable()) throw_bad_argument("slabs of a GPU can't be used in a forked child: spawn it");
}

// The library is never closed: the driver keeps threads and exit handlers of its own.
void Device::load(const std::string& library) {
  void* handle = dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) {
    throw Failure(
        ENODEV, std::string("no CUDA driver: ") + dlerror() +
                    "; install the NVIDIA driver (in a container, pass the GPU in) or use the host backend");
  }
#define ROSE_CUDA_LOAD(member, exported, parameters)                                        \
  calls_.member = reinterpret_cast<CUresult(*) parameters>(dlsym(handle, exported));        \
  if (calls_.member == nullptr) {                                                           \
    throw Failure(ENODEV, library + " has no " exported ": rose needs CUDA 11.2 or newer"); \
  }
  ROSE_CUDA_CALLS(ROSE_CUDA_LOAD)
#undef ROSE_CUDA_LOAD
}

void Device::find_device(int ordinal) {
  int num_devices = 0;
  ROSE_CUDA(*this, cuDeviceGetCount, (&num_devices), "");
  if (ordinal < 0 || ordinal >= num_devices) {
    throw_bad_argument(name_ + " of " + std::to_string(num_devices) +
                       " that the driver shows: check the device number and CUDA_VISIBLE_DEVICES");
  }
  ROSE_CUDA(*this, cuDeviceGet, (&device_, ordinal), "");
  if (!attribute(CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, "virtual memory management") ||
      !attribute(CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED,
                 "file descriptor handles")) {
    throw Failure(
        ENOTSUP,
        name_ + " lacks virtual memory management or its sharing by file descriptor: slabs need both");
  }
  allocation_.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  allocation_.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
  allocation_.location = {CU_MEM_LOCATION_TYPE_DEVICE, device_};
  // KV connectors register the cache for RDMA, and memory made without this can't be.
  bool has_rdma = attribute(CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED, "GPUDirect RDMA");
  allocation_.allocFlags.gpuDirectRDMACapable = has_rdma ? 1 : 0;
}

int Device::attribute(int number, const char* name) const {
  int value = 0;
  ROSE_CUDA(*this, cuDeviceGetAttribute, (&value, number, device_), name);
  return value;
}

void Device::check(CUresult result, const char* call, const std::string& what) const {
  if (result == CUDA_SUCCESS) return;
  const char* error_name = nullptr;
  const char* error_text = nullptr;
  calls_.cuGetErrorName(result, &error_name);
  calls_.cuGetErrorString(result, &error_text);
  std::string message = std::string(call) + " failed on " + name_ + ": " +
                        (error_name != nullptr ? error_name : "error " + std::to_string(result)) + " (" +
                        (error_text != nullptr ? error_text : "unknown to this driver") + ")";
  if (!what.empty()) message += ": " + what;
  throw Failure(result == CUDA_ERROR_OUT_OF_MEMORY ? ENOMEM : EIO, message);
}

Current::Current(const Device& device) : device_(device) {
  device.require_usable();
  ROSE_CUDA(device, cuCtxPushCurrent, (device.context()), "");
}

Current::~Current() {
  CUcontext popped = nullptr;
  device_.calls().cuCtxPopCurrent(&popped);
}

}  // namespace rose::cuda
