// Owns the coding of non-zero differences over four streams, shared by the forms of a sparse difference:
//
//   flags   1 bit per change: set when the difference is neither +1 nor -1; zeros up to a whole byte
//   signs   1 bit per +-1 change: set when it is -1; zeros up to a whole byte
//   small   1 byte per flagged change: zigzag(difference) - 3; 255 = read it from `wide`
//   wide    raw little-endian differences: the escaped ones
//
// Each set of differences has exactly one set of bytes; read_values() refuses any other by throwing
// Malformed, and never reads past the end of a stream.
#pragma once

#include <bit>

#include "sparse.hpp"

namespace rose {

struct Span {
  const std::uint8_t* data = nullptr;
  std::size_t size = 0;
};

// Reads a stream from its front; every step is checked against its end.
class Reader {
 public:
  Reader(const char* name, Span span) : name_(name), at_(span.data), left_(span.size) {}

  std::size_t left() const { return left_; }

  const std::uint8_t* take(std::size_t size) {
    if (left_ < size) {
      throw Malformed(std::string(name_) + " stream ends " + std::to_string(size - left_) + " bytes early");
    }
    const std::uint8_t* here = at_;
    at_ += size;
    left_ -= size;
    return here;
  }

  void require_end() const {
    if (left_ != 0) {
      throw Malformed(std::string(name_) + " stream has " + std::to_string(left_) + " bytes left over");
    }
  }

 private:
  const char* name_;
  const std::uint8_t* at_;
  std::size_t left_;
};

// Reads a gap from the front of a stream: 255 = skip 255 and read on.
inline void put_escaped(Bytes& out, std::size_t value) {
  for (; value >= 255; value -= 255) {
    out.push(255);
  }
  out.push(static_cast<std::uint8_t>(value));
}

inline std::size_t take_escaped(Reader& reader) {
  std::size_t value = 0;
  for (;;) {
    const std::uint8_t byte = *reader.take(1);
    value += byte;
    if (byte != 255) {
      return value;
    }
  }
}

template <typename T>
T zigzag(T difference) {
  const T sign = static_cast<T>(0) - static_cast<T>(difference >> (8 * sizeof(T) - 1));
  return static_cast<T>(static_cast<T>(difference << 1) ^ sign);
}

template <typename T>
T unzigzag(T coded) {
  return static_cast<T>(static_cast<T>(coded >> 1) ^ static_cast<T>(0 - (coded & 1)));
}

template <typename T>
bool is_unit(T difference) {
  return difference == static_cast<T>(1) || difference == static_cast<T>(-1);
}

// Writes bits from the lowest one of the first byte on; there must be room for a word behind them.
class BitWriter {
 public:
  explicit BitWriter(std::uint8_t* begin) : begin_(begin), at_(begin) {}

  // Appends `size` bits, 0 or 1.
  void put(bool bit, unsigned size) {
    pending_ |= static_cast<std::uint64_t>(bit) << num_pending_;
    num_pending_ += size;
    if (num_pending_ == 64) {
      std::memcpy(at_, &pending_, 8);
      at_ += 8;
      pending_ = 0;
      num_pending_ = 0;
    }
  }

  // Returns the number of bytes, of which the last one is filled up with zeros.
  std::size_t finish() {
    std::memcpy(at_, &pending_, 8);
    return static_cast<std::size_t>(at_ - begin_) + (num_pending_ + 7) / 8;
  }

