# Decides whether CUDA is built, and with which nvcc. Sets FUSEGRAD_WITH_CUDA (ON or OFF), FUSEGRAD_CUDA_STATUS (a
# sentence for people), FUSEGRAD_CUDA_VERSION, FUSEGRAD_BUILT_ARCHS, CMAKE_CUDA_COMPILER,
# CMAKE_CUDA_ARCHITECTURES, FUSEGRAD_CUDART (torch's runtime), FUSEGRAD_CUDA_RPATH, FUSEGRAD_CUDART_STATIC and the
# target fusegrad_cuda_settings.
set(FUSEGRAD_ALL_ARCHS 80 86 89 90a 100 120)
set(FUSEGRAD_WITH_CUDA OFF)
set(FUSEGRAD_CUDA_VERSION "")
set(FUSEGRAD_BUILT_ARCHS "")
set(FUSEGRAD_CUDA_RPATH "")

# The version of an nvcc ("13.0"), or nothing if it does not run.
function(fusegrad_nvcc_version nvcc result)
  execute_process(COMMAND ${nvcc} --version OUTPUT_VARIABLE text ERROR_QUIET RESULT_VARIABLE failed)
  string(REGEX MATCH "release ([0-9]+\\.[0-9]+)" match "${text}")
  set(${result} "${CMAKE_MATCH_1}" PARENT_SCOPE)
endfunction()

# Among the nvcc of this machine the first of torch's CUDA version, else the first of the same major version: torch's
# libraries and headers fit those. Sets nvcc, or why_not.
function(fusegrad_find_nvcc)
  string(REGEX MATCH "^[0-9]+" major ${FUSEGRAD_TORCH_CUDA})
  cmake_path(SET nvidia NORMALIZE "${FUSEGRAD_TORCH_ROOT}/../nvidia/cu${major}")
  find_program(path_nvcc nvcc NO_CACHE)
  if(FUSEGRAD_NVCC AND NOT FUSEGRAD_NVCC STREQUAL "pypi")
    set(candidates ${FUSEGRAD_NVCC})
  elseif(FUSEGRAD_NVCC STREQUAL "pypi")
    set(candidates ${nvidia}/bin/nvcc)
  else()
    set(candidates $ENV{CUDACXX} ${nvidia}/bin/nvcc $ENV{CUDA_HOME}/bin/nvcc ${path_nvcc}
        /usr/local/cuda-${FUSEGRAD_TORCH_CUDA}/bin/nvcc /usr/local/cuda/bin/nvcc)
  endif()
  set(others "")
  foreach(candidate ${candidates})
    if(EXISTS ${candidate})
      fusegrad_nvcc_version(${candidate} version)
      if(version STREQUAL FUSEGRAD_TORCH_CUDA)
        set(nvcc ${candidate})
        break()
      elseif(version MATCHES "^${major}\\." AND NOT nvcc)
        set(nvcc ${candidate})
      else()
        string(APPEND others " (${candidate} is CUDA ${version})")
      endif()
    endif()
  endforeach()
  set(nvcc "${nvcc}" PARENT_SCOPE)
  set(why_not "no nvcc of CUDA ${major}, torch's version, was found${others}" PARENT_SCOPE)
endfunction()

# The compiler of torch's CUDA version, into the environment of the Python that builds.
function(fusegrad_install_nvcc)
  set(requirement "cuda-toolkit[nvcc,nvvm,crt,cccl,cudart]==${FUSEGRAD_TORCH_CUDA}.*")
  message(STATUS "Installing nvcc: pip install '${requirement}'")
  execute_process(COMMAND ${Python_EXECUTABLE} -m pip install --quiet ${requirement} RESULT_VARIABLE failed)
  if(failed)
    message(WARNING "nvcc could not be installed. By hand: ${Python_EXECUTABLE} -m pip install '${requirement}'")
  endif()
endfunction()

# The architectures of this machine's GPUs, such as "90a;120"; empty without a GPU, or where nvidia-smi does not tell.
function(fusegrad_native_archs result)
  set(archs "")
  if(nvidia_smi)
    execute_process(COMMAND ${nvidia_smi} --query-gpu=compute_cap --format=csv,noheader OUTPUT_VARIABLE text ERROR_QUIET
                    RESULT_VARIABLE failed)
    if(NOT failed)
      string(REGEX MATCHALL "[0-9]+\\.[0-9]" capabilities "${text}")
      list(SORT capabilities COMPARE NATURAL)
      list(REMOVE_DUPLICATES capabilities)
      string(REPLACE "." "" archs "${capabilities}")
      list(TRANSFORM archs REPLACE "^90$" "90a")  # Hopper's own instructions
    endif()
  endif()
  set(${result} "${archs}" PARENT_SCOPE)
endfunction()

find_program(nvidia_smi nvidia-smi NO_CACHE)
fusegrad_native_archs(native)
set(gpu OFF)
if(native OR EXISTS /dev/nvidia0)
  set(gpu ON)
endif()

if(FUSEGRAD_CUDA STREQUAL "OFF")
  set(why_not "FUSEGRAD_CUDA=OFF")
elseif(NOT FUSEGRAD_CUDA MATCHES "^(AUTO|ON)$")
  message(FATAL_ERROR "FUSEGRAD_CUDA is '${FUSEGRAD_CUDA}'; it must be AUTO, ON or OFF.")
