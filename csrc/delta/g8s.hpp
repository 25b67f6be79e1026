// Owns the G8S form of a sparse difference: block after block of 64 Ki elements, over seven streams:
//
//   table   u32 per block: mode in the top 2 bits, number of changed elements below
//   gaps    mode GAP8:  one byte per change, unchanged elements skipped; 255 = skip 255 and read on
//           mode GAP16: the low byte of each gap
//   high    mode GAP16: the high byte of each gap
//   flags, signs, small, wide   the differences, see values.hpp; mode DENSE: all of the block's in `wide`
//
// Each stream has one kind of byte, so that an entropy coder sees one distribution.
// decode() throws Malformed on any stream that is short, long or out of range, and what it returns lies
// inside the array.
#pragma once

#include <array>

#include "values.hpp"

namespace rose {

constexpr std::uint32_t kModeShift = 30;
constexpr std::uint32_t kCountMask = (1U << kModeShift) - 1;
enum Mode : std::uint32_t { GAP8 = 0, GAP16 = 1, DENSE = 2 };
enum Stream : std::size_t { TABLE, GAPS, HIGH, FLAGS, SIGNS, SMALL, WIDE, NUM_STREAMS };

using Spans = std::vector<Span>;
using Streams = std::vector<Bytes>;

namespace g8s {

inline std::uint8_t* gaps8_portable(const std::uint16_t* places, std::size_t begin, std::size_t end,
                                    std::uint8_t* out) {
  for (std::size_t k = begin; k < end; ++k) {
    std::size_t gap = k > 0 ? places[k] - places[k - 1] - 1UL : places[k];
    const bool is_far = gap >= 255;  // no branch for the first escape, because it is unpredictable
    *out = 255;
    out += is_far;
    gap -= is_far ? 255 : 0;
    for (; gap >= 255; gap -= 255) {
      *out++ = 255;
    }
    *out++ = static_cast<std::uint8_t>(gap);
  }
  return out;
}

inline void gaps16_portable(const std::uint16_t* places, std::size_t begin, std::size_t end,
                            std::uint8_t* low, std::uint8_t* high) {
  for (std::size_t k = begin; k < end; ++k) {
    const std::size_t gap = k > 0 ? places[k] - places[k - 1] - 1UL : places[k];
    low[k] = static_cast<std::uint8_t>(gap);
    high[k] = static_cast<std::uint8_t>(gap >> 8);
  }
}

#ifdef ROSE_X86

ROSE_AVX512 inline __m512i gaps_at(const std::uint16_t* places, std::size_t k) {
  const __m512i here = _mm512_loadu_si512(places + k);
  const __m512i before = _mm512_loadu_si512(places + k - 1);
  return _mm512_sub_epi16(_mm512_sub_epi16(here, before), _mm512_set1_epi16(1));
}

ROSE_AVX512 inline std::uint8_t* gaps8_avx512(const std::uint16_t* places, std::size_t count,
                                              std::uint8_t* out) {
  const __m512i escape = _mm512_set1_epi16(255);
  std::size_t k = std::min<std::size_t>(count, 1);
  out = gaps8_portable(places, 0, k, out);
  for (; k + kLanes <= count; k += kLanes) {
    const __m512i gap = gaps_at(places, k);
    const __mmask32 far = _mm512_cmpge_epu16_mask(gap, escape);
    if (far == 0) {
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), _mm512_cvtepi16_epi8(gap));
      out += kLanes;
    } else if (_mm512_cmpge_epu16_mask(gap, _mm512_set1_epi16(510)) != 0) {
      out = gaps8_portable(places, k, k + kLanes, out);
    } else {
      // Each lane has two bytes: an escape, kept where the gap needs one, and the rest of the gap.
      const __m512i rest = _mm512_mask_sub_epi16(gap, far, gap, escape);
      const __m512i pairs = _mm512_or_si512(_mm512_slli_epi16(rest, 8), escape);
      const __mmask64 keep = 0xAAAAAAAAAAAAAAAAULL | _pdep_u64(far, 0x5555555555555555ULL);
      _mm512_storeu_si512(out, _mm512_maskz_compress_epi8(keep, pairs));
      out += kLanes + static_cast<std::size_t>(_mm_popcnt_u32(far));
    }
  }
  return gaps8_portable(places, k, count, out);
}

