// What the stand-in driver knows: handles, reservations, mappings, fills that are under way, and the faults
// that a test has asked for.

#pragma once

#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdint>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "../../csrc/vmm/cuda_api.hpp"

using namespace rose::cuda;
using Ptr = CUdeviceptr;
using Handle = CUmemGenericAllocationHandle;

namespace {

constexpr CUresult kInvalidValue = 1, kOutOfMemory = 2, kNotInitialized = 3, kInvalidContext = 201,
                   kIllegalAddress = 700;
constexpr std::size_t kGranularity = 64 * 1024;
constexpr int kNumDevices = 2;
constexpr std::size_t kFreeBytes = std::size_t{1} << 30;

struct Memory {
  int fd;
  std::size_t num_bytes;
  int num_holders;  // handles and mappings
};
struct Mapping {
  std::size_t num_bytes;
  Memory* memory;
  int access;
};
struct Fill {
  Ptr start;
  std::size_t num_bytes;
  unsigned char byte;
};

std::recursive_mutex mutex;
bool is_initialized = false;
std::map<Handle, Memory*> handles;
std::map<Ptr, std::size_t> reservations;
std::map<Ptr, Mapping> mappings;
std::set<CUstream> streams;
std::vector<Fill> pending;
Handle next_handle = 1;
int num_contexts = 0;
thread_local std::vector<CUcontext> current;

std::string fail_call;
int fail_in = 0;
int num_failing = 0;
CUresult fail_with = CUDA_SUCCESS;
std::string log_of_calls;

#define ENTER(call)            \
  std::lock_guard lock(mutex); \
  if (CUresult refused = enter(call)) return refused

CUresult enter(const std::string& call) {
  log_of_calls += call + "\n";
  bool is_any = fail_call == "*" && call != "cuCtxPopCurrent";  // leaving a context has no way to fail
  bool is_meant = num_failing > 0 && (is_any || fail_call == call);
  if (is_meant && --fail_in < 0) {
    --num_failing;
    return fail_with;
  }
  return !is_initialized && call != "cuInit" ? kNotInitialized : CUDA_SUCCESS;
}

bool is_whole(std::size_t number) { return number != 0 && number % kGranularity == 0; }

bool fits_prop(const CUmemAllocationProp* prop) {
  return prop->type == CU_MEM_ALLOCATION_TYPE_PINNED && prop->location.type == CU_MEM_LOCATION_TYPE_DEVICE &&
         prop->requestedHandleTypes == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR && prop->location.id >= 0 &&
         prop->location.id < kNumDevices && prop->win32HandleMetaData == nullptr;
}

void let_go(Memory* memory) {
  if (--memory->num_holders > 0) return;
  close(memory->fd);
  delete memory;
}

void* at(Ptr ptr) { return reinterpret_cast<void*>(ptr); }

// The mappings that make up [start, start + num_bytes) exactly, or none.
std::vector<Ptr> whole_mappings(Ptr start, std::size_t num_bytes) {
  std::vector<Ptr> found;
  Ptr next = start;
  while (next < start + num_bytes) {
    auto mapping = mappings.find(next);
    if (mapping == mappings.end()) return {};
    found.push_back(next);
    next += mapping->second.num_bytes;
  }
  return next == start + num_bytes ? found : std::vector<Ptr>{};
}

bool may(int access, Ptr start, std::size_t num_bytes) {
  for (Ptr next = start; next < start + num_bytes;) {
    auto mapping = mappings.upper_bound(next);
    if (mapping == mappings.begin()) return false;
    --mapping;
    if (next >= mapping->first + mapping->second.num_bytes) return false;
    if ((mapping->second.access & access) != access) return false;
    next = mapping->first + mapping->second.num_bytes;
  }
  return true;
}

bool overlaps_mapping(Ptr start, std::size_t num_bytes) {
  auto next = mappings.lower_bound(start);
  if (next != mappings.end() && next->first < start + num_bytes) return true;
  return next != mappings.begin() && (--next)->first + next->second.num_bytes > start;
}

bool is_reserved(Ptr start, std::size_t num_bytes) {
  auto next = reservations.upper_bound(start);
  return next != reservations.begin() && (--next)->first + next->second >= start + num_bytes;
}

void do_pending() {
  for (const Fill& fill : pending) std::memset(at(fill.start), fill.byte, fill.num_bytes);
  pending.clear();
}

}  // namespace
