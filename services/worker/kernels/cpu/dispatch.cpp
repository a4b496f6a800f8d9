// The C interface: the variant of the kernels for this CPU, teams, programs. No exception leaves it.

#include <algorithm>
#include <cstring>
#include <exception>
#include <new>

#include "kernels.h"
#include "program.h"
#include "sampler.h"
#include "team.h"

#define TOKENLOOM_API extern "C" __attribute__((visibility("default")))

#if defined(__x86_64__)
extern const tokenloom::Variant tokenloom_variant_avx512vnni;
extern const tokenloom::Variant tokenloom_variant_avx512;
extern const tokenloom::Variant tokenloom_variant_avx2;
#endif
extern const tokenloom::Variant tokenloom_variant_generic;

namespace {

bool supported(const char *name) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
                        __builtin_cpu_supports("avx512bw");
    if (std::strcmp(name, "avx512vnni") == 0) return avx512 && __builtin_cpu_supports("avx512vnni");
    if (std::strcmp(name, "avx512") == 0) return avx512;
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    if (std::strcmp(name, "avx2") == 0) return avx2;
#endif
    return std::strcmp(name, "generic") == 0;
}

}  // namespace

// The variant called `name`, or the best one for ""; null where this CPU or this build does not have it.
TOKENLOOM_API const tokenloom::Variant *tokenloom_variant(const char *name) {
    const tokenloom::Variant *best_first[] = {
#if defined(__x86_64__)
        &tokenloom_variant_avx512vnni,
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

// Loops on the calling thread that show what the machine can do; see limits.h.
TOKENLOOM_API double tokenloom_multiply_add_rounds(const tokenloom::Variant *variant, int64_t rounds) {
    return variant->multiply_add_rounds(rounds);
}
TOKENLOOM_API void tokenloom_read_through(const tokenloom::Variant *variant, const float *from, int64_t count) {
    variant->read_through(from, count);
}

// A team of `size` threads, the caller's included, each on one of `cores` unless they are null; null where the system gives no more
// threads.
TOKENLOOM_API tokenloom::Team *tokenloom_team_create(int size, const int32_t *cores) {
    try {
        return new tokenloom::Team(size, cores);
    } catch (const std::exception &) {
        return nullptr;
    }
}

// The calling thread keeps to `core` from now on.
TOKENLOOM_API void tokenloom_settle(int core) { tokenloom::settle(core); }

TOKENLOOM_API void tokenloom_team_destroy(tokenloom::Team *team) { delete team; }

// A program; null where there is no memory. Team and everything that the instructions point at must outlive it.
TOKENLOOM_API tokenloom::Program *tokenloom_program_create(const tokenloom::Variant *variant, tokenloom::Team *team,
                                                           const tokenloom::Instruction *instructions, int count,
                                                           const tokenloom::Place *places, int place_count) {
    try {
        return new tokenloom::Program(*variant, *team, instructions, count, places, place_count);
    } catch (const std::bad_alloc &) {
        return nullptr;
    }
}

TOKENLOOM_API void tokenloom_program_destroy(tokenloom::Program *program) { delete program; }

// Runs one step: 0 done, 1 no memory, 2 the inputs are wrong and `*fault` says how.
TOKENLOOM_API int tokenloom_program_run(tokenloom::Program *program, const tokenloom::StepInputs *inputs, const char **fault) {
    try {
        *fault = program->run(*inputs);
        return *fault == nullptr ? 0 : 2;
    } catch (const std::bad_alloc &) {
        return 1;
    }
}

// The result for other tokens of the step that ran last: 0 done, 1 no memory, 2 they are wrong and `*fault` says how.
TOKENLOOM_API int tokenloom_program_again(tokenloom::Program *program, const int64_t *sampled, int32_t count, float *out,
                                          const char **fault) {
    try {
        *fault = program->again(sampled, count, out);
        return *fault == nullptr ? 0 : 2;
    } catch (const std::bad_alloc &) {
        return 1;
    }
}

// Starts to note times, or copies those noted so far: nanoseconds of the calling thread by kind of instruction.
TOKENLOOM_API void tokenloom_program_start_timing(tokenloom::Program *program) { program->start_timing(); }
TOKENLOOM_API void tokenloom_program_timing(const tokenloom::Program *program, int64_t *nanoseconds) {
    std::copy(program->nanoseconds().begin(), program->nanoseconds().end(), nanoseconds);
}

// A sampler; null where there is no memory. The team must outlive it.
TOKENLOOM_API tokenloom::Sampler *tokenloom_sampler_create(const tokenloom::Variant *variant, tokenloom::Team *team) {
    try {
        return new tokenloom::Sampler(*variant, *team);
    } catch (const std::bad_alloc &) {
        return nullptr;
    }
}

TOKENLOOM_API void tokenloom_sampler_destroy(tokenloom::Sampler *sampler) { delete sampler; }

// Takes a token from each row: 0 done, 1 no memory.
TOKENLOOM_API int tokenloom_sampler_run(tokenloom::Sampler *sampler, const tokenloom::Pick *pick) {
    try {
        sampler->run(*pick);
        return 0;
    } catch (const std::bad_alloc &) {
        return 1;
    }
}
