# Decides whether the library for JAX is built. Sets FUSEGRAD_WITH_JAX (ON or OFF), FUSEGRAD_JAX_INCLUDE (the folder of
# xla/ffi/api, which jaxlib ships), FUSEGRAD_JAXLIB_VERSION and FUSEGRAD_JAX_STATUS (a sentence for people).
set(FUSEGRAD_WITH_JAX OFF)
if(FUSEGRAD_JAX STREQUAL "OFF")
  set(FUSEGRAD_JAX_STATUS "without JAX: FUSEGRAD_JAX=OFF")
  return()
elseif(NOT FUSEGRAD_JAX MATCHES "^(AUTO|ON)$")
  message(FATAL_ERROR "FUSEGRAD_JAX is '${FUSEGRAD_JAX}'; it must be AUTO, ON or OFF.")
endif()
execute_process(
  COMMAND ${Python_EXECUTABLE} ${CMAKE_CURRENT_LIST_DIR}/find_jaxlib.py ${FUSEGRAD_JAXLIB}
  WORKING_DIRECTORY ${CMAKE_CURRENT_BINARY_DIR}
  OUTPUT_VARIABLE found OUTPUT_STRIP_TRAILING_WHITESPACE RESULT_VARIABLE failed)
if(failed)
  set(FUSEGRAD_JAX_STATUS "without JAX: ${Python_EXECUTABLE} has no jaxlib")
  if(FUSEGRAD_JAX STREQUAL "ON")
    message(FATAL_ERROR "FUSEGRAD_JAX=ON, but ${Python_EXECUTABLE} has no jaxlib: pip install jax, or set FUSEGRAD_JAX=OFF.")
  endif()
  return()
endif()
list(POP_FRONT found FUSEGRAD_JAX_INCLUDE FUSEGRAD_JAXLIB_VERSION)
if(NOT EXISTS ${FUSEGRAD_JAX_INCLUDE}/xla/ffi/api/ffi.h)
  message(FATAL_ERROR "jaxlib ${FUSEGRAD_JAXLIB_VERSION} lacks ${FUSEGRAD_JAX_INCLUDE}/xla/ffi/api/ffi.h. Set FUSEGRAD_JAX=OFF, or "
                      "install another: pip install jax")
endif()
set(FUSEGRAD_WITH_JAX ON)
set(FUSEGRAD_JAX_STATUS "with JAX, by the headers of jaxlib ${FUSEGRAD_JAXLIB_VERSION}")
