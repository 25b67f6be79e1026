// Owns the sparse difference between two vectors of raw bits, in memory: for each block of 64 Ki elements the
// places that changed, in rising order, and the wrap differences new - old (mod 2^n), none of them zero.
// Exact for every bit pattern (NaN, Inf, -0). apply.hpp applies it.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "buffer.hpp"
#include "simd.hpp"
#include "state_hash.hpp"

namespace rose {

constexpr std::size_t kBlock = 65536;
constexpr std::size_t kLanes = 32;

struct Malformed : std::runtime_error {
  using std::runtime_error::runtime_error;
};

template <typename T>
struct SparseDelta {
  std::size_t num_elements = 0;
  std::vector<std::uint32_t> counts;  // the number of changes in each block
  Buffer<std::uint16_t> places;       // each inside its block
  Buffer<T> differences;

  std::size_t num_changed() const { return places.size(); }
  std::size_t block_length(std::size_t block) const {
    return std::min(kBlock, num_elements - block * kBlock);
  }
};

// Contiguous elements of a vector that lies in memory in several pieces.
template <typename T>
struct Piece {
  const T* data;
  std::size_t size;
};

// Makes a difference from parts that other code, such as the CUDA kernels, has made. Throws Malformed unless
// they form one.
template <typename T>
SparseDelta<T> assemble(Piece<std::uint32_t> counts, const std::uint16_t* places, const T* differences,
                        std::size_t num_changed, std::size_t n) {
  SparseDelta<T> delta;
  delta.num_elements = n;
  if (counts.size != (n + kBlock - 1) / kBlock) {
    throw Malformed(std::to_string(counts.size) + " blocks for " + std::to_string(n) + " elements");
  }
  delta.counts.assign(counts.data, counts.data + counts.size);
  std::size_t at = 0;
  for (std::size_t block = 0; block < counts.size; ++block) {
    const std::size_t count = delta.counts[block];
    bool is_good = count <= num_changed - at;
    for (std::size_t k = at; is_good && k < at + count; ++k) {
      is_good = places[k] < delta.block_length(block) && (k == at || places[k - 1] < places[k]) &&
                differences[k] != 0;
    }
    if (!is_good) {
      throw Malformed("changes of block " + std::to_string(block) + " don't rise inside it");
    }
    at += count;
  }
  if (at != num_changed) {
    throw Malformed(std::to_string(num_changed) + " changes, of which blocks count " + std::to_string(at));
  }
  std::copy_n(places, num_changed, delta.places.reserve(num_changed));
  std::copy_n(differences, num_changed, delta.differences.reserve(num_changed));
  delta.places.grow(num_changed);
  delta.differences.grow(num_changed);
  return delta;
}

// Calls visit(block, places, differences, count) for each block with changes.
template <typename T, typename Visit>
void for_each_block(const SparseDelta<T>& delta, Visit&& visit) {
  std::size_t at = 0;
  for (std::size_t block = 0; block < delta.counts.size(); ++block) {
    const std::size_t count = delta.counts[block];
    if (count > 0) {
      visit(block, delta.places.data() + at, delta.differences.data() + at, count);
    }
    at += count;
  }
}

// One block's changed bits, before and after: scratch for its hash.
template <typename T>
class Values {
  Buffer<T> before_;
  Buffer<T> after_;