ROSE_AVX512 inline void gaps16_avx512(const std::uint16_t* places, std::size_t count, std::uint8_t* low,
                                      std::uint8_t* high) {
  std::size_t k = std::min<std::size_t>(count, 1);
  gaps16_portable(places, 0, k, low, high);
  for (; k + kLanes <= count; k += kLanes) {
    const __m512i gap = gaps_at(places, k);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(low + k), _mm512_cvtepi16_epi8(gap));
    const __m512i top = _mm512_srli_epi16(gap, 8);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(high + k), _mm512_cvtepi16_epi8(top));
  }
  gaps16_portable(places, k, count, low, high);
}

#endif  // ROSE_X86

inline void put_gaps8(const std::uint16_t* places, std::size_t count, Bytes& gaps) {
  std::uint8_t* begin = gaps.reserve(count + kBlock / 255 + 1);
#ifdef ROSE_X86
  if (use_avx512) {
    return gaps.grow(static_cast<std::size_t>(gaps8_avx512(places, count, begin) - begin));
  }
#endif
  gaps.grow(static_cast<std::size_t>(gaps8_portable(places, 0, count, begin) - begin));
}

inline void put_gaps16(const std::uint16_t* places, std::size_t count, Bytes& gaps, Bytes& highs) {
  std::uint8_t* low = gaps.reserve(count);
  std::uint8_t* high = highs.reserve(count);
#ifdef ROSE_X86
  if (use_avx512) {
    gaps16_avx512(places, count, low, high);
  } else
#endif
  {
    gaps16_portable(places, 0, count, low, high);
  }
  gaps.grow(count);
  highs.grow(count);
}

template <typename T>
void put_dense(const std::uint16_t* places, const T* differences, std::size_t count, std::size_t length,
               Bytes& wide) {
  std::uint8_t* raw = wide.reserve(length * sizeof(T));
  std::memset(raw, 0, length * sizeof(T));
  for (std::size_t k = 0; k < count; ++k) {
    std::memcpy(raw + places[k] * sizeof(T), differences + k, sizeof(T));
  }
  wide.grow(length * sizeof(T));
}

template <typename T>
std::size_t value_bytes(const T* differences, std::size_t count) {
  std::size_t flagged = 0;
  for (std::size_t k = 0; k < count; ++k) {
    flagged += !is_unit(differences[k]);
  }
  return count / 4 + flagged * (sizeof(T) > 1 ? 2 : 1);
}

// Returns the size of the gaps as GAP8, too small by at most a byte per escape.
inline std::size_t gap8_bytes(const std::uint16_t* places, std::size_t count) {
  std::size_t escapes = count > 0 ? places[0] / 255 : 0;
  for (std::size_t k = 1; k < count; ++k) {
    // This is floor(gap / 255) for all but the longest gaps, in 16 bits, so that the compiler can use
    // vectors.
    const auto distance = static_cast<std::uint16_t>(places[k] - places[k - 1]);
    escapes += static_cast<std::uint32_t>(distance) * 257 >> 16;
  }
  return count + escapes;
}

template <typename T>
Streams encode(const SparseDelta<T>& delta) {
  Streams streams(NUM_STREAMS);
  std::size_t at = 0;
  for (std::size_t block = 0; block < delta.counts.size(); ++block) {
    const std::size_t count = delta.counts[block];
    const std::size_t length = delta.block_length(block);
    const std::uint16_t* places = delta.places.data() + at;
    const T* differences = delta.differences.data() + at;
    at += count;
    const std::size_t as_gap8 = gap8_bytes(places, count);
    Mode mode = as_gap8 <= 2 * count ? GAP8 : GAP16;
    // The size of the values is computed only where it can matter.
    const std::size_t gap_bytes = std::min(as_gap8, 2 * count);
    if (count * 2 > length && gap_bytes + value_bytes(differences, count) >= length * sizeof(T)) {
      mode = DENSE;
    }
    const std::uint32_t entry = mode << kModeShift | static_cast<std::uint32_t>(count);
    std::memcpy(streams[TABLE].reserve(sizeof(entry)), &entry, sizeof(entry));
    streams[TABLE].grow(sizeof(entry));
    if (mode == DENSE) {
      put_dense(places, differences, count, length, streams[WIDE]);
      continue;
    }
    mode == GAP8 ? put_gaps8(places, count, streams[GAPS])
                 : put_gaps16(places, count, streams[GAPS], streams[HIGH]);
    put_values(differences, count, {streams[FLAGS], streams[SIGNS], streams[SMALL], streams[WIDE]});
  }
  return streams;
}

