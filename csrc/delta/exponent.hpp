// Owns the exponent-context form of a sparse difference, for slow links. A step of fixed size changes small
// weights far more often than big ones, and the receiver holds the old weights. So every element belongs to a
// class by the exponent of its old bits, and a gap counts the unchanged elements of the same class:
//
//   class     0 for exponents >= top, 1 for top - 1, ..., 15 for top - 15 and below
//   head      u8 shift (mantissa bits), u8 top, u8 per class: 1 when its gaps are split, then u64 per class:
//             the number of its changes; 146 bytes
//   signs     those of all classes, one after the other, as in values.hpp; `wide` likewise
//   gaps[c]   whole gaps, or the low bytes of split ones; 255 = add 255 and read on
//   high[c]   the bits above the low byte of split gaps; 255 = add 255 and read on
//   flags[c], small[c]   the differences of the class
//
// decode() throws Malformed unless the streams fit the base they are read against.
#pragma once

#include "g8s.hpp"

namespace rose {
namespace exponent {

constexpr std::size_t kClasses = 16;
constexpr std::size_t kHeadBytes = 2 + kClasses + 8 * kClasses;
enum Part : std::size_t { HEAD = 0, SIGNS = 1, WIDE = 2, FIRST_CLASS = 3 };
enum ClassPart : std::size_t { GAPS, HIGH, FLAGS, SMALL, NUM_CLASS_PARTS };
constexpr std::size_t kNumStreams = FIRST_CLASS + kClasses * NUM_CLASS_PARTS;

constexpr std::size_t stream_of(std::size_t c, ClassPart part) {
  return FIRST_CLASS + c * NUM_CLASS_PARTS + part;
}

// Derives an element's class from its old bits.
template <typename T>
struct Context {
  unsigned shift;
  unsigned top;

  unsigned exponent(T bits) const {
    return static_cast<unsigned>(static_cast<T>(bits << 1) >> 1) >> shift;  // without the sign
  }
  unsigned class_of(T bits) const {
    const unsigned e = exponent(bits);
    return e >= top ? 0 : std::min<unsigned>(top - e, kClasses - 1);
  }
};

// The changes of one class: for each the number of its unchanged elements before it, and the difference.
template <typename T>
struct ClassChanges {
  Buffer<std::int32_t> gaps;
  Buffer<T> differences;
};

template <typename T>
using AllChanges = std::array<ClassChanges<T>, kClasses>;

// 32 elements by class: bit i of masks[c] is set when element i has class c; sizes[c] counts those.
struct Group {
  std::uint32_t masks[kClasses];
  std::int32_t sizes[kClasses];
};

template <typename T>
void group_portable(const T* bits, std::size_t count, Context<T> context, Group& group) {
  group = {};
  for (std::size_t i = 0; i < count; ++i) {
    const unsigned c = context.class_of(bits[i]);
    group.masks[c] |= 1U << i;
    ++group.sizes[c];
  }
}

#ifdef ROSE_X86

ROSE_AVX512 inline std::size_t group_avx512(const std::uint16_t* bits, std::size_t count,
                                            Context<std::uint16_t> context, Group* groups) {
  const __m512i no_sign = _mm512_set1_epi16(0x7FFF);
  const __m128i shift = _mm_cvtsi32_si128(static_cast<int>(context.shift));
  const __m512i top = _mm512_set1_epi16(static_cast<short>(context.top));
  const __m512i last = _mm512_set1_epi16(kClasses - 1);
  std::size_t i = 0;
  for (; i + kLanes <= count; i += kLanes, ++groups) {
    const __m512i e = _mm512_srl_epi16(_mm512_and_si512(_mm512_loadu_si512(bits + i), no_sign), shift);
    const __m512i classes = _mm512_min_epu16(_mm512_subs_epu16(top, e), last);
    for (std::size_t c = 0; c < kClasses; ++c) {
      const __mmask32 mask = _mm512_cmpeq_epi16_mask(classes, _mm512_set1_epi16(static_cast<short>(c)));
      groups->masks[c] = mask;
      groups->sizes[c] = _mm_popcnt_u32(mask);
    }
  }
  return i;
}

#endif  // ROSE_X86

template <typename T>
void group_block(const T* bits, std::size_t count, Context<T> context, Group* groups) {
  std::size_t i = 0;
#ifdef ROSE_X86
  if constexpr (sizeof(T) == 2) {
    if (use_avx512) {
      i = group_avx512(bits, count, context, groups);
    }
  }
#endif
  for (; i < count; i += kLanes) {
    group_portable(bits + i, std::min(kLanes, count - i), context, groups[i / kLanes]);
  }
}

// Returns a mask of a bit and all bits below it.
constexpr std::uint32_t through(std::uint32_t bit) { return bit | (bit - 1); }
constexpr std::uint32_t lowest(std::uint32_t bits) { return bits & (0 - bits); }

// Walks the old bits and counts, class by class, from change to change.
template <typename T>
AllChanges<T> split(const SparseDelta<T>& delta, const T* base, Context<T> context) {
  AllChanges<T> changes;
  std::int32_t skipped[kClasses] = {};
  std::vector<Group> groups(kBlock / kLanes);
  std::size_t at = 0;
  for (std::size_t block = 0; block < delta.counts.size(); ++block) {
    const std::size_t end = at + delta.counts[block];
    const std::size_t length = delta.block_length(block);
    group_block(base + block * kBlock, length, context, groups.data());
    for (std::size_t begin = 0; begin < length; begin += kLanes) {
      const Group& group = groups[begin / kLanes];
      const T* differences = delta.differences.data() + at;
      std::uint32_t changed = 0;
      for (; at < end && delta.places.data()[at] < begin + kLanes; ++at) {
        changed |= 1U << (delta.places.data()[at] - begin);
      }
      for (std::size_t c = 0; c < kClasses; ++c) {
        skipped[c] += group.sizes[c];
      }
      for (std::uint32_t rest = changed; rest != 0; rest &= rest - 1) {
        const std::uint32_t bit = lowest(rest);
        const unsigned c = context.class_of(base[block * kBlock + begin + std::countr_zero(bit)]);
        // Elements of its class that lie behind the change in this group don't count towards it.
        const int behind = std::popcount(group.masks[c] & ~through(bit));
        changes[c].gaps.push(skipped[c] - behind - 1);
        changes[c].differences.push(*differences++);
        skipped[c] = behind;
      }
    }
  }
  return changes;
}

// Walks the old bits and counts, class by class, down to the next change.
template <typename T>
class Merger {
 public:
  Merger(const AllChanges<T>& changes, Context<T> context) : changes_(changes), context_(context) {
    for (std::size_t c = 0; c < kClasses; ++c) {
      load(c);
    }
  }

