// Paged causal attention over a ragged batch.
//
// A call is one KV head of a tile of one row's query tokens: up to kTileRows (token, query head) pairs, which read the same keys and
// values.
//
// A sequence is cut into spans of kSpan positions, and what a query sees of a span is computed by itself: a maximum, a sum of weights and a
// weighted sum of values. Spans are merged in rising order (Flash-Decoding, Dao et al. 2023), so that threads may share a long sequence.
// Within a span scores are folded in by stretches of kStretch positions (the online softmax of Milakov and Gimelshein 2018, arranged as in
// FlashAttention, Dao et al. 2022). Spans and stretches belong to positions of the sequence, not to tiles, chunks or threads: who computes
// what changes no bit of a result.
//
// Keys of a block are stored with the tokens side by side ([D, 16]) and values with the dimensions side by side ([16, D]), so that both
// products are the same loop: a broadcast number times others side by side, with no sum across lanes. A register tile has kAttentionRows
// rows and kAcross registers.
//
// A query's result depends on its own sequence up to its own position alone: sums follow dimensions and positions one by one, and no
// product reads a value beyond the query's position. A weight of zero would not do there: zero times a value that is not finite is NaN, and
// an earlier token's block may be another request's prefix.

#pragma once

#include <algorithm>
#include <limits>
#include <type_traits>

#include "lanes.h"

namespace {

using tokenloom::kBlock;
using tokenloom::kMaxHeadDim;
using tokenloom::kSpan;
using tokenloom::kTileRows;

constexpr int kStretch = 64;
constexpr int kStretchBlocks = kStretch / kBlock;
static_assert(kSpan % kStretch == 0, "a span is whole stretches");

// Registers that hold 16 numbers side by side. 32 registers hold 6 times 4 sums and what they are made of, 16 hold 3 times 4.
constexpr int kParts = kBlock / kLanes;
constexpr int kAcross = 4;
constexpr int kAcrossBlocks = kAcross / kParts;
constexpr int kAttentionRows = kLanes == 16 ? 6 : 3;

constexpr float kLeastScore = -3.0e38f;
constexpr float kNothing = -std::numeric_limits<float>::infinity();  // the score of a position that is not seen

// What rows of a tile have seen: the largest score, the sum of weights relative to it, and the values summed with these weights.
struct Seen {
    float *out;      // [rows, D]
    float *maximum;  // [rows]
    float *sum;      // [rows]
};

// A tile's memory. Row r is query token r / group and query head r % group of the KV head.
struct Tile {
    alignas(64) float queries[kMaxHeadDim * kTileRows];  // [D, rows], scaled
    alignas(64) float weights[kTileRows * kStretch];     // scores first
    alignas(64) float sums[kTileRows * kLanes];          // of a span's weights, by lane
    alignas(64) float total[kTileRows * (kMaxHeadDim + 2)];
    alignas(64) float span[kTileRows * (kMaxHeadDim + 2)];
    int rows, dim, group;
    int first, last;  // positions of the first query, and before which the last one's end
    const float *keys[kStretchBlocks], *values[kStretchBlocks];            // blocks of the present stretch
    const float *next_keys[kStretchBlocks], *next_values[kStretchBlocks];  // and of what is read next
    int blocks;

