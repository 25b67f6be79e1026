// Owns the coordinate form of a sparse difference: int32 places in the whole vector in rising order, then the
// raw differences. This is the paper's format (ROSE §4.2), kept as the baseline.
// decode() throws Malformed unless the places rise inside the array and no difference is zero.
#pragma once

#include "values.hpp"

namespace rose {
namespace coo {

template <typename T>
Bytes encode(const SparseDelta<T>& delta) {
  if (delta.num_elements > 0x7FFFFFFF) {
    throw Malformed("COO places are int32, " + std::to_string(delta.num_elements) + " elements are too many");
  }
  Bytes out;
  const std::size_t count = delta.num_changed();
  std::uint8_t* raw = out.reserve(count * (4 + sizeof(T)));
  std::uint8_t* at = raw;
  for_each_block(delta, [&](std::size_t block, const std::uint16_t* places, const T*, std::size_t in_block) {
    for (std::size_t k = 0; k < in_block; ++k) {
      const auto place = static_cast<std::uint32_t>(block * kBlock + places[k]);
      std::memcpy(at + 4 * k, &place, 4);
    }
    at += 4 * in_block;
  });
  if (count > 0) {
    std::memcpy(at, delta.differences.data(), count * sizeof(T));
  }
  out.grow(count * (4 + sizeof(T)));
  return out;
}

template <typename T>
SparseDelta<T> decode(Span payload, std::size_t n) {
  const std::size_t count = payload.size / (4 + sizeof(T));
  if (payload.size != count * (4 + sizeof(T)) || count > n) {
    throw Malformed("COO payload of " + std::to_string(payload.size) + " bytes is no multiple of " +
                    std::to_string(4 + sizeof(T)) + " for at most " + std::to_string(n) + " elements");
  }
  SparseDelta<T> delta;
  delta.num_elements = n;
  delta.counts.resize((n + kBlock - 1) / kBlock);
  std::uint16_t* places = delta.places.reserve(count);
  T* differences = delta.differences.reserve(count);
  if (count > 0) {
    std::memcpy(differences, payload.data + 4 * count, count * sizeof(T));
  }
  std::int64_t last = -1;
  for (std::size_t k = 0; k < count; ++k) {
    std::int32_t place;
    std::memcpy(&place, payload.data + 4 * k, 4);
    if (place <= last || static_cast<std::size_t>(place) >= n || differences[k] == 0) {
      throw Malformed("COO places must rise from 0 to below " + std::to_string(n) +
                      " with a difference each");
    }
    last = place;
    places[k] = static_cast<std::uint16_t>(place);
    ++delta.counts[static_cast<std::size_t>(place) / kBlock];
  }
  delta.places.grow(count);
  delta.differences.grow(count);
  return delta;
}

}  // namespace coo
}  // namespace rose
