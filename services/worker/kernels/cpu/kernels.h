// What the kernels share: arguments as they come from Python (services/worker/kernels/cpu/library.py mirrors the structs).
#pragma once

#include <cstdint>

namespace tokenloom {

constexpr int kBlock = 16;         // tokens of a KV block
constexpr int kMaxHeadDim = 256;   // floats of a head; a multiple of 16
constexpr int kTileRows = 32;       // (token, query head) pairs of a task; so at most 32 query heads share a KV head

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

}  // namespace tokenloom