    // Positions from `at` on that a row sees; not positive where it sees none.
    int seen(int row, int at) const { return first + row / group + 1 - at; }
};

inline Seen seen_in(float *memory, int rows, int dim) { return {memory, memory + rows * dim, memory + rows * (dim + 1)}; }

// Calls `call` with `rows` (1 to N) as a constant.
template <int N, typename Call>
TOKENLOOM_INLINE void with_rows(int rows, const Call &call) {
    if (rows == N) return call(std::integral_constant<int, N>());
    if constexpr (N > 1) with_rows<N - 1>(rows, call);
}

// Rows of the next register tile of those left: no last one is much smaller than the others, for few rows wait for their own sums.
inline int rows_at_once(int left) {
    if (left >= 2 * kAttentionRows || left == kAttentionRows) return kAttentionRows;
    return left < kAttentionRows ? left : (left + 1) / 2;
}

// scores[i][..] = sum over d of queries[d][i] * keys[d][..], d in rising order, for N rows and the positions of kBlocks blocks.
template <int N, int kBlocks, bool kFetch>
TOKENLOOM_INLINE void score(Tile &tile, int row, int block) {
    constexpr int registers = kBlocks * kParts;
    const float *queries = tile.queries + row, *const *keys = tile.keys + block, *const *next = tile.next_keys;
    const int dim = tile.dim, stride = tile.rows;
    Lanes sums[N][registers];
#pragma GCC unroll 8
    for (int i = 0; i < N; ++i) {
#pragma GCC unroll 8
        for (int j = 0; j < registers; ++j) sums[i][j] = kZero;
    }
    for (int d = 0; d < dim; ++d, queries += stride) {
        Lanes key[registers];
        for (int j = 0; j < registers; ++j) key[j] = TOKENLOOM_CONST_LANES(keys[j / kParts] + d * kBlock + j % kParts * kLanes);
        for (int j = 0; kFetch && j < kStretchBlocks; ++j) __builtin_prefetch(next[j] + d * kBlock, 0, 2);
        for (int i = 0; i < N; ++i) {
            const float query = queries[i];
            for (int j = 0; j < registers; ++j) sums[i][j] = multiply_add(query, key[j], sums[i][j]);
        }
    }
    float *scores = tile.weights + row * kStretch + block * kBlock;
#pragma GCC unroll 8
    for (int i = 0; i < N; ++i) {
#pragma GCC unroll 8
        for (int j = 0; j < registers; ++j) TOKENLOOM_LANES(scores + i * kStretch + j * kLanes) = sums[i][j];
    }
}

// Scores of rows from `from` on against as much of the stretch at `at` as they see, in whole blocks.
inline void score_rows(Tile &tile, int from, int at) {
    for (int row = from, count = 0; row < tile.rows; row += count) {
        count = rows_at_once(tile.rows - row);
        const int blocks = std::min(tile.blocks, (tile.seen(row + count - 1, at) + kBlock - 1) / kBlock);
        int block = 0;
        for (; block + kAcrossBlocks <= blocks; block += kAcrossBlocks) {
            with_rows<kAttentionRows>(count, [&](auto n) {
                if (row == from && block == 0) return score<n.value, kAcrossBlocks, true>(tile, row, block);
                score<n.value, kAcrossBlocks, false>(tile, row, block);
            });
        }
        for (; block < blocks; ++block) {
            with_rows<kAttentionRows>(count, [&](auto n) {
                if (row == from && block == 0) return score<n.value, 1, true>(tile, row, block);
                score<n.value, 1, false>(tile, row, block);
            });
        }
    }
}

TOKENLOOM_INLINE Lanes larger(Lanes a, Lanes b) { return a > b ? a : b; }

inline float largest_of(const Lanes *value) {
    typedef float Quad __attribute__((vector_size(16), may_alias));
    const Quad *quads = reinterpret_cast<const Quad *>(value);
    Quad most = quads[0];
    for (int at = 1; at < kLanes / 4; ++at) most = quads[at] > most ? quads[at] : most;
    return std::max(std::max(most[0], most[1]), std::max(most[2], most[3]));
}

TOKENLOOM_INLINE IntLanes lane_numbers() {
    IntLanes numbers;
    for (int lane = 0; lane < kLanes; ++lane) numbers[lane] = lane;
    return numbers;
}

// 2 to the power of x for x <= 0, within 1.5 units in the last place: exactly 1 at 0, 0 below -126.5. NaN stays NaN. The polynomial of
// degree 5 has the least relative error from -1/2 to 1/2 of those that are 1 at 0.
TOKENLOOM_INLINE void exp2_in_place(Lanes *value) {
    const Lanes floor = -127.0f * kOne, x = floor > *value ? floor : *value;
    const float magic = 12582912.0f + 127.0f;  // 1.5 * 2^23: what is added to it is rounded to an integer, here an exponent
    const Lanes shifted = x + magic;
    const Lanes r = x - (shifted - magic);
    Lanes p = multiply_add(r, 1.326469821e-3f, 9.671509266e-3f);
    p = multiply_add(p, r, 5.550733954e-2f);
    p = multiply_add(p, r, 2.402224243e-1f);
    p = multiply_add(p, r, 6.931470037e-1f);
    p = multiply_add(p, r, 1.0f);
    *value = p * (Lanes)((IntLanes)shifted << 23);
}

// Turns a row's scores of a stretch into weights, the first `seen` (at least 1) of them not zero, and rescales what the row has of the span
// so far.
void soften(Tile &tile, const Seen &span, int row, int seen) {
    float *weights = tile.weights + row * kStretch, *sums = tile.sums + row * kLanes;
    for (int at = 0; seen < kStretch && at < kStretch; at += kLanes)
        TOKENLOOM_LANES(weights + at) = lane_numbers() < seen - at ? TOKENLOOM_LANES(weights + at) : kNothing * kOne;
    Lanes most = TOKENLOOM_LANES(weights), sum = kZero;
    for (int at = kLanes; at < kStretch; at += kLanes) most = larger(TOKENLOOM_LANES(weights + at), most);
    const float before = span.maximum[row], now = largest_of(&most), best = now > before ? now : before;
    for (int at = 0; at < kStretch; at += kLanes) {
        Lanes weight = TOKENLOOM_LANES(weights + at) - best;
        exp2_in_place(&weight);
        TOKENLOOM_LANES(weights + at) = weight;
        sum += weight;
    }
    Lanes change = (before - best) * kOne;
    if (change[0] != 0.0f) {
        exp2_in_place(&change);
        TOKENLOOM_LANES(sums) *= change;
        float *out = span.out + row * tile.dim;
        for (int d = 0; d < tile.dim; d += kLanes) TOKENLOOM_LANES(out + d) *= change;
    }
    TOKENLOOM_LANES(sums) += sum;
    span.maximum[row] = best;
}

// out[i][column ..] += sum of weights[i][p] * values[p][column ..] for the positions p from `from` to before `to`, in rising order.
template <int N, int kRegisters, bool kFetch>
TOKENLOOM_INLINE void weigh(const Tile &tile, float *out, int row, int column, int from, int to) {
    const int dim = tile.dim;
    const float *weights = tile.weights + row * kStretch;
    out += row * dim + column;
    Lanes sums[N][kRegisters];
    for (int i = 0; i < N; ++i) {
        for (int j = 0; j < kRegisters; ++j) sums[i][j] = TOKENLOOM_LANES(out + i * dim + j * kLanes);
    }
    for (int at = from; at < to;) {
        const int offset = at % kBlock * dim + column, end = std::min(to, at / kBlock * kBlock + kBlock);
        const float *values = tile.values[at / kBlock] + offset, *next = tile.next_values[at / kBlock] + offset;
        for (; at < end; ++at, values += dim, next += dim) {
            Lanes value[kRegisters];
            for (int j = 0; j < kRegisters; ++j) value[j] = TOKENLOOM_CONST_LANES(values + j * kLanes);
            for (int j = 0; kFetch && j < kRegisters * kLanes; j += 16) __builtin_prefetch(next + j, 0, 2);
            for (int i = 0; i < N; ++i) {
                const float weight = weights[i * kStretch + at];
                for (int j = 0; j < kRegisters; ++j) sums[i][j] = multiply_add(weight, value[j], sums[i][j]);
            }
        }
    }
    for (int at = to; kFetch && at < kStretch; ++at) {
        const float *next = tile.next_values[at / kBlock] + at % kBlock * dim + column;
        for (int j = 0; j < kRegisters * kLanes; j += 16) __builtin_prefetch(next + j, 0, 2);
    }
    for (int i = 0; i < N; ++i) {
        for (int j = 0; j < kRegisters; ++j) TOKENLOOM_LANES(out + i * dim + j * kLanes) = sums[i][j];
    }
}

template <int N, bool kFetch>
TOKENLOOM_INLINE void weigh_all(const Tile &tile, float *out, int row, int from, int to) {
    int column = 0;
    for (; column + kAcross * kLanes <= tile.dim; column += kAcross * kLanes) weigh<N, kAcross, kFetch>(tile, out, row, column, from, to);
    for (; column < tile.dim; column += kBlock) weigh<N, kParts, kFetch>(tile, out, row, column, from, to);
}

// Adds the stretch's values to rows from `from` on: to those of a register tile what all of them see, then to each what it alone does.
inline void weigh_rows(const Tile &tile, float *out, int from, int at) {
    for (int row = from, count = 0; row < tile.rows; row += count) {
        count = rows_at_once(tile.rows - row);
        const int common = std::min(kStretch, tile.seen(row, at));
        with_rows<kAttentionRows>(count, [&](auto n) {
            if (row == from) return weigh_all<n.value, true>(tile, out, row, 0, common);
            weigh_all<n.value, false>(tile, out, row, 0, common);
        });
        for (int other = row + 1; common < kStretch && other < row + count; ++other) {
            const int own = std::min(kStretch, tile.seen(other, at));
            if (own > common) weigh_all<1, false>(tile, out, other, common, own);
        }
    }
}

// Position before which the tile's last query ends.
inline int end_of(const tokenloom::Attention &args, const tokenloom::QueryTile &which) {
    const int tokens = args.query_starts[which.row + 1] - args.query_starts[which.row];
    return args.kv_lengths[which.row] - tokens + which.first + which.tokens;
}

// Where the keys of the tile's head in the `index`th block of its row lie; its values lie as far from their beginning.
inline int64_t block_at(const tokenloom::Attention &args, const tokenloom::QueryTile &which, int index) {
    const int64_t block = args.tables[(int64_t)which.row * args.table_width + index];
    return block * args.block_stride + (int64_t)which.kv_head * args.head_dim * kBlock;
}

// Where the blocks of the stretch at `at` lie, and those of the next one: behind the last that of the tile which comes next, if any is
// known. What there is no more of is the last block once more.
inline void find_blocks(const tokenloom::Attention &args, Tile &tile, const tokenloom::QueryTile &which, int at,
                        const tokenloom::QueryTile *following) {
    const int end = (tile.last + kBlock - 1) / kBlock, first = at / kBlock;
    tile.blocks = std::min(kStretchBlocks, end - first);
    for (int block = 0; block < tile.blocks; ++block) {
        const int64_t place = block_at(args, which, first + block);
        tile.keys[block] = args.keys + place, tile.values[block] = args.values + place;
    }
    const bool goes_on = first + kStretchBlocks < end || following == nullptr;
    const tokenloom::QueryTile &next = goes_on ? which : *following;
    const int start = goes_on ? first + kStretchBlocks : 0, last = (end_of(args, next) - 1) / kBlock;
    for (int block = 0; block < kStretchBlocks; ++block) {
        const int64_t place = block_at(args, next, std::min(start + block, last));
        tile.next_keys[block] = args.keys + place, tile.next_values[block] = args.values + place;
    }
}

// What the tile's rows see of a span.
void attend(const tokenloom::Attention &args, Tile &tile, const tokenloom::QueryTile &which, int span, const Seen &to,
            const tokenloom::QueryTile *following) {
    std::fill(to.out, to.out + tile.rows * tile.dim, 0.0f);
    std::fill(to.maximum, to.maximum + tile.rows, kLeastScore);
    std::fill(tile.sums, tile.sums + tile.rows * kLanes, 0.0f);
    const int end = std::min(tile.last, (span + 1) * kSpan);
    for (int at = span * kSpan; at < end; at += kStretch) {
        const int from = at > tile.first ? (at - tile.first) * tile.group : 0;  // rows before it see nothing here
        find_blocks(args, tile, which, at, following);
        score_rows(tile, from, at);
        for (int row = from; row < tile.rows; ++row) soften(tile, to, row, std::min(kStretch, tile.seen(row, at)));
        weigh_rows(tile, to.out, from, at);
    }
    for (int row = 0; row < tile.rows; ++row) {
        const Lanes sums = TOKENLOOM_LANES(tile.sums + row * kLanes);
        to.sum[row] = sum_of(&sums);
    }
}

// Adds what the rows see of a span to what they saw before it. Rows that end before the span stay as they are, to the bit.
void merge(const Tile &tile, const Seen &total, const Seen &part, int span) {
    for (int row = 0; row < tile.rows; ++row) {
        if (tile.seen(row, span * kSpan) <= 0) continue;
        const float before = total.maximum[row], other = part.maximum[row], best = other > before ? other : before;
        Lanes old = (before - best) * kOne, fresh = (other - best) * kOne;
        exp2_in_place(&old);
        exp2_in_place(&fresh);
        total.maximum[row] = best;
        total.sum[row] = total.sum[row] * old[0] + part.sum[row] * fresh[0];
        float *out = total.out + row * tile.dim;
        const float *more = part.out + row * tile.dim;
        for (int d = 0; d < tile.dim; d += kLanes)
            TOKENLOOM_LANES(out + d) = multiply_add(TOKENLOOM_LANES(out + d), old, TOKENLOOM_CONST_LANES(more + d) * fresh);
    }
}

void place(const tokenloom::Attention &args, Tile &tile, const tokenloom::QueryTile &which) {
    tile.group = args.query_heads / args.kv_heads, tile.dim = args.head_dim, tile.rows = which.tokens * tile.group;
    tile.last = end_of(args, which);
    tile.first = tile.last - which.tokens;
}

// Where the tile's row lies among the step's queries and results.
inline int64_t offset_of(const tokenloom::Attention &args, const Tile &tile, const tokenloom::QueryTile &which, int row) {
    const int64_t token = args.query_starts[which.row] + which.first + row / tile.group;
    return (token * args.query_heads + which.kv_head * tile.group + row % tile.group) * tile.dim;
}

void load_queries(const tokenloom::Attention &args, Tile &tile, const tokenloom::QueryTile &which) {
    const float scale = args.scale * 1.44269504f;  // scores are exponents of two from here on
    for (int row = 0; row < tile.rows; ++row) {
        const float *query = args.queries + offset_of(args, tile, which, row);
        for (int d = 0; d < tile.dim; ++d) tile.queries[d * tile.rows + row] = query[d] * scale;
    }
}

void store_result(const tokenloom::Attention &args, const Tile &tile, const tokenloom::QueryTile &which, const Seen &total) {
    for (int row = 0; row < tile.rows; ++row) {
        float *out = args.out + offset_of(args, tile, which, row);
        const float inverse = 1.0f / total.sum[row];
        for (int d = 0; d < tile.dim; ++d) out[d] = total.out[row * tile.dim + d] * inverse;
    }
}

// A whole tile. `following`: the one that this thread will probably compute next, or null.
void attention(const tokenloom::Attention &args, tokenloom::QueryTile which, const tokenloom::QueryTile *following) {
    Tile tile;
    place(args, tile, which);
    load_queries(args, tile, which);
    const Seen total = seen_in(tile.total, tile.rows, tile.dim), part = seen_in(tile.span, tile.rows, tile.dim);
    attend(args, tile, which, 0, total, following);
    for (int span = 1; span * kSpan < tile.last; ++span) {
        attend(args, tile, which, span, part, following);
        merge(tile, total, part, span);
    }
    store_result(args, tile, which, total);
}

// Some spans of a tile, each into a part of its own.
void attention_spans(const tokenloom::Attention &args, tokenloom::QueryTile which, tokenloom::Range spans, float *parts) {
    Tile tile;
    place(args, tile, which);
    load_queries(args, tile, which);
    for (int span = spans.first; span < spans.last; ++span)
        attend(args, tile, which, span, seen_in(parts + (int64_t)span * tile.rows * (tile.dim + 2), tile.rows, tile.dim), nullptr);
}

// A tile's result from the parts of all its spans.
void attention_merge(const tokenloom::Attention &args, tokenloom::QueryTile which, float *parts) {
    Tile tile;
    place(args, tile, which);
    const Seen total = seen_in(parts, tile.rows, tile.dim);
    for (int span = 1; span * kSpan < tile.last; ++span)
        merge(tile, total, seen_in(parts + (int64_t)span * tile.rows * (tile.dim + 2), tile.rows, tile.dim), span);
    store_result(args, tile, which, total);
}

}  // namespace
