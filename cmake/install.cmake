# make install: the program, libyard, libyard-ep and libyard-ops as archives and shared objects, the
# public headers, yard.pc, yard-ep.pc, yard-ops.pc.
include(GNUInstallDirs)

install(TARGETS switchyard yard_static yard_shared yard_ep_static yard_ep_shared
                yard_ops_static yard_ops_shared
        RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR}
        LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR}
        ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR})
install(DIRECTORY ${CMAKE_SOURCE_DIR}/include/yard
        DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} FILES_MATCHING PATTERN "*.h")

# The prefix is found from where yard.pc lies, so that one build can be installed anywhere.
set(pc_dir ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
if(IS_ABSOLUTE "${CMAKE_INSTALL_LIBDIR}")
  set(YARD_PC_PREFIX "${CMAKE_INSTALL_PREFIX}")
else()
  file(RELATIVE_PATH up "/p/${pc_dir}" "/p")
  set(YARD_PC_PREFIX "\${pcfiledir}/${up}")
  string(REGEX REPLACE "/$" "" YARD_PC_PREFIX "${YARD_PC_PREFIX}")
endif()
foreach(name yard yard-ep yard-ops)
  configure_file(${CMAKE_SOURCE_DIR}/cmake/${name}.pc.in ${CMAKE_BINARY_DIR}/${name}.pc @ONLY)
  install(FILES ${CMAKE_BINARY_DIR}/${name}.pc DESTINATION ${pc_dir})
endforeach()
