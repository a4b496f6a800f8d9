// Paged causal attention over a ragged batch.
//
// A call is one KV head of a tile of one row's query tokens: up to kTileRows (token, query head) pairs, which read the same keys and values.
// It walks the row's blocks from the first to the last; each block's scores are folded into a running maximum, sum and weighted value (the
// online softmax of Milakov and Gimelshein 2018, arranged as in FlashAttention, Dao et al. 2022).
//
// Keys of a block are stored with the tokens side by side ([D, 16]) and values with the dimensions side by side ([16, D]), so that both
// products are the same loop: a broadcast number times 16 others side by side, with no sum across lanes.
//
// A query's result depends on its own sequence up to its own position alone: sums follow dimensions and positions one by one, maxima and
// rescaling go by blocks of 16 positions, and no product reads a value beyond the query's position. A weight of zero would not do there: zero
// times a value that is not finite is NaN, and an earlier token's block may be another request's prefix.

#pragma once

#include "lanes.h"

namespace {

using tokenloom::kBlock;
using tokenloom::kMaxHeadDim;
using tokenloom::kTileRows;

// Registers that hold the 16 numbers of a product's row, and rows that are computed at once.
constexpr int kParts = kBlock / kLanes;
constexpr int kRegisterRows = kLanes == 16 ? 8 : kLanes == 8 ? 4 : 2;

constexpr float kMasked = -3.0e38f;

// c[i][0..15] (+)= sum over k of a[i][k] * b[k][0..15], for N rows at once, k in rising order.
template <int N>
TOKENLOOM_INLINE void product(float *c, int c_stride, const float *a, int a_stride, const float *b, int b_stride, int depth, bool add) {
    Lanes sums[N][kParts];
    for (int i = 0; i < N; ++i) {
        for (int j = 0; j < kParts; ++j) sums[i][j] = add ? TOKENLOOM_CONST_LANES(c + i * c_stride + j * kLanes) : kZero;
    }
    for (int k = 0; k < depth; ++k) {
        Lanes factors[kParts];
        for (int j = 0; j < kParts; ++j) factors[j] = TOKENLOOM_CONST_LANES(b + k * b_stride + j * kLanes);
        for (int i = 0; i < N; ++i) {
            const float factor = a[i * a_stride + k];
            for (int j = 0; j < kParts; ++j) sums[i][j] += factor * factors[j];
        }
    }
    for (int i = 0; i < N; ++i) {
        for (int j = 0; j < kParts; ++j) TOKENLOOM_LANES(c + i * c_stride + j * kLanes) = sums[i][j];
    }
}

inline void product_rows(int rows, float *c, int c_stride, const float *a, int a_stride, const float *b, int b_stride, int depth, bool add) {
    int i = 0;
    for (; i + kRegisterRows <= rows; i += kRegisterRows)
        product<kRegisterRows>(c + i * c_stride, c_stride, a + i * a_stride, a_stride, b, b_stride, depth, add);
    for (; i + 2 <= rows; i += 2) product<2>(c + i * c_stride, c_stride, a + i * a_stride, a_stride, b, b_stride, depth, add);
    for (; i < rows; ++i) product<1>(c + i * c_stride, c_stride, a + i * a_stride, a_stride, b, b_stride, depth, add);
}

// A tile's running state. Row r is query token r / group and query head r % group of the KV head.
struct Tile {
    alignas(64) float queries[kTileRows * kMaxHeadDim];
    alignas(64) float out[kTileRows * kMaxHeadDim];
    alignas(64) float weights[kTileRows * kBlock];
    float maximum[kTileRows];
    float sum[kTileRows];
    int rows;
};

// Turns a row's scores of one block into weights, the first `visible` of them not zero, and rescales what the row has so far.
inline void soften(Tile &tile, int row, int visible, float scale, int head_dim) {
    float *weights = tile.weights + row * kBlock;
    const int seen = visible < 0 ? 0 : visible < kBlock ? visible : kBlock;
    float best = tile.maximum[row], sum = 0.0f;
    for (int at = 0; at < kBlock; at += kLanes) TOKENLOOM_LANES(weights + at) = TOKENLOOM_LANES(weights + at) * scale;
    for (int at = 0; at < seen; ++at) best = weights[at] > best ? weights[at] : best;
    for (int at = seen; at < kBlock; ++at) weights[at] = kMasked;
    for (int at = 0; at < kBlock; at += kLanes) {
        Lanes part = TOKENLOOM_LANES(weights + at) - best;
        exp_in_place(&part);
        TOKENLOOM_LANES(weights + at) = part;
    }
    for (int at = 0; at < seen; ++at) sum += weights[at];
    Lanes change = (tile.maximum[row] - best) * kOne;
    exp_in_place(&change);
    tile.sum[row] = tile.sum[row] * change[0] + sum;
    tile.maximum[row] = best;
    if (change[0] == 1.0f) return;
    float *out = tile.out + row * head_dim;
    for (int d = 0; d < head_dim; d += kLanes) TOKENLOOM_LANES(out + d) = TOKENLOOM_LANES(out + d) * change[0];
}

// Adds one block's values to all rows, each of `tokens` tokens up to what it sees: the first token `visible` positions, each further one more.
inline void add_values(Tile &tile, int tokens, int group, int visible, const float *values, int dim) {
    const int common = visible < 0 ? 0 : visible < kBlock ? visible : kBlock;
    for (int d = 0; d < dim; d += kBlock) product_rows(tile.rows, tile.out + d, dim, tile.weights, kBlock, values + d, dim, common, true);
    for (int token = 1; common < kBlock && token < tokens; ++token) {
        const int own = visible + token < kBlock ? visible + token : kBlock, row = token * group;
        for (int d = 0; d < dim && own > common; d += kBlock)
            product_rows(group, tile.out + row * dim + d, dim, tile.weights + row * kBlock + common, kBlock, values + common * dim + d, dim,
                         own - common, true);
    }
}

void run_tile(const tokenloom::Attention &args, Tile &tile, int row, int head, int first, int tokens) {
    const int group = args.query_heads / args.kv_heads, dim = args.head_dim;
    const int query_start = args.query_starts[row], length = args.kv_lengths[row];
    const int start = length - (args.query_starts[row + 1] - query_start);  // position of the row's first query
    tile.rows = tokens * group;
    for (int r = 0; r < tile.rows; ++r) {
        const int64_t token = query_start + first + r / group;
        const float *query = args.queries + (token * args.query_heads + head * group + r % group) * dim;
        for (int d = 0; d < dim; ++d) tile.queries[r * dim + d] = query[d], tile.out[r * dim + d] = 0.0f;
        tile.maximum[r] = kMasked;
        tile.sum[r] = 0.0f;
    }
    const int last = start + first + tokens;  // positions that the tile's last query sees
    for (int at = 0; at < last; at += kBlock) {
        const int64_t block = args.tables[(int64_t)row * args.table_width + at / kBlock];
        const float *keys = args.keys + (block * args.kv_heads + head) * dim * kBlock;
        const float *values = args.values + (block * args.kv_heads + head) * kBlock * dim;
        product_rows(tile.rows, tile.weights, kBlock, tile.queries, dim, keys, kBlock, dim, false);
        for (int r = 0; r < tile.rows; ++r) soften(tile, r, start + first + r / group + 1 - at, args.scale, dim);
        add_values(tile, tokens, group, start + first + 1 - at, values, dim);
    }
    for (int r = 0; r < tile.rows; ++r) {
        const int64_t token = query_start + first + r / group;
        float *out = args.out + (token * args.query_heads + head * group + r % group) * dim;
        const float inverse = 1.0f / tile.sum[r];
        for (int d = 0; d < dim; ++d) out[d] = tile.out[r * dim + d] * inverse;
    }
}

void attention(const tokenloom::Attention &args, tokenloom::QueryTile at, int32_t kv_head) {
    Tile tile;
    const int whole = kTileRows / (args.query_heads / args.kv_heads);
    const int left = args.query_starts[at.row + 1] - args.query_starts[at.row] - at.first;
    run_tile(args, tile, at.row, kv_head, at.first, left < whole ? left : whole);
}

}  // namespace
