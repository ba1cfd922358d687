# Checks of the tree itself, as ctest entries with the label "checks". Each comes with a self-test that
# proves that it can fail. They look at the plain build only.
if(YARD_SANITIZE)
  return()
endif()
find_program(YARD_PYTHON python3)
if(NOT YARD_PYTHON)
  message(STATUS "checks of the tree: none, there is no python3")
  return()
endif()

function(yard_check name)
  cmake_parse_arguments(arg "LONG" "" "COMMAND" ${ARGN})
  set(labels checks)
  if(arg_LONG)
    list(APPEND labels long)
  endif()
  add_test(NAME ${name} COMMAND ${arg_COMMAND})
  # bytecode would be files in the tree
  set_tests_properties(${name} PROPERTIES LABELS "${labels}" TIMEOUT 900 SKIP_RETURN_CODE 77
                       WORKING_DIRECTORY ${CMAKE_SOURCE_DIR}
                       ENVIRONMENT "${test_env};PYTHONDONTWRITEBYTECODE=1")
endfunction()

set(tools ${CMAKE_SOURCE_DIR}/tools)
foreach(what rooms headers symbols format paths links)
  set(args ${CMAKE_SOURCE_DIR})
  if(what STREQUAL "symbols")
    list(APPEND args $<TARGET_FILE:yard_static> $<TARGET_FILE:yard_shared>)
  endif()
  yard_check(checks.${what} COMMAND ${YARD_PYTHON} ${tools}/check_${what}.py ${args})
  yard_check(checks.${what}_selftest COMMAND ${YARD_PYTHON} ${tools}/check_${what}.py --self-test)
endforeach()
yard_check(checks.symbols_ep COMMAND ${YARD_PYTHON} ${tools}/check_symbols.py ${CMAKE_SOURCE_DIR}
           $<TARGET_FILE:yard_ep_static> $<TARGET_FILE:yard_ep_shared> status.h fabric.h ep.h)
yard_check(checks.symbols_ops COMMAND ${YARD_PYTHON} ${tools}/check_symbols.py ${CMAKE_SOURCE_DIR}
           $<TARGET_FILE:yard_ops_static> $<TARGET_FILE:yard_ops_shared> status.h ops.h)
yard_check(checks.tables COMMAND ${YARD_PYTHON} ${tools}/bench_tables.py --check)
yard_check(checks.tables_selftest COMMAND ${YARD_PYTHON} ${tools}/bench_tables.py --self-test)
yard_check(tidy LONG COMMAND bash ${tools}/check_tidy.sh ${CMAKE_BINARY_DIR})
set_tests_properties(tidy PROPERTIES TIMEOUT 3600) # a minute a file or so, and there are hundreds
yard_check(model.golden_numpy LONG COMMAND bash ${tools}/check_golden.sh demo)
yard_check(model.families_numpy COMMAND bash ${tools}/check_golden.sh families)