// The state of reading a block's GAP8 bytes.
struct GapCursor {
  std::size_t used = 0;  // bytes
  std::size_t next = 0;  // the first place that a change may have
  std::size_t k = 0;     // changes
};

#ifdef ROSE_X86

// Returns the sums of the first 1, 2, ... 32 lanes, modulo 2^16.
ROSE_AVX512 inline __m512i running_sums(__m512i x) {
  x = _mm512_add_epi16(x, _mm512_bslli_epi128(x, 2));
  x = _mm512_add_epi16(x, _mm512_bslli_epi128(x, 4));
  x = _mm512_add_epi16(x, _mm512_bslli_epi128(x, 8));
  // Each quarter's total is its last lane; the next quarter gets it, then the upper half the lower one's.
  const __m512i begin = _mm512_and_si512(iota16(), _mm512_set1_epi16(static_cast<short>(0xFFF8)));
  const __m512i last = _mm512_sub_epi16(begin, _mm512_set1_epi16(1));
  x = _mm512_mask_add_epi16(x, 0xFF00FF00U, x, _mm512_permutexvar_epi16(last, x));
  return _mm512_mask_add_epi16(x, 0xFFFF0000U, x, _mm512_permutexvar_epi16(_mm512_set1_epi16(15), x));
}

// Reads 32 bytes at a time, as long as they can't hold more than `count` changes. `places` has room for a
// vector behind its end.
ROSE_AVX512 inline void expand_gaps8_avx512(const std::uint8_t* bytes, std::size_t size, std::size_t count,
                                            std::uint16_t* places, GapCursor& at) {
  const __m512i escape = _mm512_set1_epi16(255);
  const __m512i one = _mm512_set1_epi16(1);
  while (at.k + kLanes <= count && at.used + kLanes <= size) {
    const __m512i gap =
        _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(bytes + at.used)));
    const __mmask32 is_last = _mm512_cmpneq_epi16_mask(gap, escape);
    const __m512i sums = running_sums(_mm512_mask_add_epi16(gap, is_last, gap, one));
    const __m512i start = _mm512_set1_epi16(static_cast<short>(at.next - 1));
    _mm512_storeu_si512(places + at.k, _mm512_maskz_compress_epi16(is_last, _mm512_add_epi16(start, sums)));
    const __m128i top = _mm512_extracti32x4_epi32(sums, 3);
    at.next += static_cast<std::uint16_t>(_mm_extract_epi16(top, 7));
    at.k += static_cast<std::size_t>(_mm_popcnt_u32(is_last));
    at.used += kLanes;
  }
}

#endif  // ROSE_X86

// Reads the streams back.
template <typename T>
class Decoder {
 public:
  Decoder(const Spans& spans, std::size_t n)
      : table_("table", spans[TABLE]),
        gaps_("gap", spans[GAPS]),
        high_("high", spans[HIGH]),
        flags_("flag", spans[FLAGS]),
        signs_("sign", spans[SIGNS]),
        small_("small", spans[SMALL]),
        wide_("wide", spans[WIDE]) {
    delta_.num_elements = n;
  }

  SparseDelta<T> decode() {
    const std::size_t num_blocks = (delta_.num_elements + kBlock - 1) / kBlock;
    delta_.counts.reserve(num_blocks);
    reserve_changes(num_blocks);
    for (std::size_t block = 0; block < num_blocks; ++block) {
      std::uint32_t entry;
      std::memcpy(&entry, table_.take(sizeof(entry)), sizeof(entry));
      read_block(block, entry >> kModeShift, entry & kCountMask);
    }
    for (const Reader* reader : {&table_, &gaps_, &high_, &flags_, &signs_, &small_, &wide_}) {
      reader->require_end();
    }
    return std::move(delta_);
  }

