// Tree attention on Hopper: tiles of MT * 64 rows, blocks of 64 keys. Four warps ask the copy engine for boxes of 16
// keys of K and V, up to 190 KB ahead (one thread alone issued too slowly: 3.6 instead of 4.5 TB/s); a warpgroup for each
// 64 rows multiplies (wgmma), and takes the exponentials of a block while the values of the block before are summed.
// Nothing joins the warpgroups but the rings of K and V. merge.cuh puts the splits of a tile together.
#include "cuda/hopper/merge.cuh"

#pragma nv_diag_suppress 177  // the pass without wgmma leaves the kernel empty

namespace tlt::cuda {
namespace {

constexpr int kKeys = 64, kBlockBytes = kKeys * kDim * 2;  // of K or of V
constexpr int kCellKeys = 16, kCells = kKeys / kCellKeys, kCellBytes = kCellKeys * kDim * 2;
// A row's exponents are taken relative to a score of its own that a later one may exceed by this (base 2): the sums
// need no new scale at every maximum, and weights of up to 256 lose nothing in any of the types.
constexpr float kSlack = 8.0f;

// Thread of a warpgroup: rows warp * 16 + lane / 4 and 8 below; column 8 * j + lane % 4 * 2 + e is element
// 4 * j + 2 * h + e. Grid (items padded to whole clusters, Hkv).
template <typename T, int MT, int STAGES, int RESIDENT>
__global__ void __launch_bounds__(128 * MT + 128, RESIDENT)
    attend_wgmma(const __grid_constant__ BoxMap k_map, const __grid_constant__ BoxMap v_map,
                 const AttentionArgs a) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  constexpr int kWarps = 4 * MT;
  constexpr int kEach = 65536 / RESIDENT / (128 * MT + 128);  // registers of a thread, if those that copy give none
  constexpr bool kGive = kEach < 240;
  extern __shared__ unsigned char unaligned[];
  __shared__ uint64_t barriers[4 * STAGES];
  const uint32_t keys = (shared_at(unaligned) + 1023) & ~1023u, values = keys + STAGES * kBlockBytes;
  uint32_t first_barrier;  // computed once: the compiler would do it again at each use
  asm volatile("mov.u32 %0, %1;" : "=r"(first_barrier) : "r"(shared_at(barriers)));
  const auto key_filled = [&](int stage) { return first_barrier + 8 * stage; };
  const auto value_filled = [&](int stage) { return key_filled(STAGES + stage); };
  const auto key_freed = [&](int stage) { return key_filled(2 * STAGES + stage); };
  const auto value_freed = [&](int stage) { return key_filled(3 * STAGES + stage); };
  const int index = blockIdx.x, head = blockIdx.y, lane = threadIdx.x % 32;
  const int warp = __shfl_sync(kAll, threadIdx.x / 32, 0);
  let_next_kernel_start();
  if (threadIdx.x == 0) {
    fetch_map(k_map), fetch_map(v_map);
    for (int i = 0; i < 2 * STAGES; ++i) init_barrier(key_filled(i), kCells), init_barrier(key_freed(i), kWarps);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  if (!a.early) wait_for_kernel_in_front();
  Item item{};
  if (index < a.max_items) item = read_item(a.items, index);
  if (item.splits == 0) {
    if (a.early) wait_for_kernel_in_front();  // so that this kernel's end implies the end of all before it
    return;
  }
  const int begin = item.begin * kCellKeys, limit = min(item.prefix + item.nodes, item.end * kCellKeys);  // keys
  const int count = (limit - begin + kKeys - 1) / kKeys;
  const TileRows rows{a, item, head};
  const Team team(item, index, cluster_rank(), a.nodes_per_tile, a.cluster);

  if (warp >= kWarps) {
    if constexpr (kGive) asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    // Warp w copies cell w of every block. Lane l: where that of the l-th of the next 32 blocks lies; a page behind the
    // last reads as zeros.
    const int32_t* table = a.page_table + item.request * a.table_stride;
    const int own = warp - kWarps, cells_per_page = a.page / kCellKeys;
    const auto cell_of = [&](int i) { return item.begin + (i + lane) * kCells + own; };
    const auto page_of = [&](int i) {
      const int cell = cell_of(i);
      return cell * kCellKeys < limit ? table[cell / cells_per_page] : a.pages;
    };
    const uint64_t policy = team.stride == 1 ? read_once_policy() : read_again_policy();
    int pages = 0, places = 0, next_pages = page_of(0);
    bool waited = !a.early;
    for (int i = 0; i < count; ++i) {
      if (i % 32 == 0) {
        pages = next_pages, places = cell_of(i) % cells_per_page * (kCellKeys / 8);
        if (i + 32 < count) next_pages = page_of(i + 32);
      }
      if (!waited && begin + (i + 1) * kKeys > item.prefix) wait_for_kernel_in_front(), waited = true;
      const int stage = i % STAGES;
      const int page = __shfl_sync(kAll, pages, i % 32), place = __shfl_sync(kAll, places, i % 32);
      const auto copy = [&](uint32_t ring, const BoxMap& map, uint32_t filled, uint32_t freed) {
        if (i >= STAGES) wait_parity(freed, (i / STAGES - 1) & 1);
        if (lane == 0) {
          expect_bytes(filled, kCellBytes);
          copy_box(ring + stage * kBlockBytes + own * kCellBytes, map, 2 * head, place, page, filled, policy);
        }
        __syncwarp();
      };
      copy(keys, k_map, key_filled(stage), key_freed(stage));
      copy(values, v_map, value_filled(stage), value_freed(stage));
    }
    if (!waited) wait_for_kernel_in_front();
    sync_cluster();
    leave_cluster();
  } else {
    if constexpr (kGive) asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"((kEach + (kEach - 40) / MT) / 8 * 8));
    if (a.early) wait_for_kernel_in_front();
    const int part_row = warp % 4 * 16 + lane / 4, top_row = warp / 4 * 64 + part_row, pair = lane % 4 * 2;
    uint32_t q[kDim / 16][4];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = top_row + 8 * h;
      const bool used = rows.live(row);
      const T* from = static_cast<const T*>(a.q) + (used ? rows.offset(row, a.q_row) : 0) + pair;
#pragma unroll
      for (int step = 0; step < kDim / 16; ++step)
#pragma unroll
        for (int side = 0; side < 2; ++side)
          q[step][2 * side + h] = *reinterpret_cast<const uint32_t*>(from + step * 16 + side * 8) & (used ? ~0u : 0u);
    }
    const Sight sights[2] = {{rows, top_row}, {rows, top_row + 8}};
    float acc[64] = {}, scores[32], tops[2] = {kNone, kNone}, totals[2] = {};  // tops: of scores before scaling
    uint32_t weights[4][4];

    const auto start_scores = [&](int i) {
      const int stage = i % STAGES;
      wait_parity(key_filled(stage), i / STAGES & 1);
      pin(scores);
      wgmma_fence();
#pragma unroll
      for (int step = 0; step < kDim / 16; ++step)
        multiply_keys<T>(scores, q[step], descriptor(keys + stage * kBlockBytes + step / 4 * 1024 + step % 4 * 32),
                         step > 0);
      wgmma_commit();
    };
    // The weights of block i, while the values of the block before are summed; then makes the sums fit the new maxima.
    const auto finish_scores = [&](int i) {
      const int first_key = begin + i * kKeys;
      pin(scores);
      if (lane == 0) arrive_at(key_freed(i % STAGES));
      if (first_key + kKeys > min(item.prefix, limit)) {
#pragma unroll
        for (int h = 0; h < 2; ++h)
#pragma unroll
          for (int j = 0; j < 8; ++j)
#pragma unroll
            for (int e = 0; e < 2; ++e) {
              const int key = first_key + j * 8 + pair + e;
              if ((key >= limit) | !sights[h].sees(key - item.prefix)) scores[4 * j + 2 * h + e] = kNone;
            }
      }
      float factors[2];
      bool raised = false;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float top = scores[2 * h];
#pragma unroll
        for (int j = 0; j < 8; ++j) top = fmaxf(top, fmaxf(scores[4 * j + 2 * h], scores[4 * j + 2 * h + 1]));
        top = quad_max(top);
        const bool raise = (top - tops[h]) * a.scale_log2 > kSlack;  // false where both are none
        raised |= raise;
        factors[h] = raise ? exp2_fast((tops[h] - top) * a.scale_log2) : 1.0f;
        tops[h] = raise ? top : tops[h];
        float sum = totals[h] * factors[h], odd = 0.0f;
        const float shift = -finite(tops[h]) * a.scale_log2;
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          float &x = scores[4 * j + 2 * h], &y = scores[4 * j + 2 * h + 1];
          x = exp2_fast(fmaf(x, a.scale_log2, shift)), y = exp2_fast(fmaf(y, a.scale_log2, shift));
          sum += x, odd += y;
        }
        totals[h] = sum + odd;
      }
      pin(scores), pin(totals);
      // Here, as a branch that keeps the compiler from putting all of the above behind the wait for the products.
      wait_parity(value_filled(i % STAGES), i / STAGES & 1);
      wgmma_wait<0>();
      pin(acc);
      if (i > 0 && lane == 0) arrive_at(value_freed((i - 1) % STAGES));
      if (__any_sync(kAll, raised)) {
#pragma unroll
        for (int j = 0; j < 32; ++j) acc[2 * j] *= factors[j % 2], acc[2 * j + 1] *= factors[j % 2];
      }
#pragma unroll
      for (int j = 0; j < 16; ++j) weights[j / 4][j % 4] = pack<T>(scores[2 * j], scores[2 * j + 1]);
      pin(acc);
    };
    const auto start_values = [&](int i) {
      const int stage = i % STAGES, first_key = begin + i * kKeys;
      const uint32_t block = values + stage * kBlockBytes;
      if (first_key + kKeys > limit && limit % kCellKeys != 0) {
        // Behind the last key memory may hold anything, NaN too, which a weight of 0 does not cancel.
        for (int row = limit - first_key + threadIdx.x % 128 / 16; row < kKeys; row += 8) {
          const uint32_t chunk = threadIdx.x / 8 % 2 * 1024 + threadIdx.x % 8 * 16;
          const uint32_t at = block + row / 8 * 2048 + row % 8 * 128 + chunk;
          asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(at), "r"(0) : "memory");
        }
        show_to_async_proxy();
        asm volatile("bar.sync %0, 128;" ::"r"(warp / 4 + 1) : "memory");
      }
      wgmma_fence();
#pragma unroll
      for (int step = 0; step < kCells; ++step)
        multiply_values<T>(acc, weights[step], descriptor(block + step * kCellBytes));
      wgmma_commit();
    };
    if (count > 0) {
      start_scores(0);
      wgmma_wait<0>();
      for (int i = 0;; ++i) {
        finish_scores(i);
        if (i + 1 == count) break;
        start_scores(i + 1), start_values(i);
        wgmma_wait<1>();  // the scores; the values are summed on
      }
      start_values(count - 1);
      wgmma_wait<0>();
      pin(acc);
    }
    asm volatile("bar.sync 15, %0;" ::"n"(kWarps * 32) : "memory");  // all have left the rings
    const uint32_t part = keys + warp / 4 * kPartBytes, stats = keys + MT * kPartBytes + warp / 4 * 512;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = part_row + 8 * h;
