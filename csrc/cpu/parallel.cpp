#include "cpu/parallel.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <system_error>
#include <thread>

namespace tlt {
namespace {

thread_local bool inside_job = false;

struct Job {
  int64_t n, chunk;
  RangeFn fn;
  void* context;
  std::atomic<int64_t> next{0};
  std::exception_ptr error;
  std::mutex error_mutex;

  void work() {
    inside_job = true;
    for (;;) {
      const int64_t begin = next.fetch_add(chunk, std::memory_order_relaxed);
      if (begin >= n) break;
      try {
        fn(context, begin, std::min(n, begin + chunk));
      } catch (...) {
        std::lock_guard<std::mutex> lock(error_mutex);
        if (!error) error = std::current_exception();
        next.store(n, std::memory_order_relaxed);
      }
    }
    inside_job = false;
  }
};

class Pool {
 public:
  // False when another thread's job is running.
  bool run(Job& job, int helpers) {
    std::unique_lock<std::mutex> busy(busy_, std::try_to_lock);
    if (!busy) return false;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      grow(helpers);
      job_ = &job;
      open_seats_ = helpers;
      ++epoch_;
    }
    wake_.notify_all();
    job.work();
    std::unique_lock<std::mutex> lock(mutex_);
    open_seats_ = 0;  // a helper that has not woken yet would find nothing left to do
    done_.wait(lock, [&] { return active_ == 0; });
    return true;
  }

 private:
  void grow(int helpers) {
    for (; count_ < helpers; ++count_) {
      try {
        std::thread([this] { serve(); }).detach();
      } catch (const std::system_error&) {
        return;  // out of threads: the ranges are handed out dynamically, so those we have do the work
      }
    }
  }

  void serve() {
    uint64_t seen = 0;
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      wake_.wait(lock, [&] { return open_seats_ > 0 && epoch_ != seen; });
      seen = epoch_;
      --open_seats_;
      ++active_;
      Job* job = job_;
      lock.unlock();
      job->work();
      lock.lock();
      if (--active_ == 0) done_.notify_all();
    }
  }

  std::mutex busy_;  // held for the length of a job
  std::mutex mutex_;
  std::condition_variable wake_, done_;
  Job* job_ = nullptr;
  uint64_t epoch_ = 0;
  int open_seats_ = 0, active_ = 0, count_ = 0;
};

// Never destroyed: helpers sleep on it until the process ends. A forked child has none of the parent's threads and
// maybe a locked mutex, so it leaves the old pool alone and makes its own on first use.
std::atomic<Pool*> pool{nullptr};

Pool& the_pool() {
  static const int registered = pthread_atfork(nullptr, nullptr, [] {
    pool.store(nullptr);
    inside_job = false;
  });
  (void)registered;
  Pool* current = pool.load();
  if (current == nullptr) {
    Pool* fresh = new Pool;
    if (pool.compare_exchange_strong(current, fresh)) return *fresh;
    delete fresh;
  }
  return *current;
}

}  // namespace

void parallel_run(int64_t n, int threads, RangeFn fn, void* context) {
  if (n <= 0) return;
  const int64_t team = std::min<int64_t>(std::max(threads, 1), n);
  if (team == 1 || inside_job) return fn(context, 0, n);
  Job job;
  job.n = n;
  job.chunk = std::max<int64_t>(1, n / (team * 8));
  job.fn = fn;
  job.context = context;
  if (!the_pool().run(job, static_cast<int>(team) - 1)) return fn(context, 0, n);
  if (job.error) std::rethrow_exception(job.error);
}

}  // namespace tlt
