// Products of four neighbouring 8-bit codes in each 32-bit lane: exact in every variant, so that all of them compute the same integers.
//
// Weights come as bytes code + 128 (signed) or code (0 to 15, unsigned), four inputs of one column in a lane; activations as four signed
// bytes, -127 to 127, the same in all lanes. VNNI multiplies unsigned by signed: with signed weights its sums contain 128 times the sum of
// the activations too much, which the caller takes away (kExcess). Without VNNI, maddubs saturates sums of two products at 16 bits: 128 *
// 127 * 2 is within, 255 * 127 * 2 is not. So there weights lend their sign to the activations and are multiplied by their magnitude.
#pragma once

#include <cmath>
#include <cstring>

#include "lanes.h"

namespace {

const IntLanes kIntZero = {};
typedef int16_t ShortLanes __attribute__((vector_size(kLanes * 4)));

// kLanes * 4 bytes from any address.
TOKENLOOM_INLINE IntLanes codes_at(const uint8_t *at) {
    IntLanes codes;
    std::memcpy(&codes, at, sizeof(codes));
    return codes;
}

// Four activations in every lane.
TOKENLOOM_INLINE IntLanes four_at(const int8_t *at) {
    int32_t four;
    std::memcpy(&four, at, sizeof(four));
    return kIntZero + four;
}

#if defined(__AVX512VNNI__)
constexpr bool kExcess = true;
struct SignedCodes {
    IntLanes codes;
    TOKENLOOM_INLINE explicit SignedCodes(IntLanes stored) : codes(stored) {}
    TOKENLOOM_INLINE IntLanes plus_products(IntLanes sum, IntLanes four) const {
        return (IntLanes)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)codes, (__m512i)four);
    }
};
using UnsignedCodes = SignedCodes;
#else
constexpr bool kExcess = false;
#if defined(__AVX512BW__)
TOKENLOOM_INLINE IntLanes pairs(IntLanes unsigned_codes, IntLanes four) {
    const __m512i twos = _mm512_maddubs_epi16((__m512i)unsigned_codes, (__m512i)four);
    return (IntLanes)_mm512_madd_epi16(twos, _mm512_set1_epi16(1));
}
struct SignedCodes {
    IntLanes magnitude;
    __mmask64 negative;
    TOKENLOOM_INLINE explicit SignedCodes(IntLanes stored) {
        const __m512i codes = _mm512_xor_si512((__m512i)stored, _mm512_set1_epi8(-128));
        magnitude = (IntLanes)_mm512_abs_epi8(codes);
        negative = _mm512_movepi8_mask(codes);
    }
    TOKENLOOM_INLINE IntLanes plus_products(IntLanes sum, IntLanes four) const {
        return sum + pairs(magnitude, (IntLanes)_mm512_mask_sub_epi8((__m512i)four, negative, _mm512_setzero_si512(), (__m512i)four));
    }
};
#elif defined(__AVX2__)
TOKENLOOM_INLINE IntLanes pairs(IntLanes unsigned_codes, IntLanes four) {
    const __m256i twos = _mm256_maddubs_epi16((__m256i)unsigned_codes, (__m256i)four);
    return (IntLanes)_mm256_madd_epi16(twos, _mm256_set1_epi16(1));
}
struct SignedCodes {
    IntLanes magnitude, codes;
    TOKENLOOM_INLINE explicit SignedCodes(IntLanes stored) {
        codes = (IntLanes)_mm256_xor_si256((__m256i)stored, _mm256_set1_epi8(-128));
        magnitude = (IntLanes)_mm256_abs_epi8((__m256i)codes);
    }
    TOKENLOOM_INLINE IntLanes plus_products(IntLanes sum, IntLanes four) const {
        return sum + pairs(magnitude, (IntLanes)_mm256_sign_epi8((__m256i)four, (__m256i)codes));
    }
};
#else
// Bytes with their signs in 16 bits: the even ones and the odd ones.
TOKENLOOM_INLINE ShortLanes even(IntLanes bytes) { return (ShortLanes)bytes << 8 >> 8; }
TOKENLOOM_INLINE ShortLanes odd(IntLanes bytes) { return (ShortLanes)bytes >> 8; }
TOKENLOOM_INLINE IntLanes pairs(IntLanes codes, IntLanes four) {
    const IntLanes twos = (IntLanes)(even(codes) * even(four) + odd(codes) * odd(four));
    return (twos << 16 >> 16) + (twos >> 16);
}
struct SignedCodes {
    IntLanes codes;
    TOKENLOOM_INLINE explicit SignedCodes(IntLanes stored) : codes(stored ^ (int32_t)0x80808080) {}
    TOKENLOOM_INLINE IntLanes plus_products(IntLanes sum, IntLanes four) const { return sum + pairs(codes, four); }
};
#endif
struct UnsignedCodes {
    IntLanes codes;
    TOKENLOOM_INLINE explicit UnsignedCodes(IntLanes stored) : codes(stored) {}
    TOKENLOOM_INLINE IntLanes plus_products(IntLanes sum, IntLanes four) const { return sum + pairs(codes, four); }
};
#endif

