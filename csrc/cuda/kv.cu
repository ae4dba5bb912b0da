#include "kv.h"

#include "common.cuh"

namespace tlt::cuda {
namespace {

constexpr int kBatchedRows = 8;  // 16 bytes each in flight a thread

// V is the widest unit that divides a row. A thread owns one unit of every row of the path. Paths rise, so the rows of
// a group of eight are loaded before the first of them is stored, and no later source lies among the slots stored.
template <typename V>
__global__ void commit_kernel(const PagedKv kv, const PageTable table, const int32_t* prefix_lens,
                              const int32_t* accept_lens, const int32_t* paths, int32_t steps) {
  const int b = blockIdx.y, length = min(accept_lens[b], steps), prefix = prefix_lens[b];
  const int64_t units = kv.row_bytes / sizeof(V), plane_rows = kv.pages * kv.page_size;
  V* plane = static_cast<V*>(kv.data) + blockIdx.x * plane_rows * units;
  const int32_t* pages = table.pages + static_cast<int64_t>(b) * table.width;
  const int32_t* path = paths + static_cast<int64_t>(b) * steps;
  const auto row_of = [&](int slot) -> int64_t {
    if (slot < 0 || slot / kv.page_size >= table.width) return -1;
    const int64_t row = static_cast<int64_t>(pages[slot / kv.page_size]) * kv.page_size + slot % kv.page_size;
    return row >= 0 && row < plane_rows ? row : -1;
  };
  int first = 0;
  while (first < length && path[first] == first) ++first;  // already in place
  for (int64_t unit = threadIdx.x; unit < units; unit += blockDim.x) {
    for (int d = first; d < length; d += kBatchedRows) {
      V held[kBatchedRows];
      int64_t to[kBatchedRows];
#pragma unroll
      for (int i = 0; i < kBatchedRows; ++i) {
        to[i] = -1;
        if (d + i >= length) continue;
        const int64_t from = row_of(prefix + path[d + i]);
        if (from < 0) continue;
        held[i] = plane[from * units + unit];
        to[i] = row_of(prefix + d + i);
      }
#pragma unroll
      for (int i = 0; i < kBatchedRows; ++i) {
        if (to[i] >= 0) plane[to[i] * units + unit] = held[i];
      }
    }
  }
}

// A thread owns one unit of every page, so copies that read an earlier copy's target see it.
template <typename V>
__global__ void copy_pages_kernel(const PagedKv kv, const int64_t* src, const int64_t* dst, int32_t count) {
  const int64_t units = kv.page_size * kv.row_bytes / sizeof(V);
  const int64_t unit = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (unit >= units) return;
  V* plane = static_cast<V*>(kv.data) + blockIdx.y * kv.pages * units;
  for (int i = 0; i < count; ++i) {
    const int64_t from = src[i], to = dst[i];
    if (from >= 0 && from < kv.pages && to >= 0 && to < kv.pages) plane[to * units + unit] = plane[from * units + unit];
  }
}

template <typename V>
__global__ void gather_kernel(const V* rows, int64_t units, const int32_t* node_indptr, const int32_t* accept_lens,
                              const int32_t* paths, int32_t steps, V* out) {
  const int b = blockIdx.y, d = blockIdx.x;
  if (d >= accept_lens[b]) return;
  const int64_t at = static_cast<int64_t>(b) * steps + d, from = node_indptr[b] + paths[at];
  for (int64_t unit = threadIdx.x; unit < units; unit += blockDim.x) out[at * units + unit] = rows[from * units + unit];
}

__global__ void advance_kernel(const int32_t* accept_lens, const int64_t* emitted, int32_t steps, int32_t batch,
                               int32_t* prefix_lens, int64_t* roots) {
  const int b = blockIdx.x * blockDim.x + threadIdx.x;
  if (b >= batch || accept_lens[b] < 1) return;
  const int64_t last = emitted[static_cast<int64_t>(b) * steps + accept_lens[b] - 1];
  prefix_lens[b] += accept_lens[b];
  roots[b] = last < 0 ? 0 : last;
}

__global__ void step_inputs_kernel(const int32_t* node_indptr, const int32_t* depths, const int32_t* prefix_lens,
                                   const PageTable table, int32_t page_size, int64_t pad_slot, int32_t batch,
                                   int32_t rows, int64_t* positions, int64_t* draws, int64_t* slots) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= rows) return;
  if (i >= node_indptr[batch]) {
    positions[i] = 0, draws[i] = 1, slots[i] = pad_slot;
    return;
  }
  int low = 0, high = batch - 1;  // the last request that begins at or before row i
  while (low < high) {
    const int mid = (low + high + 1) / 2;
    if (node_indptr[mid] <= i) {
      low = mid;
    } else {
      high = mid - 1;
    }
  }
  const int prefix = prefix_lens[low], slot = prefix + i - node_indptr[low];
  positions[i] = prefix + depths[i];
  draws[i] = prefix + depths[i] + 1;
  const int page = slot / page_size;
  slots[i] = page < table.width
                 ? static_cast<int64_t>(table.pages[static_cast<int64_t>(low) * table.width + page]) * page_size +
                       slot % page_size
                 : pad_slot;
}

