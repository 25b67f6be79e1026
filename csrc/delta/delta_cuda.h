/* The C ABI of the delta codec's CUDA kernels: they compare two vectors of raw bits, compact the changes, and
   apply them.

   nvcc builds them into a library of its own, which is loaded at run time; ROSE builds and imports without
   it. Every pointer but the return value is device memory that the caller owns, and `stream` is a
   cudaStream_t. A call starts its kernels and returns NULL, or the driver's error. It never waits and never
   allocates. width: an element's bytes, 1, 2 or 4. Buffers:

     masks        uint32 per 32 elements
     counts       uint32 per 2048 elements: the number of changed ones
     offsets      int64 per 2048 elements: the number of changes before them
     places       uint16 per change: its place inside its block of 65536 elements
     differences  one element per change: new - old modulo 2^(8 width)
     starts       int64 per block and one more: the number of changes before it
     change       uint64 x 2, set to zero by the caller: the change of the state hash

   csrc/delta/sparse.hpp holds the same in host memory, so every codec's bytes are the same. */
#ifndef ROSE_DELTA_CUDA_H
#define ROSE_DELTA_CUDA_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif
#pragma GCC visibility push(default)

const char* rose_delta_mark(int width, const void* before, const void* after, uint64_t num_elements,
                            uint32_t* masks, uint32_t* counts, void* stream);
const char* rose_delta_compact(int width, const void* before, const void* after, uint64_t num_elements,
                               uint64_t first_index, const uint32_t* masks, const int64_t* offsets,
                               uint16_t* places, void* differences, uint64_t* change, void* stream);
const char* rose_delta_add(int width, void* base, uint64_t num_elements, uint64_t first_index,
                           const int64_t* starts, const uint16_t* places, const void* differences,
                           int is_reverse, uint64_t* change, void* stream);

#pragma GCC visibility pop
#ifdef __cplusplus
}
#endif
#endif
