// x [rows, inputs] times a packed weight, for any number of rows.
//
// The weight lies in panels of 32 output columns, inputs one after the other, so that a pass over a panel reads memory from front to back. A
// register tile holds kLinearRows rows of kTileLanes registers' columns (the whole panel; half of it where registers are of four floats); each
// of its sums runs over the inputs from the first to the last, in one accumulator. So an output depends on its own row and column alone,
// whatever the number of rows: prefill, decode and any batch agree in every bit. A panel stays in the second-level cache while all rows pass
// over it.
#pragma once

#include "lanes.h"

namespace {

using tokenloom::kPanel;

// Rows times registers: 32 registers hold 8 times 2 sums and what they are made of, 16 hold 3 times 4.
#if defined(__AVX512F__)
constexpr int kLinearRows = 8, kTileLanes = 2;
#else
constexpr int kLinearRows = 3, kTileLanes = 4;
#endif
constexpr int kTileColumns = kTileLanes * kLanes;

// Columns `first` to `first + kTileColumns` of a panel for N rows.
template <int N>
TOKENLOOM_INLINE void linear_tile(const tokenloom::Linear &args, int row, int panel, int first) {
    const int inputs = args.inputs, column = panel * kPanel + first;
    const float *weights = args.panels + (int64_t)panel * inputs * kPanel + first;
    const float *x = args.x + (int64_t)row * inputs;
    Lanes sums[N][kTileLanes];
    for (int i = 0; i < N; ++i) {
        for (int j = 0; j < kTileLanes; ++j) sums[i][j] = args.bias ? TOKENLOOM_CONST_LANES(args.bias + column + j * kLanes) : kZero;
    }
    for (int k = 0; k < inputs; ++k, weights += kPanel) {
        for (int at = 0; at < kTileColumns; at += 16) __builtin_prefetch(weights + 16 * kPanel + at);
        Lanes weight[kTileLanes];
        for (int j = 0; j < kTileLanes; ++j) weight[j] = TOKENLOOM_CONST_LANES(weights + j * kLanes);
        for (int i = 0; i < N; ++i) {
            const float factor = x[(int64_t)i * inputs + k];
            for (int j = 0; j < kTileLanes; ++j) sums[i][j] += factor * weight[j];
        }
    }
    for (int i = 0; i < N; ++i) {
        float *out = args.out + (int64_t)(row + i) * args.outputs + column;
        for (int j = 0; j < kTileLanes; ++j, out += kLanes) {
            const int left = args.outputs - column - j * kLanes;
            if (left >= kLanes) TOKENLOOM_LANES(out) = sums[i][j];
            for (int lane = 0; left < kLanes && lane < left; ++lane) out[lane] = sums[i][j][lane];
        }
    }
}

template <int N>
TOKENLOOM_INLINE void linear_rows(const tokenloom::Linear &args, int row, int panel) {
    for (int first = 0; first < kPanel; first += kTileColumns) linear_tile<N>(args, row, panel, first);
}

void linear(const tokenloom::Linear &args, tokenloom::Range panels, tokenloom::Range rows) {
    for (int panel = panels.first; panel < panels.last; ++panel) {
        int row = rows.first;
        for (; row + kLinearRows <= rows.last; row += kLinearRows) linear_rows<kLinearRows>(args, row, panel);
        if (kLinearRows > 4 && row + 4 <= rows.last) linear_rows<4>(args, row, panel), row += 4;
        if (kLinearRows > 2 && row + 2 <= rows.last) linear_rows<2>(args, row, panel), row += 2;
        for (; row < rows.last; ++row) linear_rows<1>(args, row, panel);
    }
}

}  // namespace
