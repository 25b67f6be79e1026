// The delta codec's kernels (transfer/format/device/cuda/delta.cu) over host memory: the same steps per
// thread, one thread after the other. The stand-in driver launches them, and tests call them directly.
//
// It shows that the steps and the arguments are right. It says nothing about how the kernels run on a GPU:
// warp sums, atomics and streams are not in it.

#include <string>

#include "device_steps.hpp"

using namespace rose;
using namespace rose::device;

namespace {

// A kernel's arguments, as cuLaunchKernel gets them: one pointer to each.
class Arguments {
 public:
  explicit Arguments(void** pointers) : pointers_(pointers) {}
  template <typename T>
  T next() {
    return *static_cast<T*>(*pointers_++);
  }

 private:
  void** pointers_;
};

void add_to(std::uint64_t* total, const StateHash& mine) {
  total[0] += mine.first;
  total[1] += mine.second;
}

// All of them go backwards, so that no thread can rely on one before it.
template <typename T>
void mark(Arguments given) {
  auto before = given.next<const T*>(), after = given.next<const T*>();
  auto size = given.next<std::uint64_t>();
  auto masks = given.next<std::uint32_t*>();
  for (std::size_t group = divide_up(size, kGroup); group-- > 0;) {
    masks[group] = mark_group(before, after, size, group);
  }
}

void count(Arguments given) {
  auto masks = given.next<const std::uint32_t*>();
  const std::size_t num_groups = divide_up(given.next<std::uint64_t>(), kGroup);
  auto counts = given.next<std::uint32_t*>();
  for (std::size_t run = divide_up(num_groups, kGroupsPerRun); run-- > 0;) {
    counts[run] = count_run(masks, num_groups, run);
  }
}

template <typename T>
void compact(Arguments given) {
  auto before = given.next<const T*>(), after = given.next<const T*>();
  auto size = given.next<std::uint64_t>(), first_index = given.next<std::uint64_t>();
  auto masks = given.next<const std::uint32_t*>();
  auto offsets = given.next<const std::int64_t*>();
  auto places = given.next<std::uint16_t*>();
  auto differences = given.next<T*>();
  auto change = given.next<std::uint64_t*>();
  for (std::size_t group = divide_up(size, kGroup); group-- > 0;) {
    add_to(change, compact_group(before, after, first_index, masks, offsets, group, places, differences));
  }
}

template <typename T>
void add(Arguments given, std::size_t num_blocks) {
  auto base = given.next<T*>();
  auto first_index = given.next<std::uint64_t>();
  auto starts = given.next<const std::int64_t*>();
  auto places = given.next<const std::uint16_t*>();
  auto differences = given.next<const T*>();
  bool is_reverse = given.next<int>() != 0;
  auto change = given.next<std::uint64_t*>();
  for (std::size_t block = num_blocks; block-- > 0;) {
    for (std::int64_t k = starts[block + 1]; k-- > starts[block];) {
      add_to(change,
             add_one(base, first_index, block * kBlockElements + places[k], differences[k], is_reverse));
    }
  }
}

template <typename T>
bool launch(const std::string& step, unsigned num_blocks, Arguments given) {
  if (step == "mark") {
    mark<T>(given);
  } else if (step == "compact") {
    compact<T>(given);
  } else if (step == "add") {
    add<T>(given, num_blocks);
  } else {
    return false;
  }
  return true;
}

}  // namespace

// Runs the kernel of this name; returns whether there is one.
extern "C" bool launch_on_host(const char* kernel, unsigned num_blocks, void** pointers) {
  const std::string name = kernel;
  const Arguments given(pointers);
  if (name == "count") {
    count(given);
    return true;
  }
  const std::string step = name.substr(0, name.find('_'));
  switch (name.back()) {
    case '1':
      return launch<std::uint8_t>(step, num_blocks, given);
    case '2':
      return launch<std::uint16_t>(step, num_blocks, given);
    case '4':
      return launch<std::uint32_t>(step, num_blocks, given);
    default:
      return false;
  }
}
