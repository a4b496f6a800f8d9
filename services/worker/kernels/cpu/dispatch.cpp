// Chooses, once, the variant of the kernels for this CPU, and counts out the tasks of a call.

#include "kernels.h"

#include <cstdlib>
#include <cstring>
#include <vector>

#define TOKENLOOM_API __attribute__((visibility("default")))

namespace {

using Function = void (*)(const tokenloom::Attention *, const int32_t *, int32_t);

struct Variant {
    const char *name;
    Function attention;
};

}  // namespace

extern "C" {
#if defined(__x86_64__)
void tokenloom_attention_avx512(const tokenloom::Attention *, const int32_t *, int32_t);
void tokenloom_attention_avx2(const tokenloom::Attention *, const int32_t *, int32_t);
#endif
void tokenloom_attention_generic(const tokenloom::Attention *, const int32_t *, int32_t);
}

namespace {

bool supported(const char *name) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (std::strcmp(name, "avx512") == 0)
        return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512bw");
    if (std::strcmp(name, "avx2") == 0) return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#endif
    return std::strcmp(name, "generic") == 0;
}

// Best first.
const Variant kVariants[] = {
#if defined(__x86_64__)
    {"avx512", tokenloom_attention_avx512},
    {"avx2", tokenloom_attention_avx2},
#endif
    {"generic", tokenloom_attention_generic},
};

const Variant *chosen = nullptr;

}  // namespace

extern "C" {

// Takes the variant called `name`, or the best one for "". Returns its name, or null where this CPU or this build does not have it.
TOKENLOOM_API const char *tokenloom_select(const char *name) {
    for (const Variant &variant : kVariants) {
        if ((*name == '\0' || std::strcmp(variant.name, name) == 0) && supported(variant.name)) {
            chosen = &variant;
            return variant.name;
        }
    }
    return nullptr;
}

// Attention of every row; tokenloom_select must have succeeded. `args->query_heads / args->kv_heads` is at most kTileRows.
TOKENLOOM_API void tokenloom_attention(const tokenloom::Attention *args) {
    const int step = tokenloom::kTileRows / (args->query_heads / args->kv_heads);
    std::vector<int32_t> tasks;
    for (int32_t row = 0; row < args->rows; ++row) {
        const int32_t tokens = args->query_starts[row + 1] - args->query_starts[row];
        for (int32_t first = 0; first < tokens; first += step) {
            for (int32_t head = 0; head < args->kv_heads; ++head) tasks.insert(tasks.end(), {row, head, first});
        }
    }
    chosen->attention(args, tasks.data(), static_cast<int32_t>(tasks.size() / 3));
}
}
