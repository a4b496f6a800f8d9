#include "team.h"

#include <pthread.h>
#include <signal.h>
#if defined(__linux__)
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include <chrono>

namespace tokenloom {

namespace {

// How long a waiting thread spins before it yields its core between looks. Beside a busy process longer spins only keep the core from a
// member that needs it (measured: decode steps of one row take 26 ms with 5 us, 36 with 100, 68 with 400); alone, yielding costs nothing.
constexpr std::chrono::microseconds kSpinTime(5);
constexpr int kSpinsPerLook = 16;
constexpr int kNoCore = -1;

inline void relax() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// Signals are for the process's own threads: here all are blocked but those that a fault of the thread itself raises.
class BlockedSignals {
  public:
    BlockedSignals() {
        sigset_t blocked;
        sigfillset(&blocked);
        for (int fault : {SIGSEGV, SIGBUS, SIGFPE, SIGILL}) sigdelset(&blocked, fault);
        pthread_sigmask(SIG_SETMASK, &blocked, &before_);
    }
    ~BlockedSignals() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }

  private:
    sigset_t before_;
};

#if defined(__linux__)
// The kernel's struct sched_attr in its first version, which no C library of ours declares.
struct SchedulingAttributes {
    uint32_t size, policy;
    uint64_t flags;
    int32_t nice;
    uint32_t priority;
    uint64_t runtime, deadline, period;
};

// How much of a core a member asks for at a time. Its share stays the same; a member that wakes beside somebody with longer turns (1.4 ms
// on two cores) gets the core at once, not at his turn's end (EEVDF; Linux takes it from 6.12 on, before it is without effect).
constexpr uint64_t kTurn = 200000;  // ns

void take_short_turns() {
    SchedulingAttributes attributes{};
    if (syscall(SYS_sched_getattr, 0, &attributes, sizeof attributes, 0) != 0 || attributes.policy != SCHED_OTHER) return;
    attributes.size = sizeof attributes;
    attributes.runtime = kTurn;
    syscall(SYS_sched_setattr, 0, &attributes, 0);
}
#endif

}  // namespace

void settle(int core) {
#if defined(__linux__)
    cpu_set_t cores;
    CPU_ZERO(&cores);
    CPU_SET(core, &cores);
    sched_setaffinity(0, sizeof cores, &cores);
    take_short_turns();
#else
    (void)core;
#endif
}

bool Progress::wait(uint32_t step) const {
    std::chrono::steady_clock::time_point began{};
    bool yielding = false;
    for (int looks = 0;; ++looks) {
        const uint64_t word = unfinished_.load(std::memory_order_acquire);
        if (word >> 32 != step) return false;
        if (static_cast<uint32_t>(word) == 0) return true;
        if (yielding) {
            std::this_thread::yield();
            continue;
        }
        relax();
        if (looks % kSpinsPerLook != 0) continue;
        const auto now = std::chrono::steady_clock::now();
        if (looks == 0) began = now;
        yielding = now - began >= kSpinTime;
    }
}

Team::Team(int size, const int32_t *cores) {
    BlockedSignals inherited;
    try {
        for (int member = 1; member < size; ++member) threads_.emplace_back(&Team::serve, this, cores ? cores[member] : kNoCore);
    } catch (...) {
        stop();
        throw;
    }
}

Team::~Team() { stop(); }

void Team::stop() {
    {
        std::lock_guard<std::mutex> lock(mutex_);
        stopping_ = true;
    }
    called_.notify_all();
    for (std::thread &thread : threads_) thread.join();
}

void Team::run(Job &job, uint32_t step) {
    std::lock_guard<std::mutex> one_at_a_time(running_);
    {
        std::lock_guard<std::mutex> lock(mutex_);
        job_ = &job;
        step_ = step;
        ++calls_;
    }
    called_.notify_all();
    job.lead(step);
    std::lock_guard<std::mutex> lock(mutex_);
    job_ = nullptr;  // who comes now is too late
}

void Team::quiesce() {
    std::unique_lock<std::mutex> lock(mutex_);
    left_.wait(lock, [this] { return inside_ == 0; });
}

void Team::serve(int core) {
#if defined(__linux__)
    pthread_setname_np(pthread_self(), "tokenloom-cpu");
#endif
    if (core != kNoCore) settle(core);
    uint64_t answered = 0;
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
        called_.wait(lock, [&] { return stopping_ || calls_ != answered; });
        if (stopping_) return;
        answered = calls_;
        Job *job = job_;
        const uint32_t step = step_;
        if (job == nullptr) continue;
        ++inside_;
        lock.unlock();
        job->work(step);
        lock.lock();
        if (--inside_ == 0) left_.notify_all();
    }
}

}  // namespace tokenloom
