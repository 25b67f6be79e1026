// Owns the G8S form of a sparse difference: for each block of 64 Ki elements the places that changed and
// the wrap difference new - old (mod 2^n) of their raw bits, spread over six streams:
//
//   table   u32 per block: mode in the top 2 bits, number of changed elements below
//   gaps    mode GAP8:  one byte per change, unchanged elements skipped; 255 = skip 255 and read on
//           mode GAP16: all low bytes of the block, then all high bytes
//   flags   1 bit per change: set when the difference is neither +1 nor -1; padded to a byte per block
//   signs   1 bit per +-1 change: set when it is -1; padded to a byte per block
//   small   1 byte per flagged change: zigzag(difference) - 3; 255 = read it from `wide`
//   wide    raw little-endian differences: those escaped, and whole blocks of mode DENSE
//
// Promises: exact for every bit pattern (NaN, Inf, -0); walk() throws Malformed on any stream that is
// short, long or out of range, and calls `visit` only with positions inside the array.
// Never writes into the caller's arrays itself.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

namespace rose {

constexpr std::size_t kBlock = 65536;
constexpr std::uint32_t kModeShift = 30;
constexpr std::uint32_t kCountMask = (1U << kModeShift) - 1;
enum Mode : std::uint32_t { GAP8 = 0, GAP16 = 1, DENSE = 2 };
enum Stream : std::size_t { TABLE, GAPS, FLAGS, SIGNS, SMALL, WIDE, NUM_STREAMS };

struct Malformed : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct Span {
  const std::uint8_t* data = nullptr;
  std::size_t size = 0;
};
using Spans = std::array<Span, NUM_STREAMS>;
using Bytes = std::vector<std::uint8_t>;
using Streams = std::array<Bytes, NUM_STREAMS>;

template <typename T>
void append(Bytes& out, T value) {
  std::uint8_t raw[sizeof(T)];
  std::memcpy(raw, &value, sizeof(T));
  out.insert(out.end(), raw, raw + sizeof(T));
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

// True when 32 bytes are equal; most of a delta is, so this is the loop that sets the scan speed.
inline bool same32(const void* a, const void* b) {
  std::uint64_t x[4];
  std::uint64_t y[4];
  std::memcpy(x, a, 32);
  std::memcpy(y, b, 32);
  return ((x[0] ^ y[0]) | (x[1] ^ y[1]) | (x[2] ^ y[2]) | (x[3] ^ y[3])) == 0;
}

template <typename T>
struct Changes {
  std::vector<std::uint16_t> places = std::vector<std::uint16_t>(kBlock);
  std::vector<T> differences = std::vector<T>(kBlock);
  std::size_t count = 0;

  void scan(const T* before, const T* after, std::size_t n) {
    constexpr std::size_t step = 32 / sizeof(T);
    count = 0;
    std::size_t i = 0;
    for (; i + step <= n; i += step) {
      if (!same32(before + i, after + i)) {
        collect(before, after, i, i + step);
      }
    }
    collect(before, after, i, n);
  }

  void collect(const T* before, const T* after, std::size_t begin, std::size_t end) {
    for (std::size_t i = begin; i < end; ++i) {
      const T difference = static_cast<T>(after[i] - before[i]);
      places[count] = static_cast<std::uint16_t>(i);
      differences[count] = difference;
      count += difference != 0;  // branch-free: a changed element is a coin toss to the predictor
    }
  }
};

template <typename T>
class Encoder {
 public:
  Streams streams;

  void block(const Changes<T>& changes, std::size_t n) {
    const Cost cost = measure(changes);
    const std::size_t gap_bytes = std::min(cost.gap8, cost.gap16);
    const bool dense = gap_bytes + cost.values >= n * sizeof(T) && changes.count > 0;
    const Mode mode = dense ? DENSE : (cost.gap8 <= cost.gap16 ? GAP8 : GAP16);
    append(streams[TABLE], static_cast<std::uint32_t>(mode << kModeShift | changes.count));
    if (dense) {
      put_dense(changes, n);
      return;
    }
    mode == GAP8 ? put_gaps8(changes) : put_gaps16(changes);
    put_values(changes);
  }

 private:
  struct Cost {
    std::size_t gap8;
    std::size_t gap16;
    std::size_t values;
  };

  static Cost measure(const Changes<T>& changes) {
    std::size_t escapes = 0;
    std::size_t flagged = 0;
    std::size_t next = 0;
    for (std::size_t k = 0; k < changes.count; ++k) {
      escapes += (changes.places[k] - next) / 255;
      next = changes.places[k] + 1UL;
      flagged += !is_unit(changes.differences[k]);
    }
    const std::size_t values = changes.count / 4 + flagged * (sizeof(T) > 1 ? 2 : 1);
    return {changes.count + escapes, 2 * changes.count, values};
  }

  void put_dense(const Changes<T>& changes, std::size_t n) {
    Bytes& wide = streams[WIDE];
    const std::size_t start = wide.size();
    wide.resize(start + n * sizeof(T));
    for (std::size_t k = 0; k < changes.count; ++k) {
      std::memcpy(&wide[start + changes.places[k] * sizeof(T)], &changes.differences[k], sizeof(T));
    }
  }

  void put_gaps8(const Changes<T>& changes) {
    Bytes& gaps = streams[GAPS];
    std::size_t next = 0;
    for (std::size_t k = 0; k < changes.count; ++k) {
      std::size_t gap = changes.places[k] - next;
      for (; gap >= 255; gap -= 255) {
        gaps.push_back(255);
      }
      gaps.push_back(static_cast<std::uint8_t>(gap));
      next = changes.places[k] + 1UL;
    }
  }

  void put_gaps16(const Changes<T>& changes) {
    Bytes& gaps = streams[GAPS];
    const std::size_t start = gaps.size();
    gaps.resize(start + 2 * changes.count);
    std::size_t next = 0;
    for (std::size_t k = 0; k < changes.count; ++k) {
      const std::size_t gap = changes.places[k] - next;
      gaps[start + k] = static_cast<std::uint8_t>(gap);
      gaps[start + changes.count + k] = static_cast<std::uint8_t>(gap >> 8);
      next = changes.places[k] + 1UL;
    }
  }

  void put_values(const Changes<T>& changes) {
    Bytes& flags = streams[FLAGS];
    Bytes& signs = streams[SIGNS];
    const std::size_t flag_start = flags.size();
    const std::size_t sign_start = signs.size();
    flags.resize(flag_start + (changes.count + 7) / 8);
    signs.resize(sign_start + (changes.count + 7) / 8);
    std::size_t units = 0;
    for (std::size_t k = 0; k < changes.count; ++k) {
      const T difference = changes.differences[k];
      if (is_unit(difference)) {
        const unsigned minus = difference != static_cast<T>(1);
        signs[sign_start + units / 8] |= static_cast<std::uint8_t>(minus << (units % 8));
        ++units;
      } else {
        flags[flag_start + k / 8] |= static_cast<std::uint8_t>(1U << (k % 8));
        put_exception(difference);
      }
    }
    signs.resize(sign_start + (units + 7) / 8);
  }

  void put_exception(T difference) {
    const T coded = static_cast<T>(zigzag(difference) - 3);
    if (coded < 255) {
      streams[SMALL].push_back(static_cast<std::uint8_t>(coded));
    } else {
      streams[SMALL].push_back(255);
      append(streams[WIDE], difference);
    }
  }
};

// Reads the six streams back; every step is checked against the stream's end and the block's length.
template <typename T>
class Walker {
 public:
  Walker(const Spans& spans, std::size_t n) : spans_(spans), n_(n) {
    const std::size_t blocks = (n + kBlock - 1) / kBlock;
    if (spans[TABLE].size != blocks * sizeof(std::uint32_t)) {
      throw Malformed("block table holds " + std::to_string(spans[TABLE].size) + " bytes, " +
                      std::to_string(n) + " elements need " + std::to_string(blocks * sizeof(std::uint32_t)));
    }
  }

  // Calls visit(position, difference) in rising order of position; returns the number of changes.
  template <typename Visit>
  std::size_t walk(Visit&& visit) {
    std::size_t total = 0;
    for (std::size_t begin = 0; begin < n_; begin += kBlock) {
      const std::size_t length = std::min(kBlock, n_ - begin);
      std::uint32_t entry;
      std::memcpy(&entry, take(TABLE, sizeof(entry)), sizeof(entry));
      const std::size_t count = entry & kCountMask;
      if (count > length) {
        throw Malformed("block at element " + std::to_string(begin) + " claims " + std::to_string(count) +
                        " changes in " + std::to_string(length));
      }
      block(entry >> kModeShift, begin, length, count, visit);
      total += count;
    }
    for (std::size_t s = 0; s < NUM_STREAMS; ++s) {
      if (at_[s] != spans_[s].size) {
        throw Malformed("stream " + std::to_string(s) + " has " + std::to_string(spans_[s].size - at_[s]) +
                        " bytes left over");
      }
    }
    return total;
  }

 private:
  template <typename Visit>
  void block(std::uint32_t mode, std::size_t begin, std::size_t length, std::size_t count, Visit& visit) {
    switch (mode) {
      case GAP8:
        return sparse(begin, length, count, visit, [this](std::size_t) { return gap8(); });
      case GAP16: {
        const std::uint8_t* low = take(GAPS, 2 * count);
        return sparse(begin, length, count, visit, [low, count](std::size_t k) {
          return static_cast<std::size_t>(low[k]) | static_cast<std::size_t>(low[count + k]) << 8;
        });
      }
      case DENSE:
        return dense(begin, length, count, visit);
      default:
        throw Malformed("block at element " + std::to_string(begin) + " has unknown mode " +
                        std::to_string(mode));
    }
  }

  template <typename Visit, typename NextGap>
  void sparse(std::size_t begin, std::size_t length, std::size_t count, Visit& visit, NextGap&& next_gap) {
    const std::uint8_t* flags = take(FLAGS, (count + 7) / 8);
    std::size_t place = 0;
    unsigned sign_bits = 0;
    std::size_t units = 0;
    for (std::size_t k = 0; k < count; ++k) {
      place += next_gap(k);
      if (place >= length) {
        throw Malformed("change at place " + std::to_string(place) + " of a block of " +
                        std::to_string(length) + " elements");
      }
      T difference;
      if (flags[k / 8] >> (k % 8) & 1) {
        difference = exception();
      } else {
        sign_bits = units % 8 == 0 ? *take(SIGNS, 1) : sign_bits >> 1;
        difference = static_cast<T>(sign_bits & 1 ? -1 : 1);
        ++units;
      }
      visit(begin + place, difference);
      ++place;
    }
  }

  template <typename Visit>
  void dense(std::size_t begin, std::size_t length, std::size_t count, Visit& visit) {
    const std::uint8_t* raw = take(WIDE, length * sizeof(T));
    std::size_t seen = 0;
    for (std::size_t i = 0; i < length; ++i) {
      T difference;
      std::memcpy(&difference, raw + i * sizeof(T), sizeof(T));
      if (difference != 0) {
        ++seen;
        visit(begin + i, difference);
      }
    }
    if (seen != count) {
      throw Malformed("dense block holds " + std::to_string(seen) + " changes, its table says " +
                      std::to_string(count));
    }
  }

  std::size_t gap8() {
    std::size_t gap = 0;
    for (;;) {
      const std::uint8_t byte = *take(GAPS, 1);
      gap += byte;
      if (byte != 255) {
        return gap;
      }
    }
  }

  T exception() {
    const std::uint8_t coded = *take(SMALL, 1);
    if (coded != 255) {
      return unzigzag(static_cast<T>(static_cast<T>(coded) + 3));
    }
    T difference;
    std::memcpy(&difference, take(WIDE, sizeof(T)), sizeof(T));
    return difference;
  }

  const std::uint8_t* take(Stream stream, std::size_t size) {
    if (spans_[stream].size - at_[stream] < size) {
      throw Malformed("stream " + std::to_string(stream) + " ends at byte " +
                      std::to_string(spans_[stream].size) + ", need " + std::to_string(at_[stream] + size));
    }
    const std::uint8_t* here = spans_[stream].data + at_[stream];
    at_[stream] += size;
    return here;
  }

  const Spans& spans_;
  std::size_t n_;
  std::array<std::size_t, NUM_STREAMS> at_{};
};

}  // namespace rose
