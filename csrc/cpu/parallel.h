// A small persistent thread pool. No OpenMP: a second libgomp beside torch's would spin on the same cores.
#pragma once
#include <cstdint>
#include <type_traits>

namespace tlt {

using RangeFn = void (*)(void* context, int64_t begin, int64_t end);

// Calls fn on disjoint ranges that cover [0, n), on at most `threads` threads, the caller's included; returns when all
// are done and rethrows the first exception. Ranges are handed out dynamically, so fn's result for an index must not
// depend on its range. Called from inside a job, or while another thread's job runs, it runs on the caller alone.
void parallel_run(int64_t n, int threads, RangeFn fn, void* context);

// body(begin, end).
template <typename Body>
void parallel_for(int64_t n, int threads, Body&& body) {
  auto call = [](void* context, int64_t begin, int64_t end) {
    (*static_cast<std::remove_reference_t<Body>*>(context))(begin, end);
  };
  parallel_run(n, threads, call, const_cast<void*>(static_cast<const void*>(&body)));
}

}  // namespace tlt
