// The CUDA backend: a slab is one handle of physical device memory, a mapping is that handle at an address.

#include <utility>

#include "cuda_device.hpp"
#include "failure.hpp"

namespace rose::cuda {
namespace {

using DevicePointer = std::shared_ptr<const Device>;

// Handles of physical memory. Memory stays while any process holds a handle to it or has it mapped.
class Handles {
 public:
  explicit Handles(DevicePointer device) : device_(std::move(device)) {}
  Handles(const Handles&) = delete;
  Handles& operator=(const Handles&) = delete;
  ~Handles() {
    if (!device_->is_usable()) return;
    for (CUmemGenericAllocationHandle handle : handles_) device_->calls().cuMemRelease(handle);
  }

  void create(std::size_t num_bytes, const std::string& what) {
    CUmemGenericAllocationHandle handle = 0;
    ROSE_CUDA(*device_, cuMemCreate, (&handle, num_bytes, &device_->allocation(), 0), what);
    keep(handle);
  }

  void import(int fd, const std::string& what) {
    CUmemGenericAllocationHandle handle = 0;
    // The driver wants the descriptor itself as the pointer.
    void* os_handle = reinterpret_cast<void*>(static_cast<std::intptr_t>(fd));
    ROSE_CUDA(*device_, cuMemImportFromShareableHandle,
              (&handle, os_handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR), what);
    keep(handle);
  }

  void take(Handles& other) { handles_.swap(other.handles_); }

  std::size_t size() const { return handles_.size(); }
  CUmemGenericAllocationHandle operator[](std::size_t i) const { return handles_[i]; }

 private:
  void keep(CUmemGenericAllocationHandle handle) {
    try {
      handles_.push_back(handle);
    } catch (...) {
      device_->calls().cuMemRelease(handle);
      throw;
    }
  }

  DevicePointer device_;
  std::vector<CUmemGenericAllocationHandle> handles_;
};

class CudaSpace : public AddressSpace {
 public:
  CudaSpace(DevicePointer device, std::shared_ptr<const Handles> slabs, std::size_t num_positions,
            std::size_t slab_bytes)
      : device_(std::move(device)),
        slabs_(std::move(slabs)),
        guards_(device_),
        slab_bytes_(slab_bytes),
        holds_(num_positions, Holds::kNothing) {
    Current current(*device_);
    ROSE_CUDA(*device_, cuMemAddressReserve, (&base_, num_bytes(), alignment_of(slab_bytes_), 0, 0),
              text(num_positions) + " positions of " + text(slab_bytes_) + " bytes");
  }
  CudaSpace(const CudaSpace&) = delete;
  CudaSpace& operator=(const CudaSpace&) = delete;

  ~CudaSpace() override {
    if (!device_->is_usable()) return;
    const Calls& calls = device_->calls();
    CUcontext popped = nullptr;
    bool is_current = calls.cuCtxPushCurrent(device_->context()) == CUDA_SUCCESS;
    calls.cuCtxSynchronize();
    for (std::size_t position = 0; position < holds_.size(); ++position) {
      if (holds_[position] != Holds::kNothing) calls.cuMemUnmap(at(position), slab_bytes_);
    }
    calls.cuMemAddressFree(base_, num_bytes());
    if (is_current) calls.cuCtxPopCurrent(&popped);
  }

  char* base() const override { return reinterpret_cast<char*>(base_); }

  void attach(std::size_t position, std::size_t slab) override {
    Current current(*device_);
    bool was_guarded = holds_[position] == Holds::kGuard;
    if (was_guarded) clear(position);
    try {
      put(position, (*slabs_)[slab], "slab " + text(slab));
    } catch (...) {
      if (was_guarded) try_guard(position);
      throw;
    }
    holds_[position] = Holds::kSlab;
  }

