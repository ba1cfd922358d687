# libyard-ep-nvshmem: the kernels of ep once more, with puts by NVSHMEM. It is loaded at run time, so
# nothing links it, and only it needs NVSHMEM's host library where it runs.
if(NOT YARD_NVSHMEM)
  return()
endif()
if(NOT cuda_objects)
  message(FATAL_ERROR "YARD_NVSHMEM wants CUDA, which is not built")
endif()
find_path(nvshmem_include nvshmem.h REQUIRED PATHS ${YARD_NVSHMEM}/include NO_DEFAULT_PATH)
find_library(nvshmem_device libnvshmem_device.a REQUIRED PATHS ${YARD_NVSHMEM}/lib NO_DEFAULT_PATH)
# The wheel has the versioned name only.
find_file(nvshmem_host NAMES libnvshmem_host.so libnvshmem_host.so.3 REQUIRED
          PATHS ${YARD_NVSHMEM}/lib NO_DEFAULT_PATH)
message(STATUS "NVSHMEM: ${YARD_NVSHMEM}")

# Device code is linked: kernels call what NVSHMEM does for peers whose memory is not mapped.
set(nvshmem_kernels dispatch_send dispatch_recv fan_out combine_send combine_recv)
list(TRANSFORM nvshmem_kernels REPLACE "(.+)" "src/ep/cuda/\\1.cu")
yard_cuda_flags(yard_nvshmem_flags)
add_library(yard_ep_nvshmem MODULE src/ep/cuda/nvshmem/library.cu ${nvshmem_kernels})
set_target_properties(yard_ep_nvshmem PROPERTIES OUTPUT_NAME yard-ep-nvshmem LINKER_LANGUAGE CUDA
                      CUDA_SEPARABLE_COMPILATION ON CUDA_RESOLVE_DEVICE_SYMBOLS ON)
target_include_directories(yard_ep_nvshmem PRIVATE ${CMAKE_SOURCE_DIR}/include ${CMAKE_SOURCE_DIR}/src
                           ${CMAKE_CUDA_TOOLKIT_INCLUDE_DIRECTORIES})
target_include_directories(yard_ep_nvshmem SYSTEM PRIVATE ${nvshmem_include})
target_compile_definitions(yard_ep_nvshmem PRIVATE YARD_EP_NVSHMEM)
target_compile_options(yard_ep_nvshmem PRIVATE ${yard_nvshmem_flags} -diag-suppress=20012,20014,177)
target_link_libraries(yard_ep_nvshmem PRIVATE ${nvshmem_device} ${nvshmem_host} ${YARD_CUDART})
target_link_options(yard_ep_nvshmem PRIVATE
                    $<HOST_LINK:-Wl$<COMMA>--exclude-libs$<COMMA>ALL>
                    $<DEVICE_LINK:-arch=sm_90a>)

include(GNUInstallDirs)
install(TARGETS yard_ep_nvshmem LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR}) # beside libyard-ep
