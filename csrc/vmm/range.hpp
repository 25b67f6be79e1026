// One engine's address range: a row of positions with room for one slab each.
//
// Every backend obeys the same rules, so that code which works on the host meets no new ones on a GPU:
//   - a mapping is one whole slab at one whole position: there are no offsets and no sub-ranges
//   - mapping a mapped position, unmapping an empty one, or mapping one slab twice in a range is refused
//   - a position without a slab faults when it is touched (with `guard` it reads as zeros)
//   - a batch is checked as a whole before anything changes, and a call that fails undoes what it did
//
// A range owns its mappings, not the slabs. Its calls may come from any thread.

#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "slabs.hpp"

namespace rose {

// A run of neighbouring positions.
struct Run {
  std::size_t first;
  std::size_t count;
};
using Runs = std::vector<Run>;

struct RangeOptions {
  bool poison;  // fills a slab with 0xFF (NaN in every float format) before it is unmapped
  bool guard;   // lets empty positions read as zeros instead of faulting; writes still fault
};

class Range {
 public:
  static constexpr std::size_t kNoSlab = std::numeric_limits<std::size_t>::max();

  // Unmaps what is left and gives the addresses back when it ends.
  Range(std::shared_ptr<const Slabs> slabs, std::size_t num_positions, RangeOptions options);
  Range(const Range&) = delete;
  Range& operator=(const Range&) = delete;

  // Maps slabs[i] at positions[i]; with `zero` it is filled with zeros. The fill is done when the call
  // returns, or has its place in the order of `stream`. Never waits for other work on the device: a kernel
  // that strays to one of these positions while its guard is exchanged for the slab faults.
  void map(const std::vector<std::size_t>& positions, const std::vector<std::size_t>& slabs, bool zero,
           Stream stream);
  // With `fence`, all work of this process on the device ends first. Without `guard_now`, the positions
  // fault until guard() is called: guarding takes about as long as unmapping, and others wait for the slabs.
  void unmap(const std::vector<std::size_t>& positions, bool fence, bool guard_now);
  // Guards the positions that unmap() left without a guard.
  void guard();
  // Fills mapped positions with zeros; the fill is done when the call returns.
  void zero(const std::vector<std::size_t>& positions);
  void fence();

  // The slab at each position, kNoSlab at an empty one.
  std::vector<std::size_t> mapped() const;
  char* address() const { return space_->base(); }
  std::size_t num_positions() const { return slab_at_.size(); }
  std::size_t slab_bytes() const { return slabs_->slab_bytes(); }
  std::size_t num_bytes() const { return num_positions() * slab_bytes(); }

 private:
  void check_map(const std::vector<std::size_t>& positions, const std::vector<std::size_t>& slabs) const;
  void check_mapped(const std::vector<std::size_t>& positions) const;
  void check_position(std::size_t position) const;

  void attach(std::size_t position, std::size_t slab);
  void detach(std::size_t position);
  void fill(const Runs& runs, unsigned char byte, Stream stream);
  void guard_bare();
  // Return what went wrong while undoing, "" if nothing did. slab_at_ is right in any case.
  std::string undo_map(const std::vector<std::size_t>& positions);
  std::string undo_unmap(const std::vector<std::size_t>& positions, const std::vector<std::size_t>& slabs);

  std::shared_ptr<const Slabs> slabs_;
  RangeOptions options_;
  std::unique_ptr<AddressSpace> space_;
  std::vector<std::size_t> slab_at_;      // per position, kNoSlab where it is empty
  std::vector<std::size_t> position_of_;  // per slab, kNoSlab where it is not mapped here
  std::set<std::size_t> bare_;            // empty positions of a guarded range that have no guard
  mutable std::mutex mutex_;
};

}  // namespace rose
