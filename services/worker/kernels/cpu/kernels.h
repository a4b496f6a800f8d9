// What one kernel call computes, and the table of all kernels as compiled for one instruction set.
//
// Everything is float32 and contiguous. T tokens, Q query heads, K key-value heads, D head size. A call computes a part of an operation
// (a range of rows, panels or tiles); parts of one operation may run at the same time and in any order.
#pragma once

#include <cstdint>

namespace tokenloom {

constexpr int kBlock = 16;        // tokens of a KV block
constexpr int kMaxHeadDim = 256;  // floats of a head; a multiple of 16
constexpr int kTileRows = 32;     // (token, query head) pairs of an attention tile; so at most 32 query heads share a KV head
constexpr int kPanel = 32;        // output columns of a packed weight's panel

// From `first` to before `last`.
struct Range {
    int32_t first, last;
};

// Query tokens of one row that an attention call takes: as many as fit a tile, from `first` of the row on.
struct QueryTile {
    int32_t row, first;
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
    int32_t table_width, query_heads, kv_heads, head_dim;
    float scale;
};

struct Linear {
    float *out;           // [rows, outputs]
    const float *x;       // [rows, inputs]
    const float *panels;  // [ceil(outputs / kPanel), inputs, kPanel]; columns beyond `outputs` are zero
    const float *bias;    // [ceil(outputs / kPanel) * kPanel], or null
    int32_t outputs, inputs;
};

struct AddNorm {
    float *normed;          // [rows, width]
    float *total;           // [rows, width]: x + residual; not written where residual is null
    const float *x;         // [rows, width]
    const float *residual;  // [rows, width], or null
    const float *weight;    // [width]
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
    int32_t query_heads, kv_heads, head_dim;
};

struct Activation {
    float *out;            // [rows, width]
    const float *gate_up;  // [rows, 2 * width]
    int32_t width;
};

// The kernels as compiled for one instruction set.
struct Variant {
    const char *name;
    void (*gather)(const Gather &, Range rows);
    void (*linear)(const Linear &, Range panels, Range rows);
    void (*add_norm)(const AddNorm &, Range rows);
    void (*rope_cache)(const RopeCache &, Range tokens);
    void (*attention)(const Attention &, QueryTile tile, int32_t kv_head);
    void (*activation)(const Activation &, Range rows);
};

}  // namespace tokenloom
