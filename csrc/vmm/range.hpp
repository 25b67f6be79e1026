// One engine's address range: positions of one slab each, backed by slabs that come and go.
// The host twin of cuMemAddressReserve / cuMemMap / cuMemUnmap, with CUDA's rules enforced, so that
// code which passes here does not fail on a GPU:
//   - a mapping is a whole slab at a whole position; no offsets, no sub-ranges
//   - mapping a mapped position, unmapping an unmapped one, or one slab twice is an error
//   - a position without a slab faults on touch
// Owns the reservation and its mappings, not the slabs. Calls may come from any thread.

#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "slab_file.hpp"

namespace rose {

class Range {
 public:
  Range(std::shared_ptr<SlabFile> slabs, std::size_t num_positions);
  Range(const Range&) = delete;
  Range& operator=(const Range&) = delete;
  ~Range();

  // Batches are checked whole before anything changes; a failed system call undoes the batch.
  void map_many(const std::vector<std::size_t>& positions, const std::vector<std::size_t>& slabs);
  void unmap_many(const std::vector<std::size_t>& positions);
  void zero(std::size_t position);

  std::optional<std::size_t> slab_at(std::size_t position) const;
  std::vector<std::pair<std::size_t, std::size_t>> mapped() const;  // (position, slab), ascending

  char* address() const { return base_; }
  std::size_t num_positions() const { return slab_at_.size(); }
  std::size_t num_bytes() const { return slab_at_.size() * slab_bytes_; }
  std::size_t slab_bytes() const { return slab_bytes_; }

 private:
  static constexpr std::size_t kNone = SIZE_MAX;

  void reserve();
  void check_map(const std::vector<std::size_t>& positions, const std::vector<std::size_t>& slabs) const;
  void check_unmap(const std::vector<std::size_t>& positions) const;
  void check_position(std::size_t position) const;
  void back(std::size_t position, std::size_t slab);
  void guard(std::size_t position);
  char* at(std::size_t position) const { return base_ + position * slab_bytes_; }

  std::shared_ptr<SlabFile> slabs_;
  std::size_t slab_bytes_;
  std::vector<std::size_t> slab_at_;      // per position, kNone where unmapped
  std::vector<std::size_t> position_of_;  // per slab, kNone where unused here
  char* base_ = nullptr;
  pid_t owner_pid_;
  mutable std::mutex mutex_;
};

}  // namespace rose
