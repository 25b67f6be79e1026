// Atomic 64-bit words in shared memory, and futex sleep/wake on them.
// Owns nothing: the memory belongs to the buffer passed in (an mmap), which is kept alive.

#include <linux/futex.h>
#include <pybind11/pybind11.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cmath>
#include <cstdint>
#include <ctime>
#include <stdexcept>
#include <string>
#include <system_error>

namespace py = pybind11;

namespace {

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "futexes address the low half of a word");

class Words {
 public:
  explicit Words(py::buffer buffer) : view_(buffer.request(/*writable=*/true)) {
    auto address = reinterpret_cast<std::uintptr_t>(view_.ptr);
    auto num_bytes = static_cast<std::size_t>(view_.size * view_.itemsize);
    if (address % 8 != 0 || num_bytes % 8 != 0) {
      throw std::invalid_argument("Words needs an 8-byte aligned buffer of whole words, got " +
                                  std::to_string(num_bytes) + " bytes");
    }
    words_ = static_cast<std::int64_t*>(view_.ptr);
    size_ = num_bytes / 8;
  }

  std::size_t size() const { return size_; }
  std::int64_t load(std::size_t i) const { return __atomic_load_n(at(i), __ATOMIC_SEQ_CST); }
  void store(std::size_t i, std::int64_t v) { __atomic_store_n(at(i), v, __ATOMIC_SEQ_CST); }
  std::int64_t add(std::size_t i, std::int64_t v) { return __atomic_add_fetch(at(i), v, __ATOMIC_SEQ_CST); }
  bool cas(std::size_t i, std::int64_t expected, std::int64_t desired) {
    return __atomic_compare_exchange_n(at(i), &expected, desired, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
  }

  // The number of words of [first, first + num) whose bits under mask are value. Each is read once, at any
  // time during the call.
  std::size_t count(std::size_t first, std::size_t num, std::int64_t mask, std::int64_t value) const {
    if (num == 0) return 0;
    if (num > size_) throw py::index_error(std::to_string(num) + " words of " + std::to_string(size_));
    const std::int64_t* begin = at(first);
    at(first + num - 1);
    std::size_t found = 0;
    for (std::size_t i = 0; i < num; ++i) {
      found += (__atomic_load_n(begin + i, __ATOMIC_RELAXED) & mask) == value;
    }
    return found;
  }

  // Sleeps until word i no longer holds `seen`, somebody wakes it, or timeout_s passes.
  // True if the word changed. Spurious returns are possible: callers loop.
  bool wait(std::size_t i, std::int64_t seen, double timeout_s) {
    std::int64_t* word = at(i);
    if (__atomic_load_n(word, __ATOMIC_SEQ_CST) != seen) return true;
    timespec timeout;
    timeout.tv_sec = static_cast<time_t>(std::floor(timeout_s));
    timeout.tv_nsec = static_cast<long>((timeout_s - std::floor(timeout_s)) * 1e9);
    {
      py::gil_scoped_release release;
      long rc = syscall(SYS_futex, reinterpret_cast<std::uint32_t*>(word), FUTEX_WAIT,
                        static_cast<std::uint32_t>(seen), &timeout, nullptr, 0);
      if (rc != 0 && errno != EAGAIN && errno != EINTR && errno != ETIMEDOUT) {
        throw std::system_error(errno, std::generic_category(), "futex wait");
      }
    }
    return __atomic_load_n(word, __ATOMIC_SEQ_CST) != seen;
  }

  // Wakes every sleeper on word i; returns how many there were.
  long wake(std::size_t i) {
    long woken = syscall(SYS_futex, reinterpret_cast<std::uint32_t*>(at(i)), FUTEX_WAKE, INT32_MAX, nullptr,
                         nullptr, 0);
    if (woken < 0) throw std::system_error(errno, std::generic_category(), "futex wake");
    return woken;
  }

 private:
  std::int64_t* at(std::size_t i) const {
    if (i >= size_) {
      throw py::index_error("word " + std::to_string(i) + " of " + std::to_string(size_));
    }
    return words_ + i;
  }

  py::buffer_info view_;
  std::int64_t* words_ = nullptr;
  std::size_t size_ = 0;
};

}  // namespace

PYBIND11_MODULE(_shm, m) {
  m.doc() = "Atomic int64 words in shared memory with futex wait and wake.";
  py::class_<Words>(m, "Words")
      .def(py::init<py::buffer>(), py::arg("buffer"))
      .def("__len__", &Words::size)
      .def("load", &Words::load, py::arg("index"))
      .def("store", &Words::store, py::arg("index"), py::arg("value"))
      .def("add", &Words::add, py::arg("index"), py::arg("value"), "Adds and returns the new value.")
      .def("cas", &Words::cas, py::arg("index"), py::arg("expected"), py::arg("desired"))
      .def("count", &Words::count, py::arg("first"), py::arg("num"), py::arg("mask"), py::arg("value"),
           "The number of words of a range whose bits under the mask are the value.")
      .def("wait", &Words::wait, py::arg("index"), py::arg("seen"), py::arg("timeout_s"))
      .def("wake", &Words::wake, py::arg("index"));
}
