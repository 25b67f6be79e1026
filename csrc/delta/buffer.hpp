// Owns growing arrays that are not zeroed, with room behind the end for a vector store. Memory that they free
// is kept for the next arrays: in a virtual machine a fresh page costs more than all work on its contents.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <mutex>
#include <new>
#include <utility>
#include <vector>

namespace rose {

struct Chunk {
  void* data = nullptr;
  std::size_t bytes = 0;
};

// Chunks that no buffer uses. Any thread may take them.
class SpareMemory {
 public:
  // Never destroyed, because Python may free buffers after everything else.
  static SpareMemory& shared() {
    static auto* const memory = new SpareMemory();
    return *memory;
  }

  // Returns a chunk of at least `bytes` that begins with the first `kept` bytes of this one, which it takes
  // back. Throws bad_alloc.
  Chunk resize(Chunk chunk, std::size_t kept, std::size_t bytes) {
    const Chunk spare = bytes >= kWorthKeeping ? take_spare(bytes) : Chunk{};
    if (spare.data != nullptr) {
      std::copy_n(static_cast<const char*>(chunk.data), kept, static_cast<char*>(spare.data));
      give_back(chunk);
      return spare;
    }
    void* const moved = std::realloc(chunk.data, bytes);  // moves the pages of a large chunk without copying
    if (moved == nullptr) {
      throw std::bad_alloc();
    }
    return {moved, bytes};
  }

  void give_back(Chunk chunk) noexcept {
    if (chunk.bytes >= kWorthKeeping) {
      const std::lock_guard lock(mutex_);
      if (spares_.size() < kMostSpares && bytes_ + chunk.bytes <= kMostBytes) {
        spares_.push_back(chunk);  // never allocates: room for all was reserved
        bytes_ += chunk.bytes;
        return;
      }
    }
    std::free(chunk.data);
  }

 private:
  static constexpr std::size_t kWorthKeeping = std::size_t{64} << 10;
  static constexpr std::size_t kMostBytes = std::size_t{128} << 20;
  static constexpr std::size_t kMostSpares = 32;
  static constexpr std::size_t kMostTimesTooBig = 4;

  SpareMemory() { spares_.reserve(kMostSpares); }

  // Returns the smallest chunk that fits, or none.
  Chunk take_spare(std::size_t bytes) {
    const std::lock_guard lock(mutex_);
    auto best = spares_.end();
    for (auto spare = spares_.begin(); spare != spares_.end(); ++spare) {
      const bool fits = spare->bytes >= bytes && spare->bytes <= kMostTimesTooBig * bytes;
      if (fits && (best == spares_.end() || spare->bytes < best->bytes)) {
        best = spare;
      }
    }
    if (best == spares_.end()) {
      return {};
    }
    const Chunk chunk = *best;
    *best = spares_.back();
    spares_.pop_back();
    bytes_ -= chunk.bytes;
    return chunk;
  }

  std::mutex mutex_;
  std::vector<Chunk> spares_;
  std::size_t bytes_ = 0;
};

template <typename T>
class Buffer {
 public:
  Buffer() = default;
  Buffer(Buffer&& other) noexcept
      : chunk_(std::exchange(other.chunk_, {})), size_(std::exchange(other.size_, 0)) {}
  Buffer& operator=(Buffer&& other) noexcept {
    std::swap(chunk_, other.chunk_);
    std::swap(size_, other.size_);
    return *this;
  }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer() { SpareMemory::shared().give_back(chunk_); }

  const T* data() const { return static_cast<const T*>(chunk_.data); }
  T* data() { return static_cast<T*>(chunk_.data); }
  std::size_t size() const { return size_; }

  // Returns the place behind the last element, with room for `more` elements and a vector. The caller then
  // calls grow() with the number that it wrote. Valid until the next reserve().
  T* reserve(std::size_t more) {
    const std::size_t need = size_ + more;
    if ((need + kBehind) * sizeof(T) > chunk_.bytes) {
      const std::size_t bytes = (need + need / 2 + kBehind) * sizeof(T);
      chunk_ = SpareMemory::shared().resize(chunk_, size_ * sizeof(T), bytes);
    }
    return data() + size_;
  }
  void grow(std::size_t added) { size_ += added; }

  void push(T value) {
    *reserve(1) = value;
    ++size_;
  }

 private:
  static constexpr std::size_t kBehind = 64;

  Chunk chunk_;
  std::size_t size_ = 0;
};

using Bytes = Buffer<std::uint8_t>;

}  // namespace rose
