// One GPU of a process: the driver library, loaded at run time, and the device's primary context.
//
// A context takes hundreds of megabytes of the GPU. Memory is made, exported and imported without one, so a
// process that only owns memory has none.

#pragma once

#include <mutex>
#include <string>

#include "cuda_api.hpp"
#include "slabs.hpp"

namespace rose::cuda {

class Device {
 public:
  // Throws where there is no driver, no such device, or no support for what slabs need.
  Device(const std::string& library, int ordinal);
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;
  ~Device();

  const Calls& calls() const { return calls_; }
  // The primary context, which the first call retains for as long as this lives.
  CUcontext context() const;
  // For fills that nobody gave a stream: the default stream would wait for the engine's kernels. A context
  // must be current.
  CUstream stream() const;
  // Free device memory. Asks in a context that ends with the call, if this process has no other.
  std::size_t free_bytes() const;
  // Whether driver calls make sense: a forked child has no CUDA.
  bool is_usable() const { return owner_.is_this(); }
  void require_usable() const;
  std::size_t granularity() const { return granularity_; }
  const CUmemAllocationProp& allocation() const { return allocation_; }
  CUmemAccessDesc access(int flags) const { return {allocation_.location, flags}; }

  // Throws "CALL failed: CUDA_ERROR_X (text): what" unless `result` is a success.
  void check(CUresult result, const char* call, const std::string& what) const;

 private:
  void load(const std::string& library);
  void find_device(int ordinal);
  int attribute(int number, const char* name) const;

  Calls calls_;
  std::string name_;  // "device 0", for messages
  CUdevice device_ = 0;
  mutable std::once_flag has_context_, has_stream_;
  mutable CUcontext context_ = nullptr;
  mutable CUstream stream_ = nullptr;
  CUmemAllocationProp allocation_{};
  std::size_t granularity_ = 0;
  OwnerProcess owner_;
};

// The device's primary context is current in this thread for as long as this lives.
class Current {
 public:
  explicit Current(const Device& device);
  Current(const Current&) = delete;
  Current& operator=(const Current&) = delete;
  ~Current();

 private:
  const Device& device_;
};

}  // namespace rose::cuda

// Calls the driver and throws with the call's name and `what` (evaluated on failure only).
#define ROSE_CUDA(device, call, arguments, what)                                             \
  do {                                                                                       \
    ::rose::cuda::CUresult rose_result = (device).calls().call arguments;                    \
    if (rose_result != ::rose::cuda::CUDA_SUCCESS) (device).check(rose_result, #call, what); \
  } while (false)
