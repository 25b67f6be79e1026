// Owns the Python interface of the delta codec: rose._delta (see rose/_delta.pyi).
// Arrays are used in place, and the GIL is released while they are read or written.
// Allocates in proportion to the changes, never to the weights.

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <cstdint>
#include <memory>
#include <variant>
#include <vector>

#include "apply.hpp"
#include "coo.hpp"
#include "exchange.hpp"
#include "exponent.hpp"
#include "g8s.hpp"

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

void require_writeable(const py::array& array, const char* name) {
  if (!array.writeable()) {
    throw py::value_error(std::string(name) + " is read-only");
  }
}

// Calls work(T{}) with the unsigned type of that width.
template <typename Work>
auto with_width(py::ssize_t width, Work&& work) {
  switch (width) {
    case 1:
      return work(std::uint8_t{});
    case 2:
      return work(std::uint16_t{});
    case 4:
      return work(std::uint32_t{});
    default:
      throw py::value_error("elements must be 1, 2 or 4 bytes wide, got " + std::to_string(width));
  }
}

template <typename T>
const T* read(const py::array& array) {
  return static_cast<const T*>(array.data());
}

py::bytes to_bytes(const Bytes& bytes) { return {reinterpret_cast<const char*>(bytes.data()), bytes.size()}; }

template <typename T>
py::array copy_of(const T* data, std::size_t size) {
  return py::array_t<T>(static_cast<py::ssize_t>(size), data);
}

// Returns an array of a buffer's memory, which goes back to the spare memory when the array does.
template <typename T>
py::array array_of(Buffer<T>&& buffer) {
  auto kept = std::make_unique<Buffer<T>>(std::move(buffer));
  const py::capsule owner(kept.get(), [](void* freed) { delete static_cast<Buffer<T>*>(freed); });
  const Buffer<T>* const held = kept.release();
  return py::array_t<T>(static_cast<py::ssize_t>(held->size()), held->data(), owner);
}

py::tuple to_tuple(const Streams& streams) {
  py::tuple result(streams.size());
  for (std::size_t s = 0; s < streams.size(); ++s) {
    result[s] = to_bytes(streams[s]);
  }
  return result;
}

Span span_of(const py::bytes& bytes) {
  char* data = nullptr;
  py::ssize_t size = 0;
  if (PyBytes_AsStringAndSize(bytes.ptr(), &data, &size) != 0) {
    throw py::error_already_set();
  }
  return {reinterpret_cast<const std::uint8_t*>(data), static_cast<std::size_t>(size)};
}

// The spans stay valid while `keep` does.
Spans spans_of(const py::sequence& streams, std::size_t expected, std::vector<py::bytes>& keep) {
  if (streams.size() != expected) {
    throw py::value_error("need " + std::to_string(expected) + " streams, got " +
                          std::to_string(streams.size()));
  }
  Spans spans;
  for (const py::handle& stream : streams) {
    keep.push_back(stream.cast<py::bytes>());
    spans.push_back(span_of(keep.back()));
  }
  return spans;
}

// A sparse difference of any width.
class Delta {
  // Calls `work` without the GIL.
  template <typename Work>
  auto visit(Work&& work) const {
    py::gil_scoped_release release;
    return std::visit(std::forward<Work>(work), delta_);
  }

  void require_base(const py::array& base) const {
    require_vector(base, "base");
    if (static_cast<std::size_t>(base.size()) != num_elements() || base.itemsize() != width()) {
      throw py::value_error("base has " + std::to_string(base.size()) + " elements of " +
                            std::to_string(base.itemsize()) + " bytes, the difference " +
                            std::to_string(num_elements()) + " of " + std::to_string(width()));
    }
  }

  // Ordered by width: 1 << index.
  std::variant<SparseDelta<std::uint8_t>, SparseDelta<std::uint16_t>, SparseDelta<std::uint32_t>> delta_;

 public:
  template <typename T>
  explicit Delta(SparseDelta<T>&& delta) : delta_(std::move(delta)) {}