  SparseDelta<T> merge(const T* base, std::size_t n) {
    SparseDelta<T> delta;
    delta.num_elements = n;
    std::vector<Group> groups(kBlock / kLanes);
    for (std::size_t begin = 0; begin < n; begin += kBlock) {
      const std::size_t length = std::min(kBlock, n - begin);
      group_block(base + begin, length, context_, groups.data());
      places_ = delta.places.reserve(length);
      differences_ = delta.differences.reserve(length);
      count_ = 0;
      for (std::size_t i = 0; i < length; i += kLanes) {
        step(groups[i / kLanes], i);
      }
      delta.counts.push_back(static_cast<std::uint32_t>(count_));
      delta.places.grow(count_);
      delta.differences.grow(count_);
    }
    for (std::size_t c = 0; c < kClasses; ++c) {
      if (used_[c] != changes_[c].gaps.size()) {
        throw Malformed("class " + std::to_string(c) + " has changes past its last element");
      }
    }
    return delta;
  }

 private:
  void load(std::size_t c) {
    left_[c] = used_[c] < changes_[c].gaps.size() ? changes_[c].gaps.data()[used_[c]] : kNone;
  }

  void step(const Group& group, std::size_t begin) {
    std::int32_t left[kClasses];
    std::int32_t any = 0;
    for (std::size_t c = 0; c < kClasses; ++c) {
      left[c] = left_[c] - group.sizes[c];
      any |= left[c];
    }
    if (any < 0) {
      return find(group, begin);
    }
    std::memcpy(left_, left, sizeof(left_));
  }

  // At least one element of the group changed.
  void find(const Group& group, std::size_t begin) {
    T found[kLanes];
    std::uint32_t changed = 0;
    for (std::size_t c = 0; c < kClasses; ++c) {
      std::uint32_t rest = group.masks[c];
      std::int32_t population = group.sizes[c];
      while (left_[c] < population) {
        for (std::int32_t i = 0; i < left_[c]; ++i) {
          rest &= rest - 1;
        }
        const std::uint32_t bit = lowest(rest);
        rest &= rest - 1;
        population -= left_[c] + 1;
        changed |= bit;
        found[std::countr_zero(bit)] = changes_[c].differences.data()[used_[c]++];
        load(c);
      }
      left_[c] -= population;
    }
    for (; changed != 0; changed &= changed - 1) {
      const auto lane = static_cast<unsigned>(std::countr_zero(changed));
      places_[count_] = static_cast<std::uint16_t>(begin + lane);
      differences_[count_++] = found[lane];
    }
  }

  // This is more than any array has, so that subtracting never makes it negative when no change is left.
  static constexpr std::int32_t kNone = 0x7FFFFFFF;