 public:
  T* const before = before_.reserve(kBlock + kLanes * 2);
  T* const after = after_.reserve(kBlock + kLanes * 2);
};

// Returns whether 32 bytes are equal. Most of them are, so this loop sets the scan speed.
inline bool same32(const void* a, const void* b) {
  std::uint64_t x[4];
  std::uint64_t y[4];
  std::memcpy(x, a, 32);
  std::memcpy(y, b, 32);
  return ((x[0] ^ y[0]) | (x[1] ^ y[1]) | (x[2] ^ y[2]) | (x[3] ^ y[3])) == 0;
}

// The scans compare n elements, the first of which is element `first` of its block, and append the changes
// behind the first `count`; they return the new count.
template <typename T>
std::size_t scan_some(const T* before, const T* after, std::size_t begin, std::size_t end, std::size_t first,
                      std::size_t count, std::uint16_t* places, Values<T>& values) {
  for (std::size_t i = begin; i < end; ++i) {
    places[count] = static_cast<std::uint16_t>(first + i);
    values.before[count] = before[i];
    values.after[count] = after[i];
    count += before[i] != after[i];  // no branch, because changes are unpredictable
  }
  return count;
}

template <typename T>
std::size_t scan_portable(const T* before, const T* after, std::size_t n, std::size_t first,
                          std::size_t count, std::uint16_t* places, Values<T>& values) {
  constexpr std::size_t step = 32 / sizeof(T);
  std::size_t i = 0;
  for (; i + step <= n; i += step) {
    if (!same32(before + i, after + i)) {
      count = scan_some(before, after, i, i + step, first, count, places, values);
    }
  }
  return scan_some(before, after, i, n, first, count, places, values);
}

#if defined(ROSE_X86) || defined(ROSE_NEON)

// Both versions are prefetched this far ahead of the comparison: the processor's own prefetch stops at every
// 4 KB page, and so memory stays busy while a block's changes are hashed.
constexpr std::size_t kScanAheadBytes = 4096;

// equal32() returns the mask of those of 32 elements that are equal.
#ifdef ROSE_X86
#define ROSE_MARKS ROSE_AVX2
ROSE_AVX2 inline __m256i load32(const void* data) {
  return _mm256_loadu_si256(static_cast<const __m256i*>(data));
}
ROSE_AVX2 inline std::uint32_t equal32(const std::uint8_t* a, const std::uint8_t* b) {
  return static_cast<std::uint32_t>(_mm256_movemask_epi8(_mm256_cmpeq_epi8(load32(a), load32(b))));
}
ROSE_AVX2 inline std::uint32_t equal32(const std::uint16_t* a, const std::uint16_t* b) {
  const __m256i low = _mm256_cmpeq_epi16(load32(a), load32(b));
  const __m256i high = _mm256_cmpeq_epi16(load32(a + 16), load32(b + 16));
  // Packing works on each half of a register alone, so the quarters have to be put in order again.
  const __m256i packed = _mm256_permute4x64_epi64(_mm256_packs_epi16(low, high), 0xD8);
  return static_cast<std::uint32_t>(_mm256_movemask_epi8(packed));
}
ROSE_AVX2 inline std::uint32_t equal32(const std::uint32_t* a, const std::uint32_t* b) {
  std::uint32_t equal = 0;
  for (unsigned i = 0; i < kLanes; i += 8) {
    const __m256i some = _mm256_cmpeq_epi32(load32(a + i), load32(b + i));
    equal |= static_cast<std::uint32_t>(_mm256_movemask_ps(_mm256_castsi256_ps(some))) << i;
  }
  return equal;
}
#else
#define ROSE_MARKS
inline std::uint32_t bits_of(uint8x16_t low, uint8x16_t high) {
  alignas(16) static const std::uint8_t weights[16] = {1, 2, 4, 8, 16, 32, 64, 128,
                                                       1, 2, 4, 8, 16, 32, 64, 128};
  const uint8x16_t bits = vld1q_u8(weights);
  uint8x16_t sums = vpaddq_u8(vandq_u8(low, bits), vandq_u8(high, bits));
  sums = vpaddq_u8(sums, sums);
  return vgetq_lane_u32(vreinterpretq_u32_u8(vpaddq_u8(sums, sums)), 0);
}
inline uint8x16_t equal16(const std::uint8_t* a, const std::uint8_t* b) {
  return vceqq_u8(vld1q_u8(a), vld1q_u8(b));
}
inline uint16x8_t equal8(const std::uint16_t* a, const std::uint16_t* b) {
  return vceqq_u16(vld1q_u16(a), vld1q_u16(b));
}
inline uint16x8_t equal8(const std::uint32_t* a, const std::uint32_t* b) {
  const uint32x4_t low = vceqq_u32(vld1q_u32(a), vld1q_u32(b));
  const uint32x4_t high = vceqq_u32(vld1q_u32(a + 4), vld1q_u32(b + 4));
  return vuzp1q_u16(vreinterpretq_u16_u32(low), vreinterpretq_u16_u32(high));
}
template <typename T>
uint8x16_t equal16(const T* a, const T* b) {
  return vuzp1q_u8(vreinterpretq_u8_u16(equal8(a, b)), vreinterpretq_u8_u16(equal8(a + 8, b + 8)));
}
template <typename T>
std::uint32_t equal32(const T* a, const T* b) {
  return bits_of(equal16(a, b), equal16(a + 16, b + 16));
}
#endif

// Marks the changed elements of 64 groups first, which waits for memory only, and then collects them from the
// cache. Most groups with a change have one, so that the inner loop's end is predictable.
template <typename T>
ROSE_MARKS std::size_t scan_marked(const T* before, const T* after, std::size_t n, std::size_t first,
                                   std::size_t count, std::uint16_t* places, Values<T>& values) {
  constexpr std::size_t step = 64 * kLanes;
  std::uint32_t changed[step / kLanes];
  std::size_t begins[step / kLanes];
  T* const old_out = values.before;
  T* const new_out = values.after;
  const std::size_t whole = n - n % kLanes;
  for (std::size_t begin = 0; begin < whole; begin += step) {
    std::size_t num_changed = 0;
    for (std::size_t i = begin; i < std::min(whole, begin + step); i += kLanes) {
      for (std::size_t line = 0; line < kLanes * sizeof(T); line += 64) {
        prefetch(reinterpret_cast<const char*>(before + i) + kScanAheadBytes + line);
        prefetch(reinterpret_cast<const char*>(after + i) + kScanAheadBytes + line);
      }
      changed[num_changed] = ~equal32(before + i, after + i);
      begins[num_changed] = i;
      num_changed += changed[num_changed] != 0;
    }
    for (std::size_t g = 0; g < num_changed; ++g) {
      std::uint32_t rest = changed[g];
      do {
        const std::size_t i = begins[g] + static_cast<std::size_t>(std::countr_zero(rest));
        places[count] = static_cast<std::uint16_t>(first + i);
        old_out[count] = before[i];
        new_out[count] = after[i];
        ++count;
        rest &= rest - 1;
      } while (rest != 0);
    }
  }
  return scan_some(before, after, whole, n, first, count, places, values);
}

#endif  // ROSE_X86 or ROSE_NEON

#ifdef ROSE_X86

ROSE_AVX512 inline __m512i iota16() {
  alignas(64) static const std::uint16_t lanes[kLanes] = {0,  1,  2,  3,  4,  5,  6,  7,  8,  9,  10,
                                                          11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21,
                                                          22, 23, 24, 25, 26, 27, 28, 29, 30, 31};
  return _mm512_load_si512(lanes);
}

ROSE_AVX512 inline void prefetch_line(const void* data, std::size_t ahead_bytes) {
  _mm_prefetch(static_cast<const char*>(data) + ahead_bytes, _MM_HINT_T0);
}

// Packs the changed ones of 32 elements to the front; returns their number.
ROSE_AVX512 inline unsigned pack32(const std::uint8_t* a, const std::uint8_t* b, __m512i at,
                                   std::uint16_t* places, std::uint8_t* before, std::uint8_t* after) {
  const __m256i x = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(a));
  const __m256i y = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(b));
  const __mmask32 changed = _mm256_cmpneq_epi8_mask(x, y);
  _mm512_storeu_si512(places, _mm512_maskz_compress_epi16(changed, at));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(before), _mm256_maskz_compress_epi8(changed, x));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(after), _mm256_maskz_compress_epi8(changed, y));
  return static_cast<unsigned>(_mm_popcnt_u32(changed));
}
ROSE_AVX512 inline unsigned pack32(const std::uint16_t* a, const std::uint16_t* b, __m512i at,
                                   std::uint16_t* places, std::uint16_t* before, std::uint16_t* after) {
  const __m512i x = _mm512_loadu_si512(a);
  const __m512i y = _mm512_loadu_si512(b);
  const __mmask32 changed = _mm512_cmpneq_epi16_mask(x, y);
  _mm512_storeu_si512(places, _mm512_maskz_compress_epi16(changed, at));
  _mm512_storeu_si512(before, _mm512_maskz_compress_epi16(changed, x));
  _mm512_storeu_si512(after, _mm512_maskz_compress_epi16(changed, y));
  return static_cast<unsigned>(_mm_popcnt_u32(changed));
}
ROSE_AVX512 inline unsigned pack32(const std::uint32_t* a, const std::uint32_t* b, __m512i at,
                                   std::uint16_t* places, std::uint32_t* before, std::uint32_t* after) {
  __mmask32 changed = 0;
  unsigned count = 0;
  for (unsigned half = 0; half < 2; ++half) {
    const __m512i x = _mm512_loadu_si512(a + 16 * half);
    const __m512i y = _mm512_loadu_si512(b + 16 * half);
    const __mmask16 some = _mm512_cmpneq_epi32_mask(x, y);
    _mm512_storeu_si512(before + count, _mm512_maskz_compress_epi32(some, x));
    _mm512_storeu_si512(after + count, _mm512_maskz_compress_epi32(some, y));
    count += static_cast<unsigned>(_mm_popcnt_u32(some));
    changed |= static_cast<__mmask32>(some) << (16 * half);
  }
  _mm512_storeu_si512(places, _mm512_maskz_compress_epi16(changed, at));
  return count;
}

