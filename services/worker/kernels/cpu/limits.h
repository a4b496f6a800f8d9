// What the machine can do at most, for measurements to be compared with: multiply-adds on registers alone, and reads of memory.
#pragma once

#include "lanes.h"

namespace {

// Independent sums: more than two units with a latency of four or five cycles can hold.
constexpr int kLimitSums = 12;

// So many rounds of kLimitSums fused multiply-adds of a register; returns the floating-point operations done, two for each.
double multiply_add_rounds(int64_t rounds) {
    const volatile float one = 1.0f, zero = 0.0f;  // volatile: what the compiler knows it does not compute
    const Lanes factor = one * kOne, term = zero * kOne;
    Lanes sums[kLimitSums];
    for (int i = 0; i < kLimitSums; ++i) sums[i] = (float)i * kOne;
    for (int64_t round = 0; round < rounds; ++round) {
#pragma GCC unroll 12
        for (int i = 0; i < kLimitSums; ++i) sums[i] = multiply_add(sums[i], factor, term);
    }
    volatile float sink = 0.0f;
    for (int i = 0; i < kLimitSums; ++i) sink = sink + sum_of(&sums[i]);
    return 2.0 * rounds * kLimitSums * kLanes;
}

// Reads `count` floats from the first to the last.
void read_through(const float *from, int64_t count) {
    constexpr int kLine = 16, kAhead = 32 * kLine;
    Lanes sum = kZero;
    for (int64_t at = 0; at + kLine <= count; at += kLine) {
        __builtin_prefetch(from + at + kAhead);
        for (int lane = 0; lane < kLine; lane += kLanes) sum += TOKENLOOM_CONST_LANES(from + at + lane);
    }
    volatile float sink = sum_of(&sum);
    (void)sink;
}

}  // namespace
