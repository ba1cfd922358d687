# make install: the program, libyard as archive and shared object, the public headers, yard.pc.
include(GNUInstallDirs)

install(TARGETS switchyard yard_static yard_shared
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
configure_file(${CMAKE_SOURCE_DIR}/cmake/yard.pc.in ${CMAKE_BINARY_DIR}/yard.pc @ONLY)
install(FILES ${CMAKE_BINARY_DIR}/yard.pc DESTINATION ${pc_dir})
