# CUDA is optional. Where it is built, the cuda folders of ep and fabric are part of the libraries and
# that of ops of the program (cmake/cuda_programs.cmake). The runtime is linked in statically and looks
# for a driver when it is asked: what contains it runs, on CPUs, where there is none.
set(yard_cuda OFF)
set(cuda_objects "")
set(cuda_link "")
if(NOT YARD_CUDA STREQUAL "OFF" AND NOT YARD_SANITIZE)
  find_program(YARD_NVCC nvcc HINTS ENV CUDA_HOME ENV CUDA_PATH PATH_SUFFIXES bin
               PATHS /usr/local/cuda/bin /opt/cuda/bin)
  if(YARD_NVCC)
    set(yard_cuda ON)
  elseif(YARD_CUDA STREQUAL "ON")
    message(FATAL_ERROR "YARD_CUDA=ON, but there is no nvcc in PATH or /usr/local/cuda/bin")
  endif()
endif()
if(NOT yard_cuda)
  message(STATUS "CUDA: not built")
  return()
endif()

# The architecture is given by hand: wgmma needs 90a, and -arch=sm_90a would make compute_90 PTX too.
set(CMAKE_CUDA_COMPILER ${YARD_NVCC})
set(CMAKE_CUDA_ARCHITECTURES OFF)
set(CMAKE_CUDA_RUNTIME_LIBRARY Static)
if(YARD_CUDA STREQUAL "AUTO")
  # A toolkit that cannot compile (no matching host compiler) must not stop the CPU build.
  include(CheckLanguage)
  check_language(CUDA)
  if(NOT CMAKE_CUDA_COMPILER)
    message(STATUS "CUDA: ${YARD_NVCC} cannot compile; not built")
    return()
  endif()
endif()
enable_language(CUDA)
find_library(YARD_CUDART cudart_static REQUIRED HINTS ${CMAKE_CUDA_IMPLICIT_LINK_DIRECTORIES})
message(STATUS "CUDA: ${CMAKE_CUDA_COMPILER} ${CMAKE_CUDA_COMPILER_VERSION}, compute 90a")

# Host code in .cu files stays C: without guarded statics, exceptions and RTTI the C compiler can
# link it, and a program with CUDA in it still needs libc only.
function(yard_cuda_flags out)
  set(flags "$<$<COMPILE_LANGUAGE:CUDA>:-std=c++17;--generate-code=arch=compute_90a,code=sm_90a;-lineinfo;\
-Xcompiler=-Wall,-Wextra,-fvisibility=hidden,-fno-threadsafe-statics,-fno-exceptions,-fno-rtti>")
  if(YARD_WERROR)
    list(APPEND flags $<$<COMPILE_LANGUAGE:CUDA>:-Werror=all-warnings>)
  endif()
  set(${out} "${flags}" PARENT_SCOPE)
endfunction()

function(yard_cuda_library name)
  add_library(${name} OBJECT ${ARGN})
  target_include_directories(${name} PRIVATE ${CMAKE_SOURCE_DIR}/include ${CMAKE_SOURCE_DIR}/src
                             ${CMAKE_CUDA_TOOLKIT_INCLUDE_DIRECTORIES})
  yard_cuda_flags(flags)
  target_compile_options(${name} PRIVATE ${flags})
endfunction()

file(GLOB cuda_ep_sources CONFIGURE_DEPENDS src/ep/cuda/*.cu src/ep/cuda/*.c src/fabric/cuda/*.c)
yard_cuda_library(yard_cuda_ep ${cuda_ep_sources})
set(cuda_objects $<TARGET_OBJECTS:yard_cuda_ep>)
# cudart_static's dlopen, shm_open and clock calls are in libc itself since glibc 2.34. Its symbols
# stay inside the shared objects that it is linked into.
set(cuda_link ${YARD_CUDART} -Wl,--exclude-libs,libcudart_static.a)
set(YARD_PC_CUDA "${YARD_CUDART} -lrt ") # what a program with the static library needs
