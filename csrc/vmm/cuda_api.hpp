// The part of CUDA's driver API that slabs use, declared here so that building needs no CUDA toolkit.
// Names, values and layouts are those of cuda.h; they are part of the driver's stable binary interface.

#pragma once

#include <cstddef>

namespace rose::cuda {

using CUresult = int;
using CUdevice = int;
using CUdeviceptr = unsigned long long;
using CUmemGenericAllocationHandle = unsigned long long;
using CUcontext = struct CUctx_st*;
using CUstream = struct CUstream_st*;

constexpr CUresult CUDA_SUCCESS = 0;
constexpr CUresult CUDA_ERROR_OUT_OF_MEMORY = 2;

constexpr int CU_MEM_ALLOCATION_TYPE_PINNED = 1;
constexpr int CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR = 1;
constexpr int CU_MEM_LOCATION_TYPE_DEVICE = 1;
constexpr int CU_MEM_ACCESS_FLAGS_PROT_READ = 1;
constexpr int CU_MEM_ACCESS_FLAGS_PROT_READWRITE = 3;
constexpr int CU_MEM_ALLOC_GRANULARITY_MINIMUM = 0;
constexpr unsigned CU_STREAM_NON_BLOCKING = 1;
constexpr int CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED = 102;
constexpr int CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED = 103;
constexpr int CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED = 110;

struct CUmemLocation {
  int type;
  int id;
};

struct CUmemAllocationProp {
  int type;
  int requestedHandleTypes;
  CUmemLocation location;
  void* win32HandleMetaData;
  struct {
    unsigned char compressionType;
    unsigned char gpuDirectRDMACapable;
    unsigned short usage;
    unsigned char reserved[4];
  } allocFlags;
};

struct CUmemAccessDesc {
  CUmemLocation location;
  int flags;
};

static_assert(sizeof(CUmemAllocationProp) == 32 && sizeof(CUmemAccessDesc) == 12);

// X(member, exported name, parameters): the exported name has a version where cuda.h's macro adds one.
#define ROSE_CUDA_CALLS(X)                                                                             \
  X(cuInit, "cuInit", (unsigned))                                                                      \
  X(cuGetErrorName, "cuGetErrorName", (CUresult, const char**))                                        \
  X(cuGetErrorString, "cuGetErrorString", (CUresult, const char**))                                    \
  X(cuDeviceGetCount, "cuDeviceGetCount", (int*))                                                      \
  X(cuDeviceGet, "cuDeviceGet", (CUdevice*, int))                                                      \
  X(cuDeviceGetAttribute, "cuDeviceGetAttribute", (int*, int, CUdevice))                               \
  X(cuDevicePrimaryCtxRetain, "cuDevicePrimaryCtxRetain", (CUcontext*, CUdevice))                      \
  X(cuDevicePrimaryCtxRelease, "cuDevicePrimaryCtxRelease_v2", (CUdevice))                             \
  X(cuCtxPushCurrent, "cuCtxPushCurrent_v2", (CUcontext))                                              \
  X(cuCtxPopCurrent, "cuCtxPopCurrent_v2", (CUcontext*))                                               \
  X(cuCtxSynchronize, "cuCtxSynchronize", ())                                                          \
  X(cuStreamCreate, "cuStreamCreate", (CUstream*, unsigned))                                           \
  X(cuStreamDestroy, "cuStreamDestroy_v2", (CUstream))                                                 \
  X(cuStreamSynchronize, "cuStreamSynchronize", (CUstream))                                            \
  X(cuMemsetD8Async, "cuMemsetD8Async", (CUdeviceptr, unsigned char, std::size_t, CUstream))           \
  X(cuMemGetInfo, "cuMemGetInfo_v2", (std::size_t*, std::size_t*))                                     \
  X(cuMemGetAllocationGranularity, "cuMemGetAllocationGranularity",                                    \
    (std::size_t*, const CUmemAllocationProp*, int))                                                   \
  X(cuMemCreate, "cuMemCreate",                                                                        \
    (CUmemGenericAllocationHandle*, std::size_t, const CUmemAllocationProp*, unsigned long long))      \
  X(cuMemRelease, "cuMemRelease", (CUmemGenericAllocationHandle))                                      \
  X(cuMemExportToShareableHandle, "cuMemExportToShareableHandle",                                      \
    (void*, CUmemGenericAllocationHandle, int, unsigned long long))                                    \
  X(cuMemImportFromShareableHandle, "cuMemImportFromShareableHandle",                                  \
    (CUmemGenericAllocationHandle*, void*, int))                                                       \
  X(cuMemAddressReserve, "cuMemAddressReserve",                                                        \
    (CUdeviceptr*, std::size_t, std::size_t, CUdeviceptr, unsigned long long))                         \
  X(cuMemAddressFree, "cuMemAddressFree", (CUdeviceptr, std::size_t))                                  \
  X(cuMemMap, "cuMemMap",                                                                              \
    (CUdeviceptr, std::size_t, std::size_t, CUmemGenericAllocationHandle, unsigned long long))         \
  X(cuMemSetAccess, "cuMemSetAccess", (CUdeviceptr, std::size_t, const CUmemAccessDesc*, std::size_t)) \
  X(cuMemUnmap, "cuMemUnmap", (CUdeviceptr, std::size_t))

struct Calls {
#define ROSE_CUDA_MEMBER(member, exported, parameters) CUresult(*member) parameters = nullptr;
  ROSE_CUDA_CALLS(ROSE_CUDA_MEMBER)
#undef ROSE_CUDA_MEMBER
};

}  // namespace rose::cuda
