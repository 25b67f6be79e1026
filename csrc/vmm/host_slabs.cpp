// The host backend: slabs are pieces of one memfd, a mapping is an mmap of one of them.
// The file can never shrink, so that no mapping of it can fault.

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <limits>
#include <utility>

#include "failure.hpp"
#include "fill.hpp"
#include "slabs.hpp"

namespace rose {
namespace {

constexpr int kEmptyFlags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
constexpr std::size_t kHugePageBytes = 2 << 20;
// How much memory is made between two calls of check_stop.
constexpr std::size_t kPieceBytes = 64 << 20;
#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25  // Linux 6.1
#endif

class File {
 public:
  explicit File(int fd) : fd_(fd) {}
  File(const File&) = delete;
  File& operator=(const File&) = delete;
  ~File() {
    if (fd_ >= 0) close(fd_);
  }
  int fd() const { return fd_; }

 private:
  int fd_;
};

// `num_bytes` of addresses that nothing is mapped at, aligned to `alignment`, a power of two. The caller owns
// them. Reserves too much and gives the ends back:
//   [ head | range .......................... | tail ]
//          ^ multiple of the alignment
char* reserve_addresses(std::size_t num_bytes, std::size_t alignment) {
  std::size_t reserved = num_bytes + alignment;
  void* start = mmap(nullptr, reserved, PROT_NONE, kEmptyFlags, -1, 0);
  if (start == MAP_FAILED) {
    throw_system_error("mmap: reserve " + text(reserved) + " bytes of address space", errno);
  }
  std::size_t misfit = reinterpret_cast<std::uintptr_t>(start) % alignment;
  std::size_t head = misfit == 0 ? 0 : alignment - misfit;
  char* base = static_cast<char*>(start) + head;
  // Failing to trim costs address space only.
  if (head > 0) munmap(start, head);
  if (alignment > head) munmap(base + num_bytes, alignment - head);
  return base;
}

// Gives a piece of a new file huge pages, as far as the kernel has them: a huge page is mapped with one entry
// instead of 512, and a part of one still in a single fault. MADV_COLLAPSE asks for them, because a memfd's
// own setting (shmem_enabled) is "never" on most systems. A refusal costs speed only, so it is not an error.
void gather_huge_pages(const File& file, std::size_t start, std::size_t num_bytes) {
  char* base = reserve_addresses(num_bytes, kHugePageBytes);
  int flags = MAP_SHARED | MAP_FIXED;
  auto offset = static_cast<off_t>(start);
  if (mmap(base, num_bytes, PROT_READ | PROT_WRITE, flags, file.fd(), offset) != MAP_FAILED) {
    // A hole has nothing to collapse, so every huge page is touched first.
    for (std::size_t at = 0; at < num_bytes; at += kHugePageBytes) {
      *static_cast<volatile char*>(base + at) = 0;
    }
    madvise(base, num_bytes, MADV_COLLAPSE);
  }
  munmap(base, num_bytes);
}

class HostSpace : public AddressSpace {
 public:
  HostSpace(std::shared_ptr<const File> file, std::size_t num_positions, std::size_t slab_bytes)
      : file_(std::move(file)),
        num_bytes_(num_positions * slab_bytes),
        slab_bytes_(slab_bytes),
        base_(reserve_addresses(num_bytes_, alignment_of(slab_bytes))) {}
  HostSpace(const HostSpace&) = delete;
  HostSpace& operator=(const HostSpace&) = delete;
  ~HostSpace() override {
    if (owner_.is_this()) munmap(base_, num_bytes_);
  }

  char* base() const override { return base_; }

  // Filled with zeros afterwards: punching a hole and faulting fresh pages in instead takes over five times
  // as long, because that frees and reallocates 512 pages per 2 MiB (benchmarks/bench_vmm.py).
  void attach(std::size_t position, std::size_t slab) override {
    void* got = mmap(at(position), slab_bytes_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED | MAP_POPULATE,
                     file_->fd(), static_cast<off_t>(slab * slab_bytes_));
    std::string what =
        "map slab " + text(slab) + " of " + text(slab_bytes_) + " bytes at position " + text(position);
    if (got == MAP_FAILED) throw_system_error("mmap: " + what, errno);
    // A child that outlives us would keep writing into a slab that already belongs to somebody else.
    if (madvise(got, slab_bytes_, MADV_DONTFORK) != 0) {
      int error = errno;
      detach(position);
      throw_system_error("madvise: " + what, error);
    }
  }

  void allow(std::size_t, std::size_t) override {}  // mapped memory is accessible at once

  void detach(std::size_t position) override { empty(position, 1, PROT_NONE); }

  void guard(std::size_t first, std::size_t count) override { empty(first, count, PROT_READ); }

  void fill(std::size_t first, std::size_t count, unsigned char byte, Stream) override {
    fill_past_caches(at(first), count * slab_bytes_, byte);
  }

  // What touches host memory is done when its call returns.
  void settle() override {}
  void fence() override {}

