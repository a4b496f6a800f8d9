// x [rows, inputs] times a packed weight, for any number of rows.
//
// The weight lies in panels of 32 output columns, inputs one after the other, so that a pass over a panel reads memory from front to back. A
// register tile holds kLinearRows rows of 32 columns; each of its sums runs over the inputs from the first to the last, in one
// accumulator. So an output depends on its own row and column alone, whatever the number of rows: prefill, decode and any batch agree
// in every bit. A panel stays in the second-level cache while all rows pass over it.
#pragma once

#include "lanes.h"

namespace {

using tokenloom::kPanel;

#if defined(__AVX512F__)
constexpr int kLinearRows = 8;
#elif defined(__AVX2__)
constexpr int kLinearRows = 3;
#else
constexpr int kLinearRows = 1;
#endif

template <int N>
TOKENLOOM_INLINE void linear_tile(const tokenloom::Linear &args, int row, int panel) {
    const int inputs = args.inputs, column = panel * kPanel;
    const float *weights = args.panels + (int64_t)panel * inputs * kPanel;
    const float *x = args.x + (int64_t)row * inputs;
    Lanes sums[N][2];
    for (int i = 0; i < N; ++i) {
        sums[i][0] = args.bias ? TOKENLOOM_CONST_LANES(args.bias + column) : 0.0f * kOne;
        sums[i][1] = args.bias ? TOKENLOOM_CONST_LANES(args.bias + column + 16) : 0.0f * kOne;
    }
    for (int k = 0; k < inputs; ++k) {
        const Lanes first = TOKENLOOM_CONST_LANES(weights + (int64_t)k * kPanel), second = TOKENLOOM_CONST_LANES(weights + (int64_t)k * kPanel + 16);
        __builtin_prefetch(weights + (int64_t)(k + 16) * kPanel);
        __builtin_prefetch(weights + (int64_t)(k + 16) * kPanel + 16);
        for (int i = 0; i < N; ++i) {
            const float factor = x[(int64_t)i * inputs + k];
            sums[i][0] += factor * first;
            sums[i][1] += factor * second;
        }
    }
    for (int i = 0; i < N; ++i) {
        float *out = args.out + (int64_t)(row + i) * args.outputs + column;
        if (column + kPanel <= args.outputs) {
            TOKENLOOM_LANES(out) = sums[i][0];
            TOKENLOOM_LANES(out + 16) = sums[i][1];
        } else {
            for (int lane = 0; column + lane < args.outputs; ++lane) out[lane] = sums[i][lane / 16][lane % 16];
        }
    }
}

void linear(const tokenloom::Linear &args, tokenloom::Range panels, tokenloom::Range rows) {
    for (int panel = panels.first; panel < panels.last; ++panel) {
        int row = rows.first;
        for (; row + kLinearRows <= rows.last; row += kLinearRows) linear_tile<kLinearRows>(args, row, panel);
        if (kLinearRows > 4 && row + 4 <= rows.last) linear_tile<4>(args, row, panel), row += 4;
        if (kLinearRows > 2 && row + 2 <= rows.last) linear_tile<2>(args, row, panel), row += 2;
        for (; row < rows.last; ++row) linear_tile<1>(args, row, panel);
    }
}

}  // namespace