// To the nearest integer, halves to the even one. No sum with a magic number: fused with a product before it, it would round otherwise.
TOKENLOOM_INLINE IntLanes rounded(Lanes value) {
#if defined(__AVX512F__)
    return (IntLanes)_mm512_cvtps_epi32((__m512)value);
#elif defined(__AVX2__)
    return (IntLanes)_mm256_cvtps_epi32((__m256)value);
#elif defined(__SSE2__)
    return (IntLanes)_mm_cvtps_epi32((__m128)value);
#elif defined(__aarch64__)
    return (IntLanes)vcvtnq_s32_f32((float32x4_t)value);
#else
    IntLanes result;
    for (int lane = 0; lane < kLanes; ++lane) result[lane] = static_cast<int32_t>(std::lrintf(value[lane]));
    return result;
#endif
}

// The greatest lane, and the lanes' sum.
#if defined(__AVX512F__)
TOKENLOOM_INLINE int32_t greatest_of(IntLanes value) { return _mm512_reduce_max_epi32((__m512i)value); }
TOKENLOOM_INLINE int32_t total_of(IntLanes value) { return _mm512_reduce_add_epi32((__m512i)value); }
#else
TOKENLOOM_INLINE int32_t greatest_of(IntLanes value) {
    int32_t greatest = value[0];
    for (int lane = 1; lane < kLanes; ++lane) greatest = value[lane] > greatest ? value[lane] : greatest;
    return greatest;
}
TOKENLOOM_INLINE int32_t total_of(IntLanes value) {
    int32_t total = 0;
    for (int lane = 0; lane < kLanes; ++lane) total += value[lane];
    return total;
}
#endif

// Numbers from -128 to 127 as bytes.
TOKENLOOM_INLINE void store_bytes(IntLanes value, int8_t *to) {
#if defined(__AVX512F__)
    _mm_storeu_si128(reinterpret_cast<__m128i *>(to), _mm512_cvtepi32_epi8((__m512i)value));
#else
    for (int lane = 0; lane < kLanes; ++lane) to[lane] = static_cast<int8_t>(value[lane]);
#endif
}

// Finite numbers of 16 bits, IEEE 754's binary16, as floats.
TOKENLOOM_INLINE Lanes halves_at(const uint8_t *at) {
#if defined(__AVX512F__)
    return (Lanes)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(at)));
#elif defined(__F16C__)
    return (Lanes)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i *>(at)));
#else
    IntLanes bits;
    for (int lane = 0; lane < kLanes; ++lane) {
        uint16_t half;
        std::memcpy(&half, at + 2 * lane, sizeof(half));
        bits[lane] = half;
    }
    const Lanes magnitude = (Lanes)((bits & 0x7fff) << 13) * 0x1p112f;
    return (Lanes)((IntLanes)magnitude | (bits & 0x8000) << 16);
#endif
}

}  // namespace
