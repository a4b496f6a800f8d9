// The C interface: chooses, once, the variant of the kernels for this CPU, and passes calls on to it.

#include <cstring>
#include <vector>

#include "kernels.h"

#define TOKENLOOM_API extern "C" __attribute__((visibility("default")))

#if defined(__x86_64__)
extern const tokenloom::Variant tokenloom_variant_avx512;
extern const tokenloom::Variant tokenloom_variant_avx2;
#endif
extern const tokenloom::Variant tokenloom_variant_generic;

namespace {

bool supported(const char *name) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (std::strcmp(name, "avx512") == 0)
        return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
               __builtin_cpu_supports("avx512bw");
    if (std::strcmp(name, "avx2") == 0) return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#endif
    return std::strcmp(name, "generic") == 0;
}

}  // namespace

// The variant called `name`, or the best one for ""; null where this CPU or this build does not have it.
TOKENLOOM_API const tokenloom::Variant *tokenloom_variant(const char *name) {
    const tokenloom::Variant *best_first[] = {
#if defined(__x86_64__)
        &tokenloom_variant_avx512,
        &tokenloom_variant_avx2,
#endif
        &tokenloom_variant_generic,
    };
    for (const tokenloom::Variant *variant : best_first) {
        if ((*name == '\0' || std::strcmp(variant->name, name) == 0) && supported(variant->name)) return variant;
    }
    return nullptr;
}

TOKENLOOM_API const char *tokenloom_variant_name(const tokenloom::Variant *variant) { return variant->name; }

// Counts out the tiles of every row and head, and runs them.
TOKENLOOM_API void tokenloom_attention(const tokenloom::Variant *variant, const tokenloom::Attention *args) {
    const int step = tokenloom::kTileRows / (args->query_heads / args->kv_heads);
    std::vector<int32_t> tasks;
    for (int32_t row = 0; row < args->rows; ++row) {
        const int32_t tokens = args->query_starts[row + 1] - args->query_starts[row];
        for (int32_t first = 0; first < tokens; first += step) {
            for (int32_t head = 0; head < args->kv_heads; ++head) tasks.insert(tasks.end(), {row, head, first});
        }
    }
    variant->attention(*args, tasks.data(), static_cast<int32_t>(tasks.size() / 3));
}

TOKENLOOM_API void tokenloom_linear(const tokenloom::Variant *variant, const tokenloom::Linear *args) { variant->linear(*args); }
TOKENLOOM_API void tokenloom_add_norm(const tokenloom::Variant *variant, const tokenloom::AddNorm *args) { variant->add_norm(*args); }
TOKENLOOM_API void tokenloom_rope_cache(const tokenloom::Variant *variant, const tokenloom::RopeCache *args) { variant->rope_cache(*args); }
TOKENLOOM_API void tokenloom_activation(const tokenloom::Variant *variant, const tokenloom::Activation *args) { variant->activation(*args); }
