#include "failure.hpp"

#include <system_error>

namespace rose {

void throw_bad_argument(const std::string& message) { throw Failure(ROSE_VMM_BAD_ARGUMENT, 0, message); }

void throw_system_error(const std::string& what, int code) {
  throw Failure(ROSE_VMM_FAILED, code, what + ": " + std::generic_category().message(code));
}

}  // namespace rose
