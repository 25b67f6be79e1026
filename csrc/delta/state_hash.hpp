// Owns the state hash: two 64-bit lanes, each a sum modulo 2^64 over (global element index, raw bits).
// Promises: independent of the order and the sharding of the elements; one element's change moves it by
// hash(new) - hash(old), so an update costs O(changed). Never looks at values as numbers.
#pragma once

#include <cstddef>
#include <cstdint>

namespace rose {

struct StateHash {
  std::uint64_t first = 0;
  std::uint64_t second = 0;

  void add(const StateHash& other) {
    first += other.first;
    second += other.second;
  }
  void subtract(const StateHash& other) {
    first -= other.first;
    second -= other.second;
  }
};

inline std::uint64_t mix64(std::uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ULL;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebULL;
  return x ^ (x >> 31);
}

// For a fixed index `first` is injective in `bits`: a single wrong element always shows.
inline StateHash hash_element(std::uint64_t index, std::uint32_t bits) {
  std::uint64_t place = (index + 1) * 0x9e3779b97f4a7c15ULL;
  place ^= place >> 29;
  const std::uint64_t first = mix64(place + bits * 0xd6e8feb86659fd93ULL);
  std::uint64_t second = (first ^ 0xa0761d6478bd642fULL) * 0xe7037ed1a0b428dbULL;
  second ^= second >> 32;
  return {first, second};
}

template <typename T>
StateHash hash_range(const T* data, std::size_t n, std::uint64_t first_index) {
  StateHash total;
  for (std::size_t i = 0; i < n; ++i) {
    total.add(hash_element(first_index + i, data[i]));
  }
  return total;
}

}  // namespace rose
