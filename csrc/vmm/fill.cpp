#include "fill.hpp"

#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace rose {

#if defined(__x86_64__)

namespace {

__attribute__((target("avx512f"))) void fill_avx512(char* start, std::size_t num_bytes, unsigned char byte) {
  __m512i value = _mm512_set1_epi32(static_cast<int>(byte * 0x01010101u));
  for (char* at = start; at < start + num_bytes; at += 64) {
    _mm512_stream_si512(reinterpret_cast<__m512i*>(at), value);
  }
}

void fill_sse2(char* start, std::size_t num_bytes, unsigned char byte) {
  __m128i value = _mm_set1_epi8(static_cast<char>(byte));
  for (char* at = start; at < start + num_bytes; at += 16) {
    _mm_stream_si128(reinterpret_cast<__m128i*>(at), value);
  }
}

}  // namespace

void fill_past_caches(char* start, std::size_t num_bytes, unsigned char byte) {
  static const bool has_avx512 = __builtin_cpu_supports("avx512f");
  if (has_avx512) {
    fill_avx512(start, num_bytes, byte);
  } else {
    fill_sse2(start, num_bytes, byte);
  }
  _mm_sfence();  // such stores are seen by other cores in no order until then
}

#else

void fill_past_caches(char* start, std::size_t num_bytes, unsigned char byte) {
  std::memset(start, byte, num_bytes);
}

#endif

}  // namespace rose
