// Activations as integers, made once for all columns of a product: each 32 neighbours of a row share a scale, the greatest magnitude over
// 127.
//
// One scale for the whole row costs too much: a few columns of a language model's activations are a hundred times the others.
#pragma once

#include "integers.h"

namespace {

using tokenloom::kCodes;

// A row of quantised activations: codes, then a number per group of each of the rest.
struct QuantizedRow {
    const int8_t *codes;     // [groups * kCodes]
    const float *scales;     // [groups]
    const float *sums;       // [groups]: the codes' sum times the scale
    const int32_t *excess;   // [groups]: -128 times the codes' sum

    TOKENLOOM_INLINE QuantizedRow(const float *row, int groups)
        : codes(reinterpret_cast<const int8_t *>(row)),
          scales(row + groups * (kCodes / 4)),
          sums(scales + groups),
          excess(reinterpret_cast<const int32_t *>(sums + groups)) {}
};

// One group. What is not finite makes the scale NaN, and so all of the row's outputs; what is below 1e-30 counts as zero.
TOKENLOOM_INLINE void quantize_group(const float *x, int8_t *codes, float *scale, float *sum, int32_t *excess) {
    IntLanes most = kIntZero;
    for (int i = 0; i < kCodes; i += kLanes) {
        const IntLanes magnitude = (IntLanes)TOKENLOOM_CONST_LANES(x + i) & 0x7fffffff;  // magnitudes are ordered as their bits are
        most = magnitude > most ? magnitude : most;
    }
    const int32_t bits = greatest_of(most);
    float greatest;
    std::memcpy(&greatest, &bits, sizeof(greatest));
    const bool finite = bits < 0x7f800000, codable = finite && greatest >= 1e-30f;
    const float inverse = codable ? 127.0f / greatest : 0.0f;
    IntLanes total = kIntZero;
    for (int i = 0; i < kCodes; i += kLanes) {
        const IntLanes rest = codable ? rounded(TOKENLOOM_CONST_LANES(x + i) * inverse) : kIntZero;
        store_bytes(rest, codes + i);
        total += rest;
    }
    const int32_t all = total_of(total);
    *scale = codable ? greatest * (1.0f / 127.0f) : finite ? 0.0f : NAN;
    *sum = *scale * static_cast<float>(all);
    *excess = -128 * all;
}

void quantize(const tokenloom::Quantize &args, tokenloom::Range rows) {
    const int groups = (args.width + kCodes - 1) / kCodes, whole = args.width / kCodes;
    for (int64_t row = rows.first; row < rows.last; ++row) {
        const float *x = args.x + row * args.width;
        float *out = args.out + row * groups * tokenloom::kQuantizedGroup;
        int8_t *codes = reinterpret_cast<int8_t *>(out);
        float *scales = out + groups * (kCodes / 4), *sums = scales + groups;
        int32_t *excess = reinterpret_cast<int32_t *>(sums + groups);
        for (int g = 0; g < whole; ++g) quantize_group(x + g * kCodes, codes + g * kCodes, scales + g, sums + g, excess + g);
        if (whole == groups) continue;
        float last[kCodes] = {};
        std::memcpy(last, x + whole * kCodes, (args.width - whole * kCodes) * sizeof(float));
        quantize_group(last, codes + whole * kCodes, scales + whole, sums + whole, excess + whole);
    }
}

}  // namespace
