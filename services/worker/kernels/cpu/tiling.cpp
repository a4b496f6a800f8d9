#include "tiling.h"

#include <algorithm>

namespace tokenloom {

namespace {

// What a piece should cost (see Tiling::cost): about 2 us, below which claiming shows, and 45 us, after which members end too far apart.
constexpr int64_t kLeastCost = 1 << 16;
constexpr int64_t kMostCost = 1 << 20;
// Pieces that a step should have per member, so that all of them end at about the same time.
constexpr int64_t kPiecesPerMember = 8;
// A position's keys and values take as long to come as so many rows take to use them.
constexpr int64_t kRowsOfReading = 16;

}  // namespace

Tiling::Tiling(int32_t query_heads, int32_t kv_heads, int32_t head_dim)
    : group_(query_heads / kv_heads), kv_heads_(kv_heads), head_dim_(head_dim) {}

bool Tiling::serves(int32_t query_heads, int32_t kv_heads, int32_t head_dim) const {
    return query_heads == group_ * kv_heads && kv_heads == kv_heads_ && head_dim == head_dim_;
}

// Positions that the tile's last query sees, times what one costs: about a 25th of a nanosecond for each float of a row.
int64_t Tiling::cost(const QueryTile &tile, const int32_t *query_starts, const int32_t *kv_lengths) const {
    const int64_t end = kv_lengths[tile.row] - (query_starts[tile.row + 1] - query_starts[tile.row]) + tile.first + tile.tokens;
    return end * head_dim_ * (kRowsOfReading + tile.tokens * group_);
}

int32_t Tiling::spans_of(const QueryTile &tile, const int32_t *query_starts, const int32_t *kv_lengths) const {
    const int32_t end = kv_lengths[tile.row] - (query_starts[tile.row + 1] - query_starts[tile.row]) + tile.first + tile.tokens;
    return (end + kSpan - 1) / kSpan;
}

// Tiles of a head follow one another: they read the same keys and values, as long as a cache holds them.
void Tiling::cut(const int32_t *query_starts, const int32_t *kv_lengths, int32_t rows, int members) {
    tiles_.clear(), pieces_.clear(), shared_.clear();
    part_floats_ = 0, members_ = members;
    int64_t all = 0;
    for (int32_t row = 0; row < rows; ++row) {
        const int32_t tokens = query_starts[row + 1] - query_starts[row], most = kTileRows / group_;
        for (int32_t head = 0; head < kv_heads_; ++head) {
            for (int32_t first = 0; first < tokens; first += most) {
                tiles_.push_back({row, first, std::min(most, tokens - first), head});
                all += cost(tiles_.back(), query_starts, kv_lengths);
            }
        }
    }
    const int64_t wanted = std::clamp(all / (kPiecesPerMember * members), kLeastCost, kMostCost);
    int64_t open = 0;  // cost of the last piece, if further tiles may join it
    for (int32_t index = 0; index < static_cast<int32_t>(tiles_.size()); ++index) {
        const int64_t own = cost(tiles_[index], query_starts, kv_lengths);
        const int32_t spans = spans_of(tiles_[index], query_starts, kv_lengths);
        const int64_t floats = static_cast<int64_t>(spans) * tiles_[index].tokens * group_ * (head_dim_ + 2);
        if (members > 1 && spans > 1 && own > 2 * wanted && part_floats_ + floats <= kMostPartFloats) {
            share(index, spans, std::max<int32_t>(1, static_cast<int32_t>(spans * wanted / own)));
            part_floats_ += floats;
            open = 0;
        } else if (open > 0 && open + own <= wanted) {
            pieces_.back().last = index + 1;
            open += own;
        } else {
            pieces_.push_back({index, index + 1, {0, 0}, -1});
            open = own;
        }
    }
    make_room();
}

void Tiling::share(int32_t tile, int32_t spans, int32_t at_once) {
    const int32_t shared = static_cast<int32_t>(shared_.size());
    shared_.push_back({part_floats_, (spans + at_once - 1) / at_once});
    for (int32_t first = 0; first < spans; first += at_once)
        pieces_.push_back({tile, tile + 1, {first, std::min(spans, first + at_once)}, shared});
}

void Tiling::make_room() {
    if (part_floats_ > parts_capacity_) {
        parts_.reset();
        parts_capacity_ = 0;
        parts_.reset(new float[part_floats_]);
        parts_capacity_ = part_floats_;
    }
    if (shared_.size() > missing_capacity_) {
        missing_capacity_ = 0;
        missing_.reset(new std::atomic<int32_t>[shared_.size()]);
        missing_capacity_ = shared_.size();
    }
    for (size_t index = 0; index < shared_.size(); ++index) missing_[index].store(shared_[index].pieces, std::memory_order_relaxed);
}

// The tile that a member meets next if all take turns, where that is begun from its sequence's start; else null.
const QueryTile *Tiling::first_after(uint32_t piece) const {
    const size_t next = static_cast<size_t>(piece) + members_;
    return next < pieces_.size() && pieces_[next].spans.first == 0 ? &tiles_[pieces_[next].first] : nullptr;
}

// Who computes a shared tile's last piece merges them all, and sets the count anew for the next layer, which begins when all pieces are
// done.
void Tiling::run(const Variant &variant, const Attention &args, uint32_t piece) const {
    const Piece &item = pieces_[piece];
    if (item.shared < 0) {
        for (int32_t tile = item.first; tile < item.last; ++tile)
            variant.attention(args, tiles_[tile], tile + 1 < item.last ? &tiles_[tile + 1] : first_after(piece));
        return;
    }
    float *parts = parts_.get() + shared_[item.shared].parts;
    variant.attention_spans(args, tiles_[item.first], item.spans, parts);
    if (missing_[item.shared].fetch_sub(1, std::memory_order_acq_rel) != 1) return;
    missing_[item.shared].store(shared_[item.shared].pieces, std::memory_order_relaxed);
    variant.attention_merge(args, tiles_[item.first], parts);
}

}  // namespace tokenloom
