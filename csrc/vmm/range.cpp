#include "range.hpp"

#include <algorithm>

#include "failure.hpp"

namespace rose {
namespace {

const std::string kUndoFailed = "; undoing it failed too: ";
constexpr unsigned char kPoison = 0xFF;  // repeated, it is a NaN as fp8, bf16, fp16, fp32 and fp64

void check_distinct(std::vector<std::size_t> values, const std::string& what) {
  std::sort(values.begin(), values.end());
  auto twice = std::adjacent_find(values.begin(), values.end());
  if (twice != values.end()) throw_bad_argument(what + " " + text(*twice) + " given twice");
}

// Joins neighbours: one driver call serves a whole run.
Runs runs_of(std::vector<std::size_t> positions) {
  std::sort(positions.begin(), positions.end());
  Runs runs;
  for (std::size_t position : positions) {
    if (!runs.empty() && position == runs.back().first + runs.back().count) {
      ++runs.back().count;
    } else {
      runs.push_back({position, 1});
    }
  }
  return runs;
}

}  // namespace

Range::Range(std::shared_ptr<const Slabs> slabs, std::size_t num_positions, RangeOptions options)
    : slabs_(std::move(slabs)), options_(options) {
  constexpr std::size_t kMaxBytes = std::size_t{1} << 46;  // half of a user address space
  std::size_t most = kMaxBytes / slabs_->slab_bytes();
  if (num_positions == 0 || num_positions > most) {
    throw_bad_argument("num_positions must be 1.." + text(most) + ", got " + text(num_positions));
  }
  slab_at_.assign(num_positions, kNoSlab);
  position_of_.assign(slabs_->num_slabs(), kNoSlab);
  space_ = slabs_->reserve(num_positions);
  if (options_.guard) space_->guard(0, num_positions);
}

void Range::map(const std::vector<std::size_t>& positions, const std::vector<std::size_t>& slabs, bool zero,
                Stream stream) {
  std::lock_guard lock(mutex_);
  check_map(positions, slabs);
  Runs runs = runs_of(positions);
  try {
    for (std::size_t i = 0; i < positions.size(); ++i) attach(positions[i], slabs[i]);
    for (const Run& run : runs) space_->allow(run.first, run.count);
    if (zero) fill(runs, 0, stream);
  } catch (Failure& failure) {
    failure.add(undo_map(positions));
    throw;
  }
  for (std::size_t position : positions) bare_.erase(position);
}

void Range::unmap(const std::vector<std::size_t>& positions, bool fence, bool guard_now) {
  std::lock_guard lock(mutex_);
  check_mapped(positions);
  std::vector<std::size_t> slabs(positions.size());
  std::transform(positions.begin(), positions.end(), slabs.begin(),
                 [&](std::size_t position) { return slab_at_[position]; });
  if (fence) space_->fence();
  if (options_.poison) fill(runs_of(positions), kPoison, std::nullopt);
  try {
    for (std::size_t position : positions) detach(position);
    if (options_.guard) bare_.insert(positions.begin(), positions.end());
    if (guard_now) guard_bare();
  } catch (Failure& failure) {
    failure.add(undo_unmap(positions, slabs));
    throw;
  }
}

void Range::guard() {
  std::lock_guard lock(mutex_);
  guard_bare();
}

void Range::zero(const std::vector<std::size_t>& positions) {
  std::lock_guard lock(mutex_);
  check_mapped(positions);
  fill(runs_of(positions), 0, std::nullopt);
}

void Range::fence() {
  std::lock_guard lock(mutex_);
  space_->fence();
}

std::vector<std::size_t> Range::mapped() const {
  std::lock_guard lock(mutex_);
  return slab_at_;
}

void Range::attach(std::size_t position, std::size_t slab) {
  space_->attach(position, slab);
  slab_at_[position] = slab;
  position_of_[slab] = position;
}

void Range::detach(std::size_t position) {
  space_->detach(position);
  position_of_[slab_at_[position]] = kNoSlab;
  slab_at_[position] = kNoSlab;
}

void Range::fill(const Runs& runs, unsigned char byte, Stream stream) {
  for (const Run& run : runs) space_->fill(run.first, run.count, byte, stream);
  if (!stream) space_->settle();
}

void Range::guard_bare() {
  for (const Run& run : runs_of({bare_.begin(), bare_.end()})) space_->guard(run.first, run.count);
  bare_.clear();
}

std::string Range::undo_map(const std::vector<std::size_t>& positions) {
  std::string trouble;
  try {
    space_->fence();  // a fill may still be running
  } catch (const std::exception& error) {
    trouble += kUndoFailed + error.what();
  }
  for (std::size_t position : positions) {
    try {
      if (slab_at_[position] != kNoSlab) detach(position);
      if (options_.guard && bare_.count(position) == 0) space_->guard(position, 1);
    } catch (const std::exception& error) {
      trouble += kUndoFailed + error.what();
    }
  }
  return trouble;
}

std::string Range::undo_unmap(const std::vector<std::size_t>& positions,
                              const std::vector<std::size_t>& slabs) {
  std::string trouble;
  for (std::size_t i = 0; i < positions.size(); ++i) {
    if (slab_at_[positions[i]] != kNoSlab) continue;
    try {
      attach(positions[i], slabs[i]);
      bare_.erase(positions[i]);
      space_->allow(positions[i], 1);
    } catch (const std::exception& error) {
      trouble += kUndoFailed + error.what();
    }
  }
  return trouble;
}

void Range::check_map(const std::vector<std::size_t>& positions,
                      const std::vector<std::size_t>& slabs) const {
  if (positions.size() != slabs.size()) {
    throw_bad_argument(text(positions.size()) + " positions for " + text(slabs.size()) + " slabs");
  }
  check_distinct(positions, "position");
  check_distinct(slabs, "slab");
  for (std::size_t i = 0; i < positions.size(); ++i) {
    check_position(positions[i]);
    if (slabs[i] >= position_of_.size()) {
      throw_bad_argument("slab " + text(slabs[i]) + " of " + text(position_of_.size()));
    }
    if (slab_at_[positions[i]] != kNoSlab) {
      throw_bad_argument("position " + text(positions[i]) + " already holds slab " +
                         text(slab_at_[positions[i]]) + ", can't map slab " + text(slabs[i]));
    }
    if (position_of_[slabs[i]] != kNoSlab) {
      throw_bad_argument("slab " + text(slabs[i]) + " is already mapped at position " +
                         text(position_of_[slabs[i]]) + ", can't map it at " + text(positions[i]));
    }
  }
}

void Range::check_mapped(const std::vector<std::size_t>& positions) const {
  check_distinct(positions, "position");
  for (std::size_t position : positions) {
    check_position(position);
    if (slab_at_[position] == kNoSlab) throw_bad_argument("position " + text(position) + " holds no slab");
  }
}

void Range::check_position(std::size_t position) const {
  if (position >= slab_at_.size()) {
    throw_bad_argument("position " + text(position) + " of " + text(slab_at_.size()));
  }
}

}  // namespace rose
