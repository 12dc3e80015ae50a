# Defines fusegrad::torch from FUSEGRAD_TORCH_ROOT, the folder that holds torch's include/ and lib/. The C++ tests and
# the installed package share this file. find_package(Torch) is not used: where torch has CUDA it demands a CUDA
# toolkit, which a machine with torch from PyPI need not have.
if(NOT TARGET fusegrad::torch)
  add_library(fusegrad::torch INTERFACE IMPORTED)
  set(root ${FUSEGRAD_TORCH_ROOT})
  target_include_directories(fusegrad::torch SYSTEM INTERFACE ${root}/include ${root}/include/torch/csrc/api/include)
  target_compile_features(fusegrad::torch INTERFACE cxx_std_20)
  # libtorch.so has no symbols: it is what brings libtorch_cuda.so with it, and linkers may drop it unasked.
  target_link_libraries(fusegrad::torch INTERFACE
    "-Wl,--push-state,--no-as-needed,${root}/lib/libtorch.so,--pop-state")
  foreach(name torch torch_cpu c10 torch_cuda c10_cuda)
    if(EXISTS ${root}/lib/lib${name}.so)
      target_link_libraries(fusegrad::torch INTERFACE ${root}/lib/lib${name}.so)
    endif()
  endforeach()
endif()