 private:
  std::uint8_t* begin_;
  std::uint8_t* at_;
  std::uint64_t pending_ = 0;
  unsigned num_pending_ = 0;
};

struct ValueStreams {
  Bytes& flags;
  Bytes& signs;
  Bytes& small;
  Bytes& wide;
};

template <typename T>
void put_values_portable(const T* differences, std::size_t count, ValueStreams out) {
  BitWriter flags(out.flags.reserve((count + 7) / 8));
  BitWriter signs(out.signs.reserve((count + 7) / 8));
  std::uint8_t* small = out.small.reserve(count);
  std::uint8_t* wide = out.wide.reserve(count * sizeof(T));
  std::size_t num_small = 0;
  std::size_t num_wide = 0;
  for (std::size_t k = 0; k < count; ++k) {  // no branch, because the kinds of changes are unpredictable
    const T difference = differences[k];
    const bool is_flagged = !is_unit(difference);
    const T coded = static_cast<T>(zigzag(difference) - 3);
    flags.put(is_flagged, 1);
    signs.put(!is_flagged && difference != static_cast<T>(1), !is_flagged);
    small[num_small] = static_cast<std::uint8_t>(std::min<T>(coded, 255));
    num_small += is_flagged;
    std::memcpy(wide + num_wide * sizeof(T), &difference, sizeof(T));
    num_wide += is_flagged & (coded >= 255);
  }
  out.flags.grow(flags.finish());
  out.signs.grow(signs.finish());
  out.small.grow(num_small);
  out.wide.grow(num_wide * sizeof(T));
}

#ifdef ROSE_X86

// Sixteen at a time; their few exceptions one by one.
ROSE_AVX2 inline void put_values_avx2(const std::uint16_t* differences, std::size_t count, ValueStreams out) {
  std::uint8_t* const flags = out.flags.reserve((count + 7) / 8);
  std::uint8_t* const signs_begin = out.signs.reserve((count + 7) / 8);
  std::uint8_t* const small_begin = out.small.reserve(count);
  std::uint8_t* const wide_begin = out.wide.reserve(2 * count);
  std::uint8_t* signs = signs_begin;
  std::uint8_t* small = small_begin;
  std::uint8_t* wide = wide_begin;
  std::uint64_t pending = 0;
  unsigned num_pending = 0;
  for (std::size_t k = 0; k < count; k += 16) {  // there is room for a vector behind the differences
    const std::uint32_t valid = count - k >= 16 ? 0xFFFF : (1U << (count - k)) - 1;
    const __m256i d = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(differences + k));
    const __m256i is_minus = _mm256_cmpeq_epi16(d, _mm256_set1_epi16(-1));
    const __m256i is_plus = _mm256_cmpeq_epi16(d, _mm256_set1_epi16(1));
    const __m256i packed = _mm256_permute4x64_epi64(_mm256_packs_epi16(is_minus, is_plus), 0xD8);
    const auto both = static_cast<std::uint32_t>(_mm256_movemask_epi8(packed));
    const std::uint32_t minus = both & valid;
    const std::uint32_t unit = (both | both >> 16) & valid;
    const std::uint32_t flagged = valid & ~unit;
    const auto low = static_cast<std::uint16_t>(flagged);
    std::memcpy(flags + k / 8, &low, 2);
    pending |= static_cast<std::uint64_t>(_pext_u32(minus, unit)) << num_pending;
    num_pending += static_cast<unsigned>(_mm_popcnt_u32(unit));
    if (num_pending >= 32) {
      std::memcpy(signs, &pending, 4);
      signs += 4;
      pending >>= 32;
      num_pending -= 32;
    }
    for (std::uint32_t rest = flagged; rest != 0; rest &= rest - 1) {
      const std::uint16_t difference = differences[k + static_cast<std::size_t>(std::countr_zero(rest))];
      const auto coded = static_cast<std::uint16_t>(zigzag(difference) - 3);
      *small++ = static_cast<std::uint8_t>(std::min<std::uint16_t>(coded, 255));
      std::memcpy(wide, &difference, 2);
      wide += coded >= 255 ? 2 : 0;
    }
  }
  std::memcpy(signs, &pending, 8);
  signs += (num_pending + 7) / 8;
  out.flags.grow((count + 7) / 8);
  out.signs.grow(static_cast<std::size_t>(signs - signs_begin));
  out.small.grow(static_cast<std::size_t>(small - small_begin));
  out.wide.grow(static_cast<std::size_t>(wide - wide_begin));
}

// Returns a mask of bits 0 to `count` - 1.
inline std::uint32_t low_bits(std::size_t count) { return count >= 32 ? ~0U : (1U << count) - 1; }