  void allow(std::size_t first, std::size_t count) override {
    set_access(first, count, CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
  }

  void detach(std::size_t position) override {
    Current current(*device_);
    clear(position);
  }

  void guard(std::size_t first, std::size_t count) override {
    if (guards_.size() == 0) make_guard(first);
    Current current(*device_);
    for (std::size_t position = first; position < first + count; ++position) {
      if (holds_[position] != Holds::kNothing) continue;
      put(position, guards_[0], "the guard");
      holds_[position] = Holds::kGuard;
    }
    set_access(first, count, CU_MEM_ACCESS_FLAGS_PROT_READ);
  }

  void fill(std::size_t first, std::size_t count, unsigned char byte, Stream given) override {
    Current current(*device_);
    CUstream stream = given ? reinterpret_cast<CUstream>(*given) : device_->stream();
    ROSE_CUDA(*device_, cuMemsetD8Async, (at(first), byte, count * slab_bytes_, stream), where(first, count));
  }

  void settle() override {
    Current current(*device_);
    ROSE_CUDA(*device_, cuStreamSynchronize, (device_->stream()), "fill");
  }

  void fence() override {
    Current current(*device_);
    ROSE_CUDA(*device_, cuCtxSynchronize, (), "fence");
  }

 private:
  enum class Holds : unsigned char { kNothing, kGuard, kSlab };

  void put(std::size_t position, CUmemGenericAllocationHandle handle, const std::string& name) {
    // The offset into a handle must be 0: the driver maps whole handles only.
    ROSE_CUDA(*device_, cuMemMap, (at(position), slab_bytes_, 0, handle, 0),
              name + " of " + text(slab_bytes_) + " bytes at position " + text(position));
  }

  void clear(std::size_t position) {
    ROSE_CUDA(*device_, cuMemUnmap, (at(position), slab_bytes_), where(position, 1));
    holds_[position] = Holds::kNothing;
  }

  void set_access(std::size_t first, std::size_t count, int flags) {
    Current current(*device_);
    CUmemAccessDesc access = device_->access(flags);
    ROSE_CUDA(*device_, cuMemSetAccess, (at(first), count * slab_bytes_, &access, 1), where(first, count));
  }

  // One handle of zeros stands behind all unmapped positions. It is filled at an empty position first, as
  // nothing can write to it once it is a guard.
  void make_guard(std::size_t position) {
    Current current(*device_);
    Handles made(device_);
    made.create(slab_bytes_, "the guard of " + text(slab_bytes_) + " bytes");
    put(position, made[0], "the guard");
    holds_[position] = Holds::kGuard;
    allow(position, 1);
    fill(position, 1, 0, std::nullopt);
    settle();
    clear(position);
    guards_.take(made);
  }

  void try_guard(std::size_t position) {
    try {
      guard(position, 1);
    } catch (const Failure&) {
      // The position stays empty: a touch faults, which is safe. The failure that led here is reported.
    }
  }

  std::string where(std::size_t first, std::size_t count) const {
    return text(count) + " slabs of " + text(slab_bytes_) + " bytes from position " + text(first);
  }
  CUdeviceptr at(std::size_t position) const { return base_ + position * slab_bytes_; }
  std::size_t num_bytes() const { return holds_.size() * slab_bytes_; }

  DevicePointer device_;
  std::shared_ptr<const Handles> slabs_;
  Handles guards_;  // one at most, made with the first guard
  std::size_t slab_bytes_;
  std::vector<Holds> holds_;  // per position: what the driver has mapped there
  CUdeviceptr base_ = 0;
};

class CudaSlabs : public Slabs {
 public:
  CudaSlabs(DevicePointer device, std::shared_ptr<const Handles> handles, std::size_t slab_bytes)
      : device_(std::move(device)), handles_(std::move(handles)), slab_bytes_(slab_bytes) {}

  std::size_t num_slabs() const override { return handles_->size(); }
  std::size_t slab_bytes() const override { return slab_bytes_; }
  std::size_t num_fds() const override { return handles_->size(); }

  int export_fd(std::size_t index) const override {
    if (index >= num_slabs()) throw_bad_argument("slab " + text(index) + " of " + text(num_slabs()));
    device_->require_usable();
    int fd = -1;
    ROSE_CUDA(*device_, cuMemExportToShareableHandle,
              (&fd, (*handles_)[index], CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0),
              "slab " + text(index) + " of " + text(slab_bytes_) + " bytes");
    return fd;
  }

  std::unique_ptr<AddressSpace> reserve(std::size_t num_positions) const override {
    return std::make_unique<CudaSpace>(device_, handles_, num_positions, slab_bytes_);
  }

 private:
  DevicePointer device_;
  std::shared_ptr<const Handles> handles_;
  std::size_t slab_bytes_;
};

class CudaBackend : public DeviceBackend {
 public:
  CudaBackend(const std::string& library, int ordinal)
      : device_(std::make_shared<const Device>(library, ordinal)) {}

  std::size_t granularity() const override { return device_->granularity(); }

  std::size_t free_bytes() const override { return device_->free_bytes(); }

  std::shared_ptr<const Slabs> create(std::size_t num_slabs, std::size_t slab_bytes, const std::string&,
                                      const std::function<void()>& check_stop) const override {
    check_slabs(num_slabs, slab_bytes, granularity());
    device_->require_usable();
    auto handles = std::make_shared<Handles>(device_);
    for (std::size_t slab = 0; slab < num_slabs; ++slab) {
      check_stop();
      handles->create(slab_bytes, "slab " + text(slab) + " of " + text(num_slabs) + ", " + text(slab_bytes) +
                                      " bytes each");
    }
    return std::make_shared<CudaSlabs>(device_, std::move(handles), slab_bytes);
  }

  std::shared_ptr<const Slabs> import(const std::vector<int>& fds, std::size_t slab_bytes) const override {
    check_slabs(fds.size(), slab_bytes, granularity());
    device_->require_usable();
    auto handles = std::make_shared<Handles>(device_);
    for (std::size_t slab = 0; slab < fds.size(); ++slab) {
      handles->import(fds[slab], "slab " + text(slab) + " of " + text(fds.size()) + ", descriptor " +
                                     std::to_string(fds[slab]) + ", " + text(slab_bytes) + " bytes");
    }
    return std::make_shared<CudaSlabs>(device_, std::move(handles), slab_bytes);
  }

 private:
  DevicePointer device_;
};

}  // namespace
}  // namespace rose::cuda

namespace rose {

std::unique_ptr<DeviceBackend> open_cuda(const std::string& library, int device) {
  return std::make_unique<cuda::CudaBackend>(library, device);
}

}  // namespace rose
