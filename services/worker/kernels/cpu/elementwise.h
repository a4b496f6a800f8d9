// What happens between the products: gathered rows, norm, rotation and cache write. Each token by itself.
#pragma once

#include <cmath>
#include <cstring>

#include "lanes.h"

namespace {

using tokenloom::Range;

void gather(const tokenloom::Gather &args, Range rows) {
    const int64_t width = args.width;
    for (int64_t row = rows.first; row < rows.last; ++row)
        std::memcpy(args.out + row * width, args.from + args.indices[row] * width, width * sizeof(float));
}

void norm(const tokenloom::Norm &args, Range rows) {
    const int width = args.width, whole = width / kLanes * kLanes;
    for (int row = rows.first; row < rows.last; ++row) {
        const float *x = args.x + (int64_t)row * width;
        Lanes squares = kZero;
        for (int i = 0; i < whole; i += kLanes) squares = multiply_add(TOKENLOOM_CONST_LANES(x + i), TOKENLOOM_CONST_LANES(x + i), squares);
        float sum = sum_of(&squares);
        for (int i = whole; i < width; ++i) sum += x[i] * x[i];
        const float factor = 1.0f / std::sqrt(sum / width + args.epsilon);
        float *normed = args.normed + (int64_t)row * width;
        for (int i = 0; i < width; ++i) normed[i] = args.weight[i] * (x[i] * factor);
    }
}

TOKENLOOM_INLINE void rotate(const float *from, const float *rotation, int half, float *to, int stride) {
    for (int i = 0; i < half; ++i) {
        const float cosine = rotation[i], sine = rotation[half + i], first = from[i], second = from[half + i];
        to[i * stride] = first * cosine - second * sine;
        to[(half + i) * stride] = second * cosine + first * sine;
    }
}

void rope_cache(const tokenloom::RopeCache &args, Range tokens) {
    using tokenloom::kBlock;
    const int dim = args.head_dim, heads = args.query_heads + 2 * args.kv_heads;
    for (int token = tokens.first; token < tokens.last; ++token) {
        const float *qkv = args.qkv + (int64_t)token * heads * dim;
        const float *rotation = args.rotations + args.positions[token] * dim;
        const int64_t block = args.cache_slots[token] / kBlock, offset = args.cache_slots[token] % kBlock;
        float *queries = args.queries + (int64_t)token * args.query_heads * dim;
        for (int head = 0; head < args.query_heads; ++head) rotate(qkv + head * dim, rotation, dim / 2, queries + head * dim, 1);
        for (int head = 0; head < args.kv_heads; ++head) {
            const float *key = qkv + (args.query_heads + head) * dim, *value = key + args.kv_heads * dim;
            float *keys = args.keys + block * args.block_stride + head * dim * kBlock + offset;
            float *values = args.values + block * args.block_stride + (head * kBlock + offset) * dim;
            rotate(key, rotation, dim / 2, keys, kBlock);
            for (int i = 0; i < dim; ++i) values[i] = value[i];
        }
    }
}

}  // namespace
