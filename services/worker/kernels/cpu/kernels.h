// What one kernel call computes, and the table of all kernels as compiled for one instruction set.
//
// Everything is float32 and contiguous, but weights of integers and the activations that meet them. T tokens, Q query heads, K key-value
// heads, D head size. A call computes a part of an operation (a range of rows, panels or tiles); parts of one operation may run at the same
// time and in any order.
#pragma once

#include <cstdint>

namespace tokenloom {

constexpr int kBlock = 16;        // tokens of a KV block
constexpr int kMaxHeadDim = 256;  // floats of a head; a multiple of 16
constexpr int kTileRows = 48;     // (token, query head) pairs of an attention tile: at least the 32 query heads that may share a KV head
constexpr int kSpan = 256;        // positions of a sequence whose attention is summed by itself
constexpr int kPanel = 32;        // output columns of a packed weight's panel
constexpr int kCodes = 32;        // inputs of a product of integers that share a scale
constexpr int kQuantizedGroup = kCodes / 4 + 3;  // floats that so many inputs take once quantised; see quantize.h

// From `first` to before `last`.
struct Range {
    int32_t first, last;
};

// One KV head of `tokens` query tokens of one row, from its `first` on: at most kTileRows with the query heads that share the KV head.
struct QueryTile {
    int32_t row, first, tokens, kv_head;
};

struct Gather {
    float *out;              // [rows, width]: out[i] = from[indices[i]]
    const float *from;       // [any, width]
    const int64_t *indices;  // [rows]
    int32_t width;
};

struct Attention {
    float *out;                   // [T, Q, D]
    const float *queries;         // [T, Q, D]
    const float *keys;            // [blocks, K, D, kBlock]
    const float *values;          // [blocks, K, kBlock, D]
    const int32_t *query_starts;  // [R + 1]: first token of each row
    const int32_t *kv_lengths;    // [R]: tokens of the sequence up to and with this step's
    const int32_t *tables;        // [R, table_width]: block ids
    int64_t block_stride;         // floats from a block's keys (values) to the next one's: at least K * D * kBlock
    int32_t table_width, query_heads, kv_heads, head_dim;
    float scale;
};

// What a product's sums become. Panels lie side by side, kPanel sums each. Where `gated`, the first half of a panel are gates and the
// second half what they gate, and the result is silu(gate) * gated: kPanel / 2 columns of a panel.
struct Epilogue {
    float *out;             // [rows, width]; what panels have beyond `width` is not written
    const float *residual;  // [rows, width], added to the result; or null
    int32_t width;
    int32_t gated;
};

// Panels that make up so many columns of the result.
inline int panels_of(int32_t width, bool gated) {
    const int columns = gated ? kPanel / 2 : kPanel;
    return (width + columns - 1) / columns;
}

struct Linear {
    Epilogue epilogue;
    const float *x;       // [rows, inputs]
    const float *panels;  // [panels, inputs, kPanel]; columns beyond the result's are zero
    const float *bias;    // [panels, kPanel], or null
    int32_t inputs;
    // What is read from memory while a panel is computed: the panel that comes `ahead` panels later; behind the last of `all` the floats at
    // `following`, or nothing where that is null.
    const float *following;
    int32_t ahead, all;
};

struct Quantize {
    float *out;      // [rows, ceil(width / kCodes) * kQuantizedGroup]; see quantize.h
    const float *x;  // [rows, width]
    int32_t width;
};

// How a weight of integers is laid out; see integer_linear.h.
enum class IntegerFormat : int32_t { kChannel8, kGroup4 };
constexpr int kIntegerFormats = 2;

struct IntegerLinear {
    Epilogue epilogue;
    const float *x;         // [rows, groups * kQuantizedGroup]: what Quantize makes
    const uint8_t *panels;  // [panels]; see integer_linear.h
    const float *bias;      // [panels, kPanel], or null
    int32_t groups;
    int32_t skip;           // panels between the last of a call and those that its caller will probably ask for next
};

struct Norm {
    float *normed;        // [rows, width]
    const float *x;       // [rows, width]
    const float *weight;  // [width]
    int32_t width;
    float epsilon;
};

struct RopeCache {
    float *queries;              // [T, Q, D]
    const float *qkv;            // [T, Q + 2 K, D]
    const float *rotations;      // [positions, D]: cosines of D / 2 angles, then sines
    const int64_t *positions;    // [T]
    const int64_t *cache_slots;  // [T]: block * kBlock + offset
    float *keys;                 // [blocks, K, D, kBlock]
    float *values;               // [blocks, K, kBlock, D]
    int64_t block_stride;        // floats from a block's keys (values) to the next one's
    int32_t query_heads, kv_heads, head_dim;
};

// Best weights that a nucleus is looked for in before all are sorted, and classes of weights by size that find them.
constexpr int kCandidates = 256, kMoreCandidates = 4096;
constexpr int kWeightClasses = 2048;

// Rows of logits to take a token from; parallel arrays of one entry a row. sampling/rows.py says what the parameters mean.
struct Pick {
    const float *logits;  // [rows, stride], of which the first `vocabulary` columns count
    int64_t stride;
    int32_t vocabulary, rows;
    const double *temperature, *top_p, *min_p, *uniforms;
    const int64_t *top_k;
    const uint8_t *sound;  // 0: a row whose token will mean nothing; null: those whose logits are not all finite
    int64_t *tokens;
    uint8_t *finite;  // whether all logits of the row are
};

// What drawing a row needs for itself.
struct PickRoom {
    double *weights, *best;  // [vocabulary] each
    int32_t *counts;         // [kWeightClasses]
};

// The kernels as compiled for one instruction set.
struct Variant {
    const char *name;
    void (*gather)(const Gather &, Range rows);
    void (*linear)(const Linear &, Range panels, Range rows);
    void (*norm)(const Norm &, Range rows);
    void (*rope_cache)(const RopeCache &, Range tokens);
    // `following`: the tile that is computed next, whose first keys and values are asked for meanwhile; or null.
    void (*attention)(const Attention &, QueryTile tile, const QueryTile *following);
    // The same in two: spans of the tile, each into its own [rows * (D + 2)] floats of `parts`, then all of them into the result.
    void (*attention_spans)(const Attention &, QueryTile tile, Range spans, float *parts);
    void (*attention_merge)(const Attention &, QueryTile tile, float *parts);
    double (*multiply_add_rounds)(int64_t rounds);
    void (*read_through)(const float *from, int64_t count);
    void (*quantize)(const Quantize &, Range rows);
    void (*integer_linear[kIntegerFormats])(const IntegerLinear &, Range panels, Range rows);
    void (*pick)(const Pick &, int32_t row, const PickRoom &);
};

}  // namespace tokenloom