template <typename T>
ROSE_AVX512 std::size_t scan_avx512(const T* before, const T* after, std::size_t n, std::size_t first,
                                    std::size_t count, std::uint16_t* places, Values<T>& values) {
  const __m512i step = _mm512_set1_epi16(kLanes);
  __m512i at = _mm512_add_epi16(iota16(), _mm512_set1_epi16(static_cast<short>(first)));
  T* old_out = values.before;
  T* new_out = values.after;
  std::size_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    for (std::size_t line = 0; line < kLanes * sizeof(T); line += 64) {
      prefetch_line(before + i, kScanAheadBytes + line);
      prefetch_line(after + i, kScanAheadBytes + line);
    }
    count += pack32(before + i, after + i, at, places + count, old_out + count, new_out + count);
    at = _mm512_add_epi16(at, step);
  }
  return scan_some(before, after, i, n, first, count, places, values);
}

#endif  // ROSE_X86

// Hands out a vector of pieces from its front.
template <typename T>
class Pieces {
 public:
  explicit Pieces(const std::vector<Piece<T>>& pieces) : piece_(pieces.begin()) {}

  // Returns at most n > 0 contiguous elements; some must be left.
  Piece<T> take(std::size_t n) {
    while (taken_ == piece_->size) {
      ++piece_;
      taken_ = 0;
    }
    const Piece<T> front{piece_->data + taken_, std::min(n, piece_->size - taken_)};
    taken_ += front.size;
    return front;
  }

