// The C ABI of slab memory: one interface, two backends (host memory, CUDA device memory).
//
// A backend makes slabs: equal pieces of physical memory that other processes can open. A range is
// address space with room for one slab at each position. Rules, the same on both backends:
//   - a mapping is one whole slab at one whole position: no offsets, no sub-ranges
//   - mapping a mapped position, unmapping an unmapped one, or one slab twice in a range is refused
//   - a position without a slab faults on touch (or reads zeros: `guard`)
//   - a batch is checked whole before anything changes; a failing call undoes what the batch did
//
// Every call returns a status; where it is not ROSE_VMM_OK, *error says why. No call throws, aborts or
// prints. A range may be used by any thread; slabs and backends are constant once made. Each object is
// closed once; an object made from another one keeps that alive.

#pragma once

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif
#pragma GCC visibility push(default)

typedef struct rose_vmm_backend rose_vmm_backend;
typedef struct rose_vmm_slabs rose_vmm_slabs;
typedef struct rose_vmm_range rose_vmm_range;

typedef enum {
  ROSE_VMM_OK = 0,
  ROSE_VMM_BAD_ARGUMENT = 1,  // the caller's mistake; nothing was done
  ROSE_VMM_FAILED = 2,        // the system or the driver said no
} rose_vmm_status;

typedef struct {
  rose_vmm_status status;
  int errno_code;      // of ROSE_VMM_FAILED: errno; EIO or ENOMEM for a driver's error
  char message[1024];  // the call, its error, the slab or position, and the sizes
} rose_vmm_error;

#define ROSE_VMM_NO_SLAB SIZE_MAX

// Backends ------------------------------------------------------------------------------------------

rose_vmm_status rose_vmm_open_host(rose_vmm_backend** backend, rose_vmm_error* error);
// Loads `library` ("libcuda.so.1") and retains the primary context of `device`.
rose_vmm_status rose_vmm_open_cuda(const char* library, int device, rose_vmm_backend** backend,
                                   rose_vmm_error* error);
void rose_vmm_close_backend(rose_vmm_backend* backend);
// A slab's size must be a multiple of this.
size_t rose_vmm_granularity(const rose_vmm_backend* backend);

// Slabs ---------------------------------------------------------------------------------------------

rose_vmm_status rose_vmm_create(const rose_vmm_backend* backend, size_t num_slabs, size_t slab_bytes,
                                const char* name, rose_vmm_slabs** slabs, rose_vmm_error* error);
// Opens what another process exported. The descriptors stay the caller's, who may close them after.
rose_vmm_status rose_vmm_import(const rose_vmm_backend* backend, const int* fds, size_t num_fds,
                                size_t slab_bytes, rose_vmm_slabs** slabs, rose_vmm_error* error);
void rose_vmm_close_slabs(rose_vmm_slabs* slabs);
size_t rose_vmm_num_slabs(const rose_vmm_slabs* slabs);
size_t rose_vmm_slab_bytes(const rose_vmm_slabs* slabs);
// How many descriptors carry all slabs: 1 on the host, one per slab on CUDA.
size_t rose_vmm_num_fds(const rose_vmm_slabs* slabs);
// A new descriptor, the caller's to close.
rose_vmm_status rose_vmm_export(const rose_vmm_slabs* slabs, size_t index, int* fd, rose_vmm_error* error);

// Ranges --------------------------------------------------------------------------------------------

typedef struct {
  int poison;  // fill a slab with 0xFF (NaN in every float format) before it is unmapped
  int guard;   // unmapped positions read as zeros instead of faulting; writes still fault
} rose_vmm_range_options;

rose_vmm_status rose_vmm_reserve(rose_vmm_slabs* slabs, size_t num_positions, rose_vmm_range_options options,
                                 rose_vmm_range** range, rose_vmm_error* error);
// Unmaps what is left and frees the addresses.
void rose_vmm_close_range(rose_vmm_range* range);
uintptr_t rose_vmm_address(const rose_vmm_range* range);
size_t rose_vmm_num_positions(const rose_vmm_range* range);

// slabs[i] goes to positions[i], filled with zeros where `zero`.
rose_vmm_status rose_vmm_map(rose_vmm_range* range, const size_t* positions, const size_t* slabs,
                             size_t count, int zero, rose_vmm_error* error);
// Where `fence`, all work of this process on the device ends first.
rose_vmm_status rose_vmm_unmap(rose_vmm_range* range, const size_t* positions, size_t count, int fence,
                               rose_vmm_error* error);
// Fills mapped positions with zeros; done when it returns.
rose_vmm_status rose_vmm_zero(rose_vmm_range* range, const size_t* positions, size_t count,
                              rose_vmm_error* error);
rose_vmm_status rose_vmm_fence(rose_vmm_range* range, rose_vmm_error* error);
// The slab at each position, ROSE_VMM_NO_SLAB where there is none; `slabs` holds num_positions.
rose_vmm_status rose_vmm_mapped(const rose_vmm_range* range, size_t* slabs, rose_vmm_error* error);

#pragma GCC visibility pop
#ifdef __cplusplus
}
#endif
