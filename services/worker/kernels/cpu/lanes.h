// As many floats at a time as a register of the instruction set holds, in GCC's vector extension: 16 with AVX-512, 8 with AVX2, 4 with SSE or
// NEON. A vector wider than a register would be legal C++ too, but the compiler keeps it in memory: products were 40 times slower.
#pragma once

#include <cstdint>

#include "kernels.h"

namespace {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

typedef float Lanes __attribute__((vector_size(kLanes * sizeof(float))));
typedef float UnalignedLanes __attribute__((vector_size(kLanes * sizeof(float)), aligned(4), may_alias));
typedef int32_t IntLanes __attribute__((vector_size(kLanes * sizeof(int32_t))));

#define TOKENLOOM_INLINE inline __attribute__((always_inline))

const Lanes kZero = {};
const Lanes kOne = kZero + 1.0f;

#define TOKENLOOM_LANES(address) (*reinterpret_cast<UnalignedLanes *>(address))
#define TOKENLOOM_CONST_LANES(address) (*reinterpret_cast<const UnalignedLanes *>(address))

// e to the power of x for x <= 0: exactly 1 at 0, 0 below -87, elsewhere within 2 units in the last place (the polynomial of Moshier's Cephes).
TOKENLOOM_INLINE void exp_in_place(Lanes *value) {
    Lanes x = *value;
    const IntLanes tiny = x < -87.0f * kOne;
    x = tiny ? -87.0f * kOne : x;
    const float magic = 12582912.0f;  // 1.5 * 2^23: a number added to it is rounded to an integer in its low bits
    const Lanes shifted = x * 1.44269504088896341f + magic;
    const Lanes n = shifted - magic;
    const Lanes r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    Lanes p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = (p * r) * r + r + 1.0f;
    const Lanes power = (Lanes)((((IntLanes)shifted - (IntLanes)(magic * kOne)) + 127) << 23);
    *value = tiny ? kZero : p * power;
}

// The lanes' sum, from the first to the last.
TOKENLOOM_INLINE float sum_of(const Lanes *value) {
    float total = 0.0f;
    for (int lane = 0; lane < kLanes; ++lane) total += (*value)[lane];
    return total;
}

}  // namespace
