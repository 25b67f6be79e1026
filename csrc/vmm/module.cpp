// Python bindings of slab memory: rose._vmm. rose/_vmm.pyi describes the classes.
//
// Python is the only caller, so the bindings stand directly on the C++ classes; there is no C ABI between.

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "failure.hpp"
#include "range.hpp"
#include "slabs.hpp"

namespace py = pybind11;

namespace rose {
namespace {

using Numbers = std::vector<std::size_t>;
using SlabsPointer = std::shared_ptr<const Slabs>;
using ReleaseGil = py::call_guard<py::gil_scoped_release>;

void raise_vmm_error(int errno_code, const char* message) {
  py::object type = py::module_::import("rose.errors").attr("VmmError");
  py::object arguments = py::make_tuple(errno_code, message);
  PyErr_SetObject(type.ptr(), arguments.ptr());
}

void translate(std::exception_ptr pointer) {
  try {
    if (pointer) std::rethrow_exception(pointer);
  } catch (const BadArgument& mistake) {
    PyErr_SetString(PyExc_ValueError, mistake.what());
  } catch (const Failure& failure) {
    raise_vmm_error(failure.errno_code(), failure.what());
  } catch (const std::bad_alloc&) {
    raise_vmm_error(ENOMEM, "no host memory for the slab tables");
  }
}

// Python sees a type of its own for each backend: what works on host memory alone is a method of the host's
// classes alone.
class SlabFile {
 public:
  explicit SlabFile(SlabsPointer made) : slabs(std::move(made)), fd_(slabs->export_fd(0)) {}
  SlabFile(SlabFile&& other) noexcept : slabs(std::move(other.slabs)), fd_(std::exchange(other.fd_, -1)) {}
  ~SlabFile() {
    if (fd_ >= 0) close(fd_);
  }
  int fileno() const { return fd_; }

  SlabsPointer slabs;