 private:
  void empty(std::size_t first, std::size_t count, int protection) {
    void* got = mmap(at(first), count * slab_bytes_, protection, kEmptyFlags | MAP_FIXED, -1, 0);
    if (got != MAP_FAILED) return;
    throw_system_error(
        "mmap: unmap " + text(count) + " slabs of " + text(slab_bytes_) + " bytes at position " + text(first),
        errno);
  }

  char* at(std::size_t position) const { return base_ + position * slab_bytes_; }

  std::shared_ptr<const File> file_;
  std::size_t num_bytes_;
  std::size_t slab_bytes_;
  char* base_;
  OwnerProcess owner_;
};

class HostSlabs : public Slabs {
 public:
  HostSlabs(std::shared_ptr<const File> file, std::size_t num_slabs, std::size_t slab_bytes)
      : file_(std::move(file)), num_slabs_(num_slabs), slab_bytes_(slab_bytes) {}

  std::size_t num_slabs() const override { return num_slabs_; }
  std::size_t slab_bytes() const override { return slab_bytes_; }
  std::size_t num_fds() const override { return 1; }

  int export_fd(std::size_t index) const override {
    if (index != 0) throw_bad_argument("descriptor " + text(index) + " of 1");
    int fd = fcntl(file_->fd(), F_DUPFD_CLOEXEC, 0);
    if (fd < 0) throw_system_error("dup the slab file", errno);
    return fd;
  }

  std::unique_ptr<AddressSpace> reserve(std::size_t num_positions) const override {
    return std::make_unique<HostSpace>(file_, num_positions, slab_bytes_);
  }

 private:
  std::shared_ptr<const File> file_;
  std::size_t num_slabs_;
  std::size_t slab_bytes_;
};

class HostBackend : public Backend {
 public:
  std::size_t granularity() const override { return static_cast<std::size_t>(sysconf(_SC_PAGESIZE)); }

  std::shared_ptr<const Slabs> create(std::size_t num_slabs, std::size_t slab_bytes, const std::string& name,
                                      const std::function<void()>& check_stop) const override {
    check_slabs(num_slabs, slab_bytes, granularity());
    std::string what = text(num_slabs) + " slabs of " + text(slab_bytes) + " bytes";
    auto file = std::make_shared<File>(memfd_create(name.c_str(), MFD_CLOEXEC | MFD_ALLOW_SEALING));
    if (file->fd() < 0) throw_system_error("memfd_create for " + what, errno);
    if (ftruncate(file->fd(), static_cast<off_t>(num_slabs * slab_bytes)) != 0) {
      throw_system_error("ftruncate: reserve " + what, errno);
    }
    if (fcntl(file->fd(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
      throw_system_error("seal the file of " + what, errno);
    }
    std::size_t whole = num_slabs * slab_bytes / kHugePageBytes * kHugePageBytes;
    for (std::size_t start = 0; start < whole; start += kPieceBytes) {
      check_stop();
      gather_huge_pages(*file, start, std::min(kPieceBytes, whole - start));
    }
    return std::make_shared<HostSlabs>(std::move(file), num_slabs, slab_bytes);
  }

  std::shared_ptr<const Slabs> import(const std::vector<int>& fds, std::size_t slab_bytes) const override {
    if (fds.size() != 1) throw_bad_argument("host slabs are one descriptor, got " + text(fds.size()));
    check_slabs(1, slab_bytes, granularity());
    std::string descriptor = "descriptor " + std::to_string(fds[0]);
    int seals = fcntl(fds[0], F_GET_SEALS);
    if (seals < 0) throw_system_error(descriptor + " is not a slab file", errno);
    if ((seals & F_SEAL_SHRINK) == 0) {
      throw_bad_argument(descriptor + " may shrink: a slab file is sealed against that");
    }
    struct stat status;
    if (fstat(fds[0], &status) != 0) throw_system_error("fstat " + descriptor, errno);
    auto num_bytes = static_cast<std::size_t>(status.st_size);
    if (num_bytes == 0 || num_bytes % slab_bytes != 0) {
      throw_bad_argument("a file of " + text(num_bytes) + " bytes is not whole slabs of " + text(slab_bytes));
    }
    auto file = std::make_shared<File>(fcntl(fds[0], F_DUPFD_CLOEXEC, 0));
    if (file->fd() < 0) throw_system_error("dup " + descriptor, errno);
    return std::make_shared<HostSlabs>(std::move(file), num_bytes / slab_bytes, slab_bytes);
  }
};

}  // namespace

std::unique_ptr<Backend> open_host() { return std::make_unique<HostBackend>(); }

void check_slabs(std::size_t num_slabs, std::size_t slab_bytes, std::size_t granularity) {
  if (slab_bytes == 0 || slab_bytes % granularity != 0) {
    std::size_t fitting = (slab_bytes / granularity + 1) * granularity;
    throw_bad_argument("slab_bytes must be a multiple of the granularity of " + text(granularity) +
                       " bytes, got " + text(slab_bytes) + ": use " + text(fitting));
  }
  auto max_bytes = static_cast<std::size_t>(std::numeric_limits<off_t>::max());
  if (num_slabs == 0 || num_slabs > max_bytes / slab_bytes) {
    throw_bad_argument("num_slabs must be 1.." + text(max_bytes / slab_bytes) + ", got " + text(num_slabs));
  }
}

}  // namespace rose
