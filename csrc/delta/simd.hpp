// Owns the choice of instructions when the process starts: AVX-512 where the processor has all that these
// loops use (Intel since Ice Lake, AMD since Zen 4), else AVX2 with BMI; on 64-bit ARM NEON; else portable
// C++. All give the same bytes and hashes; the choice changes only the speed. NEON compares versions, which
// is the pass over all weights. It has no products of 64 bits and no bits to gather by a mask, so hashes and
// streams are portable there.
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
#define ROSE_AVX2 __attribute__((target("avx2,bmi,bmi2,popcnt,lzcnt")))
#elif defined(__aarch64__)
#include <arm_neon.h>
#define ROSE_NEON 1
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

inline bool cpu_has_avx2() {
#ifdef ROSE_X86
  __builtin_cpu_init();
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi2");
#else
  return false;
#endif
}

inline bool cpu_has_neon() {
#ifdef ROSE_NEON
  return true;  // the architecture demands it
#else
  return false;
#endif
}

inline std::atomic<bool> use_avx512{cpu_has_avx512()};
inline std::atomic<bool> use_avx2{cpu_has_avx2()};
inline std::atomic<bool> use_neon{cpu_has_neon()};

// Asks for a cache line, so that memory stays busy while other work is done. The line comes to the second
// level of the cache: more of them may be on their way than to the first, and that bounds passes over
// scattered elements (7.6 ns an element instead of 12.3 on an AMD EPYC with Zen 4).
inline void prefetch(const void* data) { __builtin_prefetch(data, 0, 2); }

}  // namespace rose
