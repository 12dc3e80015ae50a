# Writes a C++ file that holds device headers as text, for NVRTC to include by name.
#
#   cmake -DOUTPUT=headers.cpp -DROOT=csrc -DHEADERS=cuda/device/a.cuh,... -P embed.cmake
#
# The headers may include one another and <cstdint>, nothing else: where kernels are compiled there are no others.
# Comments and empty lines stay behind: what they say changes no program, and so no key of a cache.
cmake_policy(VERSION 3.28)
string(REPLACE "," ";" HEADERS "${HEADERS}")
set(entries "")
foreach(header ${HEADERS})
  set(name ${header})
  if(header STREQUAL "jit/cstdint.h")
    set(name cstdint)
  endif()
  file(READ ${ROOT}/${header} text)
  string(REGEX MATCHALL "#[ \t]*include[^\n]*" includes "${text}")
  foreach(include ${includes})
    string(REGEX REPLACE "^#include [<\"]([^>\"]+)[>\"]$" "\\1" included "${include}")
    if(NOT included STREQUAL "cstdint" AND NOT included IN_LIST HEADERS)
      message(FATAL_ERROR "${header}: ${include}: an embedded header may include only <cstdint> and the other embedded "
                          "headers (FUSEGRAD_JIT_HEADERS in CMakeLists.txt)")
    endif()
  endforeach()
  if(text MATCHES "(^|\n)[^\"\n]*(\"[^\"\n]*\"[^\"\n]*)*\"[^\"\n]*//[^\"\n]*\"|/[*]")
    message(FATAL_ERROR "${header} has // in a string, or a comment that is not //")
  endif()
  string(REGEX REPLACE "[ \t]*//[^\n]*" "" text "${text}")
  string(REGEX REPLACE "\n\n+" "\n" text "${text}")
  if(text MATCHES "\\)embedded\"")
    message(FATAL_ERROR "${header} holds the delimiter )embedded\"")
  endif()
  string(APPEND entries "    {\"${name}\", R\"embedded(${text})embedded\"},\n")
endforeach()
file(WRITE ${OUTPUT} "// Written by csrc/jit/embed.cmake.
#include \"jit/headers.h\"

namespace fusegrad::jit {

std::span<const Header> headers() {
  static constexpr Header kHeaders[] = {
${entries}  };
  return kHeaders;
}

}  // namespace fusegrad::jit
")
