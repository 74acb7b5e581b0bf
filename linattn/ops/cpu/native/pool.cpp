#include "pool.h"

#include <pthread.h>

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <system_error>
#include <thread>

#if defined(__SSE2__)
#include <immintrin.h>
#endif

namespace linattn {
namespace {

// Flushes subnormal numbers to 0 in its scope: in decaying states they would cost a hundred times as much as others.
class Flush {
#if defined(__SSE2__)
    const unsigned before_ = _mm_getcsr();

public:
    Flush() { _mm_setcsr(before_ | 0x8040); }  // FTZ and DAZ
    ~Flush() { _mm_setcsr(before_); }
#elif defined(__aarch64__)
    uint64_t before_;

public:
    Flush() {
        __asm__ volatile("mrs %0, fpcr" : "=r"(before_));
        __asm__ volatile("msr fpcr, %0" ::"r"(before_ | (uint64_t(1) << 24)));
    }
    ~Flush() { __asm__ volatile("msr fpcr, %0" ::"r"(before_)); }
#else
public:
    Flush() {}
    ~Flush() {}
#endif
};

void breathe() {
#if defined(__SSE2__)
    _mm_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

constexpr int SPINS = 300;  // some ten microseconds, short enough beside other processes

// Polls `condition` at most SPINS times; returns whether it became true.
template <class Condition>
bool spin(Condition condition) {
    for (int i = 0; i < SPINS; i++) {
        if (condition()) return true;
        breathe();
    }
    return condition();
}

thread_local bool inside = false;  // true within a body and on threads of the pool

constexpr int INDEX_BITS = 40;
constexpr uint64_t INDEX = (uint64_t(1) << INDEX_BITS) - 1;

// One job at a time. The job's number and its next index (INDEX when it is closed) are one word, so that a late thread cannot take an
// index of a later job.
class Pool {
public:
    void run(int64_t count, int64_t threads, void (*body)(void*, int64_t), void* context) {
        helpers(threads - 1 < count - 1 ? threads - 1 : count - 1);
        const uint64_t last = word_.load(std::memory_order_relaxed) & ~INDEX, job = last + INDEX + 1;
        // Close the previous job first. Otherwise a late thread that has read its word could take the index after its last one as soon as
        // the new `count_` allows it: one index would run twice, and one of the new job would be counted without having run.
        word_.store(last | INDEX, std::memory_order_relaxed);
        count_.store(count, std::memory_order_release);
        body_.store(body, std::memory_order_release);
        context_.store(context, std::memory_order_release);
        limit_.store(threads - 1, std::memory_order_relaxed);
        done_.store(0, std::memory_order_relaxed);
        {
            std::lock_guard<std::mutex> guard(lock_);
            word_.store(job, std::memory_order_release);
        }
        wake_.notify_all();
        work(job);
        const auto all_done = [&] { return done_.load(std::memory_order_acquire) == count; };
        if (spin(all_done)) return;
        std::unique_lock<std::mutex> guard(lock_);
        finished_.wait(guard, all_done);
    }

    std::mutex busy;  // held while a job runs

private:
    // Starts threads until there are `wanted` beside the caller's, or as many as the system allows.
    void helpers(int64_t wanted) {
        while (size_ < wanted) {
            try {
                std::thread([this, id = size_, seen = word_.load(std::memory_order_relaxed)] { live(id, seen & ~INDEX); }).detach();
            } catch (const std::system_error&) {
                return;
            }
            size_++;
        }
    }

    void live(int64_t id, uint64_t seen) {
        const Flush flush;
        inside = true;
        for (;;) {
            const auto news = [&] { return (word_.load(std::memory_order_acquire) & ~INDEX) != seen; };
            if (!spin(news)) {
                std::unique_lock<std::mutex> guard(lock_);
                wake_.wait(guard, news);
            }
            seen = word_.load(std::memory_order_acquire) & ~INDEX;
            if (id < limit_.load(std::memory_order_relaxed)) work(seen);
        }
    }

    // Runs indices of `job` until none is left.
    void work(uint64_t job) {
        for (;;) {
            uint64_t word = word_.load(std::memory_order_acquire);
            const int64_t count = count_.load(std::memory_order_acquire);
            const auto body = body_.load(std::memory_order_acquire);
            void* const context = context_.load(std::memory_order_acquire);
            const int64_t index = int64_t(word & INDEX);
            if ((word & ~INDEX) != job || index >= count) return;
            // These change only after the word has changed: if the word is the same, the values read belong to it.
            if (!word_.compare_exchange_weak(word, word + 1, std::memory_order_acq_rel)) continue;
            body(context, index);
            if (done_.fetch_add(1, std::memory_order_acq_rel) + 1 == count) {
                { std::lock_guard<std::mutex> guard(lock_); }
                finished_.notify_all();
            }
        }
    }

    std::atomic<uint64_t> word_{0};
    std::atomic<int64_t> count_{0}, limit_{0}, done_{0};
    std::atomic<void (*)(void*, int64_t)> body_{nullptr};
    std::atomic<void*> context_{nullptr};
    std::mutex lock_;
    std::condition_variable wake_, finished_;
    int64_t size_ = 0;
};

// Never destroyed: its threads sleep until the process ends. A forked child has neither these threads nor torch's, and starts its own.
Pool* pool = nullptr;
std::once_flag once;
bool forked = false;
[[maybe_unused]] const int watched = pthread_atfork(nullptr, nullptr, [] {
    forked = true;
    if (pool) pool = new Pool;
});

}  // namespace

// Runs body(context) once on the caller and on each of torch's threads, by the OpenMP runtime that torch has loaded, if any.
#if defined(__linux__)
extern "C" __attribute__((weak)) void GOMP_parallel(void (*body)(void*), void* context, unsigned threads, unsigned flags);
#else
constexpr void (*GOMP_parallel)(void (*)(void*), void*, unsigned, unsigned) = nullptr;
#endif

namespace {

struct Borrowed {
    int64_t count;
    void (*body)(void*, int64_t);
    void* context;
    std::atomic<int64_t> next{0};

    void run(int64_t threads) {
        GOMP_parallel([](void* job) { static_cast<Borrowed*>(job)->work(); }, this, unsigned(threads < count ? threads : count), 0);
    }

private:
    void work() {
        const Flush flush;
        inside = true;
        for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < count;) body(context, i);
        inside = false;
    }
};

// Returns false, without running the job, if another thread is running one.
bool shared(int64_t count, int64_t threads, void (*body)(void*, int64_t), void* context) {
    std::call_once(once, [] { pool = new Pool; });
    std::unique_lock<std::mutex> turn(pool->busy, std::try_to_lock);
    if (!turn.owns_lock()) return false;
    if (threads < 0 && GOMP_parallel && !forked) Borrowed{count, body, context}.run(-threads);
    else pool->run(count, threads < 0 ? -threads : threads, body, context);
    return true;
}

}  // namespace

void run(int64_t count, int64_t threads, void (*body)(void*, int64_t), void* context) {
    const Flush flush;
    const bool nested = inside;
    inside = true;  // also on one thread: a nested call may find the pool free
    if (nested || count < 2 || (threads >= -1 && threads <= 1) || !shared(count, threads, body, context))
        for (int64_t i = 0; i < count; i++) body(context, i);
    inside = nested;
}

}  // namespace linattn
