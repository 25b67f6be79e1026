// The delta codec without Python, so that it runs on an emulated 64-bit ARM processor. Reads the width of the
// elements, a shift of exponents, the first index and the cut between two pieces of the new bits (arguments),
// then as many old as new bits (standard input). Writes, once portable and once with NEON: the change of the
// state hash, the hash of the new bits, and the streams of all three codecs, each behind its length. Ends
// with status 1 where a decoded difference does not lead to the new bits and back.

#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "../../csrc/delta/apply.hpp"
#include "../../csrc/delta/coo.hpp"
#include "../../csrc/delta/exponent.hpp"
#include "../../csrc/delta/g8s.hpp"

using namespace rose;

namespace {

void put(const void* data, std::size_t size) {
  if (std::fwrite(data, 1, size, stdout) != size) {
    std::exit(2);
  }
}

void put(const StateHash& hash) {
  put(&hash.first, 8);
  put(&hash.second, 8);
}

Span put(const Bytes& stream) {
  const std::uint64_t size = stream.size();
  put(&size, 8);
  put(stream.data(), stream.size());
  return {stream.data(), stream.size()};
}

Spans put(const Streams& streams) {
  Spans spans;
  for (const Bytes& stream : streams) {
    spans.push_back(put(stream));
  }
  return spans;
}

template <typename T>
void require_exact(const SparseDelta<T>& delta, const std::vector<T>& before, const std::vector<T>& after) {
  std::vector<T> bits = before;
  add(delta, bits.data(), 0, false);
  if (bits != after) {
    std::exit(1);
  }
  add(delta, bits.data(), 0, true);
  if (bits != before) {
    std::exit(1);
  }
}

template <typename T>
void run(const std::vector<std::uint8_t>& input, unsigned shift, std::uint64_t first, std::size_t cut) {
  const std::size_t n = input.size() / (2 * sizeof(T));
  std::vector<T> before(n);
  std::vector<T> after(n);
  std::memcpy(before.data(), input.data(), n * sizeof(T));
  std::memcpy(after.data(), input.data() + n * sizeof(T), n * sizeof(T));
  const std::vector<Piece<T>> pieces{{after.data(), cut}, {after.data() + cut, n - cut}};
  for (const bool is_fast : {false, true}) {
    use_neon = is_fast && cpu_has_neon();
    StateHash change;
    const SparseDelta<T> delta = scan(before.data(), pieces, n, first, change);
    put(change);
    put(hash_range(after.data(), n, first));
    const Streams g8s_streams = g8s::encode(delta);
    require_exact(g8s::Decoder<T>(put(g8s_streams), n).decode(), before, after);
    const Bytes places = coo::encode(delta);
    require_exact(coo::decode<T>(put(places), n), before, after);
    const Streams exponents = exponent::encode(delta, before.data(), shift);
    require_exact(exponent::decode<T>(put(exponents), before.data(), n), before, after);
  }
}

}  // namespace

int main(int count, char** arguments) {
  if (count != 5) {
    return 2;
  }
  std::vector<std::uint8_t> input;
  std::uint8_t part[65536];
  for (std::size_t size; (size = std::fread(part, 1, sizeof(part), stdin)) > 0;) {
    input.insert(input.end(), part, part + size);
  }
  const std::string width = arguments[1];
  const auto shift = static_cast<unsigned>(std::stoul(arguments[2]));
  const std::uint64_t first = std::stoull(arguments[3]);
  const std::size_t cut = std::stoul(arguments[4]);
  if (width == "1") {
    run<std::uint8_t>(input, shift, first, cut);
  } else if (width == "2") {
    run<std::uint16_t>(input, shift, first, cut);
  } else {
    run<std::uint32_t>(input, shift, first, cut);
  }
  return std::fflush(stdout) == 0 ? 0 : 2;
}
