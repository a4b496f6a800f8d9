// As many floats at a time as a register of the instruction set holds, in GCC's vector extension: 16 with AVX-512, 8 with AVX2, 4 with SSE
// or NEON. A vector wider than a register would be legal C++ too, but the compiler keeps it in memory: products were 40 times slower.
#pragma once

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

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

// a * b + c, rounded once wherever the instruction set can. Nothing else is fused (build.py: -ffp-contract=off): left to itself the
// compiler fuses in a tile of some rows and not in one of others, or in a loop and not in its end, and a row's bits would depend on its
// company.
TOKENLOOM_INLINE Lanes multiply_add(Lanes a, Lanes b, Lanes c) {
#if defined(__AVX512F__)
    return (Lanes)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__) && defined(__FMA__)
    return (Lanes)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
    return (Lanes)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    return a * b + c;
#endif
}
TOKENLOOM_INLINE Lanes multiply_add(float a, Lanes b, Lanes c) { return multiply_add(a * kOne, b, c); }
TOKENLOOM_INLINE Lanes multiply_add(Lanes a, Lanes b, float c) { return multiply_add(a, b, c * kOne); }
TOKENLOOM_INLINE Lanes multiply_add(Lanes a, float b, float c) { return multiply_add(a, b * kOne, c * kOne); }

// e to the power of x for x <= 0: exactly 1 at 0, 0 below -87, elsewhere within 2 units in the last place (the polynomial of Moshier's
// Cephes).
TOKENLOOM_INLINE void exp_in_place(Lanes *value) {
    Lanes x = *value;
    const IntLanes tiny = x < -87.0f * kOne;
    x = tiny ? -87.0f * kOne : x;
    const float magic = 12582912.0f;  // 1.5 * 2^23: a number added to it is rounded to an integer in its low bits
    const Lanes shifted = multiply_add(x, 1.44269504088896341f, magic);
    const Lanes n = shifted - magic;
    const Lanes r = multiply_add(2.12194440e-4f, n, multiply_add(-0.693359375f, n, x));
    Lanes p = multiply_add(r, 1.9875691500e-4f, 1.3981999507e-3f);
    p = multiply_add(p, r, 8.3334519073e-3f);
    p = multiply_add(p, r, 4.1665795894e-2f);
    p = multiply_add(p, r, 1.6666665459e-1f);
    p = multiply_add(p, r, 5.0000001201e-1f);
    p = multiply_add(p * r, r, r) + 1.0f;
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