elseif(FUSEGRAD_CUDA STREQUAL "AUTO" AND NOT gpu AND NOT FUSEGRAD_CUDA_ARCHS AND NOT FUSEGRAD_NVCC)
  set(why_not "this machine has no GPU; FUSEGRAD_CUDA=ON builds for others")
elseif(NOT FUSEGRAD_TORCH_CUDA)
  set(why_not "torch ${FUSEGRAD_TORCH_VERSION} is built without CUDA")
else()
  fusegrad_find_nvcc()
  if(NOT nvcc AND (FUSEGRAD_NVCC STREQUAL "pypi" OR (NOT FUSEGRAD_NVCC AND gpu)))
    fusegrad_install_nvcc()
    fusegrad_find_nvcc()
  endif()
  if(nvcc)
    set(FUSEGRAD_WITH_CUDA ON)
  endif()
endif()

if(NOT FUSEGRAD_WITH_CUDA)
  if(FUSEGRAD_CUDA STREQUAL "ON")
    message(FATAL_ERROR "FUSEGRAD_CUDA=ON, but ${why_not}. Install the CUDA toolkit that fits torch, name its nvcc by "
                        "FUSEGRAD_NVCC=/path/to/nvcc, take the one from PyPI by FUSEGRAD_NVCC=pypi, or set "
                        "FUSEGRAD_CUDA=OFF.")
  endif()
  set(FUSEGRAD_CUDA_STATUS "without CUDA: ${why_not}")
  return()
endif()

fusegrad_nvcc_version(${nvcc} FUSEGRAD_CUDA_VERSION)
# CMake remembers the compiler of the first configuration and would go on with it, unasked.
if(NOT nvcc STREQUAL FUSEGRAD_LAST_NVCC)
  file(REMOVE ${CMAKE_BINARY_DIR}/CMakeFiles/${CMAKE_VERSION}/CMakeCUDACompiler.cmake)
  set(FUSEGRAD_LAST_NVCC ${nvcc} CACHE INTERNAL "")
endif()
set(CMAKE_CUDA_COMPILER ${nvcc})
set(CMAKE_CUDA_RUNTIME_LIBRARY None)
if(FUSEGRAD_CUDA_ARCHS AND NOT FUSEGRAD_CUDA_ARCHS STREQUAL "native")
  set(archs ${FUSEGRAD_CUDA_ARCHS})
elseif(native)
  set(archs ${native})
elseif(FUSEGRAD_CUDA_ARCHS)
  message(FATAL_ERROR "FUSEGRAD_CUDA_ARCHS is 'native', but nvidia-smi names no GPU of this machine.")
else()
  set(archs ${FUSEGRAD_ALL_ARCHS})
endif()
set(CMAKE_CUDA_ARCHITECTURES ${archs})
list(POP_BACK CMAKE_CUDA_ARCHITECTURES last)
list(TRANSFORM CMAKE_CUDA_ARCHITECTURES APPEND "-real")
list(APPEND CMAKE_CUDA_ARCHITECTURES ${last})
list(JOIN archs " " FUSEGRAD_BUILT_ARCHS)
set(FUSEGRAD_CUDA_STATUS "with CUDA ${FUSEGRAD_CUDA_VERSION} for ${FUSEGRAD_BUILT_ARCHS}")
message(STATUS "nvcc: ${nvcc}")
enable_language(CUDA)
set(CMAKE_CUDA_STANDARD 20)
set(CMAKE_CUDA_STANDARD_REQUIRED ON)

# The packages that torch's wheels depend on hold the headers of cuBLAS, cuSPARSE and cuSOLVER, which torch's own
# include and a small toolkit lacks. The runtime is the one that torch loads.
string(REGEX MATCH "^[0-9]+" major ${FUSEGRAD_CUDA_VERSION})
cmake_path(SET nvidia NORMALIZE "${FUSEGRAD_TORCH_ROOT}/../nvidia/cu${major}")
find_library(FUSEGRAD_CUDART NAMES libcudart.so.${major} libcudart.so
             HINTS ${nvidia}/lib ${CMAKE_CUDA_IMPLICIT_LINK_DIRECTORIES} REQUIRED NO_CACHE)
find_library(FUSEGRAD_CUDART_STATIC NAMES libcudart_static.a
             HINTS ${nvidia}/lib ${CMAKE_CUDA_IMPLICIT_LINK_DIRECTORIES} REQUIRED NO_CACHE)
add_library(fusegrad_cuda_settings INTERFACE)
target_include_directories(fusegrad_cuda_settings SYSTEM INTERFACE
  ${CMAKE_CUDA_TOOLKIT_INCLUDE_DIRECTORIES} ${nvidia}/include)
target_compile_definitions(fusegrad_cuda_settings INTERFACE FUSEGRAD_WITH_CUDA)
# For profilers, kernels know their lines in a build that keeps debug information: they name this machine's folders.
target_compile_options(fusegrad_cuda_settings INTERFACE
  "$<$<COMPILE_LANGUAGE:CUDA>:--expt-relaxed-constexpr;--expt-extended-lambda;--threads=2>"
  "$<$<AND:$<COMPILE_LANGUAGE:CUDA>,$<NOT:$<CONFIG:Release>>>:-lineinfo>")
if(NOT FUSEGRAD_MANYLINUX)
  set(FUSEGRAD_CUDA_RPATH "$ORIGIN/../../../nvidia/cu${major}/lib")
endif()
