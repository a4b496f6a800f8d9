// What happens between the products: gathered rows, norm, rotation and cache write, gated activation. Each token by itself.
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

void add_norm(const tokenloom::AddNorm &args, Range rows) {
    const int width = args.width, whole = width / kLanes * kLanes;
    for (int row = rows.first; row < rows.last; ++row) {
        const float *total = args.x + (int64_t)row * width;
        if (args.residual) {
            const float *residual = args.residual + (int64_t)row * width;
            float *out = args.total + (int64_t)row * width;
            for (int i = 0; i < width; ++i) out[i] = total[i] + residual[i];
            total = out;
        }
        Lanes squares = kZero;
        for (int i = 0; i < whole; i += kLanes) squares += TOKENLOOM_CONST_LANES(total + i) * TOKENLOOM_CONST_LANES(total + i);
        float sum = sum_of(&squares);
        for (int i = whole; i < width; ++i) sum += total[i] * total[i];
        const float factor = 1.0f / std::sqrt(sum / width + args.epsilon);
        float *normed = args.normed + (int64_t)row * width;
        for (int i = 0; i < width; ++i) normed[i] = args.weight[i] * (total[i] * factor);
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
            float *keys = args.keys + (block * args.kv_heads + head) * dim * kBlock + offset;
            float *values = args.values + ((block * args.kv_heads + head) * kBlock + offset) * dim;
            rotate(key, rotation, dim / 2, keys, kBlock);
            for (int i = 0; i < dim; ++i) values[i] = value[i];
        }
    }
}

// silu(gate) * up, the sigmoid from e^-|gate| so that it never overflows.
TOKENLOOM_INLINE void gated(const Lanes *gate, const Lanes *up, Lanes *out) {
    const IntLanes negative = *gate < kZero;
    Lanes power = negative ? *gate : -*gate;
    exp_in_place(&power);
    const Lanes sigmoid = (negative ? power : kOne) / (1.0f + power);
    *out = *gate * sigmoid * *up;
}

void activation(const tokenloom::Activation &args, Range rows) {
    const int width = args.width, whole = width / kLanes * kLanes;
    for (int row = rows.first; row < rows.last; ++row) {
        const float *gates = args.gate_up + (int64_t)row * 2 * width, *ups = gates + width;
        float *out = args.out + (int64_t)row * width;
        for (int i = 0; i < whole; i += kLanes) {
            const Lanes gate = TOKENLOOM_CONST_LANES(gates + i), up = TOKENLOOM_CONST_LANES(ups + i);
            Lanes result;
            gated(&gate, &up, &result);
            TOKENLOOM_LANES(out + i) = result;
        }
        if (whole == width) continue;
        Lanes gate = kZero, up = kZero, result;
        for (int i = whole; i < width; ++i) gate[i - whole] = gates[i], up[i - whole] = ups[i];
        gated(&gate, &up, &result);
        for (int i = whole; i < width; ++i) out[i] = result[i - whole];
    }
}

}  // namespace
