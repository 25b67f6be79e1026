// C++ objects over the C ABI, as the Python bindings need them: they close what they hold, and throw.

#pragma once

#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "vmm.h"

namespace rose::bindings {

using Numbers = std::vector<std::size_t>;

// Carries a status out of code that runs without the GIL.
class CallFailed : public std::runtime_error {
 public:
  explicit CallFailed(const rose_vmm_error& error)
      : std::runtime_error(error.message), errno_code(error.errno_code) {}
  int errno_code;
};

// Runs one call of the ABI: `call(&error)`.
template <typename Call>
void run(Call call) {
  rose_vmm_error error{};
  rose_vmm_status status = call(&error);
  if (status == ROSE_VMM_BAD_ARGUMENT) throw std::invalid_argument(error.message);
  if (status != ROSE_VMM_OK) throw CallFailed(error);
}

struct CloseBackend {
  void operator()(rose_vmm_backend* backend) const { rose_vmm_close_backend(backend); }
};
struct CloseSlabs {
  void operator()(rose_vmm_slabs* slabs) const { rose_vmm_close_slabs(slabs); }
};
struct CloseRange {
  void operator()(rose_vmm_range* range) const { rose_vmm_close_range(range); }
};
using BackendPointer = std::unique_ptr<rose_vmm_backend, CloseBackend>;

class Slabs {
 public:
  explicit Slabs(rose_vmm_slabs* slabs) : slabs_(slabs) {}
  rose_vmm_slabs* get() const { return slabs_.get(); }
  std::size_t num_slabs() const { return rose_vmm_num_slabs(get()); }
  std::size_t slab_bytes() const { return rose_vmm_slab_bytes(get()); }
  std::size_t num_fds() const { return rose_vmm_num_fds(get()); }
  int export_fd(std::size_t index) const {
    int fd = -1;
    run([&](rose_vmm_error* error) { return rose_vmm_export(get(), index, &fd, error); });
    return fd;
  }

 private:
  std::unique_ptr<rose_vmm_slabs, CloseSlabs> slabs_;
};

inline Slabs create_slabs(const rose_vmm_backend* backend, std::size_t num_slabs, std::size_t slab_bytes,
                          const std::string& name) {
  rose_vmm_slabs* made = nullptr;
  run([&](rose_vmm_error* error) {
    return rose_vmm_create(backend, num_slabs, slab_bytes, name.c_str(), &made, error);
  });
  return Slabs(made);
}

inline Slabs import_slabs(const rose_vmm_backend* backend, const std::vector<int>& fds,
                          std::size_t slab_bytes) {
  rose_vmm_slabs* made = nullptr;
  run([&](rose_vmm_error* error) {
    return rose_vmm_import(backend, fds.data(), fds.size(), slab_bytes, &made, error);
  });
  return Slabs(made);
}

class Range {
 public:
  Range(const Slabs& slabs, std::size_t num_positions, bool poison, bool guard)
      : slab_bytes_(slabs.slab_bytes()) {
    rose_vmm_range* made = nullptr;
    run([&](rose_vmm_error* error) {
      return rose_vmm_reserve(slabs.get(), num_positions, {poison, guard}, &made, error);
    });
    range_.reset(made);
  }

  void map_many(const Numbers& positions, const Numbers& slabs, bool zero) {
    if (positions.size() != slabs.size()) {
      throw std::invalid_argument(std::to_string(positions.size()) + " positions for " +
                                  std::to_string(slabs.size()) + " slabs");
    }
    run([&](rose_vmm_error* error) {
      return rose_vmm_map(range_.get(), positions.data(), slabs.data(), positions.size(), zero, error);
    });
  }
  void unmap_many(const Numbers& positions, bool fence) {
    run([&](rose_vmm_error* error) {
      return rose_vmm_unmap(range_.get(), positions.data(), positions.size(), fence, error);
    });
  }
  void zero(std::size_t position) {
    run([&](rose_vmm_error* error) { return rose_vmm_zero(range_.get(), &position, 1, error); });
  }
  void fence() {
    run([&](rose_vmm_error* error) { return rose_vmm_fence(range_.get(), error); });
  }

  Numbers slab_at() const {
    Numbers slabs(num_positions());
    run([&](rose_vmm_error* error) { return rose_vmm_mapped(range_.get(), slabs.data(), error); });
    return slabs;
  }
  std::vector<std::pair<std::size_t, std::size_t>> mapped() const {
    std::vector<std::pair<std::size_t, std::size_t>> pairs;
    Numbers slabs = slab_at();
    for (std::size_t position = 0; position < slabs.size(); ++position) {
      if (slabs[position] != ROSE_VMM_NO_SLAB) pairs.emplace_back(position, slabs[position]);
    }
    return pairs;
  }

  std::uintptr_t address() const { return rose_vmm_address(range_.get()); }
  std::size_t num_positions() const { return rose_vmm_num_positions(range_.get()); }
  std::size_t slab_bytes() const { return slab_bytes_; }
  std::size_t num_bytes() const { return num_positions() * slab_bytes_; }

 private:
  std::unique_ptr<rose_vmm_range, CloseRange> range_;
  std::size_t slab_bytes_;
};

inline BackendPointer open_host() {
  rose_vmm_backend* made = nullptr;
  run([&](rose_vmm_error* error) { return rose_vmm_open_host(&made, error); });
  return BackendPointer(made);
}

inline BackendPointer open_cuda(const std::string& library, int device) {
  rose_vmm_backend* made = nullptr;
  run([&](rose_vmm_error* error) { return rose_vmm_open_cuda(library.c_str(), device, &made, error); });
  return BackendPointer(made);
}

// Distinct types for Python: what works on host memory only is a method of the host's classes only.
class HostSlabs : public Slabs {
 public:
  explicit HostSlabs(Slabs&& slabs) : Slabs(std::move(slabs)), fd_(export_fd(0)) {}
  HostSlabs(HostSlabs&& other) noexcept : Slabs(std::move(other)), fd_(std::exchange(other.fd_, -1)) {}
  ~HostSlabs() {
    if (fd_ >= 0) close(fd_);
  }
  int fileno() const { return fd_; }

 private:
  int fd_;
};
struct CudaSlabs : Slabs {};
struct HostRange : Range {
  using Range::Range;
};
struct CudaRange : Range {
  using Range::Range;
};
struct CudaDevice {
  BackendPointer backend;
};

}  // namespace rose::bindings
