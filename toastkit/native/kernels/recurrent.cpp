// The C interface of recurrent.h, and how heads and rows of states are split among threads.
#include "recurrent.h"

#include <math.h>
#include <string.h>

#include "product.h"
#include "sharing.h"

namespace toast {
namespace {

constexpr int64_t ROWS_PER_TASK = 16;      // a cache line of y
constexpr int64_t MIN_STREAMED = 1 << 18;  // elements; more than caches hold until the next step

// Whether to write the new state by non-temporal stores: elsewhere than the old one, each line
// would first be read.
bool should_stream(int64_t length, int64_t numbers, const float *state, const float *after) {
  return length == 1 && numbers >= MIN_STREAMED && state && state != after;
}

float softplus(float x) { return (x > 0 ? x : 0) + log1pf(expf(-fabsf(x))); }

float decay_of(float a_log, float bias, float a) { return expf(-expf(a_log) * softplus(a + bias)); }

float rate_of(float factor, float b) { return factor / (1 + expf(-b)); }

// Calls work(head, first, end) for all rows of all heads. size: elements touched per row. False if
// any call is.
template <class Work>
bool share_rows(int64_t heads, int64_t rows, int64_t size, const Work &work) {
  const int64_t each = (rows + ROWS_PER_TASK - 1) / ROWS_PER_TASK;
  return share_checked(helpers(double(heads) * rows * size), heads * each, [&](int64_t i) {
    const int64_t row = i % each * ROWS_PER_TASK;
    return work(i / each, row, std::min(row + ROWS_PER_TASK, rows));
  });
}

int gated_delta(const toast_delta &d, float *y, float *after) {
  const int64_t gates = d.batch * d.length * d.value_heads, heads = d.batch * d.value_heads;
  const bool columns = d.columns;
  const int64_t each = columns ? d.key_size : 1;
  auto made = memory<float>(d.a_log ? gates * each : 1), rates = memory<float>(gates);
  if (!made || !rates) return 2;
  const auto of_columns = instructions().rows->recurrent.decays;
  share(gates, 16 * each, [&](int64_t first, int64_t end) {
    for (int64_t i = first; i < end; i++) {
      const int64_t h = i % d.value_heads;
      if (d.a_log && columns) {
        of_columns(d.a + i * each, d.bias + h * each, d.a_log[h], each, made.get() + i * each);
      } else if (d.a_log) {
        made[i] = decay_of(d.a_log[h], d.bias[h], d.a[i]);
      }
      rates[i] = rate_of(d.rate_factor, d.b[i]);
    }
  });
  const float *const decays = d.a_log ? made.get() : d.a;
  const auto code = instructions().rows->recurrent.delta;
  const bool streaming = should_stream(d.length, heads * d.value_size * d.key_size, d.state, after);
  const int64_t key_step = d.key_heads * d.key_size, value_step = d.value_heads * d.value_size;
  const bool all = share_rows(
      heads, d.value_size, d.key_size * (d.length + 1),
      [&](int64_t head, int64_t first, int64_t end) {
        const int64_t b = head / d.value_heads, h = head % d.value_heads, step = b * d.length;
        const int64_t key = step * key_step + h / (d.value_heads / d.key_heads) * d.key_size;
        const int64_t value = step * value_step + h * d.value_size, gate = step * d.value_heads + h;
        const int64_t state = head * d.value_size * d.key_size;
        return code({d.length, d.key_size, streaming, d.q + key, d.k + key, key_step, d.v + value,
                     value_step, decays + gate * each,
                     rates.get() + gate, d.value_heads, columns,
                     d.mask ? d.mask + step : nullptr, d.state ? d.state + state : nullptr,
                     y + value, value_step, after + state}, first, end);
      });
  return all ? 0 : 2;
}

// A key head of a layer and its value heads, in one batch.
class LayerHead {
 public:
  LayerHead(const toast_delta_layer &layer, int64_t b, int64_t h)
      : l(layer), b_(b), h_(h), each_(l.value_heads / l.key_heads),
        channels_(2 * l.key_heads * l.key_size + l.value_heads * l.value_size),
        width_(2 * l.key_size + each_ * l.value_size) {}

