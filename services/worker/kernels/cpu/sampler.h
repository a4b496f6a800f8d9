// Takes a token from each row of a step's logits, the rows shared out among a team.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <vector>

#include "kernels.h"
#include "team.h"

namespace tokenloom {

class Sampler final : public Job {
  public:
    // Keeps both; they must outlive the sampler.
    Sampler(const Variant &variant, Team &team);
    ~Sampler() override;

    // Fills `tokens` and `finite` of `pick`. Throws std::bad_alloc.
    void run(const Pick &pick);

    void work(uint32_t step) override;

  private:
    // What one member needs to draw a row.
    struct Room {
        std::vector<double> weights, best;
        std::vector<int32_t> counts;
    };

    const Variant &variant_;
    Team &team_;
    Pick pick_{};
    Progress progress_;
    std::vector<Room> rooms_;
    int32_t room_for_ = 0;
    std::atomic<size_t> rooms_taken_{0};
    uint32_t step_ = 0;
};

}  // namespace tokenloom
