// What a product's sums become once they are complete, for products of any kind of weight.
//
// A product hands over a row's sums by pairs of registers: columns of a panel's first half and those that lie half a panel further on. So a
// gate meets what it gates in registers, whatever the width of a register and the shape of a tile. No gated product has a residual.
#pragma once

#include "lanes.h"

namespace {

constexpr int kHalfPanel = tokenloom::kPanel / 2;

// silu(gate) * up, the sigmoid from e^-|gate| so that it never overflows.
TOKENLOOM_INLINE void gated(const Lanes *gate, const Lanes *up, Lanes *out) {
    const IntLanes negative = *gate < kZero;
    Lanes power = negative ? *gate : -*gate;
    exp_in_place(&power);
    const Lanes sigmoid = (negative ? power : kOne) / (1.0f + power);
    *out = *gate * sigmoid * *up;
}

// Columns `column` to `column + kLanes` of a row of the result, as far as there are any.
TOKENLOOM_INLINE void finish_lanes(const tokenloom::Epilogue &args, int row, int column, const Lanes *result) {
    const int64_t at = (int64_t)row * args.width + column;
    const int left = args.width - column;
    if (left >= kLanes) {
        TOKENLOOM_LANES(args.out + at) = args.residual ? TOKENLOOM_CONST_LANES(args.residual + at) + *result : *result;
        return;
    }
    for (int lane = 0; lane < left; ++lane) {
        args.out[at + lane] = args.residual ? args.residual[at + lane] + (*result)[lane] : (*result)[lane];
    }
}

// A row's sums of `panel`: columns `first` to `first + kLanes` of its first half, and those of its second half that lie beside them.
TOKENLOOM_INLINE void finish(const tokenloom::Epilogue &args, int row, int panel, int first, const Lanes *low, const Lanes *high) {
    if (args.gated) {
        Lanes result;
        gated(low, high, &result);
        return finish_lanes(args, row, panel * kHalfPanel + first, &result);
    }
    finish_lanes(args, row, panel * tokenloom::kPanel + first, low);
    finish_lanes(args, row, panel * tokenloom::kPanel + kHalfPanel + first, high);
}

}  // namespace
