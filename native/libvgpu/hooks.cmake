# Generates the table of hooks, and the wrappers that only wait, from NVIDIA's headers: see hooks.py. Defines
# VGPU_HOOKS, the folder of generated files, and the target vgpu_hooks that generates them. tests/native
# includes this file too.
set(VGPU_LAYERS ${CMAKE_CURRENT_LIST_DIR}) # the folders of libvgpu, the lowest first: tests/lint/test_native_layers.py
foreach(layer driver ledger compute residency families view entry)
  list(APPEND VGPU_LAYERS ${CMAKE_CURRENT_LIST_DIR}/${layer})
endforeach()

find_package(Python3 3.11 REQUIRED COMPONENTS Interpreter)
set(VGPU_HOOKS ${CMAKE_BINARY_DIR}/hooks)
set(VGPU_HOOKS_MADE ${VGPU_HOOKS}/hooks.def ${VGPU_HOOKS}/known.def ${VGPU_HOOKS}/waits.c)
add_custom_command(
  OUTPUT ${VGPU_HOOKS}/made
  BYPRODUCTS ${VGPU_HOOKS_MADE}
  COMMAND ${Python3_EXECUTABLE} ${CMAKE_CURRENT_LIST_DIR}/hooks.py --out ${VGPU_HOOKS}
          --include ${VGPU_CUDA_INCLUDE} --include ${VGPU_NVML_INCLUDE} ${CMAKE_C_COMPILER}
  COMMAND ${CMAKE_COMMAND} -E touch ${VGPU_HOOKS}/made
  DEPENDS ${CMAKE_CURRENT_LIST_DIR}/hooks.py ${CMAKE_CURRENT_LIST_DIR}/hooks.toml
          ${CMAKE_CURRENT_LIST_DIR}/driver/cuda_api.h ${VGPU_CUDA_INCLUDE}/cuda.h ${VGPU_CUDA_INCLUDE}/cudaTypedefs.h
  COMMENT "table of hooks"
  VERBATIM)
add_custom_target(vgpu_hooks DEPENDS ${VGPU_HOOKS}/made)
set_source_files_properties(${VGPU_HOOKS_MADE} PROPERTIES GENERATED TRUE)
