// The physical side of a slab pool on a host: one memfd cut into slabs of equal size.
// Owns the file descriptor. The file can never shrink, so that no mapping of it can fault.

#pragma once

#include <cstddef>
#include <string>

namespace rose {

class SlabFile {
 public:
  // Makes a new file. slab_bytes must be a power of two and at least a page.
  static SlabFile create(std::size_t num_slabs, std::size_t slab_bytes, const std::string& name);
  // Opens a received descriptor, which is duplicated: the caller keeps its own.
  static SlabFile from_fd(int fd, std::size_t slab_bytes);

  SlabFile(SlabFile&& other) noexcept;
  SlabFile(const SlabFile&) = delete;
  SlabFile& operator=(const SlabFile&) = delete;
  SlabFile& operator=(SlabFile&&) = delete;
  ~SlabFile();

  int fd() const { return fd_; }
  std::size_t num_slabs() const { return num_slabs_; }
  std::size_t slab_bytes() const { return slab_bytes_; }

 private:
  SlabFile(int fd, std::size_t num_slabs, std::size_t slab_bytes)
      : fd_(fd), num_slabs_(num_slabs), slab_bytes_(slab_bytes) {}

  int fd_;
  std::size_t num_slabs_;
  std::size_t slab_bytes_;
};

}  // namespace rose
