// One row's token from its logits: greedy, or drawn after temperature, min_p, top_k and top_p. sampling/picking.py says what each means;
// its torch path gives the same tokens, which tests/kernels/test_sampler.py compares.
//
// Probabilities are float64 and are summed one after the other, in the order of ids. Nothing is known of other rows here.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "lanes.h"

namespace {

using tokenloom::kCandidates;
using tokenloom::kMoreCandidates;

constexpr int kDoubles = kLanes / 2;
typedef double DoubleLanes __attribute__((vector_size(kDoubles * sizeof(double))));
typedef double UnalignedDoubles __attribute__((vector_size(kDoubles * sizeof(double)), aligned(8), may_alias));
typedef int64_t LongLanes __attribute__((vector_size(kDoubles * sizeof(int64_t))));

// As for floats.
TOKENLOOM_INLINE DoubleLanes multiply_add(DoubleLanes a, DoubleLanes b, DoubleLanes c) {
#if defined(__AVX512F__)
    return (DoubleLanes)_mm512_fmadd_pd((__m512d)a, (__m512d)b, (__m512d)c);
#elif defined(__AVX2__) && defined(__FMA__)
    return (DoubleLanes)_mm256_fmadd_pd((__m256d)a, (__m256d)b, (__m256d)c);
#elif defined(__aarch64__)
    return (DoubleLanes)vfmaq_f64((float64x2_t)c, (float64x2_t)a, (float64x2_t)b);
#else
    return a * b + c;
#endif
}

// Orders of weights. Types of this namespace, so that what the standard library makes of them stays within this instruction set's object:
// of equal functions of several objects the linker keeps any one, and a machine without AVX-512 might get that of AVX-512.
struct Falling {
    TOKENLOOM_INLINE bool operator()(double a, double b) const { return a > b; }
};
struct Rising {
    TOKENLOOM_INLINE bool operator()(double a, double b) const { return a < b; }
};

TOKENLOOM_INLINE DoubleLanes doubles_at(const float *from) {
#if defined(__AVX2__)
    typedef float Half __attribute__((vector_size(kDoubles * sizeof(float)), aligned(4), may_alias));
    return __builtin_convertvector(*reinterpret_cast<const Half *>(from), DoubleLanes);
#else  // two floats fill no register
    return DoubleLanes{from[0], from[1]};
#endif
}

// The greatest of `n` logits, the lowest id that has it, and whether all are finite.
struct Greatest {
    float value;
    int32_t id;
    bool finite;
};

Greatest greatest_of(const float *logits, int n) {
    constexpr int kChains = 4, kStride = kChains * kLanes;
    constexpr int32_t kExponent = 0x7f800000;
    Greatest found = {logits[0], 0, true};
    bool finite = true;
    const int whole = n / kStride * kStride;
    if (whole > 0) {
        Lanes best[kChains];
        IntLanes at[kChains], special = {};
        for (int chain = 0; chain < kChains; ++chain) {
            best[chain] = -std::numeric_limits<float>::infinity() * kOne;
            at[chain] = IntLanes{};
        }
        for (int i = 0; i < whole; i += kStride) {
            for (int chain = 0; chain < kChains; ++chain) {
                const Lanes value = TOKENLOOM_CONST_LANES(logits + i + chain * kLanes);
                const IntLanes better = value > best[chain];
                best[chain] = better ? value : best[chain];
                at[chain] = better ? IntLanes{} + i : at[chain];
                special |= ((IntLanes)value & kExponent) == kExponent;
            }
        }
        for (int chain = 0; chain < kChains; ++chain) {
            for (int lane = 0; lane < kLanes; ++lane) {
                const float value = best[chain][lane];
                const int32_t id = at[chain][lane] + chain * kLanes + lane;
                if (value > found.value || (value == found.value && id < found.id)) found = {value, id, true};
            }
        }
        for (int lane = 0; lane < kLanes; ++lane) {
            finite = finite && !special[lane];
        }
    }
    for (int i = whole; i < n; ++i) {
        if (logits[i] > found.value) found = {logits[i], i, true};
        finite = finite && std::isfinite(logits[i]);
    }
    found.finite = finite;
    return found;
}

// e to the power of x for x <= 0, within 2 units in the last place: exactly 1 at 0, 0 below -708. Its Taylor polynomial after halving the
// range by powers of two, whose remainder lies under 1e-17.
TOKENLOOM_INLINE DoubleLanes exp_of(DoubleLanes x) {
    const LongLanes tiny = x < -708.0;
    x = tiny ? DoubleLanes{} - 708.0 : x;
    const double magic = 6755399441055744.0;  // 1.5 * 2^52
    const DoubleLanes one = DoubleLanes{} + 1.0;
    const DoubleLanes shifted = multiply_add(x, 1.4426950408889634 * one, magic * one);
    const DoubleLanes n = shifted - magic;
    const DoubleLanes r = multiply_add(n, -1.42860682030941723212e-6 * one, multiply_add(n, -6.93145751953125e-1 * one, x));
    constexpr double kInverse[] = {1.0 / 6227020800, 1.0 / 479001600, 1.0 / 39916800, 1.0 / 3628800, 1.0 / 362880, 1.0 / 40320,
                                   1.0 / 5040,       1.0 / 720,       1.0 / 120,      1.0 / 24,      1.0 / 6,      0.5};
    DoubleLanes p = kInverse[0] * one;
    for (int i = 1; i < 12; ++i) p = multiply_add(p, r, kInverse[i] * one);
    p = multiply_add(p * r, r, r) + 1.0;
    const LongLanes magic_bits = (LongLanes)(DoubleLanes{} + magic);
    const DoubleLanes power = (DoubleLanes)((((LongLanes)shifted - magic_bits) + 1023) << 52);
    return tiny ? DoubleLanes{} : p * power;
}

// Weights of all ids, 1 for the best: e^(logit / temperature), without those under `least`.
void weigh(const float *logits, int n, float best, double temperature, double least, double *weights) {
    const double top = static_cast<double>(best) / temperature;
    const auto weight_of = [&](const float *at) {
        const DoubleLanes weight = exp_of(doubles_at(at) / temperature - top);
        return weight >= least ? weight : DoubleLanes{};
    };
    const int whole = n / kDoubles * kDoubles;
    for (int i = 0; i < whole; i += kDoubles) *reinterpret_cast<UnalignedDoubles *>(weights + i) = weight_of(logits + i);
    if (whole == n) return;
    float rest[kDoubles] = {};
    std::copy(logits + whole, logits + n, rest);
    const DoubleLanes weight = weight_of(rest);
    for (int i = whole; i < n; ++i) weights[i] = weight[i - whole];
}

// Copies weights that are surely among the `wanted` best and more, unordered; returns how many. `counts`: room for kWeightClasses.
int candidates_of(const double *weights, int n, int wanted, int32_t *counts, double *out) {
    constexpr int kShift = 48, kTop = 0x3ff0;  // a class: sixteen to a power of two, from 1 downwards; the last one holds the rest
    const auto class_of = [](double weight) {
        uint64_t bits;
        std::memcpy(&bits, &weight, sizeof bits);
        return std::clamp(kTop - static_cast<int>(bits >> kShift), 0, tokenloom::kWeightClasses - 1);
    };
    std::fill_n(counts, tokenloom::kWeightClasses, 0);
    for (int i = 0; i < n; ++i) ++counts[class_of(weights[i])];
    int last = 0;
    for (int seen = counts[0]; seen < wanted; seen += counts[last]) ++last;
    int found = 0;
    for (int i = 0; i < n; ++i) {
        if (class_of(weights[i]) <= last) out[found++] = weights[i];
    }
    return found;
}

struct Cut {
    double threshold;
    bool settled;
};

// The least weight that stays after top_k and top_p, as seen from the `shown` best in falling order, and whether these were enough to know.
// `total` is the weight of all `n` ids; where k cuts within the best, what is left sums to their first k.
Cut cut_at(const double *best, int shown, int k, double p, double total, int n) {
    double cumulative = 0.0, left = total;
    const bool within = k <= shown;
    if (within) {
        left = 0.0;
        for (int i = 0; i < k; ++i) left += best[i];
    }
    int kept = 0;
    for (int i = 0; i < shown; ++i) {
        cumulative += best[i];
        kept += cumulative - best[i] < p * left;
    }
    kept = std::min(std::max(kept, 1), k);
    const double threshold = std::max(best[std::min(kept, shown) - 1], std::numeric_limits<double>::min());
    return {threshold, within || (k >= n && cumulative >= p * left)};
}

// Looks at a few best ids first, and at all of them only where the nucleus is wider still.
double threshold_of(const double *weights, int n, int64_t top_k, double top_p, double total, int32_t *counts, double *room) {
    const int k = top_k > 0 ? static_cast<int>(std::min<int64_t>(top_k, n)) : n;
    for (int wanted : {kCandidates, kMoreCandidates}) {
        if (wanted >= n) break;
        const int found = candidates_of(weights, n, wanted, counts, room);
        std::sort(room, room + found, Falling());
        const Cut cut = cut_at(room, wanted, k, top_p, total, n);
        if (cut.settled) return cut.threshold;
    }
    std::copy_n(weights, n, room);
    std::sort(room, room + n, Falling());
    return cut_at(room, n, k, top_p, total, n).threshold;
}

// The first id, in the order of ids, whose cumulative probability exceeds u * total; -1 where nothing has any: a temperature so small that
// logits over it are infinite. Overwrites `weights` by their running sums.
int32_t draw(double *weights, int n, double threshold, double u) {
    double total = 0.0;
    for (int i = 0; i < n; ++i) {
        total += weights[i] >= threshold ? weights[i] : 0.0;
        weights[i] = total;
    }
    if (!(total > 0)) return -1;
    // u * total can round up to total itself: then it is the last id that has any probability, the first to reach the total.
    const double *chosen = std::upper_bound(weights, weights + n, u * total, Rising());
    const double *last = std::lower_bound(weights, weights + n, total, Rising());
    return static_cast<int32_t>(std::min(chosen, last) - weights);
}

// See Variant::pick.
void pick(const tokenloom::Pick &args, int32_t row, const tokenloom::PickRoom &room) {
    const float *logits = args.logits + row * args.stride;
    const int n = args.vocabulary;
    const Greatest greatest = greatest_of(logits, n);
    args.finite[row] = greatest.finite;
    args.tokens[row] = greatest.id;
    const bool sound = args.sound == nullptr ? greatest.finite : args.sound[row] != 0;
    if (args.temperature[row] <= 0 || !sound || !std::isfinite(greatest.value)) return;
    weigh(logits, n, greatest.value, args.temperature[row], args.min_p[row], room.weights);
    double threshold = 0.0;
    const bool by_k = args.top_k[row] > 0 && args.top_k[row] < n;
    if (by_k || args.top_p[row] < 1) {
        double total = 0.0;
        for (int i = 0; i < n; ++i) total += room.weights[i];
        threshold = threshold_of(room.weights, n, args.top_k[row], args.top_p[row], total, room.counts, room.best);
    }
    const int32_t drawn = draw(room.weights, n, threshold, args.uniforms[row]);
    if (drawn >= 0) args.tokens[row] = drawn;
}

}  // namespace
