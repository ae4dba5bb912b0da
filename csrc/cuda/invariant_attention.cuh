// Batch-invariant attention: a row's bits depend on its own q, keys and values, in path order, alone.
//
// A row at absolute position t sees t + 1 keys, its path: committed keys, then its ancestors and itself. The path is cut
// at places that depend on t alone:
//
//   border  = 64 * floor((t - 128) / 64), 0 for t < 128
//   prefix  keys before it, in splits of 512, each four streams of 128 keys folded in order
//   recent  the other 1 to 192 keys: three streams of 64, folded in order
//   result  the splits folded in order, then the recent keys
//
// A stream is an online softmax over cells of 16 keys at multiples of 16 of the absolute position. A tree has at most
// 128 nodes, so a tree node is never a prefix key, and the prefix is read once for a tile of rows. Recent keys are
// gathered for each row: a key then stands in the same place of the same product whether it is a tree slot, a chunk's
// row or a committed key. A row of m16n8k16 does not see the other rows of its tile, so tiles of any height agree; a
// weight of 0 adds exactly 0, and a cell of which a row sees nothing multiplies its sums by exactly 1.
//
// Two kernels share all arithmetic. invariant_attend: four streams at once, a warp (or two) each, for few rows; its
// splits and recent keys are merged by invariant_merge. invariant_chunk: the streams one after another, eight warps of
// 16 rows each, for the rows of a chunk, whose recent keys lie in a row and are shared by the tile.
#pragma once
#include "invariant_attend.cuh"
#include "invariant_chunk.cuh"

namespace tlt::cuda {
namespace {

template <typename... Arguments>
void launch_in_line(void (*kernel)(Arguments...), int blocks, int threads, int bytes, cudaStream_t stream,
                    const char* name, const Arguments&... arguments) {
  check(cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel), cudaFuncAttributeMaxDynamicSharedMemorySize, bytes), name);
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(blocks), config.blockDim = dim3(threads), config.dynamicSmemBytes = bytes;
  config.stream = stream, config.attrs = &attribute, config.numAttrs = 1;
  check(cudaLaunchKernelEx(&config, kernel, arguments...), name);
}

template <typename T, int D, int MT, int WM, int STAGES>
void launch_attend(const InvariantStep& s, const InvariantPlan& plan, const InvariantLayer& l, cudaStream_t stream) {
  constexpr int ring = kStreams * STAGES * 2 * kCellKeys * D * 2, meet = kStreams * WM * MT * (D / 8 + 1) * 512;
  launch_in_line(&invariant_attend<T, D, MT, WM, STAGES>, s.workers, 128 * WM, ring > meet ? ring : meet, stream,
                 "invariant_attend", s, plan, l);
}

template <typename T, int D>
void launch_all(const InvariantStep& s, const InvariantPlan& plan, const InvariantLayer& l, cudaStream_t stream) {
  if (s.chunk_nodes > 0) {
    constexpr int stages = 3, bytes = stages * 64 * D * 4 + 256 * (D / 8) * 16;
    launch_in_line(&invariant_chunk<T, D, stages>, s.chunk_workers, 256, bytes, stream, "invariant_chunk", s, plan, l);
  }
  switch (l.block_m) {
    case 16: launch_attend<T, D, 1, 1, 3>(s, plan, l, stream); break;
    case 32: launch_attend<T, D, 2, 1, 3>(s, plan, l, stream); break;
    case 64: launch_attend<T, D, 2, 2, 4>(s, plan, l, stream); break;
    default: throw std::invalid_argument("block_m: expected 16, 32 or 64, got " + std::to_string(l.block_m));
  }
  const int rows = s.rows * l.kv_heads * s.group;
  launch_in_line(&invariant_merge<T, D>, (rows + 3) / 4, 128, 0, stream, "invariant_merge", s, plan, l);
}

}  // namespace

template <typename T>
void invariant_attention_typed(const InvariantStep& s, const InvariantPlan& plan, const InvariantLayer& l, uint64_t stream) {
  switch (l.head_dim) {
    case 64: return launch_all<T, 64>(s, plan, l, as_stream(stream));
    case 128: return launch_all<T, 128>(s, plan, l, as_stream(stream));
    default: throw std::invalid_argument("head_dim: expected 64 or 128, got " + std::to_string(l.head_dim));
  }
}

}  // namespace tlt::cuda
