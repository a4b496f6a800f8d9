// x [rows, inputs] times a weight of integers, for any number of rows.
//
// Both are cut into groups of 32 inputs. Within a group everything is integers, and exact; the groups' sums are scaled and added as floats,
// from the first to the last. So an output has the same bits whatever the number of rows, as in linear.h, and a variant of the kernels
// differs from another only in where it fuses a product with a sum.
//
// The weight lies in panels of 32 columns, of a panel group after group, of a group eight steps of four inputs:
//   kChannel8  [32 columns][4 inputs] bytes of code + 128 a step; behind the last group a float32 scale for each column
//   kGroup4    [16 columns][4 inputs] bytes a step: the low half is the code, 0 to 15, of this column, the high half that of the column 16
//              further on; behind each group the columns' scales, then their minimums, of 16 bits
#pragma once

#include <utility>

#include "epilogue.h"
#include "quantize.h"

namespace {

using tokenloom::IntegerFormat;
using tokenloom::kPanel;

constexpr int kSteps = kCodes / 4;

// Rows of a tile: each takes two registers of integers and two of floats.
#if defined(__AVX512VNNI__)
constexpr int kIntegerRows = 6;
#elif defined(__AVX512F__)
constexpr int kIntegerRows = 5;
#else
constexpr int kIntegerRows = 2;
#endif

constexpr int step_bytes(IntegerFormat format) { return format == IntegerFormat::kGroup4 ? kHalfPanel * 4 : kPanel * 4; }
constexpr int group_bytes(IntegerFormat format) {
    return kSteps * step_bytes(format) + (format == IntegerFormat::kGroup4 ? 4 * kPanel : 0);
}
constexpr int panel_end(IntegerFormat format) { return format == IntegerFormat::kChannel8 ? 4 * kPanel : 0; }

// A group's integer sums for N rows: columns `first` and kHalfPanel + `first` on of the group at `weights`.
template <IntegerFormat F, int N>
TOKENLOOM_INLINE void group_sums(const uint8_t *weights, const int8_t *codes, int64_t stride, int first, IntLanes (*sums)[2]) {
    weights += first * 4;
    for (int step = 0; step < kSteps; ++step, weights += step_bytes(F)) {
        if (first == 0) {
            for (int at = 0; at < step_bytes(F); at += 64) __builtin_prefetch(weights + 2048 + at);
        }
        const IntLanes stored = codes_at(weights);
        if constexpr (F == IntegerFormat::kGroup4) {
            const UnsignedCodes low(stored & 0x0f0f0f0f), high((stored >> 4) & 0x0f0f0f0f);
            for (int i = 0; i < N; ++i) {
                const IntLanes four = four_at(codes + i * stride + step * 4);
                sums[i][0] = low.plus_products(sums[i][0], four);
                sums[i][1] = high.plus_products(sums[i][1], four);
            }
        } else {
            const SignedCodes low(stored), high(codes_at(weights + kHalfPanel * 4));
            for (int i = 0; i < N; ++i) {
                const IntLanes four = four_at(codes + i * stride + step * 4);
                sums[i][0] = low.plus_products(sums[i][0], four);
                sums[i][1] = high.plus_products(sums[i][1], four);
            }
        }
    }
}

// What a pass over a panel fetches of the panel that comes next: so many lines at each group, from `at` on.
struct NextPanel {
    const uint8_t *at;
    int lines;
};

// Columns `first` to `first + kLanes` of each half of a panel for N rows.
template <IntegerFormat F, int N>
TOKENLOOM_INLINE void integer_tile(const tokenloom::IntegerLinear &args, int row, int panel, int first, NextPanel ahead) {
    const int groups = args.groups, width = groups * tokenloom::kQuantizedGroup;
    const uint8_t *weights = args.panels + (int64_t)panel * (groups * group_bytes(F) + panel_end(F));
    const float *rows = args.x + (int64_t)row * width;
    const QuantizedRow x(rows, groups);
    Lanes sums[N][2];
    for (int i = 0; i < N; ++i) sums[i][0] = sums[i][1] = kZero;
    for (int g = 0; g < groups; ++g, weights += group_bytes(F)) {
        for (int line = 0; line < ahead.lines; ++line, ahead.at += 64) __builtin_prefetch(ahead.at, 0, 2);
        IntLanes parts[N][2];
        for (int i = 0; i < N; ++i) {
            const bool excess = kExcess && F != IntegerFormat::kGroup4;
            parts[i][0] = parts[i][1] = kIntZero + (excess ? x.excess[i * width + g] : 0);
        }
        group_sums<F, N>(weights, x.codes + g * kCodes, (int64_t)width * 4, first, parts);
        const uint8_t *behind = weights + kSteps * step_bytes(F) + first * 2;
        for (int j = 0; j < 2; ++j, behind += kHalfPanel * 2) {
            Lanes scale, minimum;
            if constexpr (F == IntegerFormat::kGroup4) scale = halves_at(behind), minimum = halves_at(behind + kPanel * 2);
            for (int i = 0; i < N; ++i) {
                Lanes part = __builtin_convertvector(parts[i][j], Lanes);
                if constexpr (F == IntegerFormat::kGroup4) part *= scale;
                sums[i][j] = multiply_add(part, kOne * x.scales[i * width + g], sums[i][j]);
                if constexpr (F == IntegerFormat::kGroup4) sums[i][j] = multiply_add(minimum, kOne * x.sums[i * width + g], sums[i][j]);
            }
        }
    }
    for (int j = 0; j < 2; ++j) {
        const int column = j * kHalfPanel + first;
        const Lanes bias = args.bias ? TOKENLOOM_CONST_LANES(args.bias + (int64_t)panel * kPanel + column) : kZero;
        for (int i = 0; i < N; ++i) {
            if constexpr (F == IntegerFormat::kGroup4) sums[i][j] += bias;
            if constexpr (F == IntegerFormat::kChannel8)
                sums[i][j] = multiply_add(sums[i][j], TOKENLOOM_CONST_LANES((const float *)weights + column), bias);
        }
    }
    for (int i = 0; i < N; ++i) finish(args.epilogue, row + i, panel, first, &sums[i][0], &sums[i][1]);
}

template <IntegerFormat F, int N>
void integer_rows(const tokenloom::IntegerLinear &args, int row, int panel, NextPanel ahead) {
    integer_tile<F, N>(args, row, panel, 0, ahead);
    for (int first = kLanes; first < kHalfPanel; first += kLanes) integer_tile<F, N>(args, row, panel, first, {nullptr, 0});
}

template <IntegerFormat F, int... N>
TOKENLOOM_INLINE void integer_any_rows(int rows, const tokenloom::IntegerLinear &args, int row, int panel, NextPanel ahead,
                                       std::integer_sequence<int, N...>) {
    static constexpr void (*passes[])(const tokenloom::IntegerLinear &, int, int, NextPanel) = {integer_rows<F, N + 1>...};
    passes[rows - 1](args, row, panel, ahead);
}

// Rows are shared out evenly over as few passes as take them all. Where there are several, only the first waits for memory: so each of them
// fetches its part of the next panel.
template <IntegerFormat F>
void integer_linear(const tokenloom::IntegerLinear &args, tokenloom::Range panels, tokenloom::Range rows) {
    const int passes = (rows.last - rows.first + kIntegerRows - 1) / kIntegerRows;
    const int lines = passes > 1 ? (group_bytes(F) + passes * 64 - 1) / (passes * 64) : 0;
    const int64_t panel_bytes = args.groups * group_bytes(F) + panel_end(F);
    for (int panel = panels.first; panel < panels.last; ++panel) {
        NextPanel ahead = {args.panels + (panel + 1 + (panel + 1 < panels.last ? 0 : args.skip)) * panel_bytes, lines};
        int row = rows.first;
        for (int left = passes; left > 0; --left, ahead.at += args.groups * lines * 64) {
            const int many = (rows.last - row + left - 1) / left;
            integer_any_rows<F>(many, args, row, panel, ahead, std::make_integer_sequence<int, kIntegerRows>());
            row += many;
        }
    }
}

}  // namespace
