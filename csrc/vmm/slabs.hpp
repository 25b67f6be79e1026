// What a backend provides: physical slabs, and address space to map them into. A backend is mechanism alone:
// range.cpp checks the rules, once for all backends.

#pragma once

#include <sys/types.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace rose {

// A stream of the device, as the number that torch and the driver know it by. 0 is the default stream.
using Stream = std::optional<std::uintptr_t>;

// Addresses for a number of positions. Not thread-safe. Every call leaves things as they were if it throws.
class AddressSpace {
 public:
  virtual ~AddressSpace() = default;  // fences, unmaps what is left, gives the addresses back
  virtual char* base() const = 0;
  // Backs an empty or guarded position; it may be touched after allow().
  virtual void attach(std::size_t position, std::size_t slab) = 0;
  // Makes a run of attached positions readable and writable.
  virtual void allow(std::size_t first, std::size_t count) = 0;
  // Empties a position: a touch faults.
  virtual void detach(std::size_t position) = 0;
  // Makes a run of empty positions read as zeros; a write faults.
  virtual void guard(std::size_t first, std::size_t count) = 0;
  // Starts to fill a run of allowed positions; it must have ended before any of them is detached. It runs on
  // `stream`, in the order of the work there, or beside all other work if there is none. The host has no
  // streams: it fills at once.
  virtual void fill(std::size_t first, std::size_t count, unsigned char byte, Stream stream) = 0;
  // Waits for the fills that have no stream.
  virtual void settle() = 0;
  // Waits until no work of this process can touch the memory any more.
  virtual void fence() = 0;
};

// The physical memory of one pool, as this process sees it.
class Slabs {
 public:
  virtual ~Slabs() = default;
  virtual std::size_t num_slabs() const = 0;
  virtual std::size_t slab_bytes() const = 0;
  // How many descriptors carry all slabs: 1 on the host, one per slab on CUDA.
  virtual std::size_t num_fds() const = 0;
  // A new descriptor, the caller's to close.
  virtual int export_fd(std::size_t index) const = 0;
  virtual std::unique_ptr<AddressSpace> reserve(std::size_t num_positions) const = 0;
};

class Backend {
 public:
  virtual ~Backend() = default;
  // A slab's size must be a multiple of this many bytes.
  virtual std::size_t granularity() const = 0;
  // Calls `check_stop` now and then while it makes memory; what that throws ends the making.
  virtual std::shared_ptr<const Slabs> create(std::size_t num_slabs, std::size_t slab_bytes,
                                              const std::string& name,
                                              const std::function<void()>& check_stop) const = 0;
  // Opens what another process exported. The descriptors stay the caller's.
  virtual std::shared_ptr<const Slabs> import(const std::vector<int>& fds, std::size_t slab_bytes) const = 0;
};

// A backend of one GPU.
class DeviceBackend : public Backend {
 public:
  // Device memory that nobody has taken yet.
  virtual std::size_t free_bytes() const = 0;
};

std::unique_ptr<Backend> open_host();
std::unique_ptr<DeviceBackend> open_cuda(const std::string& library, int device);

// Throws unless there is at least one slab and its size is a positive multiple of the granularity.
void check_slabs(std::size_t num_slabs, std::size_t slab_bytes, std::size_t granularity);

// Ranges start at a multiple of this: the largest power of two that divides a slab.
inline std::size_t alignment_of(std::size_t slab_bytes) { return slab_bytes & -slab_bytes; }

// Tells whether this process is the one that made an object. A forked child inherits neither mappings nor
// driver state: what it would free is not there, or belongs to somebody else by now.
class OwnerProcess {
 public:
  bool is_this() const { return getpid() == pid_; }

 private:
  pid_t pid_ = getpid();
};

}  // namespace rose
