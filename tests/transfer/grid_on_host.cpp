// A stand-in for the library of csrc/delta/delta_cuda.cu on machines without a GPU: the same calls over host
// memory, the same steps per thread, one thread after the other.
//
// It shows that the steps and what calls them are right. It says nothing about how the kernels run on a GPU:
// launches, streams, warp sums and atomics are not in it.

#include "../../csrc/delta/delta_cuda.h"
#include "../../csrc/delta/device_steps.hpp"

using namespace rose;
using namespace rose::device;

namespace {

template <typename Work>
const char* with_width(int width, Work&& work) {
  switch (width) {
    case 1:
      work(std::uint8_t{});
      return nullptr;
    case 2:
      work(std::uint16_t{});
      return nullptr;
    case 4:
      work(std::uint32_t{});
      return nullptr;
    default:
      return "elements must be 1, 2 or 4 bytes wide";
  }
}

void add_to(std::uint64_t* total, const StateHash& mine) {
  total[0] += mine.first;
  total[1] += mine.second;
}

}  // namespace

// Backwards, so that no thread can rely on one before it.
const char* rose_delta_mark(int width, const void* before, const void* after, uint64_t num_elements,
                            uint32_t* masks, uint32_t* counts, void*) {
  const std::size_t num_groups = divide_up(num_elements, kGroup);
  return with_width(width, [&]<typename T>(T) {
    for (std::size_t group = num_groups; group-- > 0;) {
      masks[group] =
          mark_group(static_cast<const T*>(before), static_cast<const T*>(after), num_elements, group);
    }
    for (std::size_t run = divide_up(num_groups, kGroupsPerRun); run-- > 0;) {
      counts[run] = count_run(masks, num_groups, run);
    }
  });
}

const char* rose_delta_compact(int width, const void* before, const void* after, uint64_t num_elements,
                               uint64_t first_index, const uint32_t* masks, const int64_t* offsets,
                               uint16_t* places, void* differences, uint64_t* change, void*) {
  return with_width(width, [&]<typename T>(T) {
    for (std::size_t group = divide_up(num_elements, kGroup); group-- > 0;) {
      add_to(change, compact_group(static_cast<const T*>(before), static_cast<const T*>(after), first_index,
                                   masks, offsets, group, places, static_cast<T*>(differences)));
    }
  });
}

const char* rose_delta_add(int width, void* base, uint64_t num_elements, uint64_t first_index,
                           const int64_t* starts, const uint16_t* places, const void* differences,
                           int is_reverse, uint64_t* change, void*) {
  return with_width(width, [&]<typename T>(T) {
    for (std::size_t block = divide_up(num_elements, kBlockElements); block-- > 0;) {
      for (std::int64_t k = starts[block + 1]; k-- > starts[block];) {
        add_to(change, add_one(static_cast<T*>(base), first_index, block * kBlockElements + places[k],
                               static_cast<const T*>(differences)[k], is_reverse != 0));
      }
    }
  });
}
