// Shared by primitives of recurrent layers: float32 arrays, of which some are optional; and whole
// layers of the common form with a recurrence in place of attention.
#pragma once

#include <algorithm>

#include "../kernels/recurrent.h"
#include "mixture.h"

namespace toast {

// Row-contiguous float32 data of arrays by their number; NULL for one that is absent. given: which
// are present; `arrays` has these alone.
class OptionalFloats {
 public:
  OptionalFloats(const Arrays &arrays, const std::vector<bool> &given) : at_(given.size(), -1) {
    data_.reserve(given.size());
    for (size_t i = 0, next = 0; i < given.size(); i++)
      if (given[i]) at_[i] = int(next), data_.emplace_back(arrays[next++]);
  }
  template <class T = float>
  const T *operator()(size_t i) const {
    return at_[i] < 0 ? nullptr : reinterpret_cast<const T *>(data_[at_[i]].data());
  }

 private:
  std::vector<int> at_;
  std::vector<Contiguous> data_;
};

// Which of the objects are not NULL; appends their arrays to `inputs`.
inline std::vector<bool> collect_inputs(void **objects, int count, Arrays &inputs) {
  std::vector<bool> given;
  for (int i = 0; i < count; i++) {
    given.push_back(objects[i]);
    if (objects[i]) inputs.push_back(array_of(objects[i]));
  }
  return given;
}

// Index of input i among those present; -1 if it is absent.
inline int input_index(const std::vector<bool> &given, int i) {
  int before = 0;
  for (int k = 0; k < i; k++) before += given[k];
  return given[i] ? before : -1;
}

// Saves the last `rows` rows of a convolution's input, its state for the next positions, to `last`
// (batch, rows, channels). x: (batch, length, channels) with rows `step` floats apart. before: the
// state before x, for inputs shorter than `rows`; NULL for zeros.
inline void save_last_rows(const float *x, int64_t batch, int64_t length, int64_t step,
                           const float *before, int64_t rows, int64_t channels, float *last) {
  for (int64_t n = 0; n < batch; n++)
    for (int64_t i = 0; i < rows; i++, last += channels) {
      const int64_t at = length - rows + i;
      if (at >= 0) {
        std::copy_n(x + (n * length + at) * step, channels, last);
      } else if (before) {
        std::copy_n(before + (n * rows + rows + at) * channels, channels, last);
      } else {
        std::fill_n(last, channels, 0.f);
      }
    }
}

inline void check_floats(const Arrays &inputs) {
  for (auto &one : inputs) check(one.dtype() == mx::float32, "numbers that are no float32");
}

// Where toast_operands.rest of such a layer has what others have not: KERNEL and KERNEL_BIAS in
// place of RoPE frequencies and sinks; BEHIND_FACTOR and the following.
enum { KERNEL = NORMS, KERNEL_BIAS, BEHIND_FACTOR = FACTOR + 1 };

// The first inputs of such a layer: x (B, L, columns) and, unless it is at the start of a sequence,
// where all are NULL, its states. All float32. Throws std::invalid_argument if they do not fit.
inline Arrays begin_layer(const mx::array &x, void **before, const std::vector<mx::Shape> &states) {
  check_hidden_states(x);
  Arrays inputs = {x};
  for (size_t i = 0; i < states.size(); i++) {
    check(!before[i] == !before[0], "a layer that has partly begun");
    if (!before[i]) continue;
    inputs.push_back(array_of(before[i]));
    check(inputs.back().shape() == states[i] && inputs.back().dtype() == mx::float32,
          "rows that came before, or a state, of another shape");
  }
  return inputs;
}

// Such a layer: its outputs and new states. inputs: as begun, then weights. The last state may take
// over the buffer of the one before.
inline Arrays lazy_layer(const char *name, Arrays inputs, const std::vector<mx::Shape> &states,
                         const Ending &ending, bool begun, Work work) {
  std::vector<mx::Shape> shapes(ending.outputs, inputs[0].shape());
  shapes.insert(shapes.end(), states.begin(), states.end());
  const std::vector<mx::Dtype> dtypes(shapes.size(), mx::float32);
  const size_t kept = begun ? states.size() : 0;
  const Weights weights = {1 + kept, inputs.size()};
  return lazy(name, std::move(shapes), dtypes, std::move(inputs), std::move(work),
              begun ? int(kept) : -1, weights);
}

}  // namespace toast
