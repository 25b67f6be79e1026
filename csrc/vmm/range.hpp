// One engine's address range: positions of one slab each, backed by slabs that come and go.
// Holds the rules of vmm.h for every backend, so that code which passes on the host does not meet new
// ones on a GPU. Owns the mappings, not the slabs. Calls may come from any thread.

#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "slabs.hpp"
#include "vmm.h"

namespace rose {

// Neighbouring positions.
struct Run {
  std::size_t first;
  std::size_t count;
};
using Runs = std::vector<Run>;

class Range {
 public:
  Range(std::shared_ptr<const Slabs> slabs, std::size_t num_positions, rose_vmm_range_options options);
  Range(const Range&) = delete;
  Range& operator=(const Range&) = delete;

  void map(const std::vector<std::size_t>& positions, const std::vector<std::size_t>& slabs, bool zero);
  void unmap(const std::vector<std::size_t>& positions, bool fence);
  void zero(const std::vector<std::size_t>& positions);
  void fence();

  // The slab at each position, kNone where there is none.
  std::vector<std::size_t> mapped() const;
  char* address() const { return space_->base(); }
  std::size_t num_positions() const { return slab_at_.size(); }

 private:
  static constexpr std::size_t kNone = ROSE_VMM_NO_SLAB;

  void check_map(const std::vector<std::size_t>& positions, const std::vector<std::size_t>& slabs) const;
  void check_mapped(const std::vector<std::size_t>& positions) const;
  void check_position(std::size_t position) const;

  void attach(std::size_t position, std::size_t slab);
  void detach(std::size_t position);
  void fill(const Runs& runs, unsigned char byte);
  void guard_empty(const Runs& runs);
  // What went wrong while undoing, "" if nothing did; slab_at_ says what is mapped in any case.
  std::string undo_map(const std::vector<std::size_t>& positions);
  std::string undo_unmap(const std::vector<std::size_t>& positions, const std::vector<std::size_t>& slabs);

  std::shared_ptr<const Slabs> slabs_;
  rose_vmm_range_options options_;
  std::unique_ptr<AddressSpace> space_;
  std::vector<std::size_t> slab_at_;      // per position, kNone where unmapped
  std::vector<std::size_t> position_of_;  // per slab, kNone where unused here
  mutable std::mutex mutex_;
};

}  // namespace rose
