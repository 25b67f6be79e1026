#include "range.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <string>
#include <system_error>

namespace rose {
namespace {

constexpr int kGuardFlags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;

[[noreturn]] void throw_errno(const std::string& what) {
  throw std::system_error(errno, std::generic_category(), what);
}

std::string text(std::size_t n) { return std::to_string(n); }

void check_distinct(std::vector<std::size_t> values, const std::string& what) {
  std::sort(values.begin(), values.end());
  auto twice = std::adjacent_find(values.begin(), values.end());
  if (twice != values.end()) throw std::invalid_argument(what + " " + text(*twice) + " given twice");
}

}  // namespace

Range::Range(std::shared_ptr<SlabFile> slabs, std::size_t num_positions)
    : slabs_(std::move(slabs)), slab_bytes_(slabs_->slab_bytes()), owner_pid_(getpid()) {
  constexpr std::size_t kMaxBytes = std::size_t{1} << 46;  // half of a user address space
  if (num_positions == 0 || num_positions > kMaxBytes / slab_bytes_) {
    throw std::invalid_argument("num_positions must be 1.." + text(kMaxBytes / slab_bytes_) + ", got " +
                                text(num_positions));
  }
  slab_at_.assign(num_positions, kNone);
  position_of_.assign(slabs_->num_slabs(), kNone);
  reserve();
}

Range::~Range() {
  // A forked child has the guard but not the mappings (see back()); others may live there by now.
  if (base_ != nullptr && getpid() == owner_pid_) munmap(base_, num_bytes());
}

// Reserves one slab too many and gives the ends back, so that the range starts at a slab boundary:
//   [ head | range .......................... | tail ]
//          ^ multiple of slab_bytes
void Range::reserve() {
  std::size_t reserved = num_bytes() + slab_bytes_;
  void* start = mmap(nullptr, reserved, PROT_NONE, kGuardFlags, -1, 0);
  if (start == MAP_FAILED) throw_errno("reserve " + text(reserved) + " bytes of address space");
  std::size_t misfit = reinterpret_cast<std::uintptr_t>(start) % slab_bytes_;
  std::size_t head = misfit == 0 ? 0 : slab_bytes_ - misfit;
  base_ = static_cast<char*>(start) + head;
  // Failing to trim costs address space only.
  if (head > 0) munmap(start, head);
  if (slab_bytes_ - head > 0) munmap(base_ + num_bytes(), slab_bytes_ - head);
}

void Range::map_many(const std::vector<std::size_t>& positions, const std::vector<std::size_t>& slabs) {
  std::lock_guard lock(mutex_);
  check_map(positions, slabs);
  std::size_t done = 0;
  try {
    for (; done < positions.size(); ++done) back(positions[done], slabs[done]);
  } catch (...) {
    for (std::size_t i = 0; i < done; ++i) guard(positions[i]);
    throw;
  }
}

void Range::unmap_many(const std::vector<std::size_t>& positions) {
  std::lock_guard lock(mutex_);
  check_unmap(positions);
  for (std::size_t position : positions) guard(position);
}

void Range::zero(std::size_t position) {
  std::lock_guard lock(mutex_);
  check_unmap({position});
  std::memset(at(position), 0, slab_bytes_);
}

std::optional<std::size_t> Range::slab_at(std::size_t position) const {
  std::lock_guard lock(mutex_);
  check_position(position);
  std::size_t slab = slab_at_[position];
  return slab == kNone ? std::nullopt : std::optional(slab);
}

std::vector<std::pair<std::size_t, std::size_t>> Range::mapped() const {
  std::lock_guard lock(mutex_);
  std::vector<std::pair<std::size_t, std::size_t>> pairs;
  for (std::size_t position = 0; position < slab_at_.size(); ++position) {
    if (slab_at_[position] != kNone) pairs.emplace_back(position, slab_at_[position]);
  }
  return pairs;
}

void Range::check_map(const std::vector<std::size_t>& positions,
                      const std::vector<std::size_t>& slabs) const {
  if (positions.size() != slabs.size()) {
    throw std::invalid_argument(text(positions.size()) + " positions for " + text(slabs.size()) + " slabs");
  }
  check_distinct(positions, "position");
  check_distinct(slabs, "slab");
  for (std::size_t i = 0; i < positions.size(); ++i) {
    check_position(positions[i]);
    if (slabs[i] >= position_of_.size()) {
      throw std::invalid_argument("slab " + text(slabs[i]) + " of " + text(position_of_.size()));
    }
    if (slab_at_[positions[i]] != kNone) {
      throw std::invalid_argument("position " + text(positions[i]) + " already holds slab " +
                                  text(slab_at_[positions[i]]) + ", can't map slab " + text(slabs[i]));
    }
    if (position_of_[slabs[i]] != kNone) {
      throw std::invalid_argument("slab " + text(slabs[i]) + " is already mapped at position " +
                                  text(position_of_[slabs[i]]) + ", can't map it at " + text(positions[i]));
    }
  }
}

void Range::check_unmap(const std::vector<std::size_t>& positions) const {
  check_distinct(positions, "position");
  for (std::size_t position : positions) {
    check_position(position);
    if (slab_at_[position] == kNone) {
      throw std::invalid_argument("position " + text(position) + " holds no slab");
    }
  }
}

void Range::check_position(std::size_t position) const {
  if (position >= slab_at_.size()) {
    throw std::invalid_argument("position " + text(position) + " of " + text(slab_at_.size()));
  }
}

// Zeroing: on 2 MiB slabs, populate + memset took 220 us, punching a hole and faulting fresh pages in
// 1,300-1,400 us, because the latter frees and reallocates 512 pages.
void Range::back(std::size_t position, std::size_t slab) {
  void* address = at(position);
  void* got = mmap(address, slab_bytes_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED | MAP_POPULATE,
                   slabs_->fd(), static_cast<off_t>(slab * slab_bytes_));
  if (got == MAP_FAILED) throw_errno("map slab " + text(slab) + " at position " + text(position));
  slab_at_[position] = slab;
  position_of_[slab] = position;
  // A child that outlives us would keep writing into a slab that already belongs to somebody else.
  if (madvise(address, slab_bytes_, MADV_DONTFORK) != 0) {
    int error = errno;
    guard(position);
    throw std::system_error(error, std::generic_category(), "keep slab " + text(slab) + " from forks");
  }
  std::memset(address, 0, slab_bytes_);
}

void Range::guard(std::size_t position) {
  void* got = mmap(at(position), slab_bytes_, PROT_NONE, kGuardFlags | MAP_FIXED, -1, 0);
  if (got == MAP_FAILED) throw_errno("unmap position " + text(position));
  position_of_[slab_at_[position]] = kNone;
  slab_at_[position] = kNone;
}

}  // namespace rose
