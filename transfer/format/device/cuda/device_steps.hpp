// Owns the work of one thread of each CUDA kernel. delta.cu makes kernels from it, and the tests run it
// on the processor, thread by thread. The difference has the form of sparse.hpp: places inside blocks of 64
// Ki elements, in rising order, and the wrap differences.
//
//   elements   group 0 (32) | group 1 | ...                     one thread each: marks, later compacts
//   groups     run 0 (64 groups, 2048 elements) | run 1 | ...   one thread each: counts
//   runs       block 0 (32 runs, 64 Ki elements) | ...
//
// Each thread writes only to places of its own; the caller sums up the threads' hashes.
#pragma once

#include "element_hash.hpp"

namespace rose::device {

constexpr std::size_t kGroup = 32;
constexpr std::size_t kGroupsPerRun = 64;
constexpr std::size_t kBlockElements = 65536;

ROSE_ANYWHERE constexpr std::size_t divide_up(std::size_t a, std::size_t b) { return (a + b - 1) / b; }

ROSE_ANYWHERE inline unsigned count_ones(std::uint32_t mask) {
#ifdef __CUDA_ARCH__
  return static_cast<unsigned>(__popc(mask));
#else
  return static_cast<unsigned>(__builtin_popcount(mask));
#endif
}

ROSE_ANYWHERE inline unsigned lowest_one(std::uint32_t mask) {
#ifdef __CUDA_ARCH__
  return static_cast<unsigned>(__ffs(static_cast<int>(mask)) - 1);
#else
  return static_cast<unsigned>(__builtin_ctz(mask));
#endif
}

// The elements that a thread reads at once.
template <typename T>
struct alignas(16) Pack {
  T lanes[16 / sizeof(T)];
};

// Bit i is set when element i of the group changed.
template <typename T>
ROSE_ANYWHERE std::uint32_t mark_group(const T* before, const T* after, std::size_t n, std::size_t group) {
  const std::size_t begin = group * kGroup;
  const T* a = before + begin;
  const T* b = after + begin;
  std::uint32_t mask = 0;
  const bool is_aligned =
      (reinterpret_cast<std::uintptr_t>(a) | reinterpret_cast<std::uintptr_t>(b)) % 16 == 0;
  if (is_aligned && begin + kGroup <= n) {
    constexpr std::size_t lanes = 16 / sizeof(T);
    for (std::size_t at = 0; at < kGroup; at += lanes) {
      const auto x = *reinterpret_cast<const Pack<T>*>(a + at);
      const auto y = *reinterpret_cast<const Pack<T>*>(b + at);
      for (std::size_t lane = 0; lane < lanes; ++lane) {
        mask |= static_cast<std::uint32_t>(x.lanes[lane] != y.lanes[lane]) << (at + lane);
      }
    }
    return mask;
  }
  for (std::size_t i = 0; i < kGroup && begin + i < n; ++i) {
    mask |= static_cast<std::uint32_t>(a[i] != b[i]) << i;
  }
  return mask;
}

// Counts the changes of the run's groups.
ROSE_ANYWHERE inline std::uint32_t count_run(const std::uint32_t* masks, std::size_t num_groups,
                                             std::size_t run) {
  std::uint32_t count = 0;
  for (std::size_t g = run * kGroupsPerRun; g < num_groups && g < (run + 1) * kGroupsPerRun; ++g) {
    count += count_ones(masks[g]);
  }
  return count;
}

// Writes the group's changes where they belong; returns the change of the state hash. offsets: for each run
// the number of all changes before it.
template <typename T>
ROSE_ANYWHERE StateHash compact_group(const T* before, const T* after, std::uint64_t first_index,
                                      const std::uint32_t* masks, const std::int64_t* offsets,
                                      std::size_t group, std::uint16_t* places, T* differences) {
  StateHash change;
  std::uint32_t mask = masks[group];
  if (mask == 0) {
    return change;
  }
  const std::size_t run = group / kGroupsPerRun;
  auto at = static_cast<std::size_t>(offsets[run]);
  for (std::size_t g = run * kGroupsPerRun; g < group; ++g) {
    at += count_ones(masks[g]);
  }
  for (; mask != 0; mask &= mask - 1, ++at) {
    const std::size_t i = group * kGroup + lowest_one(mask);
    places[at] = static_cast<std::uint16_t>(i % kBlockElements);
    differences[at] = static_cast<T>(after[i] - before[i]);
    change.add(hash_element(first_index + i, after[i]));
    change.subtract(hash_element(first_index + i, before[i]));
  }
  return change;
}

// Adds a difference to an element, or subtracts it; returns the change of the state hash.
template <typename T>
ROSE_ANYWHERE StateHash add_one(T* base, std::uint64_t first_index, std::size_t index, T difference,
                                bool is_reverse) {
  const T before = base[index];
  const T after = static_cast<T>(is_reverse ? before - difference : before + difference);
  base[index] = after;
  StateHash change = hash_element(first_index + index, after);
  change.subtract(hash_element(first_index + index, before));
  return change;
}

}  // namespace rose::device
