// The stand-in driver's green contexts: one GPU of 20 multiprocessors, which are taken apart in groups of 8.

#include <cstddef>
#include <map>

#include "../../csrc/vmm/cuda_api.hpp"

using namespace rose::cuda;

namespace {

constexpr CUresult kInvalidValue = 1, kInvalidResource = 915;
constexpr unsigned kNumMultiprocessors = 20, kGroup = 8;
constexpr int kKindSm = 1;

// As in cuda.h; begin is in what the driver keeps to itself.
struct Resource {
  int kind;
  unsigned begin;
  unsigned char hidden[88];
  unsigned num_sms;
  unsigned char other[44];
  Resource* next;
};
static_assert(offsetof(Resource, num_sms) == 96 && sizeof(Resource) == 152);

std::map<void*, Resource> described;

}  // namespace

extern "C" {

CUresult cuDeviceGetName(char* name, int size, CUdevice) {
  const char text[] = "stand-in";
  for (int i = 0; i < size; ++i) name[i] = i < static_cast<int>(sizeof text) ? text[i] : '\0';
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetDevResource(CUdevice, Resource* resource, int kind) {
  if (kind != kKindSm) return kInvalidValue;
  *resource = {};
  resource->kind = kind;
  resource->num_sms = kNumMultiprocessors;
  return CUDA_SUCCESS;
}

CUresult cuDevSmResourceSplitByCount(Resource* groups, unsigned* num_groups, const Resource* whole,
                                     Resource* rest, unsigned, unsigned least) {
  const unsigned size = (least + kGroup - 1) / kGroup * kGroup;
  if (size == 0 || size > whole->num_sms) return kInvalidResource;
  const unsigned number = *num_groups < whole->num_sms / size ? *num_groups : whole->num_sms / size;
  for (unsigned i = 0; i < number; ++i) {
    groups[i] = *whole;
    groups[i].begin = whole->begin + i * size;
    groups[i].num_sms = size;
  }
  *rest = *whole;
  rest->begin = whole->begin + number * size;
  rest->num_sms = whole->num_sms - number * size;
  *num_groups = number;
  return CUDA_SUCCESS;
}

CUresult cuDevResourceGenerateDesc(void** description, Resource* resources, unsigned number) {
  if (number != 1 || resources->kind != kKindSm) return kInvalidResource;
  *description = new char;
  described[*description] = *resources;
  return CUDA_SUCCESS;
}

CUresult cuGreenCtxCreate(void** context, void* description, CUdevice, unsigned flags) {
  if (described.count(description) == 0 || flags != 1) return kInvalidValue;
  *context = description;
  return CUDA_SUCCESS;
}

// A stream's number tells a test what it runs on: 1000 times the first multiprocessor, and how many.
CUresult cuGreenCtxStreamCreate(CUstream* stream, void* context, unsigned flags, int) {
  if (described.count(context) == 0 || flags != CU_STREAM_NON_BLOCKING) return kInvalidValue;
  const Resource& found = described[context];
  *stream = reinterpret_cast<CUstream>(static_cast<std::size_t>(1000 * found.begin + found.num_sms));
  return CUDA_SUCCESS;
}

}  // extern "C"
