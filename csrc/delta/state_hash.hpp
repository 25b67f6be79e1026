// Owns the hashing of vectors: sums of element hashes (element_hash.hpp) over ranges and over lists of
// changes. Vectors and portable code give the same sums.
#pragma once

#include "element_hash.hpp"
#include "simd.hpp"

namespace rose {

#ifdef ROSE_X86

ROSE_AVX512 inline __m512i load8(const std::uint8_t* data) {
  return _mm512_cvtepu8_epi64(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(data)));
}
ROSE_AVX512 inline __m512i load8(const std::uint16_t* data) {
  return _mm512_cvtepu16_epi64(_mm_loadu_si128(reinterpret_cast<const __m128i*>(data)));
}
ROSE_AVX512 inline __m512i load8(const std::uint32_t* data) {
  return _mm512_cvtepu32_epi64(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(data)));
}

ROSE_AVX512 inline __m512i xor_shifted(__m512i x, unsigned bits) {
  return _mm512_xor_si512(x, _mm512_srli_epi64(x, bits));
}

ROSE_AVX512 inline __m512i times(__m512i x, std::uint64_t factor) {
  return _mm512_mullo_epi64(x, _mm512_set1_epi64(static_cast<long long>(factor)));
}

// Hashes eight elements at once; `place` is that of hash_element().
ROSE_AVX512 inline void hash8(__m512i place, __m512i bits, __m512i& first, __m512i& second) {
  __m512i x = _mm512_add_epi64(place, times(bits, kBitsFactor));
  x = times(xor_shifted(x, 30), kMixFirst);
  x = times(xor_shifted(x, 27), kMixSecond);
  first = xor_shifted(x, 31);
  const __m512i mask = _mm512_set1_epi64(static_cast<long long>(kLaneMask));
  second = xor_shifted(times(_mm512_xor_si512(first, mask), kLaneFactor), 32);
}

ROSE_AVX512 inline StateHash reduce(__m512i first, __m512i second) {
  return {static_cast<std::uint64_t>(_mm512_reduce_add_epi64(first)),
          static_cast<std::uint64_t>(_mm512_reduce_add_epi64(second))};
}

template <typename T>
ROSE_AVX512 std::size_t hash_range_avx512(const T* data, std::size_t n, std::uint64_t first_index,
                                          StateHash& total) {
  const __m512i iota = _mm512_set_epi64(8, 7, 6, 5, 4, 3, 2, 1);
  const __m512i start = _mm512_set1_epi64(static_cast<long long>(first_index));
  __m512i place = times(_mm512_add_epi64(start, iota), kPlaceFactor);
  const __m512i step = _mm512_set1_epi64(static_cast<long long>(8 * kPlaceFactor));
  __m512i sum_first = _mm512_setzero_si512();
  __m512i sum_second = _mm512_setzero_si512();
  std::size_t i = 0;
  for (; i + 8 <= n; i += 8) {
    __m512i first;
    __m512i second;
    hash8(xor_shifted(place, 29), load8(data + i), first, second);
    sum_first = _mm512_add_epi64(sum_first, first);
    sum_second = _mm512_add_epi64(sum_second, second);
    place = _mm512_add_epi64(place, step);
  }
  total.add(reduce(sum_first, sum_second));
  return i;
}

// Sums the change of the hash over eight changes at a time.
class ChangeSum {
 public:
  ROSE_AVX512 explicit ChangeSum(std::uint64_t first_index)
      : start_(_mm512_set1_epi64(static_cast<long long>(first_index + 1))),
        first_(_mm512_setzero_si512()),
        second_(_mm512_setzero_si512()) {}

  template <typename T>
  ROSE_AVX512 void add8(const std::uint16_t* places, const T* before, const T* after) {
    const __m512i raw = times(_mm512_add_epi64(start_, load8(places)), kPlaceFactor);
    const __m512i place = xor_shifted(raw, 29);
    __m512i old_first;
    __m512i old_second;
    __m512i new_first;
    __m512i new_second;
    hash8(place, load8(before), old_first, old_second);
    hash8(place, load8(after), new_first, new_second);
    first_ = _mm512_add_epi64(first_, _mm512_sub_epi64(new_first, old_first));
    second_ = _mm512_add_epi64(second_, _mm512_sub_epi64(new_second, old_second));
  }

  ROSE_AVX512 StateHash total() const { return reduce(first_, second_); }

 private:
  __m512i start_;
  __m512i first_;
  __m512i second_;
};

template <typename T>
ROSE_AVX512 std::size_t hash_change_avx512(const std::uint16_t* places, const T* before, const T* after,
                                           std::size_t count, std::uint64_t first_index, StateHash& change) {
  ChangeSum sum(first_index);
  std::size_t k = 0;
  for (; k + 8 <= count; k += 8) {
    sum.add8(places + k, before + k, after + k);
  }
  change.add(sum.total());
  return k;
}

#endif  // ROSE_X86

template <typename T>
StateHash hash_range(const T* data, std::size_t n, std::uint64_t first_index) {
  StateHash total;
  std::size_t i = 0;
#ifdef ROSE_X86
  if (use_avx512) {
    i = hash_range_avx512(data, n, first_index, total);
  }
#endif
  for (; i < n; ++i) {
    total.add(hash_element(first_index + i, data[i]));
  }
  return total;
}

// Returns the change of the hash when elements first_index + places[k] change from before[k] to after[k].
template <typename T>
StateHash hash_change(const std::uint16_t* places, const T* before, const T* after, std::size_t count,
                      std::uint64_t first_index) {
  StateHash change;
  std::size_t k = 0;
#ifdef ROSE_X86
  if (use_avx512) {
    k = hash_change_avx512(places, before, after, count, first_index, change);
  }
#endif
  for (; k < count; ++k) {
    change.add(hash_element(first_index + places[k], after[k]));
    change.subtract(hash_element(first_index + places[k], before[k]));
  }
  return change;
}

}  // namespace rose