ROSE_AVX512 inline void put_values_avx512(const std::uint16_t* differences, std::size_t count,
                                          ValueStreams out) {
  std::uint8_t* flags = out.flags.reserve((count + 7) / 8);
  std::uint8_t* const signs_begin = out.signs.reserve((count + 7) / 8);
  std::uint8_t* const small_begin = out.small.reserve(count);
  std::uint8_t* const wide_begin = out.wide.reserve(2 * count);
  std::uint8_t* signs = signs_begin;
  std::uint8_t* small = small_begin;
  std::uint8_t* wide = wide_begin;
  const __m512i plus_one = _mm512_set1_epi16(1);
  const __m512i minus_one = _mm512_set1_epi16(-1);
  const __m512i escape = _mm512_set1_epi16(255);
  std::uint64_t pending = 0;
  unsigned num_pending = 0;
  for (std::size_t k = 0; k < count; k += kLanes) {
    const __mmask32 valid = low_bits(count - k);
    const __m512i d = _mm512_maskz_loadu_epi16(valid, differences + k);
    const __mmask32 minus = _mm512_mask_cmpeq_epi16_mask(valid, d, minus_one);
    const __mmask32 unit = minus | _mm512_mask_cmpeq_epi16_mask(valid, d, plus_one);
    const __mmask32 flagged = valid & ~unit;
    std::memcpy(flags + k / 8, &flagged, 4);
    pending |= static_cast<std::uint64_t>(_pext_u32(minus, unit)) << num_pending;
    num_pending += static_cast<unsigned>(_mm_popcnt_u32(unit));
    if (num_pending >= 32) {
      std::memcpy(signs, &pending, 4);
      signs += 4;
      pending >>= 32;
      num_pending -= 32;
    }
    if (flagged != 0) {
      const __m512i sign = _mm512_srai_epi16(d, 15);
      const __m512i twice = _mm512_slli_epi16(d, 1);
      const __m512i coded = _mm512_sub_epi16(_mm512_xor_si512(twice, sign), _mm512_set1_epi16(3));
      const __m512i packed = _mm512_maskz_compress_epi16(flagged, coded);
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(small), _mm512_cvtusepi16_epi8(packed));
      small += _mm_popcnt_u32(flagged);
      const __mmask32 escaped = _mm512_mask_cmpge_epu16_mask(flagged, coded, escape);
      if (escaped != 0) {
        _mm512_storeu_si512(wide, _mm512_maskz_compress_epi16(escaped, d));
        wide += 2 * _mm_popcnt_u32(escaped);
      }
    }
  }
  std::memcpy(signs, &pending, 8);
  signs += (num_pending + 7) / 8;
  out.flags.grow((count + 7) / 8);
  out.signs.grow(static_cast<std::size_t>(signs - signs_begin));
  out.small.grow(static_cast<std::size_t>(small - small_begin));
  out.wide.grow(static_cast<std::size_t>(wide - wide_begin));
}

#endif  // ROSE_X86

template <typename T>
void put_values(const T* differences, std::size_t count, ValueStreams out) {
#ifdef ROSE_X86
  if constexpr (sizeof(T) == 2) {
    if (use_avx512) {
      return put_values_avx512(differences, count, out);
    }
    if (use_avx2) {
      return put_values_avx2(differences, count, out);
    }
  }
#endif
  put_values_portable(differences, count, out);
}

struct ValueReaders {
  Reader& flags;
  Reader& signs;
  Reader& small;
  Reader& wide;
};

// Reads one difference that is neither +1 nor -1; `coded` is its byte of `small`.
template <typename T>
T take_exception(std::uint8_t coded, Reader& wide) {
  T difference = unzigzag(static_cast<T>(static_cast<T>(coded) + 3));
  if (coded == 255) {
    std::memcpy(&difference, wide.take(sizeof(T)), sizeof(T));
  }
  if (difference == 0) {
    throw Malformed("a difference is zero");
  }
  return difference;
}

template <typename T>
void expand_values_portable(const std::uint8_t* flags, const std::uint8_t* signs, const std::uint8_t* small,
                            Reader& wide, std::size_t count, T* differences) {
  std::size_t units = 0;
  for (std::size_t k = 0; k < count; ++k) {  // no branch; `signs` may be read a byte past its end
    const unsigned minus = signs[units / 8] >> (units % 8) & 1U;
    differences[k] = static_cast<T>(1 - 2 * static_cast<int>(minus));
    units += ~(static_cast<unsigned>(flags[k / 8]) >> (k % 8)) & 1U;
  }
  for (std::size_t k = 0; k < count; k += 64) {
    std::uint64_t rest = 0;
    std::memcpy(&rest, flags + k / 8, std::min<std::size_t>(8, (count - k + 7) / 8));
    for (; rest != 0; rest &= rest - 1) {
      differences[k + static_cast<std::size_t>(std::countr_zero(rest))] = take_exception<T>(*small++, wide);
    }
  }
}

#ifdef ROSE_X86

