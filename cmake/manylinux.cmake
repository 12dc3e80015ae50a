# FUSEGRAD_MANYLINUX=ON: libraries that glibc 2.28 and the libstdc++ of GCC 8 load, made by a newer compiler on a newer
# system. Defines fusegrad_old_system, an archive of what those do not have, of which each library takes what it needs.
enable_language(ASM)
execute_process(COMMAND ${CMAKE_CXX_COMPILER} -print-file-name=libstdc++.a OUTPUT_VARIABLE archive
                OUTPUT_STRIP_TRAILING_WHITESPACE)
# The whole libstdc++.a would be a second one in the process; these members have functions only.
set(members floating_from_chars.o floating_to_chars.o eh_ptr.o condition_variable.o memory_resource.o)
set(folder ${CMAKE_CURRENT_BINARY_DIR}/libstdc++)
file(MAKE_DIRECTORY ${folder})
execute_process(COMMAND ${CMAKE_AR} x ${archive} ${members} WORKING_DIRECTORY ${folder} COMMAND_ERROR_IS_FATAL ANY)
list(TRANSFORM members PREPEND ${folder}/)
add_library(fusegrad_old_system STATIC cmake/manylinux/old_versions.S cmake/manylinux/missing.cpp ${members})
set_source_files_properties(${members} PROPERTIES EXTERNAL_OBJECT ON)
target_link_libraries(fusegrad_old_system INTERFACE
  "-Wl,--push-state,--no-as-needed,-l:libpthread.so.0,-l:libdl.so.2,-l:librt.so.1,--pop-state")
target_link_options(fusegrad_old_system INTERFACE LINKER:--exclude-libs,libfusegrad_old_system.a)
