// Owns the choice of instructions: AVX-512 where the processor has all that these loops use (Intel since Ice
// Lake, AMD since Zen 4, so every host of an H100 or later), else portable C++.
// Both give the same bytes and hashes; the choice changes only the speed.
#pragma once

#include <atomic>

#if defined(__x86_64__)
#pragma GCC diagnostic push
// GCC 12 warns about its own _mm512_undefined_...().
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>
#pragma GCC diagnostic pop
#define ROSE_X86 1
#define ROSE_AVX512 \
  __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi2,bmi,bmi2,popcnt,lzcnt")))
#endif

namespace rose {

inline bool cpu_has_avx512() {
#ifdef ROSE_X86
  __builtin_cpu_init();
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
         __builtin_cpu_supports("avx512vbmi2") && __builtin_cpu_supports("bmi2");
#else
  return false;
#endif
}

inline std::atomic<bool> use_avx512{cpu_has_avx512()};

}  // namespace rose