  // False if out of memory.
  bool steps(float *y, float *last, float *after) {
    const int64_t count = l.length * (width_ + 2) + 1;
    buffer_ = static_cast<float *>(scratch(HEADS, count * int64_t(sizeof(float))));
    if (!buffer_) return false;
    const int64_t keys = l.key_size, values = each_ * l.value_size;
    const int64_t all_keys = l.key_heads * keys;
    convolve(l.q, keys, h_ * keys, 0, last);
    convolve(l.k, keys, all_keys + h_ * keys, keys, last);
    convolve(l.v, values, 2 * all_keys + h_ * values, 2 * keys, last);
    const double scale = pow(double(keys), -0.5), square = scale * scale;
    normalise(0, float(square), float(1e-6 * square));
    normalise(keys, float(scale), float(1e-6 * square));
    bool done = true;
    for (int64_t i = 0; i < each_; i++) done = apply(i, y, after) && done;
    return done;
  }

 private:
  // Convolves `count` channels, from `channel` of all on, into column `at` of the buffer, and saves
  // their last positions.
  void convolve(const toast_projection &x, int64_t count, int64_t channel, int64_t at,
                float *last) {
    const int64_t kept = l.kernel - 1, earlier = (b_ * kept) * channels_ + channel;
    const float *from = x.data + b_ * l.length * x.step + h_ * x.head;
    const float *before = l.before ? l.before + earlier : nullptr;
    const toast_convolution c = {
        1, l.length, count, l.kernel, from, {0, x.step}, before, {0, channels_}, TOAST_F32,
        l.weight + channel * l.kernel, nullptr, TOAST_F32, 1, width_};
    for (int64_t first = 0; first < count; first += CHANNEL_BLOCK)
      code_.convolve(c, 0, first, first + CHANNEL_BLOCK < count ? first + CHANNEL_BLOCK : count,
                     buffer_ + at, TOAST_F32);
    for (int64_t i = 0; i < kept; i++) {
      const int64_t t = l.length - kept + i;
      const float *row = t >= 0 ? from + t * x.step : before ? before + (t + kept) * channels_ : 0;
      float *to = last + earlier + i * channels_;
      row ? memcpy(to, row, count * sizeof(float)) : memset(to, 0, count * sizeof(float));
    }
  }

  // Normalises queries or keys in place.
  void normalise(int64_t at, float factor, float eps) {
    float *rows = buffer_ + at;
    const toast_vectors x = {rows, l.length, width_, TOAST_F32};
    for (int64_t t = 0; t < l.length; t++)
      code_.norm({&x, l.key_size, nullptr, TOAST_F32, factor, eps, rows + t * (width_ - l.key_size),
                  TOAST_F32, false, nullptr}, t);
  }

  // One value head.
  bool apply(int64_t i, float *y, float *after) {
    const int64_t head = h_ * each_ + i, size = l.value_size, y_step = l.value_heads * size;
    const int64_t state = (b_ * l.value_heads + head) * size * l.key_size;
    float *decays = buffer_ + l.length * width_, *rates = decays + l.length;
    y += b_ * l.length * y_step + head * size;
    for (int64_t t = 0; t < l.length; t++) {
      decays[t] = decay_of(l.a_log[head], l.bias[head], *at(l.a, t, i));
      rates[t] = rate_of(1, *at(l.b, t, i));
    }
    const int64_t numbers = l.batch * l.value_heads * size * l.key_size;
    const bool streaming = should_stream(l.length, numbers, l.state, after);
    const DeltaHead rule = {l.length, l.key_size, streaming, buffer_, buffer_ + l.key_size, width_,
                            buffer_ + 2 * l.key_size + i * size, width_, decays, rates, 1, false,
                            nullptr, l.state ? l.state + state : nullptr, y, y_step, after + state};
    if (!code_.recurrent.delta(rule, 0, size)) return false;
    for (int64_t t = 0; t < l.length; t++) {
      float *row = y + t * y_step;
      const toast_vectors x = {row, 1, size, TOAST_F32};
      code_.norm({&x, size, l.norm, TOAST_F32, 0, l.eps, row, TOAST_F32, false, nullptr}, 0);
      code_.gate({at(l.z, t, i * size), row, TOAST_F32, TOAST_SILU, row}, 0, size);
    }
    return true;
  }

  const float *at(const toast_projection &p, int64_t t, int64_t i) const {
    return p.data + (b_ * l.length + t) * p.step + h_ * p.head + i;
  }

