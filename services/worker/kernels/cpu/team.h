// The threads that compute a step together.
//
// The caller's thread is member 0; the others sleep between steps and cost nothing then. A step never waits for a member to come: whoever
// is there claims the next piece of work (see Progress), so that a member that lost its core holds up no more than the piece it is in.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

namespace tokenloom {

// Work of one operation within one step: how many pieces are still to be claimed, and how many to be finished.
//
// Each number carries the step's in its upper half. A member that was away while the others ended the step, and perhaps began the next one,
// sees another step's number, claims nothing and goes home: nobody has to wait for it.
class Progress {
  public:
    // Sets up `pieces` pieces for `step`; before the step is made known to the team.
    void begin(uint32_t step, uint32_t pieces) {
        const uint64_t word = static_cast<uint64_t>(step) << 32 | pieces;
        unclaimed_.store(word, std::memory_order_relaxed);
        unfinished_.store(word, std::memory_order_relaxed);
    }

    // Takes a piece: how many were left before it, 0 when none is (or the step is over).
    uint32_t claim(uint32_t step) {
        uint64_t word = unclaimed_.load(std::memory_order_relaxed);
        while (word >> 32 == step && static_cast<uint32_t>(word) != 0) {
            if (unclaimed_.compare_exchange_weak(word, word - 1, std::memory_order_relaxed)) return static_cast<uint32_t>(word);
        }
        return 0;
    }

    // A claimed piece is done: what it wrote is seen by whoever sees all pieces finished.
    void finish() { unfinished_.fetch_sub(1, std::memory_order_acq_rel); }

    // Waits until all pieces are finished; false: the step is over. Spins for a few microseconds, then yields the core between looks.
    bool wait(uint32_t step) const;

  private:
    alignas(64) std::atomic<uint64_t> unclaimed_{0};
    alignas(64) std::atomic<uint64_t> unfinished_{0};
};

// Something a team can work at.
class Job {
  public:
    virtual ~Job() = default;
    // Works at `step` until it is complete. Called by every member that comes in time, at the same time; must not throw.
    virtual void work(uint32_t step) = 0;
    // The same for member 0, the caller of Team::run.
    virtual void lead(uint32_t step) { work(step); }
};

// Keeps the calling thread to `core` and has it take turns of kTurn beside others that want the core. What the system refuses is left out:
// the thread works without.
void settle(int core);

class Team {
  public:
    // A team of `size` members, the caller included. `cores`: the one that each settles on, member 0's first (which its thread takes by
    // `settle`); null: they go where the system puts them. Throws std::system_error when the threads cannot be had.
    Team(int size, const int32_t *cores);
    ~Team();
    Team(const Team &) = delete;
    Team &operator=(const Team &) = delete;

    int size() const { return static_cast<int>(threads_.size()) + 1; }

    // Calls the members to `step` of `job`, works at it too, and returns when it is complete. Callers from several threads take turns.
    void run(Job &job, uint32_t step);

    // Waits until no member is within any job, so that one may be destroyed.
    void quiesce();

  private:
    void serve(int core);
    void stop();

    std::mutex running_;
    std::mutex mutex_;
    std::condition_variable called_, left_;
    Job *job_ = nullptr;
    uint64_t calls_ = 0;
    uint32_t step_ = 0;
    int inside_ = 0;
    bool stopping_ = false;
    std::vector<std::thread> threads_;
};

}  // namespace tokenloom
