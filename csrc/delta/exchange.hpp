// Replaces chosen elements of live weights. Each element must hold the bits that it is expected to hold. If
// one does not, everything that was written is taken back. Never reads or writes outside of the vector. One
// pass compares and writes, so memory is fetched once, and the next elements are fetched meanwhile. SIMD
// would not help: the pass waits for memory, and there are no scatter instructions for 8 or 16 bits.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "simd.hpp"

namespace rose {

// The number of elements that are compared before they are written, and the number being fetched.
constexpr std::size_t kExchangeAtOnce = 32;
constexpr std::size_t kExchangeAhead = 96;

// The elements data[places[k] + shift]. Each is to change from before[k] to after[k].
template <typename T, typename Place>
struct Exchange {
  T* data;
  std::size_t size;
  const Place* places;
  std::int64_t shift;
  const T* before;
  const T* after;

  // Returns the index of element k, which is at least `size` if the place lies outside. The sum may wrap
  // around, and only unsigned integers define that.
  std::uint64_t at(std::size_t k) const {
    return static_cast<std::uint64_t>(places[k]) + static_cast<std::uint64_t>(shift);
  }

  void ask(std::size_t k) const {
    prefetch(reinterpret_cast<const void*>(reinterpret_cast<std::uintptr_t>(data) + at(k) * sizeof(T)));
  }

  // Returns whether these elements lie inside of the vector and hold the expected bits.
  bool can_write(std::size_t begin, std::size_t end) const {
    bool is_inside = true;
    for (std::size_t k = begin; k < end; ++k) {
      is_inside &= at(k) < size;
    }
    if (!is_inside) {
      return false;
    }
    unsigned differing = 0;
    for (std::size_t k = begin; k < end; ++k) {
      differing |= static_cast<unsigned>(data[at(k)]) ^ static_cast<unsigned>(before[k]);
    }
    return differing == 0;
  }

  // Exchanges the first `count` elements, all or none. Returns whether it exchanged them.
  bool run(std::size_t count) const {
    for (std::size_t k = 0; k < std::min(count, kExchangeAhead); ++k) {
      ask(k);
    }
    for (std::size_t begin = 0; begin < count; begin += kExchangeAtOnce) {
      const std::size_t end = std::min(count, begin + kExchangeAtOnce);
      for (std::size_t k = begin + kExchangeAhead; k < std::min(count, end + kExchangeAhead); ++k) {
        ask(k);
      }
      if (!can_write(begin, end)) {
        take_back(begin);
        return false;
      }
      for (std::size_t k = begin; k < end; ++k) {
        data[at(k)] = after[k];
      }
    }
    return true;
  }

 private:
  // Goes from the last to the first, so that an element that was named twice holds its first bits again.
  void take_back(std::size_t count) const {
    while (count-- > 0) {
      data[at(count)] = before[count];
    }
  }
};

}  // namespace rose
