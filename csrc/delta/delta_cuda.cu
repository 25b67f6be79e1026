// Owns the CUDA kernels of delta_cuda.h, built from device_steps.hpp. `make cuda` compiles them.
//
// Compiled with nvcc 13.0; has not run on a GPU.

#include "delta_cuda.h"
#include "device_steps.hpp"

namespace rose::device {
namespace {

constexpr unsigned kThreads = 256;
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
__global__ void mark(const T* before, const T* after, std::size_t n, std::size_t num_groups,
                     std::uint32_t* masks) {
  const std::size_t group = own_index();
  if (group < num_groups) {
    masks[group] = mark_group(before, after, n, group);
  }
}

__global__ void count(const std::uint32_t* masks, std::size_t num_groups, std::size_t num_runs,
                      std::uint32_t* counts) {
  const std::size_t run = own_index();
  if (run < num_runs) {
    counts[run] = count_run(masks, num_groups, run);
  }
}

template <typename T>
__global__ void compact(const T* before, const T* after, std::size_t num_groups, std::uint64_t first_index,
                        const std::uint32_t* masks, const std::int64_t* offsets, std::uint16_t* places,
                        T* differences, std::uint64_t* change) {
  const std::size_t group = own_index();
  StateHash mine;
  if (group < num_groups) {
    mine = compact_group(before, after, first_index, masks, offsets, group, places, differences);
  }
  add_to(change, mine);
}

// Starts one block of threads for each block of elements.
template <typename T>
__global__ void add(T* base, std::uint64_t first_index, const std::int64_t* starts,
                    const std::uint16_t* places, const T* differences, bool is_reverse,
                    std::uint64_t* change) {
  StateHash mine;
  const std::size_t begin = std::size_t{blockIdx.x} * kBlockElements;
  for (std::int64_t k = starts[blockIdx.x] + threadIdx.x; k < starts[blockIdx.x + 1]; k += blockDim.x) {
    mine.add(add_one(base, first_index, begin + places[k], differences[k], is_reverse));
  }
  add_to(change, mine);
}

unsigned blocks_for(std::size_t num_threads) {
  return static_cast<unsigned>(divide_up(num_threads, kThreads));
}

const char* last_error() {
  const cudaError_t error = cudaGetLastError();
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

// Calls work(T{}) with the unsigned type of that width.
template <typename Work>
const char* with_width(int width, Work&& work) {
  switch (width) {
    case 1:
      work(std::uint8_t{});
      break;
    case 2:
      work(std::uint16_t{});
      break;
    case 4:
      work(std::uint32_t{});
      break;
    default:
      return "elements must be 1, 2 or 4 bytes wide";
  }
  return last_error();
}

}  // namespace
}  // namespace rose::device

using namespace rose::device;

const char* rose_delta_mark(int width, const void* before, const void* after, uint64_t num_elements,
                            uint32_t* masks, uint32_t* counts, void* stream) {
  const std::size_t num_groups = divide_up(num_elements, kGroup);
  const std::size_t num_runs = divide_up(num_groups, kGroupsPerRun);
  if (num_groups == 0) {
    return nullptr;
  }
  auto* const queue = static_cast<cudaStream_t>(stream);
  return with_width(width, [&]<typename T>(T) {
    mark<T><<<blocks_for(num_groups), kThreads, 0, queue>>>(
        static_cast<const T*>(before), static_cast<const T*>(after), num_elements, num_groups, masks);
    count<<<blocks_for(num_runs), kThreads, 0, queue>>>(masks, num_groups, num_runs, counts);
  });
}

const char* rose_delta_compact(int width, const void* before, const void* after, uint64_t num_elements,
                               uint64_t first_index, const uint32_t* masks, const int64_t* offsets,
                               uint16_t* places, void* differences, uint64_t* change, void* stream) {
  const std::size_t num_groups = divide_up(num_elements, kGroup);
  if (num_groups == 0) {
    return nullptr;
  }
  return with_width(width, [&]<typename T>(T) {
    compact<T><<<blocks_for(num_groups), kThreads, 0, static_cast<cudaStream_t>(stream)>>>(
        static_cast<const T*>(before), static_cast<const T*>(after), num_groups, first_index, masks, offsets,
        places, static_cast<T*>(differences), change);
  });
}

const char* rose_delta_add(int width, void* base, uint64_t num_elements, uint64_t first_index,
                           const int64_t* starts, const uint16_t* places, const void* differences,
                           int is_reverse, uint64_t* change, void* stream) {
  const std::size_t num_blocks = divide_up(num_elements, kBlockElements);
  if (num_blocks == 0) {
    return nullptr;
  }
  return with_width(width, [&]<typename T>(T) {
    add<T><<<static_cast<unsigned>(num_blocks), kThreads, 0, static_cast<cudaStream_t>(stream)>>>(
        static_cast<T*>(base), first_index, starts, places, static_cast<const T*>(differences),
        is_reverse != 0, change);
  });
}
