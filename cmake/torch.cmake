# Asks Python where torch is (without importing it, which takes seconds) and defines fusegrad::torch.
# Sets FUSEGRAD_TORCH_ROOT, FUSEGRAD_TORCH_VERSION ("2.11.0") and FUSEGRAD_TORCH_CUDA ("13.0" or empty).
execute_process(
  COMMAND ${Python_EXECUTABLE} ${CMAKE_CURRENT_LIST_DIR}/find_torch.py
  WORKING_DIRECTORY ${CMAKE_CURRENT_BINARY_DIR}
  OUTPUT_VARIABLE found OUTPUT_STRIP_TRAILING_WHITESPACE RESULT_VARIABLE failed)
if(failed)
  message(FATAL_ERROR "${Python_EXECUTABLE} has no torch. Install it there first: pip install torch==2.11.0")
endif()
list(POP_FRONT found FUSEGRAD_TORCH_ROOT FUSEGRAD_TORCH_VERSION FUSEGRAD_TORCH_CUDA)
if(FUSEGRAD_TORCH_VERSION VERSION_LESS 2.11)
  message(FATAL_ERROR "fusegrad needs torch 2.11 or later, ${FUSEGRAD_TORCH_ROOT} is ${FUSEGRAD_TORCH_VERSION}.")
endif()
include(${CMAKE_CURRENT_LIST_DIR}/torch_target.cmake)
