// Owns writing a sparse difference into the bits that it was made for, the change of the state hash, and
// notes of what changed. Exact for every bit pattern. add() with is_reverse undoes add(). Vectors and
// portable code give the same bits and sums. Never checks that the bits are the right ones; hashes do that.
//
// Writing waits for memory, hashing waits for the multiplier. So one pass of the loop writes eight changes,
// hashes an earlier eight, and prefetches the memory of later ones:
//
//   changes   ... | hashed | 32 written before | written | 96 being fetched | prefetched | ... next block's
#pragma once

#include "sparse.hpp"

namespace rose {

// Writes one change, and notes the bits before and after for the hash.
template <typename T>
struct Adder {
  T* data;
  const std::uint16_t* places;
  const T* differences;
  T* before;
  T* after;
  T flip;  // (d ^ -1) + 1 is -d

  void operator()(std::size_t k) const {
    const T old = data[places[k]];
    before[k] = old;
    data[places[k]] = after[k] = static_cast<T>(old + static_cast<T>((differences[k] ^ flip) - flip));
  }
};

// The number of changes being fetched from memory, and the number that portable code writes before it hashes
// them.
constexpr std::size_t kAskAhead = 128;
constexpr std::size_t kHashAtOnce = 32;

// Prefetches the memory of the change that is `ahead` changes behind the block's begin, which may lie in the
// next block. num_left: the changes of this block and of the next one.
template <typename T>
inline void ask(const Adder<T>& add_one, std::size_t ahead, std::size_t count, std::size_t num_left) {
  if (ahead < num_left) {
    prefetch((ahead < count ? add_one.data : add_one.data + kBlock) + add_one.places[ahead]);
  }
}

#ifdef ROSE_X86

// The number of changes that leave the store buffer before the hash reads them as vectors.
constexpr std::size_t kHashBehind = 32;

// Adds all but the last count % 8 changes of a block; returns how many those are. num_left: the changes of
// this block and of the next one, whose places and elements follow this one's.
template <typename T>
ROSE_AVX512 std::size_t add_block_avx512(const Adder<T> add_one, std::size_t count, std::size_t num_left,
                                         std::uint64_t first_index, StateHash& change) {
  ChangeSum sum(first_index);
  std::size_t k = 0;
  std::size_t hashed = 0;
  const auto hash = [&]() ROSE_AVX512 {
    sum.add8(add_one.places + hashed, add_one.before + hashed, add_one.after + hashed);
    hashed += 8;
  };
  for (; k + 8 <= count; k += 8) {
    const std::size_t asked = k + kAskAhead;
    if (asked + 8 <= num_left) {
      const T* const ahead = asked < count ? add_one.data : add_one.data + kBlock;
      for (std::size_t i = 0; i < 8; ++i) {
        prefetch(ahead + add_one.places[asked + i]);
      }
    }
    for (std::size_t i = 0; i < 8; ++i) {
      add_one(k + i);
    }
    if (k >= kHashBehind) {
      hash();
    }
  }
  while (hashed < k) {
    hash();
  }
  change.add(sum.total());
  return k;
}

#endif  // ROSE_X86

// Where to note all changes, in order: their places in the vector, and the bits before and after.
template <typename T>
struct Notes {
  std::int32_t* places;
  T* before;
  T* after;
};

// Adds the differences in place (or takes them away again); returns the change of the state hash.
template <typename T>
StateHash add(const SparseDelta<T>& delta, T* base, std::uint64_t first_index, bool is_reverse,
              const Notes<T>* notes = nullptr) {
  StateHash change;
  Values<T> values;
  for_each_block(
      delta, [&](std::size_t block, const std::uint16_t* places, const T* differences, std::size_t count) {
        const std::uint64_t first = first_index + block * kBlock;
        const auto noted = static_cast<std::size_t>(places - delta.places.data());
        T* const before = notes != nullptr ? notes->before + noted : values.before;
        T* const after = notes != nullptr ? notes->after + noted : values.after;
        const T flip = is_reverse ? static_cast<T>(-1) : static_cast<T>(0);
        const Adder<T> add_one{base + block * kBlock, places, differences, before, after, flip};
        const std::size_t num_next = block + 1 < delta.counts.size() ? delta.counts[block + 1] : 0;
        std::size_t k = 0;
#ifdef ROSE_X86
        if (use_avx512) {
          k = add_block_avx512(add_one, count, count + num_next, first, change);
        }
#endif
        while (k < count) {
          const std::size_t begin = k;
          for (const std::size_t end = std::min(count, k + kHashAtOnce); k < end; ++k) {
            ask(add_one, k + kAskAhead, count, count + num_next);
            add_one(k);
          }
          change.add(hash_change(places + begin, before + begin, after + begin, k - begin, first));
        }
        for (k = 0; notes != nullptr && k < count; ++k) {
          notes->places[noted + k] = static_cast<std::int32_t>(block * kBlock + places[k]);
        }
      });
  return change;
}

}  // namespace rose
