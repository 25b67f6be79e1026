// A stand-in for libcuda.so.1 on machines without a GPU: the driver calls that slabs use, over memfds.
//
// It enforces what the CUDA driver API documents about them (granularity, offset 0, whole handles, no double
// map, no access before cuMemSetAccess, work that is asynchronous until synchronised, a current context), so
// that our CUDA code runs and its mistakes show. It says nothing about how a GPU or the real driver behaves:
// passing on it is no evidence that anything works on one, nor how fast.
//
// stand_in_* are for the tests: make the n-th call fail, see the calls made, count what is still held.

#include <sys/stat.h>

#include "stand_in_state.hpp"

extern "C" {

// For the tests ---------------------------------------------------------------------------------------

// After `skip` more calls of `call` ("*": any), the next `count` fail with `error` and do nothing.
void stand_in_fail(const char* call, int skip, int count, int error) {
  std::lock_guard lock(mutex);
  fail_call = call;
  fail_in = skip;
  num_failing = count;
  fail_with = error;
}
// The names of all calls since the last stand_in_forget(), one a line.
const char* stand_in_calls() { return log_of_calls.c_str(); }
void stand_in_forget() { log_of_calls.clear(); }
// Handles, reservations, mappings, streams and contexts that were not given back.
int stand_in_num_held() {
  return static_cast<int>(handles.size() + reservations.size() + mappings.size() + streams.size()) +
         num_contexts;
}

// The driver --------------------------------------------------------------------------------------------

CUresult cuInit(unsigned flags) {
  ENTER("cuInit");
  is_initialized = true;
  return flags == 0 ? CUDA_SUCCESS : kInvalidValue;
}

CUresult cuGetErrorName(CUresult error, const char** name) {
  static const std::map<CUresult, const char*> names = {{1, "CUDA_ERROR_INVALID_VALUE"},
                                                        {2, "CUDA_ERROR_OUT_OF_MEMORY"},
                                                        {3, "CUDA_ERROR_NOT_INITIALIZED"},
                                                        {201, "CUDA_ERROR_INVALID_CONTEXT"},
                                                        {700, "CUDA_ERROR_ILLEGAL_ADDRESS"}};
  auto found = names.find(error);
  *name = found != names.end() ? found->second : nullptr;
  return found != names.end() ? CUDA_SUCCESS : kInvalidValue;
}

CUresult cuGetErrorString(CUresult error, const char** text) {
  *text = error == kOutOfMemory ? "out of memory" : "said by the stand-in";
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetCount(int* count) {
  ENTER("cuDeviceGetCount");
  *count = kNumDevices;
  return CUDA_SUCCESS;
}

CUresult cuDeviceGet(CUdevice* device, int ordinal) {
  ENTER("cuDeviceGet");
  *device = ordinal;
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetAttribute(int* value, int, CUdevice) {
  ENTER("cuDeviceGetAttribute");
  *value = 1;
  return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) {
  ENTER("cuDevicePrimaryCtxRetain");
  ++num_contexts;
  *context = reinterpret_cast<CUcontext>(static_cast<std::uintptr_t>(device) + 1);
  return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxRelease_v2(CUdevice) {
  ENTER("cuDevicePrimaryCtxRelease");
  --num_contexts;
  return CUDA_SUCCESS;
}

CUresult cuCtxPushCurrent_v2(CUcontext context) {
  ENTER("cuCtxPushCurrent");
  if (context == nullptr || num_contexts == 0) return kInvalidContext;
  current.push_back(context);
  return CUDA_SUCCESS;
}

CUresult cuCtxPopCurrent_v2(CUcontext* context) {
  ENTER("cuCtxPopCurrent");
  if (current.empty()) return kInvalidContext;
  *context = current.back();
  current.pop_back();
  return CUDA_SUCCESS;
}

CUresult cuCtxGetCurrent(CUcontext* context) {
  *context = current.empty() ? nullptr : current.back();
  return CUDA_SUCCESS;
}

CUresult cuCtxSynchronize() {
  ENTER("cuCtxSynchronize");
  if (current.empty()) return kInvalidContext;
  do_pending();
  return CUDA_SUCCESS;
}

CUresult cuStreamCreate(CUstream* stream, unsigned) {
  ENTER("cuStreamCreate");
  if (current.empty()) return kInvalidContext;
  *stream = reinterpret_cast<CUstream>(new char);
  streams.insert(*stream);
  return CUDA_SUCCESS;
}

CUresult cuStreamDestroy_v2(CUstream stream) {
  ENTER("cuStreamDestroy");
  if (streams.erase(stream) == 0) return kInvalidValue;
  delete reinterpret_cast<char*>(stream);
  return CUDA_SUCCESS;
}

CUresult cuStreamSynchronize(CUstream stream) {
  ENTER("cuStreamSynchronize");
  if (streams.count(stream) == 0) return kInvalidValue;
  do_pending();
  return CUDA_SUCCESS;
}

CUresult cuMemsetD8Async(Ptr start, unsigned char byte, std::size_t num_bytes, CUstream stream) {
  ENTER("cuMemsetD8Async");
  if (current.empty()) return kInvalidContext;
  bool is_known = stream == nullptr || streams.count(stream) != 0;  // null: the default stream
  if (!is_known || !may(CU_MEM_ACCESS_FLAGS_PROT_READWRITE, start, num_bytes)) {
    return kInvalidValue;
  }
  pending.push_back({start, num_bytes, byte});
  return CUDA_SUCCESS;
}

CUresult cuMemcpyDtoH_v2(void* to, Ptr from, std::size_t num_bytes) {
  ENTER("cuMemcpyDtoH");
  if (current.empty()) return kInvalidContext;
  if (!may(CU_MEM_ACCESS_FLAGS_PROT_READ, from, num_bytes)) return kInvalidValue;
  std::memcpy(to, at(from), num_bytes);
  return CUDA_SUCCESS;
}

CUresult cuMemcpyHtoD_v2(Ptr to, const void* from, std::size_t num_bytes) {
  ENTER("cuMemcpyHtoD");
  if (current.empty()) return kInvalidContext;
  if (!may(CU_MEM_ACCESS_FLAGS_PROT_READWRITE, to, num_bytes)) return kInvalidValue;
  std::memcpy(at(to), from, num_bytes);
  return CUDA_SUCCESS;
}

CUresult cuMemGetInfo_v2(std::size_t* free, std::size_t* total) {
  ENTER("cuMemGetInfo");
  if (current.empty()) return kInvalidContext;
  *free = kFreeBytes;
  *total = 2 * kFreeBytes;
  return CUDA_SUCCESS;
}

CUresult cuMemGetAllocationGranularity(std::size_t* granularity, const CUmemAllocationProp* prop,
                                       int option) {
  ENTER("cuMemGetAllocationGranularity");
  *granularity = kGranularity;
  return fits_prop(prop) && option == CU_MEM_ALLOC_GRANULARITY_MINIMUM ? CUDA_SUCCESS : kInvalidValue;
}

CUresult cuMemCreate(Handle* handle, std::size_t num_bytes, const CUmemAllocationProp* prop,
                     unsigned long long flags) {
  ENTER("cuMemCreate");
  if (!is_whole(num_bytes) || !fits_prop(prop) || flags != 0) return kInvalidValue;
  int fd = memfd_create("stand-in-cuda", MFD_CLOEXEC);
  if (fd < 0 || ftruncate(fd, static_cast<off_t>(num_bytes)) != 0) return kOutOfMemory;
  *handle = next_handle++;
  handles[*handle] = new Memory{fd, num_bytes, 1};
  return CUDA_SUCCESS;
}

CUresult cuMemRelease(Handle handle) {
  ENTER("cuMemRelease");
  auto found = handles.find(handle);
  if (found == handles.end()) return kInvalidValue;
  let_go(found->second);
  handles.erase(found);
  return CUDA_SUCCESS;
}

CUresult cuMemExportToShareableHandle(void* os_handle, Handle handle, int type, unsigned long long flags) {
  ENTER("cuMemExportToShareableHandle");
  auto found = handles.find(handle);
  if (found == handles.end() || type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR || flags != 0) {
    return kInvalidValue;
  }
  *static_cast<int*>(os_handle) = dup(found->second->fd);
  return CUDA_SUCCESS;
}

CUresult cuMemImportFromShareableHandle(Handle* handle, void* os_handle, int type) {
  ENTER("cuMemImportFromShareableHandle");
  int fd = static_cast<int>(reinterpret_cast<std::intptr_t>(os_handle));
  struct stat status;
  if (type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR || fstat(fd, &status) != 0 ||
      !is_whole(static_cast<std::size_t>(status.st_size))) {
    return kInvalidValue;
  }
  *handle = next_handle++;
  handles[*handle] = new Memory{dup(fd), static_cast<std::size_t>(status.st_size), 1};
  return CUDA_SUCCESS;
}

CUresult cuMemAddressReserve(Ptr* start, std::size_t num_bytes, std::size_t alignment, Ptr,
                             unsigned long long flags) {
  ENTER("cuMemAddressReserve");
  if (!is_whole(num_bytes) || (alignment & (alignment - 1)) != 0 || flags != 0) return kInvalidValue;
  // Over-reserved and never trimmed: addresses are plenty.
  char* got = static_cast<char*>(
      mmap(nullptr, num_bytes + alignment, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
  if (got == MAP_FAILED) return kOutOfMemory;
  *start = (reinterpret_cast<Ptr>(got) + alignment - 1) & ~(alignment - 1);
  reservations[*start] = num_bytes;
  return CUDA_SUCCESS;
}

CUresult cuMemAddressFree(Ptr start, std::size_t num_bytes) {
  ENTER("cuMemAddressFree");
  auto found = reservations.find(start);
  if (found == reservations.end() || found->second != num_bytes || overlaps_mapping(start, num_bytes)) {
    return kInvalidValue;
  }
  munmap(at(start), num_bytes);
  reservations.erase(found);
  return CUDA_SUCCESS;
}

CUresult cuMemMap(Ptr start, std::size_t num_bytes, std::size_t offset, Handle handle,
                  unsigned long long flags) {
  ENTER("cuMemMap");
  auto found = handles.find(handle);
  if (found == handles.end() || offset != 0 || flags != 0 || start % kGranularity != 0 ||
      num_bytes != found->second->num_bytes || !is_reserved(start, num_bytes) ||
      overlaps_mapping(start, num_bytes)) {
    return kInvalidValue;
  }
  if (mmap(at(start), num_bytes, PROT_NONE, MAP_SHARED | MAP_FIXED, found->second->fd, 0) == MAP_FAILED) {
    return kOutOfMemory;
  }
  ++found->second->num_holders;
  mappings[start] = {num_bytes, found->second, 0};
  return CUDA_SUCCESS;
}

CUresult cuMemSetAccess(Ptr start, std::size_t num_bytes, const CUmemAccessDesc* access, std::size_t count) {
  ENTER("cuMemSetAccess");
  std::vector<Ptr> wholes = whole_mappings(start, num_bytes);
  if (wholes.empty() || count != 1 || access->location.type != CU_MEM_LOCATION_TYPE_DEVICE)
    return kInvalidValue;
  int protection = access->flags == CU_MEM_ACCESS_FLAGS_PROT_READWRITE ? PROT_READ | PROT_WRITE : PROT_READ;
  for (Ptr each : wholes) {
    mappings[each].access = access->flags;
    mprotect(at(each), mappings[each].num_bytes, protection);
  }
  return CUDA_SUCCESS;
}

CUresult cuMemGetAccess(unsigned long long* flags, const CUmemLocation*, Ptr start) {
  ENTER("cuMemGetAccess");
  auto found = mappings.find(start);
  if (found == mappings.end()) return kInvalidValue;
  *flags = static_cast<unsigned long long>(found->second.access);
  return CUDA_SUCCESS;
}

CUresult cuMemUnmap(Ptr start, std::size_t num_bytes) {
  ENTER("cuMemUnmap");
  std::vector<Ptr> wholes = whole_mappings(start, num_bytes);
  if (wholes.empty()) return kInvalidValue;
  for (const Fill& fill : pending) {
    if (fill.start < start + num_bytes && start < fill.start + fill.num_bytes) return kIllegalAddress;
  }
  mmap(at(start), num_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
  for (Ptr each : wholes) {
    let_go(mappings[each].memory);
    mappings.erase(each);
  }
  return CUDA_SUCCESS;
}

}  // extern "C"
