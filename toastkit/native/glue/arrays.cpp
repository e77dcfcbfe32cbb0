// Finds the mx::array inside a Python object, and makes lazy operations.
//
// mlx.core offers no access to its C++ arrays other than its Python objects. So ctypes passes the
// objects themselves, and the arrays are read where nanobind stores them: an int32 after the object
// header holds the offset of the instance, and bit 2 of the byte after that tells whether the
// instance itself or a pointer to it is there. probe.py checks this in a child process before a
// library is trusted.
#include "arrays.h"

#include <string.h>

#include <algorithm>
#include <iterator>
#include <string>

#include "mlx/backend/cpu/encoder.h"
#include "mlx/primitives.h"
#include "mlx/stream.h"

namespace toast {
namespace {

constexpr uint8_t INSIDE = 4;  // nanobind: the instance is stored in the object
constexpr int MAX_AXES = 8;
int64_t head = 16;  // bytes of a Python object's header
thread_local std::string last_error;
thread_local std::shared_ptr<void> kept;  // see keep_until_run

class Operation : public mx::Primitive {
 public:
  // Moves the weights out of `inputs` if all of them are evaluated.
  Operation(const char *name, Arrays &inputs, Weights weights, Work work, Allocate allocate)
      : mx::Primitive(mx::default_stream(mx::Device::cpu)),
        name_(name),
        first_(weights.first),
        work_(std::move(work)),
        allocate_(std::move(allocate)) {
    const auto from = inputs.begin() + weights.first, to = inputs.begin() + weights.end;
    if (!std::all_of(from, to, [](auto &one) { return one.is_available(); })) return;
    weights_.assign(std::move_iterator(from), std::move_iterator(to));
    inputs.erase(from, to);
  }

  void eval_cpu(const Arrays &inputs, Arrays &outputs) override {
    // It may be evaluated once more: a graph that is being traced, or one that mx.compile keeps.
    const bool again = outputs[0].is_tracer() ||
                       size_t(outputs[0].primitive_ptr().use_count()) > outputs.size();
    give_memory(inputs, outputs);
    auto held = std::move(kept);
    Arrays arrays;  // MLX keeps their buffers until this has run, except those of weights
    arrays.reserve(inputs.size() + weights_.size() + outputs.size());
    auto add = [&](size_t from, size_t to) {
      for (; from < to; from++) arrays.push_back(mx::array::unsafe_weak_copy(inputs[from]));
    };
    add(0, first_);
    if (again) {
      arrays.insert(arrays.end(), weights_.begin(), weights_.end());
    } else {
      std::move(weights_.begin(), weights_.end(), std::back_inserter(arrays));
    }
    add(first_, inputs.size());
    size_t numbers = 0;
    for (auto &one : outputs) {
      arrays.push_back(mx::array::unsafe_weak_copy(one));
      numbers += one.size();
    }
    mx::cpu::get_command_encoder(stream()).dispatch(
        [arrays = std::move(arrays), work = again ? work_ : std::move(work_), numbers,
         held = std::move(held)]() mutable {
          if (numbers) work(arrays);
          held.reset();
        });
  }

  void eval_gpu(const Arrays &, Arrays &) override {
    throw std::runtime_error("native operations run on the CPU");
  }

  const char *name() const override { return name_; }

 private:
  // Gives the outputs their buffers. Without memory it throws std::bad_alloc, and they can be
  // evaluated once more.
  void give_memory(const Arrays &inputs, Arrays &outputs) const {
    auto set_others = [&](const Arrays &to) {
      for (auto &one : outputs)
        if (&one.inputs() != &inputs && !one.is_tracer()) one.inputs() = to;
    };
    // Every output refers to the inputs until all are evaluated, which would keep an input's buffer
    // from being donated.
    set_others({});
    try {
      if (allocate_) {
        allocate_(inputs, outputs);
      } else {
        for (auto &one : outputs) one.set_data(memory_for(one));
      }
    } catch (...) {
      kept.reset();
      set_others(inputs);
      throw;
    }
  }