  const toast_delta_layer &l;
  const RowInstructions &code_ = *instructions().rows;
  const int64_t b_, h_, each_, channels_, width_;
  float *buffer_ = nullptr;  // (length, width_): q, k, v; then a head's decays, rates
};

int layer_steps(const toast_delta_layer &l, float *y, float *last, float *after) {
  const int64_t state = l.batch * l.value_heads * l.value_size * l.key_size;
  const Helpers help = helpers(double(state) * (l.length + 1));
  const bool done = share_checked(help, l.batch * l.key_heads, [&](int64_t i) {
    return LayerHead(l, i / l.key_heads, i % l.key_heads).steps(y, last, after);
  });
  return done ? 0 : 2;
}

int scan_steps(const toast_scan &s, float *y, float *after) {
  const int64_t gates = s.selective ? 1 : s.batch * s.length * s.heads;
  auto decays = memory<float>(gates), dts = memory<float>(gates);
  if (!decays || !dts) return 2;
  share(s.selective ? 0 : gates, 16, [&](int64_t first, int64_t end) {
    for (int64_t i = first; i < end; i++) {
      const int64_t h = i % s.heads;
      dts[i] = std::min(std::max(softplus(s.dt[i] + s.bias[h]), s.least), s.most);  // keeps NaN
      decays[i] = expf(-expf(s.a_log[h]) * dts[i]);
    }
  });
  const auto code = instructions().rows->recurrent.scan;
  const int64_t numbers = s.batch * s.heads * s.size * s.state_size;
  const bool streaming = should_stream(s.length, numbers, s.state, after);
  const int64_t x_step = s.heads * s.size, group_step = s.groups * s.state_size;
  const bool all = share_rows(
      s.batch * s.heads, s.size, s.state_size * (s.length + 1),
      [&](int64_t head, int64_t first, int64_t end) {
        const int64_t b = head / s.heads, h = head % s.heads, step = b * s.length;
        const int64_t group = step * group_step + h / (s.heads / s.groups) * s.state_size;
        const int64_t x = step * x_step + h * s.size;
        const int64_t gate = s.selective ? 0 : step * s.heads + h;
        const int64_t state = head * s.size * s.state_size;
        ScanHead of = {s.length, s.state_size, streaming, s.x + x, s.b + group, s.c + group, x_step,
                       group_step, decays.get() + gate, dts.get() + gate, s.heads, s.d + h,
                       s.mask ? s.mask + step : nullptr, s.state ? s.state + state : nullptr,
                       y + x, after + state};
        if (s.selective) {
          of.a_log = s.a_log + h * s.size * s.state_size, of.d = s.d + h * s.size, of.dt = s.dt + x;
          of.bias = s.bias ? s.bias + h * s.size : nullptr, of.least = s.least, of.most = s.most;
        }
        return code(of, first, end);
      });
  return all ? 0 : 2;
}

int wkv_steps(const toast_wkv &w, float *y, float *after) {
  const auto code = instructions().rows->recurrent.wkv;
  const int64_t of_state = w.size * w.size, step = w.heads * w.size;
  const bool streaming = should_stream(w.length, w.batch * w.heads * of_state, w.state, after);
  const bool all = share_rows(
      w.batch * w.heads, w.size, w.size * (w.length + 1),
      [&](int64_t head, int64_t first, int64_t end) {
        const int64_t at = head / w.heads * w.length * step + head % w.heads * w.size;
        return code({w.length, w.size, step, streaming, w.r + at, w.w + at, w.k + at, w.v + at,
                     w.a + at, w.b + at, w.state ? w.state + head * of_state : nullptr, y + at,
                     after + head * of_state}, first, end);
      });
  return all ? 0 : 2;
}

// One step of a head before its recurrence: from offset `at` of all steps on, with the parameters
// of head `h`.
void prepare_step(const toast_time_mixing &m, int64_t h, int64_t at) {
  const auto gate = instructions().rows->gate;
  auto sigmoid = [&](float *x) { gate({x, nullptr, TOAST_F32, TOAST_SIGMOID, x}, 0, m.size); };
  float *const w = m.w + at, *const k = m.k + at, *const v = m.v + at;
  float *const a = m.a + at, *const b = m.b + at, square = 0;
  sigmoid(w), sigmoid(a);
  if (m.f) sigmoid(m.share + at);
  for (int64_t i = 0; i < m.size; i++) {
    w[i] = expf(-0.606531f * w[i]);
    if (m.f) v[i] += (m.f[at + i] - v[i]) * m.share[at + i];
    b[i] = k[i] * m.k_k[h * m.size + i];
    square += b[i] * b[i];
  }
  const float norm = std::max(sqrtf(square), 1e-7f);
  for (int64_t i = 0; i < m.size; i++) {
    const float key = b[i] / norm;
    k[i] *= 1 + (a[i] - 1) * m.k_a[h * m.size + i];
    b[i] = key * a[i];
    a[i] = -key;
  }
}

// The same after it. y: of this step.
void finish_step(const toast_time_mixing &m, int64_t h, int64_t at, float *y) {
  const toast_vectors x = {y, 1, m.size, TOAST_F32};
  const int64_t own = h * m.size;
  instructions().rows->norm({&x, m.size, m.norm + own, TOAST_F32, 0, m.eps, y, TOAST_F32, true,
                             m.norm_bias + own}, 0);
  float bonus = 0;
  for (int64_t i = 0; i < m.size; i++) bonus += m.r[at + i] * m.k[at + i] * m.r_k[own + i];
  for (int64_t i = 0; i < m.size; i++) y[i] = (y[i] + bonus * m.v[at + i]) * m.g[at + i];
}

int time_mixing_steps(const toast_time_mixing &m, float *y, float *after) {
  const auto code = instructions().rows->recurrent.wkv;
  const int64_t of_state = m.size * m.size, step = m.heads * m.size, all = m.batch * m.heads;
  const bool streaming = should_stream(m.length, all * of_state, m.state, after);
  const Helpers help = helpers(double(all) * of_state * (m.length + 1));
  const bool done = share_checked(help, all, [&](int64_t i) {
    const int64_t h = i % m.heads, first = i / m.heads * m.length * step + h * m.size;
    for (int64_t t = 0; t < m.length; t++) prepare_step(m, h, first + t * step);
    if (!code({m.length, m.size, step, streaming, m.r + first, m.w + first, m.k + first,
               m.v + first, m.a + first, m.b + first, m.state ? m.state + i * of_state : nullptr,
               y + first, after + i * of_state}, 0, m.size))
      return false;
    for (int64_t t = 0; t < m.length; t++)
      finish_step(m, h, first + t * step, y + first + t * step);
    return true;
  });
  return done ? 0 : 2;
}

}  // namespace
}  // namespace toast

