// Owns the Python face of the delta codec: rose._delta (see rose/_delta.pyi).
// Promises: arrays are used in place, the GIL is released while they are read or written, and apply()
// reads a whole delta through once before it writes the first element.
// Never allocates in proportion to the weights, only to the changes.

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include "g8s.hpp"
#include "state_hash.hpp"

namespace py = pybind11;
using namespace rose;

namespace {

py::tuple lanes(const StateHash& hash) { return py::make_tuple(hash.first, hash.second); }

void require_vector(const py::array& array, const char* name) {
  if (array.ndim() != 1 || !(array.flags() & py::array::c_style)) {
    throw py::value_error(std::string(name) + " must be a contiguous vector");
  }
  if (array.dtype().kind() != 'u') {
    throw py::value_error(std::string(name) + " must hold unsigned integers (raw bits)");
  }
}

void require_same(const py::array& a, const py::array& b) {
  require_vector(a, "old");
  require_vector(b, "new");
  if (a.size() != b.size() || a.itemsize() != b.itemsize()) {
    throw py::value_error("old has " + std::to_string(a.size()) + " elements of " +
                          std::to_string(a.itemsize()) + " bytes, new has " + std::to_string(b.size()) +
                          " of " + std::to_string(b.itemsize()));
  }
}

// Calls work(T{}) with the unsigned type of the element width.
template <typename Work>
auto with_width(const py::array& array, Work&& work) {
  switch (array.itemsize()) {
    case 1:
      return work(std::uint8_t{});
    case 2:
      return work(std::uint16_t{});
    case 4:
      return work(std::uint32_t{});
    default:
      throw py::value_error("elements must be 1, 2 or 4 bytes wide, got " + std::to_string(array.itemsize()));
  }
}

template <typename T>
const T* read(const py::array& array) {
  return static_cast<const T*>(array.data());
}

struct Encoded {
  Streams streams;
  std::size_t num_changed = 0;
  StateHash change;
};

template <typename T>
Encoded encode_all(const T* before, const T* after, std::size_t n, std::uint64_t first) {
  Encoder<T> encoder;
  Changes<T> changes;
  Encoded result;
  for (std::size_t begin = 0; begin < n; begin += kBlock) {
    const std::size_t length = std::min(kBlock, n - begin);
    changes.scan(before + begin, after + begin, length);
    encoder.block(changes, length);
    result.num_changed += changes.count;
    for (std::size_t k = 0; k < changes.count; ++k) {
      const std::size_t i = begin + changes.places[k];
      result.change.add(hash_element(first + i, after[i]));
      result.change.subtract(hash_element(first + i, before[i]));
    }
  }
  result.streams = std::move(encoder.streams);
  return result;
}

py::tuple encode(const py::array& before, const py::array& after, std::uint64_t first_index) {
  require_same(before, after);
  Encoded result = with_width(before, [&](auto zero) {
    using T = decltype(zero);
    const T* a = read<T>(before);
    const T* b = read<T>(after);
    const auto n = static_cast<std::size_t>(before.size());
    py::gil_scoped_release release;
    return encode_all(a, b, n, first_index);
  });
  py::tuple streams(static_cast<std::size_t>(NUM_STREAMS));
  for (std::size_t s = 0; s < NUM_STREAMS; ++s) {
    const Bytes& bytes = result.streams[s];
    streams[s] = py::bytes(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  }
  return py::make_tuple(streams, result.num_changed, lanes(result.change));
}

Spans spans_of(const py::sequence& streams, std::vector<py::bytes>& keep) {
  if (streams.size() != NUM_STREAMS) {
    throw py::value_error("need " + std::to_string(NUM_STREAMS) + " streams, got " +
                          std::to_string(streams.size()));
  }
  Spans spans;
  for (std::size_t s = 0; s < NUM_STREAMS; ++s) {
    keep.push_back(streams[s].cast<py::bytes>());
    char* data = nullptr;
    py::ssize_t size = 0;
    if (PyBytes_AsStringAndSize(keep.back().ptr(), &data, &size) != 0) {
      throw py::error_already_set();
    }
    spans[s] = {reinterpret_cast<const std::uint8_t*>(data), static_cast<std::size_t>(size)};
  }
  return spans;
}

struct Effect {
  std::size_t num_changed = 0;
  StateHash change;
};

template <typename T>
Effect measure(const T* base, std::size_t n, const Spans& spans, std::uint64_t first) {
  Effect effect;
  effect.num_changed = Walker<T>(spans, n).walk([&](std::size_t i, T difference) {
    effect.change.add(hash_element(first + i, static_cast<T>(base[i] + difference)));
    effect.change.subtract(hash_element(first + i, base[i]));
  });
  return effect;
}

py::tuple run(const py::array& base, const py::sequence& streams, std::uint64_t first_index, bool write) {
  require_vector(base, "base");
  if (write && !base.writeable()) {
    throw py::value_error("base is read-only");
  }
  std::vector<py::bytes> keep;
  const Spans spans = spans_of(streams, keep);
  const Effect effect = with_width(base, [&](auto zero) {
    using T = decltype(zero);
    T* data = const_cast<T*>(read<T>(base));
    const auto n = static_cast<std::size_t>(base.size());
    py::gil_scoped_release release;
    const Effect seen = measure(data, n, spans, first_index);
    if (write) {
      Walker<T>(spans, n).walk(
          [&](std::size_t i, T difference) { data[i] = static_cast<T>(data[i] + difference); });
    }
    return seen;
  });
  return py::make_tuple(effect.num_changed, lanes(effect.change));
}

py::tuple state_hash(const py::array& bits, std::uint64_t first_index) {
  require_vector(bits, "bits");
  return lanes(with_width(bits, [&](auto zero) {
    using T = decltype(zero);
    const T* data = read<T>(bits);
    const auto n = static_cast<std::size_t>(bits.size());
    py::gil_scoped_release release;
    return hash_range(data, n, first_index);
  }));
}

using Places = py::array_t<std::int64_t, py::array::c_style>;

py::tuple hash_change(const Places& places, const py::array& before, const py::array& after) {
  require_same(before, after);
  if (places.ndim() != 1 || places.size() != before.size()) {
    throw py::value_error("need one place per element");
  }
  return lanes(with_width(before, [&](auto zero) {
    using T = decltype(zero);
    const T* a = read<T>(before);
    const T* b = read<T>(after);
    const std::int64_t* where = places.data();
    const auto n = static_cast<std::size_t>(before.size());
    py::gil_scoped_release release;
    StateHash change;
    for (std::size_t k = 0; k < n; ++k) {
      change.add(hash_element(static_cast<std::uint64_t>(where[k]), b[k]));
      change.subtract(hash_element(static_cast<std::uint64_t>(where[k]), a[k]));
    }
    return change;
  }));
}

}  // namespace

PYBIND11_MODULE(_delta, m) {
  m.doc() = "Sparse wrap differences of raw weight bits, and the state hash over them.";
  py::register_exception<Malformed>(m, "MalformedStream", PyExc_ValueError);
  m.attr("NUM_STREAMS") = static_cast<std::size_t>(NUM_STREAMS);
  m.def("encode", &encode, py::arg("old"), py::arg("new"), py::arg("first_index"));
  m.def(
      "measure",
      [](const py::array& base, const py::sequence& streams, std::uint64_t first) {
        return run(base, streams, first, false);
      },
      py::arg("base"), py::arg("streams"), py::arg("first_index"));
  m.def(
      "apply",
      [](const py::array& base, const py::sequence& streams, std::uint64_t first) {
        return run(base, streams, first, true);
      },
      py::arg("base"), py::arg("streams"), py::arg("first_index"));
  m.def("state_hash", &state_hash, py::arg("bits"), py::arg("first_index"));
  m.def("hash_change", &hash_change, py::arg("places"), py::arg("old"), py::arg("new"));
}