  const char *name_;
  size_t first_;  // index of the weights among the inputs
  Arrays weights_;
  Work work_;
  Allocate allocate_;
};

}  // namespace

mx::array &array_of(void *object) {
  auto start = static_cast<char *>(object);
  int32_t offset;
  memcpy(&offset, start + head, sizeof offset);
  void *there = start + offset;
  if (start[head + 4] & INSIDE) return *static_cast<mx::array *>(there);
  memcpy(&there, there, sizeof there);
  return *static_cast<mx::array *>(there);
}

Arrays arrays_of(void **objects, int count) {
  Arrays arrays;
  for (int i = 0; i < count; i++) arrays.push_back(array_of(objects[i]));
  return arrays;
}

int type_of(const mx::array &a) {
  if (a.dtype() == mx::float32) return TOAST_F32;
  if (a.dtype() == mx::float16) return TOAST_F16;
  if (a.dtype() == mx::bfloat16) return TOAST_BF16;
  throw std::invalid_argument("a number of a type that the kernels have not");
}

int cache_type(const mx::array &a) { return a.dtype() == mx::int8 ? TOAST_I8 : type_of(a); }

int head_size(const mx::array &a) {
  const int length = a.shape(-1);
  return a.dtype() == mx::int8 && length ? length - int(sizeof(float)) : length;
}

void check(bool holds, const char *what) {
  if (!holds) throw std::invalid_argument(what);
}

const char *error_text(const char *what) {
  last_error = what;
  return last_error.c_str();
}

void need(int code) {
  if (code == 2) throw std::bad_alloc();
  check(!code, "numbers that the kernels do not take");
}

void keep_until_run(std::shared_ptr<void> what) { kept = std::move(what); }

// An mx::array is nothing but a shared pointer to its description, which it does not expose.
bool is_sole_reference(const mx::array &a) {
  static_assert(sizeof(mx::array) == sizeof(std::shared_ptr<void>));
  return reinterpret_cast<const std::shared_ptr<void> &>(a).use_count() == 1;
}

bool is_sole_owner(const mx::array &a) {
  return is_sole_reference(a) && a.data_shared_ptr().use_count() == 1;
}

bool reuse_or_allocate(const mx::array &input, mx::array &output) {
  const bool fits = input.flags().row_contiguous && input.shape() == output.shape() &&
                    input.dtype() == output.dtype();
  const bool may = fits && (input.is_donatable() ||
                            (is_sole_owner(input) && bytes_to_grow_in(input)));
  if (may) {
    output.copy_shared_buffer(input);
  } else {
    output.set_data(memory_for(output));
  }
  return may;
}

void allocate_by_position(const Arrays &, Arrays &outputs) {
  for (mx::array &out : outputs) {
    const int64_t heads = out.shape(1), positions = out.shape(2), size = out.shape(3);
    out.set_data(memory_for(out), out.size(),
                 {positions * heads * size, size, heads * size, 1},
                 {true, heads == 1 || positions == 1, false});
  }
}

Arrays lazy(const char *name, std::vector<mx::Shape> shapes, const std::vector<mx::Dtype> &dtypes,
            Arrays inputs, Work work, Allocate allocate, Weights weights) {
  auto operation =
      std::make_shared<Operation>(name, inputs, weights, std::move(work), std::move(allocate));
  return mx::array::make_arrays(std::move(shapes), dtypes, operation, std::move(inputs));
}

Arrays lazy(const char *name, std::vector<mx::Shape> shapes, const std::vector<mx::Dtype> &dtypes,
            Arrays inputs, Work work, int in_place, Weights weights) {
  Allocate allocate;
  if (in_place >= 0)
    allocate = [in_place](const Arrays &inputs, Arrays &outputs) {
      for (size_t i = 0; i + 1 < outputs.size(); i++)
        outputs[i].set_data(memory_for(outputs[i]));
      reuse_or_allocate(inputs[in_place], outputs.back());
    };
  return lazy(name, std::move(shapes), dtypes, std::move(inputs), std::move(work),
              std::move(allocate), weights);
}

mx::array lazy(const char *name, mx::Shape shape, mx::Dtype dtype, Arrays inputs, Work work,
               Allocate allocate, Weights weights) {
  auto operation =
      std::make_shared<Operation>(name, inputs, weights, std::move(work), std::move(allocate));
  return mx::array(std::move(shape), dtype, std::move(operation), std::move(inputs));
}

Contiguous::Contiguous(const mx::array &a) {
  if (a.flags().row_contiguous || !a.size()) {
    data_ = a.data<char>();
    return;
  }
  const int64_t item = a.itemsize(), columns = a.shape(-1), step = a.strides(-1);
  copy_.reset(new char[a.nbytes()]);
  data_ = copy_.get();
  char *to = copy_.get();
  std::vector<int64_t> at(a.ndim());
  for (size_t row = 0; row < a.size() / columns; row++) {
    int64_t from = 0;
    for (size_t axis = 0; axis + 1 < a.ndim(); axis++) from += at[axis] * a.strides(axis);
    const char *start = a.data<char>() + from * item;
    if (step == 1) {
      memcpy(to, start, columns * item);
      to += columns * item;
    } else {
      for (int64_t k = 0; k < columns; k++, to += item) memcpy(to, start + k * step * item, item);
    }
    for (int axis = int(a.ndim()) - 2; axis >= 0; axis--) {
      if (++at[axis] < a.shape(axis)) break;
      at[axis] = 0;
    }
  }
}

mx::Strides row_strides(const mx::Shape &shape) {
  mx::Strides strides(shape.size());
  int64_t step = 1;
  for (int axis = int(shape.size()) - 1; axis >= 0; step *= shape[axis--]) strides[axis] = step;
  return strides;
}

Rows::Rows(const mx::array &a) : data_(a.data<char>()), strides_(a.strides()) {
  if (a.shape(-1) == 1 || a.strides(-1) == 1) return;
  data_ = copy_.emplace(a).data();
  strides_ = row_strides(a.shape());
}

}  // namespace toast

extern "C" {

TOAST_API void toast_set_head(int64_t bytes) { toast::head = bytes; }

// For the probe: writes the number of axes, the shape, the item size in bytes and the size of what
// seems to be an array. Returns 0 if the object cannot hold one.
TOAST_API int toast_describe(void *object, int64_t *about) {
  auto start = static_cast<char *>(object);
  int32_t offset;
  memcpy(&offset, start + toast::head, sizeof offset);
  if (offset < toast::head + 8 || offset > toast::head + 64) return 0;
  const mx::array &a = toast::array_of(object);
  if (a.ndim() > toast::MAX_AXES) return 0;
  *about++ = a.ndim();
  for (int size : a.shape()) *about++ = size;
  *about++ = a.itemsize();
  *about++ = a.size();
  return 1;
}

}  // extern "C"
