// How fast a kernel that only reads gets through as many bytes as a layer's keys and values: the ceiling of the shares in
// bench/kernels_attention.py, whose launches it copies (a graph over disjoint sets far beyond L2, median of 15 replays).
//   nvcc -arch=sm_90a -o /tmp/read bench/read_ceiling.cu && /tmp/read
// early: launched while the launch before it drains (programmatic dependent launch).
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdio>
#include <vector>

constexpr int kThreads = 512;
constexpr int kInFlight = 8;  // loads of 16 bytes a thread
constexpr float kReadTbs = 4.13f;  // READ_TBS of bench/kernels_attention.py

__device__ uint4 load_once(const uint4* from) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(from));
  return v;
}

__global__ void __launch_bounds__(kThreads) read_all(const uint4* data, size_t count, unsigned* out, bool early) {
  if (early) asm volatile("griddepcontrol.launch_dependents;");
  const size_t step = static_cast<size_t>(gridDim.x) * kThreads;
  size_t i = static_cast<size_t>(blockIdx.x) * kThreads + threadIdx.x;
  unsigned seen = 0;
  for (; i + (kInFlight - 1) * step < count; i += kInFlight * step) {
    uint4 v[kInFlight];
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) v[k] = load_once(data + i + k * step);
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) seen ^= v[k].x ^ v[k].y ^ v[k].z ^ v[k].w;
  }
  for (; i < count; i += step) seen ^= load_once(data + i).x;
  if (seen == 0x12345678u) *out = seen;  // so that the loads are not dropped
}

float microseconds(const char* data, size_t bytes, int sets, int blocks, bool early, unsigned* out, cudaStream_t stream) {
  cudaGraph_t graph;
  cudaGraphExec_t run;
  cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal);
  for (int k = 0; k < sets; ++k) {
    cudaLaunchAttribute overlap{};
    overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    overlap.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = blocks;
    config.blockDim = kThreads;
    config.stream = stream;
    config.attrs = &overlap;
    config.numAttrs = early;
    const auto* set = reinterpret_cast<const uint4*>(data + k * bytes);
    cudaLaunchKernelEx(&config, read_all, set, bytes / sizeof(uint4), out, early);
  }
  cudaStreamEndCapture(stream, &graph);
  cudaGraphInstantiate(&run, graph, 0);
  cudaEvent_t begin, end;
  cudaEventCreate(&begin);
  cudaEventCreate(&end);
  std::vector<float> times;
  for (int r = 0; r < 20; ++r) {
    cudaEventRecord(begin, stream);
    cudaGraphLaunch(run, stream);
    cudaEventRecord(end, stream);
    cudaEventSynchronize(end);
    float ms;
    cudaEventElapsedTime(&ms, begin, end);
    if (r >= 5) times.push_back(ms * 1e3f / sets);
  }
  cudaGraphExecDestroy(run);
  cudaGraphDestroy(graph);
  std::nth_element(times.begin(), times.begin() + times.size() / 2, times.end());
  return times[times.size() / 2];
}

int main() {
  constexpr size_t kTotal = size_t{1} << 30;
  char* data;
  unsigned* out;
  cudaStream_t stream;
  cudaMalloc(&data, kTotal);
  cudaMalloc(&out, sizeof(unsigned));
  cudaMemset(data, 1, kTotal);
  cudaStreamCreate(&stream);
  for (size_t mb : {33, 67, 134, 268})
    for (int blocks : {264, 528, 1056})
      for (bool early : {false, true}) {
        const size_t bytes = mb * 1000000 / 4096 * 4096;
        const int sets = static_cast<int>(std::min<size_t>(kTotal / bytes, 12));
        const float us = microseconds(data, bytes, sets, blocks, early, out, stream);
        const float tbs = bytes / us / 1e6f;
        printf("%3zu MB, %4d blocks, early %d: %6.2f us, %.2f TB/s, share of %.2f: %.3f\n", mb, blocks, early, us, tbs,
               kReadTbs, tbs / kReadTbs);
      }
  const cudaError_t error = cudaGetLastError();
  if (error != cudaSuccess) fprintf(stderr, "%s\n", cudaGetErrorString(error));
  return error != cudaSuccess;
}