 private:
  // Makes room for what the table claims. A claim past the array is refused where its block is read.
  void reserve_changes(std::size_t num_blocks) {
    Reader table = table_;
    std::size_t total = 0;
    for (std::size_t block = 0; block < num_blocks && table.left() >= sizeof(std::uint32_t); ++block) {
      std::uint32_t entry;
      std::memcpy(&entry, table.take(sizeof(entry)), sizeof(entry));
      total += std::min<std::size_t>(entry & kCountMask, kBlock);
    }
    total = std::min(total, delta_.num_elements);
    delta_.places.reserve(total);
    delta_.differences.reserve(total);
  }

  void read_block(std::size_t block, std::uint32_t mode, std::size_t count) {
    const std::size_t length = delta_.block_length(block);
    if (count > length) {
      throw Malformed("block " + std::to_string(block) + " claims " + std::to_string(count) + " changes in " +
                      std::to_string(length));
    }
    std::uint16_t* places = delta_.places.reserve(count);
    T* differences = delta_.differences.reserve(count);
    if (mode == DENSE) {
      read_dense(block, length, count, places, differences);
    } else if (mode == GAP8 || mode == GAP16) {
      const std::size_t end = mode == GAP8 ? read_gaps8(count, places) : read_gaps16(count, places);
      if (end > length) {
        throw Malformed("change at place " + std::to_string(end - 1) + " of block " + std::to_string(block) +
                        " with " + std::to_string(length) + " elements");
      }
      read_values({flags_, signs_, small_, wide_}, count, differences);
    } else {
      throw Malformed("block " + std::to_string(block) + " has unknown mode " + std::to_string(mode));
    }
    delta_.counts.push_back(static_cast<std::uint32_t>(count));
    delta_.places.grow(count);
    delta_.differences.grow(count);
  }

  // Both return the place behind the last change. A place past 65535 wraps in `places`, never in `next`.
  std::size_t read_gaps8(std::size_t count, std::uint16_t* places) {
    // At most this many bytes belong to the block: with more escapes the place would leave the block.
    const std::size_t most = std::min(gaps_.left(), count + kBlock / 255 + 1);
    const std::uint8_t* bytes = gaps_.take(0);
    GapCursor at;
#ifdef ROSE_X86
    if (use_avx512) {
      expand_gaps8_avx512(bytes, most, count, places, at);
    }
#endif
    auto [used, next, k] = at;
    while (k < count && used < most) {
      const std::uint8_t byte = bytes[used++];
      places[k] = static_cast<std::uint16_t>(next + byte);
      const std::size_t is_last = byte != 255;  // no branch, because escapes are unpredictable
      next += byte + is_last;
      k += is_last;
    }
    if (k < count) {
      throw Malformed("gap stream ends " + std::to_string(count - k) + " changes early");
    }
    gaps_.take(used);
    return next;
  }

  std::size_t read_gaps16(std::size_t count, std::uint16_t* places) {
    const std::uint8_t* low = gaps_.take(count);
    const std::uint8_t* high = high_.take(count);
    std::size_t next = 0;
    for (std::size_t k = 0; k < count; ++k) {
      next += low[k] + 256UL * high[k];
      places[k] = static_cast<std::uint16_t>(next);
      ++next;
    }
    return next;
  }

  void read_dense(std::size_t block, std::size_t length, std::size_t count, std::uint16_t* places,
                  T* differences) {
    const std::uint8_t* raw = wide_.take(length * sizeof(T));
    std::size_t seen = 0;
    for (std::size_t i = 0; i < length; ++i) {
      T difference;
      std::memcpy(&difference, raw + i * sizeof(T), sizeof(T));
      if (difference != 0 && seen < count) {
        places[seen] = static_cast<std::uint16_t>(i);
        differences[seen] = difference;
      }
      seen += difference != 0;
    }
    if (seen != count) {
      throw Malformed("dense block " + std::to_string(block) + " holds " + std::to_string(seen) +
                      " changes, its table says " + std::to_string(count));
    }
  }

  Reader table_;
  Reader gaps_;
  Reader high_;
  Reader flags_;
  Reader signs_;
  Reader small_;
  Reader wide_;
  SparseDelta<T> delta_;
};

}  // namespace g8s
}  // namespace rose
