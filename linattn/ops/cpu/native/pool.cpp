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

// While there is one, subnormal numbers are 0: where states fade they would cost a hundred times as much as others.
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

constexpr int SPINS = 300;  // some ten microseconds: what a core does not miss where another process wants it

// True as soon as `condition` is, at the latest after SPINS looks.
template <class Condition>
bool spin(Condition condition) {
    for (int i = 0; i < SPINS; i++) {
        if (condition()) return true;
        breathe();
    }
    return condition();
}

thread_local bool inside = false;  // a body, or a thread of the pool

constexpr int INDEX_BITS = 40;
constexpr uint64_t INDEX = (uint64_t(1) << INDEX_BITS) - 1;

// One job at a time. Its number and its next index, INDEX when it is closed, are one word, so that who comes late takes nothing from a
// later job.
class Pool {
public:
    void run(int64_t count, int64_t threads, void (*body)(void*, int64_t), void* context) {
        helpers(threads - 1 < count - 1 ? threads - 1 : count - 1);
        const uint64_t last = word_.load(std::memory_order_relaxed) & ~INDEX, job = last + INDEX + 1;
        // First the last job is closed. Else who is late in it, and has looked at its word, could take the index behind its last one as
        // soon as `count_` has room for it: an index done twice, and one of the new job counted that is not done.
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

    std::mutex busy;  // held by who runs a job

private:
    // There are at least `wanted` threads beside the caller's, or as many as the system gives.
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

    // Take indices of `job` until there are none.
    void work(uint64_t job) {
        for (;;) {
            uint64_t word = word_.load(std::memory_order_acquire);
            const int64_t count = count_.load(std::memory_order_acquire);
            const auto body = body_.load(std::memory_order_acquire);
            void* const context = context_.load(std::memory_order_acquire);
            const int64_t index = int64_t(word & INDEX);
            if ((word & ~INDEX) != job || index >= count) return;
            // Whoever changes these changes the word before: if it still stands, what was read belongs to it.
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

// Never destroyed: its threads sleep until the process ends. A forked child has none of them and starts anew, and has none of torch's.
Pool* pool = nullptr;
std::once_flag once;
bool forked = false;
[[maybe_unused]] const int watched = pthread_atfork(nullptr, nullptr, [] {
    forked = true;
    if (pool) pool = new Pool;
});

}  // namespace

// Of the OpenMP that torch has loaded, if it has: torch's threads and the caller run body(context) once each.
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

// Whether no other thread is at it, so that several threads have done the job.
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
    inside = true;  // alone too: what a body calls may find the pool free by then
    if (nested || count < 2 || (threads >= -1 && threads <= 1) || !shared(count, threads, body, context))
        for (int64_t i = 0; i < count; i++) body(context, i);
    inside = nested;
}

}  // namespace linattn