 private:
  typename std::vector<Piece<T>>::const_iterator piece_;
  std::size_t taken_ = 0;
};

// Returns the difference from `before` to the n elements of `after`; adds its effect on the state hash.
// follows: the place of `before` if it is to become `after`, written while each block is in the cache.
template <typename T>
SparseDelta<T> scan(const T* before, const std::vector<Piece<T>>& after, std::size_t n,
                    std::uint64_t first_index, StateHash& change, T* follows = nullptr) {
  SparseDelta<T> delta;
  delta.num_elements = n;
  delta.counts.reserve((n + kBlock - 1) / kBlock);
  Values<T> values;
  Pieces<T> rest(after);
  for (std::size_t begin = 0; begin < n; begin += kBlock) {
    const std::size_t length = std::min(kBlock, n - begin);
    std::uint16_t* places = delta.places.reserve(length);
    T* differences = delta.differences.reserve(length);
    std::size_t count = 0;
    for (std::size_t first = 0; first < length;) {
      const Piece<T> piece = rest.take(length - first);
      const T* old = before + begin + first;
#ifdef ROSE_X86
      if (use_avx512) {
        count = scan_avx512(old, piece.data, piece.size, first, count, places, values);
      } else if (use_avx2) {
        count = scan_marked(old, piece.data, piece.size, first, count, places, values);
      } else
#elif defined(ROSE_NEON)
      if (use_neon) {
        count = scan_marked(old, piece.data, piece.size, first, count, places, values);
      } else
#endif
      {
        count = scan_portable(old, piece.data, piece.size, first, count, places, values);
      }
      first += piece.size;
    }
    for (std::size_t k = 0; k < count; ++k) {
      differences[k] = static_cast<T>(values.after[k] - values.before[k]);
    }
    if (follows != nullptr) {
      for (std::size_t k = 0; k < count; ++k) {
        follows[begin + places[k]] = values.after[k];
      }
    }
    change.add(hash_change(places, values.before, values.after, count, first_index + begin));
    delta.counts.push_back(static_cast<std::uint32_t>(count));
    delta.places.grow(count);
    delta.differences.grow(count);
  }
  return delta;
}

}  // namespace rose
