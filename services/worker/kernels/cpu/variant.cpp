// All kernels for one instruction set: compiled once for each, with the compiler's flags for it and TOKENLOOM_ISA as its name.

#include "attention.h"
#include "elementwise.h"
#include "integer_linear.h"
#include "limits.h"
#include "linear.h"
#include "sampling.h"

#define TOKENLOOM_JOIN(a, b) a##b
#define TOKENLOOM_SYMBOL(isa) TOKENLOOM_JOIN(tokenloom_variant_, isa)
#define TOKENLOOM_QUOTE(text) #text
#define TOKENLOOM_STRING(text) TOKENLOOM_QUOTE(text)

extern const tokenloom::Variant TOKENLOOM_SYMBOL(TOKENLOOM_ISA);
const tokenloom::Variant TOKENLOOM_SYMBOL(TOKENLOOM_ISA) = {
    TOKENLOOM_STRING(TOKENLOOM_ISA), gather, linear, norm, rope_cache, attention, attention_spans, attention_merge,
    multiply_add_rounds, read_through, quantize,
    {integer_linear<IntegerFormat::kChannel8>, integer_linear<IntegerFormat::kGroup4>}, pick,
};