  const AllChanges<T>& changes_;
  Context<T> context_;
  std::int32_t left_[kClasses] = {};
  std::size_t used_[kClasses] = {};
  std::uint16_t* places_ = nullptr;
  T* differences_ = nullptr;
  std::size_t count_ = 0;
};

// Counts have 32 bits.
inline void require_length(std::size_t n) {
  if (n >= 0x7FFFFFFF) {
    throw Malformed("exponent context takes fewer than 2^31 elements, got " + std::to_string(n));
  }
}

// Returns the exponent that all but one in 512 of the old elements stay at or below.
template <typename T>
unsigned choose_top(const T* base, std::size_t n, unsigned shift) {
  constexpr std::size_t stride = 61;
  std::vector<std::size_t> histogram((std::size_t{1} << (8 * sizeof(T) - 1 - shift)), 0);
  const Context<T> context{shift, 0};
  std::size_t sampled = 0;
  for (std::size_t i = 0; i < n; i += stride) {
    ++histogram[context.exponent(base[i])];
    ++sampled;
  }
  std::size_t above = 0;
  std::size_t top = histogram.size() - 1;
  while (top > 0 && (above += histogram[top]) * 512 <= sampled) {
    --top;
  }
  return static_cast<unsigned>(top);
}

// Above this mean, gaps are split, because a whole gap would consist mostly of escapes.
constexpr std::uint64_t kSplitMean = 200;

template <typename T>
Streams encode(const SparseDelta<T>& delta, const T* base, unsigned shift) {
  require_length(delta.num_elements);
  const Context<T> context{shift, choose_top(base, delta.num_elements, shift)};
  const AllChanges<T> changes = split(delta, base, context);
  Streams streams(kNumStreams);
  std::uint8_t* head = streams[HEAD].reserve(kHeadBytes);
  streams[HEAD].grow(kHeadBytes);
  head[0] = static_cast<std::uint8_t>(shift);
  head[1] = static_cast<std::uint8_t>(context.top);
  for (std::size_t c = 0; c < kClasses; ++c) {
    const std::uint64_t count = changes[c].gaps.size();
    const std::int32_t* gaps = changes[c].gaps.data();
    std::uint64_t total = 0;
    for (std::size_t k = 0; k < count; ++k) {
      total += static_cast<std::uint32_t>(gaps[k]);
    }
    const bool is_split = total >= kSplitMean * count && count > 0;
    head[2 + c] = is_split;
    std::memcpy(head + 2 + kClasses + 8 * c, &count, 8);
    for (std::size_t k = 0; k < count; ++k) {
      const auto gap = static_cast<std::uint32_t>(gaps[k]);
      if (is_split) {
        streams[stream_of(c, GAPS)].push(static_cast<std::uint8_t>(gap));
        put_escaped(streams[stream_of(c, HIGH)], gap >> 8);
      } else {
        put_escaped(streams[stream_of(c, GAPS)], gap);
      }
    }
    put_values(changes[c].differences.data(), count,
               {streams[stream_of(c, FLAGS)], streams[SIGNS], streams[stream_of(c, SMALL)], streams[WIDE]});
  }
  return streams;
}

template <typename T>
ClassChanges<T> read_class(const Spans& spans, std::size_t c, std::uint64_t count, bool is_split,
                           std::size_t n, Reader& signs, Reader& wide) {
  if (count > n) {
    throw Malformed("class " + std::to_string(c) + " claims " + std::to_string(count) + " changes of " +
                    std::to_string(n) + " elements");
  }
  Reader gaps("gap", spans[stream_of(c, GAPS)]);
  Reader high("high", spans[stream_of(c, HIGH)]);
  Reader flags("flag", spans[stream_of(c, FLAGS)]);
  Reader small("small", spans[stream_of(c, SMALL)]);
  ClassChanges<T> changes;
  changes.gaps.reserve(count);
  for (std::uint64_t k = 0; k < count; ++k) {
    const std::uint64_t gap =
        is_split ? *gaps.take(1) + 256 * std::uint64_t{take_escaped(high)} : take_escaped(gaps);
    if (gap >= n) {
      throw Malformed("gap of " + std::to_string(gap) + " in " + std::to_string(n) + " elements");
    }
    changes.gaps.push(static_cast<std::int32_t>(gap));
  }
  T* differences = changes.differences.reserve(count);
  read_values({flags, signs, small, wide}, count, differences);
  changes.differences.grow(count);
  for (const Reader* reader : {&gaps, &high, &flags, &small}) {
    reader->require_end();
  }
  return changes;
}

// `base`: the old bits that the streams were made from.
template <typename T>
SparseDelta<T> decode(const Spans& spans, const T* base, std::size_t n) {
  require_length(n);
  const Span head = spans[HEAD];
  if (head.size != kHeadBytes || head.data[0] >= 8 * sizeof(T) - 1) {
    throw Malformed("exponent context has a head of " + std::to_string(head.size) + " bytes, need " +
                    std::to_string(kHeadBytes) + ", or a mantissa as wide as the element");
  }
  const Context<T> context{head.data[0], head.data[1]};
  Reader signs("sign", spans[SIGNS]);
  Reader wide("wide", spans[WIDE]);
  AllChanges<T> changes;
  for (std::size_t c = 0; c < kClasses; ++c) {
    std::uint64_t count;
    std::memcpy(&count, head.data + 2 + kClasses + 8 * c, 8);
    if (head.data[2 + c] > 1) {
      throw Malformed("class " + std::to_string(c) + " has gaps of unknown form");
    }
    changes[c] = read_class<T>(spans, c, count, head.data[2 + c] == 1, n, signs, wide);
  }
  signs.require_end();
  wide.require_end();
  return Merger<T>(changes, context).merge(base, n);
}

}  // namespace exponent
}  // namespace rose
