// The stand-in driver's modules: what cuda-python needs to find the driver's calls, and kernels that run on
// the host as soon as they are launched. A module's code is not looked at.

#include <dlfcn.h>

#include <set>
#include <string>

#include "../../csrc/vmm/cuda_api.hpp"

using namespace rose::cuda;

extern "C" bool launch_on_host(const char* kernel, unsigned num_blocks, void** pointers);

namespace {

constexpr CUresult kNotFound = 500, kInvalidContext = 201;

std::set<std::string> functions;  // their names outlive every module
int module_code;

}  // namespace

extern "C" {

CUresult cuCtxGetCurrent(CUcontext* context);

CUresult cuGetProcAddress_v2(const char* name, void** call, int, unsigned long long, int* status) {
  const std::string base = name;
  *call = nullptr;
  // The newest version of a call goes by the name without one.
  for (const char* version : {"_v2", ""}) {
    if (*call == nullptr) *call = dlsym(RTLD_DEFAULT, (base + version).c_str());
  }
  if (status != nullptr) *status = *call != nullptr ? 0 : 1;
  return *call != nullptr ? CUDA_SUCCESS : kNotFound;
}

CUresult cuGetProcAddress(const char* name, void** call, int version, unsigned long long flags) {
  return cuGetProcAddress_v2(name, call, version, flags, nullptr);
}

CUresult cuDriverGetVersion(int* version) {
  *version = 13000;
  return CUDA_SUCCESS;
}

CUresult cuModuleLoadData(void** module, const void*) {
  *module = &module_code;
  return CUDA_SUCCESS;
}

CUresult cuModuleGetFunction(const void** function, void*, const char* name) {
  *function = functions.insert(name).first->c_str();
  return CUDA_SUCCESS;
}

CUresult cuLaunchKernel(const void* function, unsigned num_blocks, unsigned, unsigned, unsigned, unsigned,
                        unsigned, unsigned, CUstream, void** pointers, void**) {
  CUcontext context = nullptr;
  if (cuCtxGetCurrent(&context) != CUDA_SUCCESS || context == nullptr) return kInvalidContext;
  return launch_on_host(static_cast<const char*>(function), num_blocks, pointers) ? CUDA_SUCCESS : kNotFound;
}

}  // extern "C"