#pragma unroll
      for (int j = 0; j < kChunks; ++j)
        store_floats(part + row * kPartRow + (j * 8 + pair) * 4, acc[4 * j + 2 * h], acc[4 * j + 2 * h + 1]);
      const float total = quad_sum(totals[h]);
      if (lane % 4 == 0) {
        store_float(stats + row * 4, tops[h] == kNone ? kNone : tops[h] * a.scale_log2);
        store_float(stats + (64 + row) * 4, total);
      }
    }
    sync_cluster();
    merge<T, MT>(a, rows, team, keys, index, head, warp, lane);
    __syncwarp();
    leave_cluster();
  }
#endif
}

// A cache in boxes of 16 keys of a head: 64 of D, 8 keys, halves of D (of heads side by side), groups of 8 keys, pages.
BoxMap map_of(const void* cache, const AttentionArgs& a) {
  BoxMap map;
  const auto bytes = [](int64_t elements) { return static_cast<uint64_t>(elements) * 2; };
  const auto size = [](int x) { return static_cast<uint64_t>(x); };
  const uint64_t sizes[5] = {kDim / 2, 8, size(2 * a.kv_heads), size(a.page / 8), size(a.pages)};
  const uint64_t strides[4] = {bytes(a.slot_stride), bytes(kDim / 2), bytes(8 * a.slot_stride), bytes(a.page_stride)};
  const uint32_t box[5] = {kDim / 2, 8, 2, kCellKeys / 8, 1}, element_steps[5] = {1, 1, 1, 1, 1};
  constexpr int kHalf = 6, kBfloat16 = 9, kSwizzle128 = 3;  // CUtensorMapDataType, CUtensorMapSwizzle
  const int result = encode_tiled()(&map, a.dtype == Dtype::kFloat16 ? kHalf : kBfloat16, 5, const_cast<void*>(cache), sizes,
                               strides, box, element_steps, 0, kSwizzle128, 0, 0);
  if (result != 0) {
    throw std::runtime_error("k_cache, v_cache: expected strides of a multiple of 16 bytes, got CUresult " +
                             std::to_string(result) + " from cuTensorMapEncodeTiled");
  }
  return map;
}

