# Settings for compiling the C code of this tree: for the native parts, and for the simulator when it is built
# alone.
set(CMAKE_C_STANDARD 11)
set(CMAKE_C_EXTENSIONS ON) # _GNU_SOURCE interfaces: dlvsym, pidfd_open, SO_PEERCRED
set(CMAKE_C_STANDARD_REQUIRED ON)
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)
if(NOT CMAKE_BUILD_TYPE)
  set(CMAKE_BUILD_TYPE RelWithDebInfo)
endif()

set(VGPU_CUDA_INCLUDE "" CACHE PATH "folder that holds cuda.h")
set(VGPU_NVML_INCLUDE "" CACHE PATH "folder that holds nvml.h")
set(VGPU_SANITIZE "" CACHE STRING "sanitizers, as -fsanitize= takes them (address,undefined or thread)")
option(VGPU_WERROR "treat warnings as errors" ON)

add_compile_options(-Wall -Wextra -Wshadow -Wstrict-prototypes -Wmissing-prototypes
                    -fvisibility=hidden -fno-plt)
add_compile_definitions(_GNU_SOURCE)
if(VGPU_WERROR)
  add_compile_options(-Werror)
endif()
if(VGPU_SANITIZE OR CMAKE_BUILD_TYPE STREQUAL Debug)
  add_compile_definitions(VGPU_DEBUG) # common/invariant.h
endif()
if(VGPU_SANITIZE)
  add_compile_options(-fsanitize=${VGPU_SANITIZE} -fno-omit-frame-pointer)
  add_link_options(-fsanitize=${VGPU_SANITIZE})
endif()

set(CMAKE_LIBRARY_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/lib)
set(CMAKE_RUNTIME_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/bin)
