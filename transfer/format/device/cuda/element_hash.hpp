// Owns the state hash of one element: two 64-bit lanes, summed modulo 2^64 over (global element index, raw
// bits). The sum is independent of the order and the sharding of the elements, and the change of one element
// moves it by hash(new) - hash(old), so an update costs O(changed). Never reads values as numbers. Runs on
// the processor and, compiled by NVRTC, on the device.
#pragma once

#include <cstddef>
#include <cstdint>

#ifdef __CUDACC__  // NVRTC defines it too
#define ROSE_ANYWHERE __host__ __device__
#else
#define ROSE_ANYWHERE
#endif

namespace rose {

struct StateHash {
  std::uint64_t first = 0;
  std::uint64_t second = 0;

  ROSE_ANYWHERE void add(const StateHash& other) {
    first += other.first;
    second += other.second;
  }
  ROSE_ANYWHERE void subtract(const StateHash& other) {
    first -= other.first;
    second -= other.second;
  }
};

constexpr std::uint64_t kPlaceFactor = 0x9e3779b97f4a7c15ULL;
constexpr std::uint64_t kBitsFactor = 0xd6e8feb86659fd93ULL;
constexpr std::uint64_t kMixFirst = 0xbf58476d1ce4e5b9ULL;
constexpr std::uint64_t kMixSecond = 0x94d049bb133111ebULL;
constexpr std::uint64_t kLaneMask = 0xa0761d6478bd642fULL;
constexpr std::uint64_t kLaneFactor = 0xe7037ed1a0b428dbULL;

ROSE_ANYWHERE inline std::uint64_t mix64(std::uint64_t x) {
  x = (x ^ (x >> 30)) * kMixFirst;
  x = (x ^ (x >> 27)) * kMixSecond;
  return x ^ (x >> 31);
}

// For a fixed index, `first` is injective in `bits`, so a single wrong element is always noticed.
ROSE_ANYWHERE inline StateHash hash_element(std::uint64_t index, std::uint32_t bits) {
  std::uint64_t place = (index + 1) * kPlaceFactor;
  place ^= place >> 29;
  const std::uint64_t first = mix64(place + bits * kBitsFactor);
  std::uint64_t second = (first ^ kLaneMask) * kLaneFactor;
  second ^= second >> 32;
  return {first, second};
}

}  // namespace rose