extern "C" {

int toast_gated_delta(const toast_delta *delta, float *y, float *after) {
  const toast_delta &d = *delta;
  if (d.key_heads <= 0 || d.value_heads % d.key_heads || d.key_size <= 0) return 1;
  if (!d.a_log != !d.bias || (!d.a_log && !d.columns)) return 1;
  return toast::gated_delta(d, y, after);
}

int toast_delta_layer_steps(const toast_delta_layer *layer, float *y, float *last, float *after) {
  const toast_delta_layer &l = *layer;
  if (l.key_heads <= 0 || l.value_heads % l.key_heads || l.key_size <= 0 || l.kernel <= 0 ||
      l.kernel > toast::MAX_KERNEL)
    return 1;
  return toast::layer_steps(l, y, last, after);
}

int toast_scan_steps(const toast_scan *scan, float *y, float *after) {
  const toast_scan &s = *scan;
  if (s.groups <= 0 || s.heads % s.groups || s.state_size <= 0) return 1;
  return toast::scan_steps(s, y, after);
}

int toast_wkv_steps(const toast_wkv *wkv, float *y, float *after) {
  return wkv->size <= 0 ? 1 : toast::wkv_steps(*wkv, y, after);
}

int toast_time_mixing_steps(const toast_time_mixing *mixing, float *y, float *after) {
  return mixing->size <= 0 ? 1 : toast::time_mixing_steps(*mixing, y, after);
}

void toast_token_shift(const float *x, const float *before, int64_t batch, int64_t length,
                       int64_t columns, const float *mix, float *out) {
  toast::share(batch * length, columns, [&](int64_t first, int64_t end) {
    for (int64_t t = first; t < end; t++) {
      const float *const now = x + t * columns;
      const float *then = t % length ? now - columns : before;
      if (then == before && before) then += t / length * columns;
      for (int64_t i = 0; i < columns; i++)
        out[t * columns + i] = now[i] + ((then ? then[i] : 0.f) - now[i]) * mix[i];
    }
  });
}

void toast_linear_steps(const toast_linear *linear, float *h) {
  const toast_linear &l = *linear;
  const auto code = toast::instructions().rows->recurrent.linear;
  toast::share_rows(l.batch, l.channels, l.length, [&](int64_t b, int64_t first, int64_t end) {
    code(l, b, first, end, h);
    return true;
  });
}

}  // extern "C"
