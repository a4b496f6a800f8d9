// What the kernels share: arguments as they come from Python (ops/cpu_kernels.py mirrors the structs), and the table of one variant.
//
// Everything is float32 and contiguous. T tokens, Q query heads, K key-value heads, D head size.
#pragma once

#include <cstdint>

namespace tokenloom {

constexpr int kBlock = 16;       // tokens of a KV block
constexpr int kMaxHeadDim = 256;  // floats of a head; a multiple of 16
constexpr int kTileRows = 32;    // (token, query head) pairs of an attention task; so at most 32 query heads share a KV head
constexpr int kPanel = 32;       // output columns of a packed weight's panel

struct Attention {
    float *out;                   // [T, Q, D]
    const float *queries;         // [T, Q, D]
    const float *keys;            // [blocks, K, D, kBlock]
    const float *values;          // [blocks, K, kBlock, D]
    const int32_t *query_starts;  // [R + 1]: first token of each row
    const int32_t *kv_lengths;    // [R]: tokens of the sequence up to and with this step's
    const int32_t *tables;        // [R, table_width]: block ids
    int32_t rows, table_width, query_heads, kv_heads, head_dim;
    float scale;
};

struct Linear {
    float *out;           // [rows, outputs]
    const float *x;       // [rows, inputs]
    const float *panels;  // [ceil(outputs / kPanel), inputs, kPanel]; columns beyond `outputs` are zero
    const float *bias;    // [ceil(outputs / kPanel) * kPanel], or null
    int32_t rows, outputs, inputs;
};

struct AddNorm {
    float *normed;          // [rows, width]
    float *total;           // [rows, width]: x + residual; not written where residual is null
    const float *x;         // [rows, width]
    const float *residual;  // [rows, width], or null
    const float *weight;    // [width]
    int32_t rows, width;
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
    int32_t tokens, query_heads, kv_heads, head_dim;
};

struct Activation {
    float *out;            // [rows, width]
    const float *gate_up;  // [rows, 2 * width]
    int32_t rows, width;
};

// The kernels as compiled for one instruction set. `tasks` are triples (row, KV head, first query token of the tile).
struct Variant {
    const char *name;
    void (*attention)(const Attention &, const int32_t *tasks, int32_t count);
    void (*linear)(const Linear &);
    void (*add_norm)(const AddNorm &);
    void (*rope_cache)(const RopeCache &);
    void (*activation)(const Activation &);
};

}  // namespace tokenloom
