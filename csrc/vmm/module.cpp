// Python bindings of the C ABI: rose._vmm. The classes are described in rose/_vmm.pyi.

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "bindings.hpp"

namespace py = pybind11;

namespace rose::bindings {
namespace {

using ReleaseGil = py::call_guard<py::gil_scoped_release>;

void raise_vmm_error(std::exception_ptr pointer) {
  try {
    if (pointer) std::rethrow_exception(pointer);
  } catch (const CallFailed& failed) {
    py::object type = py::module_::import("rose.errors").attr("VmmError");
    py::object arguments = py::make_tuple(failed.errno_code, failed.what());
    PyErr_SetObject(type.ptr(), arguments.ptr());
  }
}

template <typename Type, typename RangeType>
py::class_<Type> bind_slabs(py::module_& m, const char* name) {
  auto reserve = [](const Type& slabs, std::size_t num_positions, bool poison, bool guard) {
    return RangeType(slabs, num_positions, poison, guard);
  };
  return py::class_<Type>(m, name)
      .def("reserve", reserve, py::arg("num_positions"), py::kw_only(), py::arg("poison") = false,
           py::arg("guard") = false, ReleaseGil())
      .def("export", &Type::export_fd, py::arg("index"))
      .def_property_readonly("num_fds", &Type::num_fds)
      .def_property_readonly("num_slabs", &Type::num_slabs)
      .def_property_readonly("slab_bytes", &Type::slab_bytes);
}

template <typename Type, typename... Options>
py::class_<Type> bind_range(py::module_& m, const char* name, const Options&... options) {
  auto slab_at = [](const Type& range, std::size_t position) -> py::object {
    if (position >= range.num_positions()) {
      throw std::invalid_argument("position " + std::to_string(position) + " of " +
                                  std::to_string(range.num_positions()));
    }
    std::size_t slab = range.slab_at()[position];
    return slab == ROSE_VMM_NO_SLAB ? py::object(py::none()) : py::object(py::int_(slab));
  };
  return py::class_<Type>(m, name, options...)
      .def(
          "map",
          [](Type& range, std::size_t position, std::size_t slab, bool zero) {
            range.map_many({position}, {slab}, zero);
          },
          py::arg("position"), py::arg("slab"), py::kw_only(), py::arg("zero") = true, ReleaseGil())
      .def(
          "unmap", [](Type& range, std::size_t position, bool fence) { range.unmap_many({position}, fence); },
          py::arg("position"), py::kw_only(), py::arg("fence") = true, ReleaseGil())
      .def("map_many", &Type::map_many, py::arg("positions"), py::arg("slabs"), py::kw_only(),
           py::arg("zero") = true, ReleaseGil())
      .def("unmap_many", &Type::unmap_many, py::arg("positions"), py::kw_only(), py::arg("fence") = true,
           ReleaseGil())
      .def("zero", &Type::zero, py::arg("position"), ReleaseGil())
      .def("fence", &Type::fence, ReleaseGil())
      .def("slab_at", slab_at, py::arg("position"))
      .def("mapped", &Type::mapped, ReleaseGil())
      .def_property_readonly("address", &Type::address)
      .def_property_readonly("num_positions", &Type::num_positions)
      .def_property_readonly("num_bytes", &Type::num_bytes)
      .def_property_readonly("slab_bytes", &Type::slab_bytes);
}

void bind_host(py::module_& m) {
  bind_slabs<HostSlabs, HostRange>(m, "SlabFile")
      .def_static(
          "create",
          [](std::size_t num_slabs, std::size_t slab_bytes, const std::string& name) {
            return HostSlabs(create_slabs(open_host().get(), num_slabs, slab_bytes, name));
          },
          py::arg("num_slabs"), py::arg("slab_bytes"), py::arg("name") = "rose-slabs")
      .def_static(
          "from_fd",
          [](int fd, std::size_t slab_bytes) {
            return HostSlabs(import_slabs(open_host().get(), {fd}, slab_bytes));
          },
          py::arg("fd"), py::arg("slab_bytes"))
      .def("fileno", &HostSlabs::fileno);
  bind_range<HostRange>(m, "Range", py::buffer_protocol()).def_buffer([](HostRange& range) {
    return py::buffer_info(reinterpret_cast<void*>(range.address()), 1,
                           py::format_descriptor<std::uint8_t>::format(), 1,
                           {static_cast<py::ssize_t>(range.num_bytes())}, {py::ssize_t{1}});
  });
  m.def("host_granularity", [] { return rose_vmm_granularity(open_host().get()); });
}

void bind_cuda(py::module_& m) {
  bind_slabs<CudaSlabs, CudaRange>(m, "CudaSlabs");
  bind_range<CudaRange>(m, "CudaRange")
      .def_property_readonly("__cuda_array_interface__", [](const CudaRange& range) {
        return py::dict(py::arg("shape") = py::make_tuple(range.num_bytes()), py::arg("typestr") = "|i1",
                        py::arg("data") = py::make_tuple(range.address(), false), py::arg("version") = 3);
      });
  py::class_<CudaDevice>(m, "CudaDevice")
      .def(py::init(
               [](int device, const std::string& library) { return CudaDevice{open_cuda(library, device)}; }),
           py::arg("device") = 0, py::arg("library") = "libcuda.so.1")
      .def_property_readonly(
          "granularity", [](const CudaDevice& device) { return rose_vmm_granularity(device.backend.get()); })
      .def(
          "create",
          [](const CudaDevice& device, std::size_t num_slabs, std::size_t slab_bytes) {
            return CudaSlabs{create_slabs(device.backend.get(), num_slabs, slab_bytes, "")};
          },
          py::arg("num_slabs"), py::arg("slab_bytes"), ReleaseGil())
      .def(
          "import_fds",
          [](const CudaDevice& device, const std::vector<int>& fds, std::size_t slab_bytes) {
            return CudaSlabs{import_slabs(device.backend.get(), fds, slab_bytes)};
          },
          py::arg("fds"), py::arg("slab_bytes"), ReleaseGil());
}

}  // namespace
}  // namespace rose::bindings

PYBIND11_MODULE(_vmm, m) {
  m.doc() = "Slabs of physical memory and address ranges over them, on the host and on CUDA devices.";
  py::register_exception_translator(&rose::bindings::raise_vmm_error);
  rose::bindings::bind_host(m);
  rose::bindings::bind_cuda(m);
}