  // is_following: `before` is overwritten with `after`.
  static py::tuple between(const py::array& before, const py::sequence& after, std::uint64_t first_index,
                           bool is_following) {
    require_vector(before, "old");
    if (is_following) {
      require_writeable(before, "old");
    }
    std::vector<py::array> keep;
    py::ssize_t size = 0;
    for (const py::handle& piece : after) {
      keep.push_back(piece.cast<py::array>());
      require_vector(keep.back(), "new");
      if (keep.back().itemsize() != before.itemsize()) {
        throw py::value_error("old has elements of " + std::to_string(before.itemsize()) + " bytes, new of " +
                              std::to_string(keep.back().itemsize()));
      }
      size += keep.back().size();
    }
    if (before.size() != size) {
      throw py::value_error("old has " + std::to_string(before.size()) + " elements, new has " +
                            std::to_string(size));
    }
    StateHash change;
    Delta delta = with_width(before.itemsize(), [&](auto zero) {
      using T = decltype(zero);
      const T* a = read<T>(before);
      std::vector<Piece<T>> b;
      for (const py::array& piece : keep) {
        b.push_back({read<T>(piece), static_cast<std::size_t>(piece.size())});
      }
      T* follows = is_following ? const_cast<T*>(a) : nullptr;
      py::gil_scoped_release release;
      return Delta(scan(a, b, static_cast<std::size_t>(size), first_index, change, follows));
    });
    return py::make_tuple(std::move(delta), lanes(change));
  }

  static Delta from_parts(const py::array& counts, const py::array& places, const py::array& differences,
                          std::size_t n) {
    require_vector(counts, "counts");
    require_vector(places, "places");
    require_vector(differences, "differences");
    if (counts.itemsize() != 4 || places.itemsize() != 2 || places.size() != differences.size()) {
      throw py::value_error("need uint32 counts and as many uint16 places as differences");
    }
    return with_width(differences.itemsize(), [&](auto zero) {
      using T = decltype(zero);
      return Delta(assemble({read<std::uint32_t>(counts), static_cast<std::size_t>(counts.size())},
                            read<std::uint16_t>(places), read<T>(differences),
                            static_cast<std::size_t>(places.size()), n));
    });
  }

  static Delta from_g8s(const py::sequence& streams, std::size_t n, py::ssize_t width) {
    std::vector<py::bytes> keep;
    const Spans spans = spans_of(streams, NUM_STREAMS, keep);
    return with_width(width, [&](auto zero) {
      py::gil_scoped_release release;
      return Delta(g8s::Decoder<decltype(zero)>(spans, n).decode());
    });
  }

  static Delta from_coo(const py::bytes& payload, std::size_t n, py::ssize_t width) {
    const Span span = span_of(payload);
    return with_width(width, [&](auto zero) {
      py::gil_scoped_release release;
      return Delta(coo::decode<decltype(zero)>(span, n));
    });
  }

  static Delta from_exponents(const py::sequence& streams, const py::array& base) {
    require_vector(base, "base");
    std::vector<py::bytes> keep;
    const Spans spans = spans_of(streams, exponent::kNumStreams, keep);
    return with_width(base.itemsize(), [&](auto zero) {
      using T = decltype(zero);
      const T* bits = read<T>(base);
      py::gil_scoped_release release;
      return Delta(exponent::decode<T>(spans, bits, static_cast<std::size_t>(base.size())));
    });
  }

  py::tuple parts() const {
    return std::visit(
        [](const auto& delta) {
          const py::array counts = copy_of(delta.counts.data(), delta.counts.size());
          const py::array places = copy_of(delta.places.data(), delta.num_changed());
          return py::make_tuple(counts, places, copy_of(delta.differences.data(), delta.num_changed()));
        },
        delta_);
  }

  py::tuple g8s() const {
    return to_tuple(visit([](const auto& delta) { return g8s::encode(delta); }));
  }

  py::bytes coo() const {
    return to_bytes(visit([](const auto& delta) { return coo::encode(delta); }));
  }

