// Owns the hashing of vectors: sums of element hashes (element_hash.hpp) over ranges and over lists of
// changes. Vectors and portable code give the same sums.
#pragma once

#include <cstring>

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

ROSE_AVX2 inline __m256i load4(const std::uint8_t* data) {
  int word;
  std::memcpy(&word, data, 4);
  return _mm256_cvtepu8_epi64(_mm_cvtsi32_si128(word));
}
ROSE_AVX2 inline __m256i load4(const std::uint16_t* data) {
  return _mm256_cvtepu16_epi64(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(data)));
}
ROSE_AVX2 inline __m256i load4(const std::uint32_t* data) {
  return _mm256_cvtepu32_epi64(_mm_loadu_si128(reinterpret_cast<const __m128i*>(data)));
}

ROSE_AVX2 inline __m256i xor_shifted(__m256i x, int bits) {
  return _mm256_xor_si256(x, _mm256_srli_epi64(x, bits));
}

ROSE_AVX2 inline __m256i all4(std::uint64_t x) { return _mm256_set1_epi64x(static_cast<long long>(x)); }

// The product of lanes below 2^32. AVX2 multiplies halves of lanes alone.
ROSE_AVX2 inline __m256i times_low(__m256i x, std::uint64_t factor) {
  const __m256i high = _mm256_mul_epu32(x, all4(factor >> 32));
  return _mm256_add_epi64(_mm256_mul_epu32(x, all4(factor)), _mm256_slli_epi64(high, 32));
}

ROSE_AVX2 inline __m256i times(__m256i x, std::uint64_t factor) {
  const __m256i high = _mm256_mul_epu32(_mm256_srli_epi64(x, 32), all4(factor));
  return _mm256_add_epi64(times_low(x, factor), _mm256_slli_epi64(high, 32));
}

// The sums of the hashes of lanes, four elements at a time.
class HashSum4 {
 public:
  ROSE_AVX2 HashSum4() : first_(_mm256_setzero_si256()), second_(_mm256_setzero_si256()) {}

  // `place` is that of hash_element().
  ROSE_AVX2 void add(__m256i place, __m256i bits) {
    __m256i x = _mm256_add_epi64(place, times_low(bits, kBitsFactor));
    x = times(xor_shifted(x, 30), kMixFirst);
    x = times(xor_shifted(x, 27), kMixSecond);
    x = xor_shifted(x, 31);
    first_ = _mm256_add_epi64(first_, x);
    x = times(_mm256_xor_si256(x, all4(kLaneMask)), kLaneFactor);
    second_ = _mm256_add_epi64(second_, xor_shifted(x, 32));
  }

  ROSE_AVX2 StateHash total() const {
    std::uint64_t first[4];
    std::uint64_t second[4];
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(first), first_);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(second), second_);
    return {first[0] + first[1] + first[2] + first[3], second[0] + second[1] + second[2] + second[3]};
  }

 private:
  __m256i first_;
  __m256i second_;
};

template <typename T>
ROSE_AVX2 std::size_t hash_range_avx2(const T* data, std::size_t n, std::uint64_t first_index,
                                      StateHash& total) {
  const __m256i lanes = _mm256_add_epi64(all4(first_index + 1), _mm256_setr_epi64x(0, 1, 2, 3));
  __m256i place = times(lanes, kPlaceFactor);
  HashSum4 sum;
  std::size_t i = 0;
  for (; i + 4 <= n; i += 4) {
    sum.add(xor_shifted(place, 29), load4(data + i));
    place = _mm256_add_epi64(place, all4(4 * kPlaceFactor));
  }
  total.add(sum.total());
  return i;
}

template <typename T>
ROSE_AVX2 std::size_t hash_change_avx2(const std::uint16_t* places, const T* before, const T* after,
                                       std::size_t count, std::uint64_t first_index, StateHash& change) {
  const __m256i start = all4((first_index + 1) * kPlaceFactor);
  HashSum4 old_sum;
  HashSum4 new_sum;
  std::size_t k = 0;
  for (; k + 4 <= count; k += 4) {
    const __m256i raw = _mm256_add_epi64(start, times_low(load4(places + k), kPlaceFactor));
    const __m256i place = xor_shifted(raw, 29);
    old_sum.add(place, load4(before + k));
    new_sum.add(place, load4(after + k));
  }
  change.add(new_sum.total());
  change.subtract(old_sum.total());
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
  } else if (use_avx2) {
    i = hash_range_avx2(data, n, first_index, total);
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
  } else if (use_avx2) {
    k = hash_change_avx2(places, before, after, count, first_index, change);
  }
#endif
  for (; k < count; ++k) {
    change.add(hash_element(first_index + places[k], after[k]));
    change.subtract(hash_element(first_index + places[k], before[k]));
  }
  return change;
}

}  // namespace rose
