# CUDA is optional. The CPU program never depends on it: src/<room>/cuda/*.{cu,c} become one object
# library, which goes into the program (which starts without a driver too: the runtime is static and
# looks for it when it is asked) and into gpu_test, built from tests/**/cuda/*.c. The libraries do not
# contain it.
set(yard_cuda OFF)
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

file(GLOB cuda_sources CONFIGURE_DEPENDS src/*/cuda/*.cu src/*/cuda/*.c)
add_library(yard_cuda OBJECT ${cuda_sources})
target_include_directories(yard_cuda PRIVATE ${CMAKE_CUDA_TOOLKIT_INCLUDE_DIRECTORIES})
# Host code in .cu files stays C: without guarded statics, exceptions and RTTI the C compiler can
# link it, and a program with CUDA in it still needs libc only.
target_compile_options(yard_cuda PRIVATE "$<$<COMPILE_LANGUAGE:CUDA>:-std=c++17;\
--generate-code=arch=compute_90a,code=sm_90a;-lineinfo;-Xcompiler=-Wall,-Wextra,-fvisibility=hidden;\
-Xcompiler=-fno-threadsafe-statics,-fno-exceptions,-fno-rtti>"
  $<$<AND:$<COMPILE_LANGUAGE:CUDA>,$<BOOL:${YARD_WERROR}>>:-Werror=all-warnings>)
target_sources(switchyard PRIVATE $<TARGET_OBJECTS:yard_cuda>)
target_link_libraries(switchyard PRIVATE ${YARD_CUDART})
set_target_properties(switchyard PROPERTIES LINKER_LANGUAGE C CUDA_ARCHITECTURES OFF
                      CUDA_RUNTIME_LIBRARY Static)

# cudart_static's dlopen, shm_open and clock calls are in libc itself since glibc 2.34.
file(GLOB gpu_test_sources CONFIGURE_DEPENDS tests/gpu_test.c tests/*/cuda/*.c)
add_executable(gpu_test ${gpu_test_sources} $<TARGET_OBJECTS:yard_cuda>
               $<TARGET_OBJECTS:room_base> $<TARGET_OBJECTS:room_ops>)
target_include_directories(gpu_test PRIVATE ${CMAKE_SOURCE_DIR}/tests
                           ${CMAKE_CUDA_TOOLKIT_INCLUDE_DIRECTORIES})
target_link_libraries(gpu_test PRIVATE ${YARD_CUDART} Threads::Threads m)
set_target_properties(gpu_test PROPERTIES LINKER_LANGUAGE C)