  py::tuple exponents(const py::array& base, unsigned shift) const {
    require_base(base);
    const auto bits = static_cast<unsigned>(8 * width());
    if (shift + 1 >= bits || bits - 1 - shift > 8) {
      throw py::value_error("exponents of " + std::to_string(bits) + "-bit elements have 1 to 8 bits, not " +
                            std::to_string(static_cast<int>(bits - 1) - static_cast<int>(shift)));
    }
    return to_tuple(visit([&]<typename T>(const SparseDelta<T>& delta) {
      return exponent::encode(delta, static_cast<const T*>(base.data()), shift);
    }));
  }

  py::tuple apply(const py::array& base, std::uint64_t first_index, bool is_reverse) const {
    require_base(base);
    require_writeable(base, "base");
    return lanes(visit([&]<typename T>(const SparseDelta<T>& delta) {
      return add(delta, static_cast<T*>(const_cast<void*>(base.data())), first_index, is_reverse);
    }));
  }

  py::tuple apply_noting(const py::array& base, std::uint64_t first_index) const {
    require_base(base);
    require_writeable(base, "base");
    if (num_elements() > INT32_MAX) {
      throw py::value_error(std::to_string(num_elements()) + " elements have no places of 32 bits");
    }
    return std::visit(
        [&]<typename T>(const SparseDelta<T>& delta) {
          Buffer<std::int32_t> places;
          Buffer<T> before;
          Buffer<T> after;
          StateHash change;
          {
            py::gil_scoped_release release;
            const std::size_t count = delta.num_changed();
            const Notes<T> notes{places.reserve(count), before.reserve(count), after.reserve(count)};
            change = add(delta, static_cast<T*>(const_cast<void*>(base.data())), first_index, false, &notes);
            places.grow(count);
            before.grow(count);
            after.grow(count);
          }
          return py::make_tuple(lanes(change), array_of(std::move(places)), array_of(std::move(before)),
                                array_of(std::move(after)));
        },
        delta_);
  }

  std::size_t num_elements() const {
    return std::visit([](const auto& delta) { return delta.num_elements; }, delta_);
  }
  std::size_t num_changed() const {
    return std::visit([](const auto& delta) { return delta.num_changed(); }, delta_);
  }
  py::ssize_t width() const { return py::ssize_t{1} << delta_.index(); }
};

py::tuple state_hash(const py::array& bits, std::uint64_t first_index) {
  require_vector(bits, "bits");
  return lanes(with_width(bits.itemsize(), [&](auto zero) {
    using T = decltype(zero);
    const T* data = read<T>(bits);
    const auto n = static_cast<std::size_t>(bits.size());
    py::gil_scoped_release release;
    return hash_range(data, n, first_index);
  }));
}

bool exchange(const py::array& bits, const py::array& places, std::int64_t shift, const py::array& before,
              const py::array& after) {
  require_vector(bits, "bits");
  require_writeable(bits, "bits");
  require_vector(before, "old");
  require_vector(after, "new");
  const bool is_index = places.dtype().kind() == 'i' && (places.itemsize() == 4 || places.itemsize() == 8);
  if (places.ndim() != 1 || !(places.flags() & py::array::c_style) || !is_index) {
    throw py::value_error("places must be a contiguous vector of int32 or int64");
  }
  for (const py::array* const each : {&bits, &places, &before, &after}) {
    if (!(each->flags() & py::detail::npy_api::NPY_ARRAY_ALIGNED_)) {
      throw py::value_error("the vectors must begin at multiples of their elements' width");
    }
  }
  for (const py::array* const values : {&before, &after}) {
    if (values->size() != places.size() || values->itemsize() != bits.itemsize()) {
      throw py::value_error("need " + std::to_string(places.size()) + " elements of " +
                            std::to_string(bits.itemsize()) + " bytes, got " +
                            std::to_string(values->size()) + " of " + std::to_string(values->itemsize()));
    }
  }
  return with_width(bits.itemsize(), [&](auto zero) {
    using T = decltype(zero);
    T* const data = const_cast<T*>(read<T>(bits));
    const auto size = static_cast<std::size_t>(bits.size());
    const auto count = static_cast<std::size_t>(places.size());
    const auto run = [&]<typename Place>(Place) {
      const Exchange<T, Place> elements{data,          size, read<Place>(places), shift, read<T>(before),
                                        read<T>(after)};
      py::gil_scoped_release release;
      return elements.run(count);
    };
    return places.itemsize() == 4 ? run(std::int32_t{}) : run(std::int64_t{});
  });
}

