# Programs with CUDA in them. Those for tests run on machines with libc and a driver, so cmocka is not
# theirs.
if(NOT cuda_objects)
  return()
endif()

file(GLOB cuda_sources CONFIGURE_DEPENDS src/ops/cuda/*.cu src/ops/cuda/*.c)
yard_cuda_library(yard_cuda ${cuda_sources})
target_sources(switchyard PRIVATE $<TARGET_OBJECTS:yard_cuda>)
target_link_libraries(switchyard PRIVATE ${YARD_CUDART})
set_target_properties(switchyard PROPERTIES LINKER_LANGUAGE C CUDA_ARCHITECTURES OFF
                      CUDA_RUNTIME_LIBRARY Static)

file(GLOB gpu_test_sources CONFIGURE_DEPENDS tests/gpu_test.c tests/ops/cuda/*.c)
add_executable(gpu_test ${gpu_test_sources} $<TARGET_OBJECTS:yard_cuda>
               $<TARGET_OBJECTS:room_base> $<TARGET_OBJECTS:room_ops>)
target_include_directories(gpu_test PRIVATE ${CMAKE_SOURCE_DIR}/tests
                           ${CMAKE_CUDA_TOOLKIT_INCLUDE_DIRECTORIES})
target_link_libraries(gpu_test PRIVATE ${YARD_CUDART} Threads::Threads m)
set_target_properties(gpu_test PROPERTIES LINKER_LANGUAGE C)

file(GLOB engine_gpu_test_sources CONFIGURE_DEPENDS tests/engine/cuda/*.c)
add_executable(engine_gpu_test ${engine_gpu_test_sources} $<TARGET_OBJECTS:yard_cuda>)
target_link_libraries(engine_gpu_test PRIVATE yard_static ${YARD_CUDART})
set_target_properties(engine_gpu_test PROPERTIES LINKER_LANGUAGE C)

file(GLOB ep_gpu_test_sources CONFIGURE_DEPENDS tests/ep/cuda/*.c tests/ep/cuda/*.cu)
add_executable(ep_gpu_test ${ep_gpu_test_sources})
target_include_directories(ep_gpu_test PRIVATE ${CMAKE_SOURCE_DIR}/tests
                           ${CMAKE_CUDA_TOOLKIT_INCLUDE_DIRECTORIES})
target_link_libraries(ep_gpu_test PRIVATE yard_ep_static)
set_target_properties(ep_gpu_test PROPERTIES LINKER_LANGUAGE C)
target_compile_options(ep_gpu_test PRIVATE
  "$<$<COMPILE_LANGUAGE:CUDA>:-std=c++17;--generate-code=arch=compute_90a,code=sm_90a;\
-Xcompiler=-fno-threadsafe-statics,-fno-exceptions,-fno-rtti>")
