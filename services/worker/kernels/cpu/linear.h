// x [rows, inputs] times a packed weight, for any number of rows.
//
// The weight lies in panels of 32 output columns, inputs one after the other, so that a pass over a panel reads memory from front to back.
// A register tile holds up to kLinearRows rows of kTileLanes registers' columns; rows are shared out evenly over as few tiles as hold them,
// and a panel stays in the second-level cache while all of them pass over it (Goto, van de Geijn 2008). It takes 128 bytes an input: inputs
// are not cut into blocks of their own, so that beyond some 4,096 of them (512 KiB) a panel and its rows outgrow a cache of 1 MiB.
//
// Each sum has one order: blocks of kSumBlock inputs, each summed from zero in one accumulator with a fused multiply-add per input, are
// added to the bias from the first to the last. So an output depends on its own row and column alone, whatever the number of rows, and the
// error grows with the block and the number of blocks, not with the inputs.
#pragma once

#include <utility>

#include "epilogue.h"

namespace {

using tokenloom::kPanel;

// Rows times registers, an even number of them: 32 registers hold 12 times 2 sums and what they are made of, 16 hold 3 times 4.
#if defined(__AVX512F__)
constexpr int kLinearRows = 8, kTileLanes = 2;
#else
constexpr int kLinearRows = 3, kTileLanes = 4;
#endif
constexpr int kTilePairs = kTileLanes / 2;
constexpr int kSumBlock = 256;

// Where a tile's register `j` of columns starts within a panel, for the tile that starts at `first` of each half.
constexpr int tile_column(int first, int j) { return j < kTilePairs ? first + j * kLanes : kHalfPanel + first + (j - kTilePairs) * kLanes; }

// From how many rows on there are passes that find the panel in the cache, so that another can be read from memory meanwhile; for fewer,
// how far ahead a panel is asked for, in floats.
constexpr int kRowsToReadAhead = kLinearRows + 1, kReadAhead = 32 * kPanel;

// Which part of a panel a tile asks for while it computes: from `at` on, `step` floats for each of its inputs.
struct Ahead {
    const float *at;
    int32_t step;
};

// Adds the products of `inputs` inputs, at most kSumBlock, to the sums of N rows.
template <int N>
TOKENLOOM_INLINE void linear_block(const float *x, int64_t stride, const float *weights, int inputs, Ahead ahead,
                                   Lanes (*totals)[kTileLanes]) {
    asm volatile("" : : "r"(totals) : "memory");  // else GCC keeps totals in registers that the loop needs, and spills there
    Lanes sums[N][kTileLanes] = {};
    for (int k = 0; k < inputs; ++k, weights += kPanel) {
        __builtin_prefetch(ahead.at, 0, 2);
        __builtin_prefetch(ahead.at + ahead.step / 2, 0, 2);
        ahead.at += ahead.step;
        Lanes weight[kTileLanes];
        for (int j = 0; j < kTileLanes; ++j) weight[j] = TOKENLOOM_CONST_LANES(weights + tile_column(0, j));
        for (int i = 0; i < N; ++i) {
            const float factor = x[i * stride + k];
            for (int j = 0; j < kTileLanes; ++j) sums[i][j] = multiply_add(factor, weight[j], sums[i][j]);
        }
    }
    for (int i = 0; i < N; ++i) {
        for (int j = 0; j < kTileLanes; ++j) totals[i][j] += sums[i][j];
    }
}

// N rows from `row` on of all columns of `panel`.
template <int N>
void linear_rows(const tokenloom::Linear &args, int row, int panel, Ahead ahead) {
    const int inputs = args.inputs;
    const float *bias = args.bias ? args.bias + (int64_t)panel * kPanel : nullptr;
    for (int first = 0; first < kHalfPanel; first += kTilePairs * kLanes) {
        const float *weights = args.panels + (int64_t)panel * inputs * kPanel + first;
        const float *x = args.x + (int64_t)row * inputs;
        Lanes totals[N][kTileLanes];
        for (int j = 0; j < kTileLanes; ++j) {
            const Lanes start = bias ? TOKENLOOM_CONST_LANES(bias + tile_column(first, j)) : kZero;
            for (int i = 0; i < N; ++i) totals[i][j] = start;
        }
        for (int k = 0; k < inputs; k += kSumBlock) {
            const int block = inputs - k < kSumBlock ? inputs - k : kSumBlock;
            linear_block<N>(x + k, inputs, weights + (int64_t)k * kPanel, block, {ahead.at + (int64_t)k * ahead.step, ahead.step}, totals);
        }
        for (int i = 0; i < N; ++i) {
            for (int j = 0; j < kTilePairs; ++j) {
                finish(args.epilogue, row + i, panel, first + j * kLanes, &totals[i][j], &totals[i][kTilePairs + j]);
            }
        }
    }
}

template <int... N>
TOKENLOOM_INLINE void linear_any_rows(int rows, const tokenloom::Linear &args, int row, int panel, Ahead ahead,
                                      std::integer_sequence<int, N...>) {
    static constexpr void (*passes[])(const tokenloom::Linear &, int, int, Ahead) = {linear_rows<N + 1>...};
    passes[rows - 1](args, row, panel, ahead);
}

// What tiles that pass over `panel` so many times ask for: few rows what they come to next, more the panel that is to be computed next.
TOKENLOOM_INLINE Ahead read_ahead(const tokenloom::Linear &args, int panel, int rows, int passes) {
    const int64_t floats = (int64_t)args.inputs * kPanel;
    if (rows < kRowsToReadAhead) return {args.panels + panel * floats + kReadAhead, kPanel};
    const int step = (kPanel + passes - 1) / passes, next = panel + args.ahead;
    if (next < args.all) return {args.panels + next * floats, step};
    return args.following ? Ahead{args.following + (next - args.all) * floats, step} : Ahead{args.panels, 0};
}

void linear(const tokenloom::Linear &args, tokenloom::Range panels, tokenloom::Range rows) {
    const int passes = (rows.last - rows.first + kLinearRows - 1) / kLinearRows;
    for (int panel = panels.first; panel < panels.last; ++panel) {
        Ahead ahead = read_ahead(args, panel, rows.last - rows.first, passes);
        int row = rows.first;
        for (int left = passes; left > 0; --left) {
            const int many = (rows.last - row + left - 1) / left;
            linear_any_rows(many, args, row, panel, ahead, std::make_integer_sequence<int, kLinearRows>());
            row += many;
            ahead.at += (int64_t)args.inputs * ahead.step;
        }
    }
}

}  // namespace
