#pragma once
#include <cstdint>

namespace tlt {

// out[m][n] = base[m][n] + bias[n] + sum_k x[m][k] * weight[n][k], fp32. weight [out_dim, in_dim] and out [rows, out_dim]
// have no gaps; rows of x and base are *_stride floats apart. bias and base may be null; base may not overlap out.
struct LinearArgs {
  const float* x;
  int64_t x_stride;
  const float* weight;
  const float* bias;
  const float* base;
  int64_t base_stride;
  int64_t rows, out_dim, in_dim;
  float* out;
  int threads;
};

// The bits of out[m][n] depend on x[m], weight[n], bias[n] and base[m][n] alone: not on the number of rows, their order
// or the threads.
void linear(const LinearArgs& args);

}  // namespace tlt
