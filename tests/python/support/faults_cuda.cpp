// An allocator for torch.cuda.memory.CUDAPluggableAllocator that lets allocations fail as faults.cpp says. A library of
// its own: PyTorch's, whose exception it throws, is loaded later than what is preloaded.
#include <c10/util/Exception.h>
#include <dlfcn.h>

namespace {

template <class Function>
Function find(const char* name) {
  void* found = dlsym(RTLD_DEFAULT, name);
  TORCH_CHECK(found != nullptr, "faults: ", name, " was not found");
  return reinterpret_cast<Function>(found);
}

}  // namespace

extern "C" void* faults_cuda_malloc(size_t size, int /*device*/, void* /*stream*/) {
  static const auto real = find<int (*)(void**, size_t)>("cudaMalloc");
  static const auto fails = find<int (*)()>("faults_device");
  void* data = nullptr;
  const bool none = fails() != 0 || real(&data, size == 0 ? 1 : size) != 0;
  TORCH_CHECK_WITH(OutOfMemoryError, !none, "CUDA out of memory. Tried to allocate ", size, " bytes.");
  return data;
}

extern "C" void faults_cuda_free(void* data, size_t /*size*/, int /*device*/, void* /*stream*/) {
  static const auto real = find<int (*)(void*)>("cudaFree");
  if (data != nullptr) (void)real(data);
}