 private:
  int fd_;
};
struct CudaSlabs {
  SlabsPointer slabs;
};
struct CudaDevice {
  std::unique_ptr<DeviceBackend> backend;
};
struct HostRange : Range {
  using Range::Range;
};
struct CudaRange : Range {
  using Range::Range;
};

template <typename Type, typename RangeType>
py::class_<Type> bind_slabs(py::module_& m, const char* name) {
  auto reserve = [](const Type& self, std::size_t num_positions, bool poison, bool guard) {
    return std::make_unique<RangeType>(self.slabs, num_positions, RangeOptions{poison, guard});
  };
  return py::class_<Type>(m, name)
      .def("reserve", reserve, py::arg("num_positions"), py::kw_only(), py::arg("poison") = false,
           py::arg("guard") = false, ReleaseGil())
      .def(
          "export", [](const Type& self, std::size_t index) { return self.slabs->export_fd(index); },
          py::arg("index"))
      .def_property_readonly("num_fds", [](const Type& self) { return self.slabs->num_fds(); })
      .def_property_readonly("num_slabs", [](const Type& self) { return self.slabs->num_slabs(); })
      .def_property_readonly("slab_bytes", [](const Type& self) { return self.slabs->slab_bytes(); });
}

py::object slab_at(const Range& range, std::size_t position) {
  if (position >= range.num_positions()) {
    throw_bad_argument("position " + text(position) + " of " + text(range.num_positions()));
  }
  std::size_t slab = range.mapped()[position];
  return slab == Range::kNoSlab ? py::object(py::none()) : py::object(py::int_(slab));
}

std::vector<std::pair<std::size_t, std::size_t>> mapped_pairs(const Range& range) {
  std::vector<std::pair<std::size_t, std::size_t>> pairs;
  Numbers slabs = range.mapped();
  for (std::size_t position = 0; position < slabs.size(); ++position) {
    if (slabs[position] != Range::kNoSlab) pairs.emplace_back(position, slabs[position]);
  }
  return pairs;
}

std::uintptr_t address_of(const Range& range) { return reinterpret_cast<std::uintptr_t>(range.address()); }

template <typename Type, typename... Options>
py::class_<Type> bind_range(py::module_& m, const char* name, const Options&... options) {
  return py::class_<Type>(m, name, options...)
      .def(
          "map",
          [](Type& self, std::size_t position, std::size_t slab, bool zero) {
            self.map({position}, {slab}, zero, std::nullopt);
          },
          py::arg("position"), py::arg("slab"), py::kw_only(), py::arg("zero") = true, ReleaseGil())
      .def(
          "unmap", [](Type& self, std::size_t position, bool fence) { self.unmap({position}, fence, true); },
          py::arg("position"), py::kw_only(), py::arg("fence") = true, ReleaseGil())
      .def(
          "map_many",
          [](Type& self, const Numbers& positions, const Numbers& slabs, bool zero, Stream stream) {
            self.map(positions, slabs, zero, stream);
          },
          py::arg("positions"), py::arg("slabs"), py::kw_only(), py::arg("zero") = true,
          py::arg("stream") = py::none(), ReleaseGil())
      .def(
          "unmap_many",
          [](Type& self, const Numbers& positions, bool fence, bool guard) {
            self.unmap(positions, fence, guard);
          },
          py::arg("positions"), py::kw_only(), py::arg("fence") = true, py::arg("guard") = true, ReleaseGil())
      .def(
          "guard", [](Type& self) { self.guard(); }, ReleaseGil())
      .def(
          "zero", [](Type& self, std::size_t position) { self.zero({position}); }, py::arg("position"),
          ReleaseGil())
      .def(
          "fence", [](Type& self) { self.fence(); }, ReleaseGil())
      .def(
          "slab_at", [](const Type& self, std::size_t position) { return slab_at(self, position); },
          py::arg("position"))
      .def(
          "mapped", [](const Type& self) { return mapped_pairs(self); }, ReleaseGil())
      .def_property_readonly("address", [](const Type& self) { return address_of(self); })
      .def_property_readonly("num_positions", [](const Type& self) { return self.num_positions(); })
      .def_property_readonly("num_bytes", [](const Type& self) { return self.num_bytes(); })
      .def_property_readonly("slab_bytes", [](const Type& self) { return self.slab_bytes(); });
}

// Runs the handlers of signals that have arrived; throws what one of them raised. Needs the GIL.
void check_signals() {
  if (PyErr_CheckSignals() != 0) throw py::error_already_set();
}

void bind_host(py::module_& m) {
  bind_slabs<SlabFile, HostRange>(m, "SlabFile")
      .def_static(
          "create",
          [](std::size_t num_slabs, std::size_t slab_bytes, const std::string& name) {
            return SlabFile(open_host()->create(num_slabs, slab_bytes, name, check_signals));
          },
          py::arg("num_slabs"), py::arg("slab_bytes"), py::arg("name") = "rose-slabs")
      .def_static(
          "from_fd",
          [](int fd, std::size_t slab_bytes) { return SlabFile(open_host()->import({fd}, slab_bytes)); },
          py::arg("fd"), py::arg("slab_bytes"))
      .def("fileno", &SlabFile::fileno);
  bind_range<HostRange>(m, "Range", py::buffer_protocol()).def_buffer([](HostRange& range) {
    return py::buffer_info(range.address(), 1, py::format_descriptor<std::uint8_t>::format(), 1,
                           {static_cast<py::ssize_t>(range.num_bytes())}, {py::ssize_t{1}});
  });
  m.def("host_granularity", [] { return open_host()->granularity(); });
}

void bind_cuda(py::module_& m) {
  bind_slabs<CudaSlabs, CudaRange>(m, "CudaSlabs");
  bind_range<CudaRange>(m, "CudaRange")
      .def_property_readonly("__cuda_array_interface__", [](const CudaRange& range) {
        return py::dict(py::arg("shape") = py::make_tuple(range.num_bytes()), py::arg("typestr") = "|i1",
                        py::arg("data") = py::make_tuple(address_of(range), false), py::arg("version") = 3);
      });
  py::class_<CudaDevice>(m, "CudaDevice")
      .def(py::init(
               [](int device, const std::string& library) { return CudaDevice{open_cuda(library, device)}; }),
           py::arg("device") = 0, py::arg("library") = "libcuda.so.1")
      .def_property_readonly("granularity",
                             [](const CudaDevice& device) { return device.backend->granularity(); })
      .def_property_readonly("free_bytes",
                             [](const CudaDevice& device) { return device.backend->free_bytes(); })
      .def(
          "create",
          [](const CudaDevice& device, std::size_t num_slabs, std::size_t slab_bytes) {
            return CudaSlabs{device.backend->create(num_slabs, slab_bytes, "", check_signals)};
          },
          py::arg("num_slabs"), py::arg("slab_bytes"))
      .def(
          "import_fds",
          [](const CudaDevice& device, const std::vector<int>& fds, std::size_t slab_bytes) {
            return CudaSlabs{device.backend->import(fds, slab_bytes)};
          },
          py::arg("fds"), py::arg("slab_bytes"), ReleaseGil());
}

}  // namespace
}  // namespace rose

PYBIND11_MODULE(_vmm, m) {
  m.doc() = "Slabs of physical memory and address ranges over them, on the host and on CUDA devices.";
  py::register_local_exception_translator(&rose::translate);
  rose::bind_host(m);
  rose::bind_cuda(m);
}
