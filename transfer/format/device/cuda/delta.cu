// Owns the CUDA kernels of the delta codec, built from device_steps.hpp. NVRTC compiles them at first use
// (transfer/format/device/kernels.py), so there is no host code here. They have not run on a GPU.
//
// Each kernel exists for elements of 1, 2 and 4 bytes: mark_1, mark_2, mark_4, and so on. A thread works on
// one group, one run, or some of a block's changes. Buffers, all of them device memory of the caller:
//
//   masks        uint32 per 32 elements
//   counts       uint32 per 2048 elements: the number of changed ones
//   offsets      int64 per 2048 elements: the number of changes before them
//   places       uint16 per change: its place inside its block of 65536 elements
//   differences  one element per change: new - old modulo 2^(8 width)
//   starts       int64 per block and one more: the number of changes before it
//   change       uint64 x 2, set to zero by the caller: the change of the state hash
//
// csrc/delta/sparse.hpp holds the same in host memory, so every codec's bytes are the same.

#include "device_steps.hpp"

namespace rose::device {
namespace {

constexpr unsigned kWarp = 32;

// Sums over the warp, and one of its threads adds the sum: 32 times fewer atomics on two addresses. All
// threads of the warp must get here.
__device__ void add_to(std::uint64_t* total, StateHash mine) {
  for (unsigned step = kWarp / 2; step > 0; step /= 2) {
    mine.first += __shfl_down_sync(~0U, mine.first, step);
    mine.second += __shfl_down_sync(~0U, mine.second, step);
  }
  if (threadIdx.x % kWarp == 0 && (mine.first != 0 || mine.second != 0)) {
    atomicAdd(reinterpret_cast<unsigned long long*>(total), mine.first);
    atomicAdd(reinterpret_cast<unsigned long long*>(total) + 1, mine.second);
  }
}

__device__ std::size_t own_index() { return std::size_t{blockIdx.x} * blockDim.x + threadIdx.x; }

template <typename T>
__device__ void mark(const T* before, const T* after, std::uint64_t num_elements, std::uint32_t* masks) {
  const std::size_t group = own_index();
  if (group < divide_up(num_elements, kGroup)) {
    masks[group] = mark_group(before, after, num_elements, group);
  }
}

template <typename T>
__device__ void compact(const T* before, const T* after, std::uint64_t num_elements,
                        std::uint64_t first_index, const std::uint32_t* masks, const std::int64_t* offsets,
                        std::uint16_t* places, T* differences, std::uint64_t* change) {
  const std::size_t group = own_index();
  StateHash mine;
  if (group < divide_up(num_elements, kGroup)) {
    mine = compact_group(before, after, first_index, masks, offsets, group, places, differences);
  }
  add_to(change, mine);
}

// One block of threads does one block of elements.
template <typename T>
__device__ void add(T* base, std::uint64_t first_index, const std::int64_t* starts,
                    const std::uint16_t* places, const T* differences, int is_reverse,
                    std::uint64_t* change) {
  StateHash mine;
  const std::size_t begin = std::size_t{blockIdx.x} * kBlockElements;
  for (std::int64_t k = starts[blockIdx.x] + threadIdx.x; k < starts[blockIdx.x + 1]; k += blockDim.x) {
    mine.add(add_one(base, first_index, begin + places[k], differences[k], is_reverse != 0));
  }
  add_to(change, mine);
}

}  // namespace
}  // namespace rose::device

using namespace rose::device;

extern "C" __global__ void count(const std::uint32_t* masks, std::uint64_t num_elements,
                                 std::uint32_t* counts) {
  const std::size_t num_groups = divide_up(num_elements, kGroup);
  const std::size_t run = own_index();
  if (run < divide_up(num_groups, kGroupsPerRun)) {
    counts[run] = count_run(masks, num_groups, run);
  }
}

#define ROSE_KERNELS(WIDTH, T)                                                                              \
  extern "C" __global__ void mark_##WIDTH(const T* before, const T* after, std::uint64_t num_elements,      \
                                          std::uint32_t* masks) {                                           \
    mark<T>(before, after, num_elements, masks);                                                            \
  }                                                                                                         \
  extern "C" __global__ void compact_##WIDTH(const T* before, const T* after, std::uint64_t num_elements,   \
                                             std::uint64_t first_index, const std::uint32_t* masks,         \
                                             const std::int64_t* offsets, std::uint16_t* places,            \
                                             T* differences, std::uint64_t* change) {                       \
    compact<T>(before, after, num_elements, first_index, masks, offsets, places, differences, change);      \
  }                                                                                                         \
  extern "C" __global__ void add_##WIDTH(T* base, std::uint64_t first_index, const std::int64_t* starts,    \
                                         const std::uint16_t* places, const T* differences, int is_reverse, \
                                         std::uint64_t* change) {                                           \
    add<T>(base, first_index, starts, places, differences, is_reverse, change);                             \
  }

ROSE_KERNELS(1, std::uint8_t)
ROSE_KERNELS(2, std::uint16_t)
ROSE_KERNELS(4, std::uint32_t)
