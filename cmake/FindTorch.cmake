# Finds the libraries of the torch package at TORCH_INSTALL_PREFIX (the folder of torch/__init__.py) and defines
#
#   Torch::cpu    what operators for the CPU need
#   Torch::stable the library that has PyTorch's stable ABI
#   Torch::python what functions for Python that take tensors need as well
#
# torch's own TorchConfig.cmake does not serve: with a torch built for CUDA it fails unless a CUDA toolkit is
# installed, and a fresh machine has no toolkit. Nothing is asked of one here.

foreach(_name IN ITEMS c10 torch_cpu torch torch_python)
  find_library(Torch_${_name}_LIBRARY ${_name} PATHS "${TORCH_INSTALL_PREFIX}/lib" NO_DEFAULT_PATH)
  mark_as_advanced(Torch_${_name}_LIBRARY)
endforeach()
find_path(Torch_INCLUDE_DIR ATen/ATen.h PATHS "${TORCH_INSTALL_PREFIX}/include" NO_DEFAULT_PATH)
mark_as_advanced(Torch_INCLUDE_DIR)

include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(
  Torch
  REQUIRED_VARS Torch_torch_LIBRARY Torch_torch_cpu_LIBRARY Torch_torch_python_LIBRARY Torch_c10_LIBRARY Torch_INCLUDE_DIR
  REASON_FAILURE_MESSAGE "TORCH_INSTALL_PREFIX must be the folder of an installed torch package")

if(Torch_FOUND AND NOT TARGET Torch::cpu)
  add_library(Torch::cpu INTERFACE IMPORTED)
  target_include_directories(
    Torch::cpu SYSTEM INTERFACE "${Torch_INCLUDE_DIR}" "${Torch_INCLUDE_DIR}/torch/csrc/api/include")
  target_link_libraries(
    Torch::cpu INTERFACE "${Torch_torch_LIBRARY}" "${Torch_torch_cpu_LIBRARY}" "${Torch_c10_LIBRARY}")
  # Since torch 2.7 its wheels have the new ABI of libstdc++ only, which is not every compiler's default.
  target_compile_definitions(Torch::cpu INTERFACE _GLIBCXX_USE_CXX11_ABI=1)
  add_library(Torch::stable INTERFACE IMPORTED)
  target_link_libraries(Torch::stable INTERFACE "${Torch_torch_cpu_LIBRARY}")
  add_library(Torch::python INTERFACE IMPORTED)
  target_link_libraries(Torch::python INTERFACE Torch::cpu "${Torch_torch_python_LIBRARY}")
endif()