template <int MT, int STAGES>
constexpr int shared_bytes() {
  static_assert(2 * STAGES * kBlockBytes >= MT * (kPartBytes + 512));
  return 2 * STAGES * kBlockBytes + 1024;  // and what aligns it
}

struct Launch {
  cudaLaunchAttribute attributes[2]{};
  cudaLaunchConfig_t config{};

  Launch(dim3 grid, int threads, int bytes, int cluster, cudaStream_t stream) {
    attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[0].val.programmaticStreamSerializationAllowed = 1;
    attributes[1].id = cudaLaunchAttributeClusterDimension;
    attributes[1].val.clusterDim.x = cluster, attributes[1].val.clusterDim.y = attributes[1].val.clusterDim.z = 1;
    config.gridDim = grid, config.blockDim = dim3(threads), config.dynamicSmemBytes = bytes, config.stream = stream;
    config.attrs = attributes, config.numAttrs = 2;
  }
};

// a null: how many clusters run at once. Else a launch.
template <typename T, int MT, int STAGES, int RESIDENT>
int launch(const AttentionArgs* a, int cluster, cudaStream_t stream) {
  const auto kernel = reinterpret_cast<const void*>(&attend_wgmma<T, MT, STAGES, RESIDENT>);
  constexpr int bytes = shared_bytes<MT, STAGES>(), threads = 128 * MT + 128;
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes), "attend: shared memory");
  const int blocks = a == nullptr ? cluster : (a->max_items + cluster - 1) / cluster * cluster;
  Launch launch(dim3(blocks, a == nullptr ? 1 : a->kv_heads), threads, bytes, cluster, stream);
  if (a == nullptr) {
    int clusters = 0;
    check(cudaOccupancyMaxActiveClusters(&clusters, kernel, &launch.config), "attend: clusters");
    return clusters;
  }
  BoxMap k_map = map_of(a->k_cache, *a), v_map = map_of(a->v_cache, *a);
  void* arguments[] = {&k_map, &v_map, const_cast<AttentionArgs*>(a)};
  check(cudaLaunchKernelExC(&launch.config, kernel, arguments), "attend");
  return 0;
}

template <typename T>
int launch_tiles(const AttentionArgs* a, int block_m, int stages, int cluster, cudaStream_t stream) {
  if (block_m == 64 && stages == 6) return launch<T, 1, 6, 1>(a, cluster, stream);
  if (block_m == 64 && stages == 3) return launch<T, 1, 3, 2>(a, cluster, stream);
  if (block_m == 128 && stages == 6) return launch<T, 2, 6, 1>(a, cluster, stream);
  throw std::invalid_argument("block_m, stages: expected 64 and 3 or 6, or 128 and 6, got " + std::to_string(block_m) +
                              " and " + std::to_string(stages));
}

}  // namespace

void attend_hopper(const AttentionArgs& a, uint64_t stream) {
  if (a.dtype == Dtype::kFloat16) {
    launch_tiles<__half>(&a, a.block_m, a.stages, a.cluster, as_stream(stream));
  } else {
    launch_tiles<__nv_bfloat16>(&a, a.block_m, a.stages, a.cluster, as_stream(stream));
  }
}

int attention_clusters(int block_m, int stages, int cluster) {
  return launch_tiles<__nv_bfloat16>(nullptr, block_m, stages, cluster, nullptr);
}

}  // namespace tlt::cuda
