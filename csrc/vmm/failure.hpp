// The exceptions of slab memory. module.cpp turns them into Python's ValueError and VmmError.

#pragma once

#include <cstddef>
#include <exception>
#include <string>
#include <system_error>
#include <utility>

namespace rose {

// The system or the driver refused. `errno_code` is EIO or ENOMEM for an error of the CUDA driver.
class Failure : public std::exception {
 public:
  Failure(int errno_code, std::string message) : errno_code_(errno_code), message_(std::move(message)) {}

  const char* what() const noexcept override { return message_.c_str(); }
  int errno_code() const { return errno_code_; }
  // Appends to the message, e.g. that undoing the failed call failed too.
  void add(const std::string& more) { message_ += more; }

 private:
  int errno_code_;
  std::string message_;
};

// The caller made a mistake, and nothing was changed.
class BadArgument : public Failure {
 public:
  explicit BadArgument(std::string message) : Failure(0, std::move(message)) {}
};

[[noreturn]] inline void throw_bad_argument(const std::string& message) { throw BadArgument(message); }

// "what: strerror(code)".
[[noreturn]] inline void throw_system_error(const std::string& what, int code) {
  throw Failure(code, what + ": " + std::generic_category().message(code));
}

inline std::string text(std::size_t number) { return std::to_string(number); }

}  // namespace rose