// Reads the lanes of `d` that are set in `mask` from the front of `small` and `wide`.
ROSE_AVX512 inline __m512i put_exceptions(__m512i d, __mmask32 mask, const std::uint8_t*& small,
                                          Reader& wide) {
  const auto count = static_cast<std::size_t>(_mm_popcnt_u32(mask));
  const __m256i bytes = _mm256_maskz_expand_epi8(mask, _mm256_maskz_loadu_epi8(low_bits(count), small));
  small += count;
  const __m512i coded = _mm512_add_epi16(_mm512_cvtepu8_epi16(bytes), _mm512_set1_epi16(3));
  const __m512i one = _mm512_set1_epi16(1);
  const __m512i sign = _mm512_sub_epi16(_mm512_setzero_si512(), _mm512_and_si512(coded, one));
  d = _mm512_mask_mov_epi16(d, mask, _mm512_xor_si512(_mm512_srli_epi16(coded, 1), sign));
  const __mmask32 escaped = _mm512_mask_cmpeq_epi16_mask(mask, coded, _mm512_set1_epi16(255 + 3));
  if (escaped != 0) {
    const auto num_escaped = static_cast<std::size_t>(_mm_popcnt_u32(escaped));
    const __m512i raw = _mm512_maskz_loadu_epi16(low_bits(num_escaped), wide.take(2 * num_escaped));
    d = _mm512_mask_expand_epi16(d, escaped, raw);
    if (_mm512_mask_cmpeq_epi16_mask(escaped, d, _mm512_setzero_si512()) != 0) {
      throw Malformed("a difference is zero");
    }
  }
  return d;
}

// `flags` and `signs` must have 8 readable bytes behind their end.
ROSE_AVX512 inline void expand_values_avx512(const std::uint8_t* flags, const std::uint8_t* signs,
                                             const std::uint8_t* small, Reader& wide, std::size_t count,
                                             std::uint16_t* differences) {
  std::size_t units = 0;
  for (std::size_t k = 0; k < count; k += kLanes) {
    std::uint32_t flagged;
    std::memcpy(&flagged, flags + k / 8, 4);
    const std::uint32_t unit = low_bits(count - k) & ~flagged;
    std::uint64_t bits;
    std::memcpy(&bits, signs + units / 8, 8);
    const __mmask32 minus = _pdep_u32(static_cast<std::uint32_t>(bits >> (units % 8)), unit);
    units += static_cast<std::size_t>(_mm_popcnt_u32(unit));
    const __m512i units_only = _mm512_mask_mov_epi16(_mm512_set1_epi16(1), minus, _mm512_set1_epi16(-1));
    const __mmask32 exceptions = flagged & low_bits(count - k);
    const __m512i d = exceptions == 0 ? units_only : put_exceptions(units_only, exceptions, small, wide);
    _mm512_storeu_si512(differences + k, d);
  }
}

#endif  // ROSE_X86

inline std::size_t count_bits(const std::uint8_t* data, std::size_t size) {
  std::size_t total = 0;
  std::size_t i = 0;
  for (; i + 8 <= size; i += 8) {
    std::uint64_t word;
    std::memcpy(&word, data + i, 8);
    total += static_cast<std::size_t>(std::popcount(word));
  }
  for (; i < size; ++i) {
    total += static_cast<std::size_t>(std::popcount(data[i]));
  }
  return total;
}

inline void require_zero_padding(const char* name, const std::uint8_t* bytes, std::size_t num_bits) {
  if (num_bits % 8 != 0 && bytes[num_bits / 8] >> (num_bits % 8) != 0) {
    throw Malformed(std::string(name) + " are padded with ones");
  }
}

// Reads the next `count` differences; `differences` has room for a vector behind its end.
template <typename T>
void read_values(ValueReaders in, std::size_t count, T* differences) {
  const std::uint8_t* flags = in.flags.take((count + 7) / 8);
  require_zero_padding("flags", flags, count);
  const std::size_t flagged = count_bits(flags, (count + 7) / 8);
  const std::size_t units = count - flagged;
  const std::uint8_t* signs = in.signs.take((units + 7) / 8);
  require_zero_padding("signs", signs, units);
  const std::uint8_t* small = in.small.take(flagged);
#ifdef ROSE_X86
  if constexpr (sizeof(T) == 2) {
    if (use_avx512) {
      // The bytes are copied because whole words are read and the streams may end here.
      std::vector<std::uint8_t> words((count + 7) / 8 + (units + 7) / 8 + 16);
      std::uint8_t* sign_words = words.data() + (count + 7) / 8 + 8;
      std::memcpy(words.data(), flags, (count + 7) / 8);
      std::memcpy(sign_words, signs, (units + 7) / 8);
      return expand_values_avx512(words.data(), sign_words, small, in.wide, count, differences);
    }
  }
#endif
  expand_values_portable(flags, signs, small, in.wide, count, differences);
}

}  // namespace rose