bool wide(const void* data, int64_t row_bytes) {
  return row_bytes % 16 == 0 && reinterpret_cast<uintptr_t>(data) % 16 == 0;
}

int threads_for(int64_t units) { return static_cast<int>(units >= 256 ? 256 : (units + 31) / 32 * 32); }

template <typename V>
void launch_commit(const PagedKv& kv, const PageTable& table, const int32_t* prefix_lens, const int32_t* accept_lens,
                   const int32_t* paths, int32_t steps, int32_t batch, cudaStream_t stream) {
  commit_kernel<V><<<dim3(kv.planes, batch), threads_for(kv.row_bytes / sizeof(V)), 0, stream>>>(
      kv, table, prefix_lens, accept_lens, paths, steps);
}

template <typename V>
void launch_copy(const PagedKv& kv, const int64_t* src, const int64_t* dst, int32_t count, cudaStream_t stream) {
  const int64_t units = kv.page_size * kv.row_bytes / sizeof(V);
  copy_pages_kernel<V><<<dim3((units + 255) / 256, kv.planes), 256, 0, stream>>>(kv, src, dst, count);
}

template <typename V>
void launch_gather(const void* rows, int64_t row_bytes, const int32_t* node_indptr, const int32_t* accept_lens,
                   const int32_t* paths, int32_t steps, int32_t batch, void* out, cudaStream_t stream) {
  const int64_t units = row_bytes / sizeof(V);
  gather_kernel<V><<<dim3(steps, batch), threads_for(units), 0, stream>>>(
      static_cast<const V*>(rows), units, node_indptr, accept_lens, paths, steps, static_cast<V*>(out));
}

}  // namespace

void commit_kv(const PagedKv& kv, const PageTable& table, const int32_t* prefix_lens, const int32_t* accept_lens,
               const int32_t* paths, int32_t steps, int32_t batch, uint64_t stream) {
  if (batch == 0 || steps == 0 || kv.planes == 0 || kv.row_bytes == 0) return;
  if (wide(kv.data, kv.row_bytes)) {
    launch_commit<uint4>(kv, table, prefix_lens, accept_lens, paths, steps, batch, as_stream(stream));
  } else {
    launch_commit<uint16_t>(kv, table, prefix_lens, accept_lens, paths, steps, batch, as_stream(stream));
  }
  check_launch("commit_kv");
}

void copy_pages(const PagedKv& kv, const int64_t* src, const int64_t* dst, int32_t count, uint64_t stream) {
  if (count == 0 || kv.planes == 0 || kv.row_bytes == 0) return;
  if (wide(kv.data, kv.row_bytes)) {
    launch_copy<uint4>(kv, src, dst, count, as_stream(stream));
  } else {
    launch_copy<uint16_t>(kv, src, dst, count, as_stream(stream));
  }
  check_launch("copy_pages");
}

void gather_accepted(const void* rows, int64_t row_bytes, const int32_t* node_indptr, const int32_t* accept_lens,
                     const int32_t* paths, int32_t steps, int32_t batch, void* out, uint64_t stream) {
  if (batch == 0 || steps == 0 || row_bytes == 0) return;
  if (wide(rows, row_bytes) && wide(out, row_bytes)) {
    launch_gather<uint4>(rows, row_bytes, node_indptr, accept_lens, paths, steps, batch, out, as_stream(stream));
  } else {
    launch_gather<uint16_t>(rows, row_bytes, node_indptr, accept_lens, paths, steps, batch, out, as_stream(stream));
  }
  check_launch("gather_accepted");
}

void advance(const int32_t* accept_lens, const int64_t* emitted, int32_t steps, int32_t batch, int32_t* prefix_lens,
             int64_t* roots, uint64_t stream) {
  if (batch == 0) return;
  advance_kernel<<<(batch + 127) / 128, 128, 0, as_stream(stream)>>>(accept_lens, emitted, steps, batch, prefix_lens,
                                                                     roots);
  check_launch("advance");
}

void step_inputs(const int32_t* node_indptr, const int32_t* depths, const int32_t* prefix_lens, const PageTable& table,
                 int32_t page_size, int64_t pad_slot, int32_t batch, int32_t rows, int64_t* positions, int64_t* draws,
                 int64_t* slots, uint64_t stream) {
  if (rows == 0) return;
  step_inputs_kernel<<<(rows + 127) / 128, 128, 0, as_stream(stream)>>>(
      node_indptr, depths, prefix_lens, table, page_size, pad_slot, batch, rows, positions, draws, slots);
  check_launch("step_inputs");
}

void copy_async(void* to, const void* from, int64_t bytes, uint64_t stream) {
  if (bytes > 0) check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, as_stream(stream)), "copy_async");
}

void copy_block_async(void* to, const void* from, int64_t pitch, int64_t bytes, int64_t rows, uint64_t stream) {
  if (bytes <= 0 || rows <= 0) return;
  check(cudaMemcpy2DAsync(to, pitch, from, pitch, bytes, rows, cudaMemcpyDefault, as_stream(stream)), "copy_block_async");
}

}  // namespace tlt::cuda
