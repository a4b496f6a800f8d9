// How a step's attention is shared out: which tiles of queries there are, and which of them, or spans of one, make a piece.
//
// Pieces take about the same time, whatever the rows: short sequences are put together, long ones are cut into spans. Neither changes a bit
// of a result (attention.h): the cut may follow the number of threads.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "kernels.h"

namespace tokenloom {

// Most memory of all parts of tiles that are cut, in floats (16 MiB); further tiles are computed whole.
constexpr int64_t kMostPartFloats = 4 << 20;

class Tiling {
  public:
    Tiling(int32_t query_heads, int32_t kv_heads, int32_t head_dim);

    // Whether it is that of such heads.
    bool serves(int32_t query_heads, int32_t kv_heads, int32_t head_dim) const;

    // Cuts a step of `rows` rows for a team of `members`. Throws std::bad_alloc.
    void cut(const int32_t *query_starts, const int32_t *kv_lengths, int32_t rows, int members);

    uint32_t pieces() const { return static_cast<uint32_t>(pieces_.size()); }

    // Computes a piece of one layer. Pieces of a layer may run at the same time and in any order; layers follow one another.
    void run(const Variant &variant, const Attention &args, uint32_t piece) const;

  private:
    // Tiles from `first` to before `last`, whole; or, of the one tile `first`, `spans`.
    struct Piece {
        int32_t first, last;
        Range spans;
        int32_t shared;  // index into shared_; -1: whole tiles
    };
    // A tile that is cut: where its parts lie, how many pieces it has, and how many of them are not computed yet.
    struct Shared {
        int64_t parts;
        int32_t pieces;
    };

    int64_t cost(const QueryTile &tile, const int32_t *query_starts, const int32_t *kv_lengths) const;
    int32_t spans_of(const QueryTile &tile, const int32_t *query_starts, const int32_t *kv_lengths) const;
    void share(int32_t tile, int32_t spans, int32_t at_once);
    void make_room();
    const QueryTile *first_after(uint32_t piece) const;

    const int32_t group_, kv_heads_, head_dim_;
    std::vector<QueryTile> tiles_;
    std::vector<Piece> pieces_;
    std::vector<Shared> shared_;
    int64_t part_floats_ = 0;
    int32_t members_ = 1;
    std::unique_ptr<float[]> parts_;
    int64_t parts_capacity_ = 0;
    std::unique_ptr<std::atomic<int32_t>[]> missing_;
    size_t missing_capacity_ = 0;
};

}  // namespace tokenloom
