// The one exception of the backends; the C ABI turns it into a status and a message.

#pragma once

#include <cstddef>
#include <exception>
#include <string>
#include <utility>

#include "vmm.h"

namespace rose {

class Failure : public std::exception {
 public:
  Failure(rose_vmm_status status, int errno_code, std::string message)
      : status_(status), errno_code_(errno_code), message_(std::move(message)) {}

  const char* what() const noexcept override { return message_.c_str(); }
  rose_vmm_status status() const { return status_; }
  int errno_code() const { return errno_code_; }
  // More of the same story, e.g. that undoing failed too.
  void add(const std::string& more) { message_ += more; }

 private:
  rose_vmm_status status_;
  int errno_code_;
  std::string message_;
};

[[noreturn]] void throw_bad_argument(const std::string& message);
// "what: strerror(code)".
[[noreturn]] void throw_system_error(const std::string& what, int code);

inline std::string text(std::size_t number) { return std::to_string(number); }

}  // namespace rose
