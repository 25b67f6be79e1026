// Owns growing arrays that are not zeroed, with room behind the end that a vector store may overrun.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <new>
#include <utility>

namespace rose {

template <typename T>
class Buffer {
 public:
  Buffer() = default;
  Buffer(Buffer&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)),
        size_(std::exchange(other.size_, 0)),
        capacity_(std::exchange(other.capacity_, 0)) {}
  Buffer& operator=(Buffer&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
    std::swap(capacity_, other.capacity_);
    return *this;
  }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer() { std::free(data_); }

  const T* data() const { return data_; }
  T* data() { return data_; }
  std::size_t size() const { return size_; }

  // The place behind the last element, with room for `more` elements and a vector; then grow() by what
  // was written. Valid until the next reserve().
  T* reserve(std::size_t more) {
    const std::size_t need = size_ + more;
    if (data_ == nullptr || need > capacity_) {
      const std::size_t capacity = need + need / 2;
      void* moved = std::realloc(data_, (capacity + kBehind) * sizeof(T));
      if (moved == nullptr) {
        throw std::bad_alloc();
      }
      data_ = static_cast<T*>(moved);
      capacity_ = capacity;
    }
    return data_ + size_;
  }
  void grow(std::size_t added) { size_ += added; }

  void push(T value) {
    *reserve(1) = value;
    ++size_;
  }

 private:
  static constexpr std::size_t kBehind = 64;

  T* data_ = nullptr;
  std::size_t size_ = 0;
  std::size_t capacity_ = 0;
};

using Bytes = Buffer<std::uint8_t>;

}  // namespace rose
