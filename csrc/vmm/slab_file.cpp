#include "slab_file.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <bit>
#include <cerrno>
#include <limits>
#include <stdexcept>
#include <system_error>
#include <utility>

namespace rose {
namespace {

[[noreturn]] void throw_errno(const std::string& what) {
  throw std::system_error(errno, std::generic_category(), what);
}

void check_slab_bytes(std::size_t slab_bytes) {
  auto page_bytes = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  if (!std::has_single_bit(slab_bytes) || slab_bytes < page_bytes) {
    throw std::invalid_argument("slab_bytes must be a power of two and at least a page of " +
                                std::to_string(page_bytes) + " bytes, got " + std::to_string(slab_bytes));
  }
}

}  // namespace

SlabFile SlabFile::create(std::size_t num_slabs, std::size_t slab_bytes, const std::string& name) {
  check_slab_bytes(slab_bytes);
  auto max_bytes = static_cast<std::size_t>(std::numeric_limits<off_t>::max());
  if (num_slabs == 0 || num_slabs > max_bytes / slab_bytes) {
    throw std::invalid_argument("num_slabs must be 1.." + std::to_string(max_bytes / slab_bytes) + ", got " +
                                std::to_string(num_slabs));
  }
  int fd = memfd_create(name.c_str(), MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (fd < 0) throw_errno("memfd_create");
  SlabFile file(fd, num_slabs, slab_bytes);
  if (ftruncate(fd, static_cast<off_t>(num_slabs * slab_bytes)) != 0) {
    throw_errno("reserve " + std::to_string(num_slabs) + " slabs of " + std::to_string(slab_bytes) +
                " bytes");
  }
  if (fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
    throw_errno("seal the slab file");
  }
  return file;
}

SlabFile SlabFile::from_fd(int fd, std::size_t slab_bytes) {
  check_slab_bytes(slab_bytes);
  int seals = fcntl(fd, F_GET_SEALS);
  if (seals < 0) throw_errno("descriptor " + std::to_string(fd) + " is not a slab file");
  if ((seals & F_SEAL_SHRINK) == 0) {
    throw std::invalid_argument("descriptor " + std::to_string(fd) +
                                " may shrink: a slab file is sealed against that");
  }
  struct stat status;
  if (fstat(fd, &status) != 0) throw_errno("fstat the slab file");
  auto num_bytes = static_cast<std::size_t>(status.st_size);
  if (num_bytes == 0 || num_bytes % slab_bytes != 0) {
    throw std::invalid_argument("a file of " + std::to_string(num_bytes) + " bytes is not whole slabs of " +
                                std::to_string(slab_bytes));
  }
  int own_fd = fcntl(fd, F_DUPFD_CLOEXEC, 0);
  if (own_fd < 0) throw_errno("dup the slab file");
  return SlabFile(own_fd, num_bytes / slab_bytes, slab_bytes);
}

SlabFile::SlabFile(SlabFile&& other) noexcept
    : fd_(std::exchange(other.fd_, -1)), num_slabs_(other.num_slabs_), slab_bytes_(other.slab_bytes_) {}

SlabFile::~SlabFile() {
  if (fd_ >= 0) close(fd_);
}

}  // namespace rose
