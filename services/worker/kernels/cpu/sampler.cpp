#include "sampler.h"

namespace tokenloom {

// So few greedy rows take less time than waking the team.
constexpr int32_t kFewRows = 4;

Sampler::Sampler(const Variant &variant, Team &team) : variant_(variant), team_(team), rooms_(team.size()) {}

Sampler::~Sampler() { team_.quiesce(); }

void Sampler::run(const Pick &pick) {
    if (pick.rows <= 0) return;
    const bool draws = std::any_of(pick.temperature, pick.temperature + pick.rows, [](double temperature) { return temperature > 0; });
    if (draws && room_for_ < pick.vocabulary) {
        room_for_ = 0;
        for (Room &room : rooms_) {
            room.weights.resize(pick.vocabulary);
            room.best.resize(pick.vocabulary);
            room.counts.resize(kWeightClasses);
        }
        room_for_ = pick.vocabulary;
    }
    if (!draws && pick.rows <= kFewRows) {
        for (int32_t row = 0; row < pick.rows; ++row) variant_.pick(pick, row, {});
        return;
    }
    pick_ = pick;
    rooms_taken_.store(0, std::memory_order_relaxed);
    progress_.begin(++step_, static_cast<uint32_t>(pick.rows));
    team_.run(*this, step_);
}

void Sampler::work(uint32_t step) {
    Room *room = nullptr;
    while (const uint32_t left = progress_.claim(step)) {
        // Only who has work of this step takes a room, so that there are never more of them than members.
        if (room == nullptr) room = &rooms_[rooms_taken_.fetch_add(1, std::memory_order_relaxed)];
        variant_.pick(pick_, pick_.rows - static_cast<int32_t>(left), {room->weights.data(), room->best.data(), room->counts.data()});
        progress_.finish();
    }
    progress_.wait(step);
}

}  // namespace tokenloom