std::string set_instructions(const std::string& wanted) {
  if (wanted != "avx512" && wanted != "avx2" && wanted != "neon" && wanted != "portable") {
    throw py::value_error("instructions are avx512, avx2, neon or portable, not " + wanted);
  }
  use_avx512 = wanted == "avx512" && cpu_has_avx512();
  use_avx2 = (wanted == "avx512" || wanted == "avx2") && cpu_has_avx2();
  use_neon = wanted != "portable" && cpu_has_neon();
  return use_avx512 ? "avx512" : use_avx2 ? "avx2" : use_neon ? "neon" : "portable";
}

}  // namespace

PYBIND11_MODULE(_delta, m) {
  m.doc() =
      "Sparse wrap differences of raw weight bits, the state hash over them, writing them into weights.";
  py::register_exception<Malformed>(m, "MalformedStream", PyExc_ValueError);
  m.attr("INTERFACE") = 2;  // as transfer/format/codec.py wants it; raised when Python needs what is new here
  m.attr("NUM_G8S_STREAMS") = static_cast<std::size_t>(NUM_STREAMS);
  m.attr("NUM_EXPONENT_STREAMS") = exponent::kNumStreams;
  py::class_<Delta>(m, "Delta")
      .def_static(
          "between",
          [](const py::array& old, const py::sequence& later, std::uint64_t first_index) {
            return Delta::between(old, later, first_index, false);
          },
          py::arg("old"), py::arg("new"), py::arg("first_index"))
      .def_static(
          "follow",
          [](const py::array& kept, const py::sequence& later, std::uint64_t first_index) {
            return Delta::between(kept, later, first_index, true);
          },
          py::arg("kept"), py::arg("new"), py::arg("first_index"))
      .def_static("from_g8s", &Delta::from_g8s, py::arg("streams"), py::arg("num_elements"), py::arg("width"))
      .def_static("from_coo", &Delta::from_coo, py::arg("payload"), py::arg("num_elements"), py::arg("width"))
      .def_static("from_exponents", &Delta::from_exponents, py::arg("streams"), py::arg("base"))
      .def_static("from_parts", &Delta::from_parts, py::arg("counts"), py::arg("places"),
                  py::arg("differences"), py::arg("num_elements"))
      .def("parts", &Delta::parts)
      .def("g8s", &Delta::g8s)
      .def("coo", &Delta::coo)
      .def("exponents", &Delta::exponents, py::arg("base"), py::arg("shift"))
      .def(
          "apply", [](const Delta& d, const py::array& b, std::uint64_t i) { return d.apply(b, i, false); },
          py::arg("base"), py::arg("first_index"))
      .def(
          "revert", [](const Delta& d, const py::array& b, std::uint64_t i) { return d.apply(b, i, true); },
          py::arg("base"), py::arg("first_index"))
      .def("apply_noting", &Delta::apply_noting, py::arg("base"), py::arg("first_index"))
      .def_property_readonly("num_elements", &Delta::num_elements)
      .def_property_readonly("num_changed", &Delta::num_changed)
      .def_property_readonly("width", &Delta::width);
  m.def("state_hash", &state_hash, py::arg("bits"), py::arg("first_index"));
  m.def("exchange", &exchange, py::arg("bits"), py::arg("places"), py::arg("shift"), py::arg("old"),
        py::arg("new"));
  m.def("set_instructions", &set_instructions, py::arg("wanted"));
}
