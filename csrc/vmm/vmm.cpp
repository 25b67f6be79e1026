// The C ABI over the C++ classes: no exception leaves this file.

#include "vmm.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <new>

#include "failure.hpp"
#include "range.hpp"
#include "slabs.hpp"

struct rose_vmm_backend {
  std::unique_ptr<rose::Backend> backend;
};
struct rose_vmm_slabs {
  std::shared_ptr<const rose::Slabs> slabs;
};
struct rose_vmm_range {
  rose::Range range;
};

namespace {

rose_vmm_status report(rose_vmm_error* error, rose_vmm_status status, int errno_code, const char* message) {
  error->status = status;
  error->errno_code = errno_code;
  std::strncpy(error->message, message, sizeof(error->message) - 1);
  error->message[sizeof(error->message) - 1] = '\0';
  return status;
}

template <typename Work>
rose_vmm_status attempt(rose_vmm_error* error, Work work) {
  try {
    work();
    return ROSE_VMM_OK;
  } catch (const rose::Failure& failure) {
    return report(error, failure.status(), failure.errno_code(), failure.what());
  } catch (const std::bad_alloc&) {
    return report(error, ROSE_VMM_FAILED, ENOMEM, "no host memory for the slab tables");
  } catch (const std::exception& other) {
    return report(error, ROSE_VMM_FAILED, EIO, other.what());
  }
}

std::vector<std::size_t> list(const std::size_t* values, std::size_t count) {
  return std::vector<std::size_t>(values, values + count);
}

}  // namespace

rose_vmm_status rose_vmm_open_host(rose_vmm_backend** backend, rose_vmm_error* error) {
  return attempt(error, [&] { *backend = new rose_vmm_backend{rose::open_host()}; });
}

rose_vmm_status rose_vmm_open_cuda(const char* library, int device, rose_vmm_backend** backend,
                                   rose_vmm_error* error) {
  return attempt(error, [&] { *backend = new rose_vmm_backend{rose::open_cuda(library, device)}; });
}

void rose_vmm_close_backend(rose_vmm_backend* backend) { delete backend; }

size_t rose_vmm_granularity(const rose_vmm_backend* backend) { return backend->backend->granularity(); }

rose_vmm_status rose_vmm_create(const rose_vmm_backend* backend, size_t num_slabs, size_t slab_bytes,
                                const char* name, rose_vmm_slabs** slabs, rose_vmm_error* error) {
  return attempt(error,
                 [&] { *slabs = new rose_vmm_slabs{backend->backend->create(num_slabs, slab_bytes, name)}; });
}

rose_vmm_status rose_vmm_import(const rose_vmm_backend* backend, const int* fds, size_t num_fds,
                                size_t slab_bytes, rose_vmm_slabs** slabs, rose_vmm_error* error) {
  return attempt(error, [&] {
    *slabs = new rose_vmm_slabs{backend->backend->import(std::vector<int>(fds, fds + num_fds), slab_bytes)};
  });
}

void rose_vmm_close_slabs(rose_vmm_slabs* slabs) { delete slabs; }

size_t rose_vmm_num_slabs(const rose_vmm_slabs* slabs) { return slabs->slabs->num_slabs(); }

size_t rose_vmm_slab_bytes(const rose_vmm_slabs* slabs) { return slabs->slabs->slab_bytes(); }

size_t rose_vmm_num_fds(const rose_vmm_slabs* slabs) { return slabs->slabs->num_fds(); }

rose_vmm_status rose_vmm_export(const rose_vmm_slabs* slabs, size_t index, int* fd, rose_vmm_error* error) {
  return attempt(error, [&] { *fd = slabs->slabs->export_fd(index); });
}

rose_vmm_status rose_vmm_reserve(rose_vmm_slabs* slabs, size_t num_positions, rose_vmm_range_options options,
                                 rose_vmm_range** range, rose_vmm_error* error) {
  return attempt(error, [&] { *range = new rose_vmm_range{{slabs->slabs, num_positions, options}}; });
}

void rose_vmm_close_range(rose_vmm_range* range) { delete range; }

uintptr_t rose_vmm_address(const rose_vmm_range* range) {
  return reinterpret_cast<uintptr_t>(range->range.address());
}

size_t rose_vmm_num_positions(const rose_vmm_range* range) { return range->range.num_positions(); }

rose_vmm_status rose_vmm_map(rose_vmm_range* range, const size_t* positions, const size_t* slabs,
                             size_t count, int zero, rose_vmm_error* error) {
  return attempt(error, [&] { range->range.map(list(positions, count), list(slabs, count), zero != 0); });
}

rose_vmm_status rose_vmm_unmap(rose_vmm_range* range, const size_t* positions, size_t count, int fence,
                               rose_vmm_error* error) {
  return attempt(error, [&] { range->range.unmap(list(positions, count), fence != 0); });
}

rose_vmm_status rose_vmm_zero(rose_vmm_range* range, const size_t* positions, size_t count,
                              rose_vmm_error* error) {
  return attempt(error, [&] { range->range.zero(list(positions, count)); });
}

rose_vmm_status rose_vmm_fence(rose_vmm_range* range, rose_vmm_error* error) {
  return attempt(error, [&] { range->range.fence(); });
}

rose_vmm_status rose_vmm_mapped(const rose_vmm_range* range, size_t* slabs, rose_vmm_error* error) {
  return attempt(error, [&] {
    std::vector<std::size_t> mapped = range->range.mapped();
    std::copy(mapped.begin(), mapped.end(), slabs);
  });
}
