// Python bindings of the host slab backend: rose._vmm.

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cerrno>
#include <cstdint>
#include <system_error>

#include "range.hpp"
#include "slab_file.hpp"

namespace py = pybind11;
using rose::Range;
using rose::SlabFile;

namespace {

using ReleaseGil = py::call_guard<py::gil_scoped_release>;

void raise_as_oserror(std::exception_ptr pointer) {
  try {
    if (pointer) std::rethrow_exception(pointer);
  } catch (const std::system_error& error) {
    py::object arguments = py::make_tuple(error.code().value(), error.what());
    PyErr_SetObject(PyExc_OSError, arguments.ptr());
  }
}

py::buffer_info whole(Range& range) {
  return py::buffer_info(range.address(), 1, py::format_descriptor<std::uint8_t>::format(), 1,
                         {static_cast<py::ssize_t>(range.num_bytes())}, {py::ssize_t{1}});
}

void bind_slab_file(py::module_& m) {
  py::class_<SlabFile, std::shared_ptr<SlabFile>>(m, "SlabFile")
      .def_static("create", &SlabFile::create, py::arg("num_slabs"), py::arg("slab_bytes"),
                  py::arg("name") = "rose-slabs")
      .def_static("from_fd", &SlabFile::from_fd, py::arg("fd"), py::arg("slab_bytes"))
      .def("fileno", &SlabFile::fd)
      .def_property_readonly("num_slabs", &SlabFile::num_slabs)
      .def_property_readonly("slab_bytes", &SlabFile::slab_bytes);
}

void bind_range(py::module_& m) {
  py::class_<Range, std::shared_ptr<Range>>(m, "Range", py::buffer_protocol())
      .def(py::init<std::shared_ptr<SlabFile>, std::size_t>(), py::arg("slabs"), py::arg("num_positions"))
      .def(
          "map",
          [](Range& range, std::size_t position, std::size_t slab) { range.map_many({position}, {slab}); },
          py::arg("position"), py::arg("slab"), ReleaseGil())
      .def(
          "unmap", [](Range& range, std::size_t position) { range.unmap_many({position}); },
          py::arg("position"), ReleaseGil())
      .def("map_many", &Range::map_many, py::arg("positions"), py::arg("slabs"), ReleaseGil())
      .def("unmap_many", &Range::unmap_many, py::arg("positions"), ReleaseGil())
      .def("zero", &Range::zero, py::arg("position"), ReleaseGil())
      .def("slab_at", &Range::slab_at, py::arg("position"), ReleaseGil())
      .def("mapped", &Range::mapped, ReleaseGil())
      .def_property_readonly(
          "address", [](const Range& range) { return reinterpret_cast<std::uintptr_t>(range.address()); })
      .def_property_readonly("num_positions", &Range::num_positions)
      .def_property_readonly("num_bytes", &Range::num_bytes)
      .def_property_readonly("slab_bytes", &Range::slab_bytes)
      .def_buffer(&whole);
}

}  // namespace

PYBIND11_MODULE(_vmm, m) {
  m.doc() = "Slabs in a memfd and address ranges over them: the host twin of CUDA's VMM.";
  py::register_exception_translator(&raise_as_oserror);
  bind_slab_file(m);
  bind_range(m);
}
