// A model's step as a list of instructions, recorded once (ops/recording.py) and replayed by a team of threads with one call.
//
// Values between instructions lie in places. A place has a width and room for one row of each token of the step (or for each sampled one);
// values whose lives do not overlap share one (ops/places.py). All places lie in one arena, which grows to the largest step seen.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "kernels.h"
#include "team.h"
#include "tiling.h"

namespace tokenloom {

enum class Kind : int32_t { kEmbedding, kGather, kLinear, kNorm, kRopeCache, kAttention, kQuantize, kIntegerLinear };
constexpr int kKinds = 8;

// Most tokens that `again` takes: room for them is kept in every step's arena. ops/base.py has the same number.
constexpr int32_t kMostAgain = 128;

// The place that is not in the arena but where the caller wants the result.
constexpr int32_t kOutputPlace = 0;
constexpr int32_t kNoPlace = -1;

// One operation. What a kind does not need is zero or null; ops/native.py mirrors the struct.
struct Instruction {
    const float *weight;  // embedding: table; linear: panels, of bytes where they are integers; norm: [width]; rope: rotations
    const float *bias;    // linear
    float *keys, *values;  // rope, attention: the layer's cache
    int64_t block_stride;  // floats from one of its blocks to the next
    Kind kind;
    int32_t sampled;                        // its rows are the sampled tokens (1) or all tokens (0)
    int32_t from, residual, to;             // places; residual is a product's, or kNoPlace
    int32_t gated;                          // linear: see Epilogue
    int32_t inputs, outputs;                // floats of a row, read and written
    int32_t bound;                          // embedding: rows of the table; rope: positions
    int32_t blocks;                         // rope, attention: blocks of the cache
    int32_t query_heads, kv_heads, head_dim;
    int32_t format;  // integer linear: IntegerFormat
    float number;  // norm: epsilon; attention: scale
};

struct Place {
    int32_t width;    // floats of a row
    int32_t sampled;  // as in Instruction
};

// One step's rows; see ops/base.py for shapes and meaning.
struct StepInputs {
    const int64_t *token_ids, *positions, *cache_slots;
    const int32_t *query_starts, *kv_lengths, *tables;
    const int64_t *sampled;
    float *out;  // rows of the output place
    int32_t tokens, rows, sampled_tokens, table_width;
};

class Program final : public Job {
  public:
    // Keeps `variant` and `team`, copies the rest. What the instructions point at must outlive the program.
    Program(const Variant &variant, Team &team, const Instruction *instructions, int count, const Place *places, int place_count);
    ~Program() override;

    // Runs one step. Returns null, or what is wrong with the inputs, of which nothing was used then. Throws std::bad_alloc.
    const char *run(const StepInputs &inputs);

    // Runs what follows the picking of tokens once more, for other tokens of the step that ran last. Returns null, or what is wrong with
    // them. The caller knows that no operation on all tokens follows the first on picked ones.
    const char *again(const int64_t *sampled, int32_t count, float *out);

    void work(uint32_t step) override;
    void lead(uint32_t step) override;

    // From now on the calling thread's time is noted by kind of instruction, waiting included.
    void start_timing() { timing_ = true; }
    const std::array<int64_t, kKinds> &nanoseconds() const { return nanoseconds_; }

  private:
    // How an instruction is cut into pieces in the current step.
    struct Cut {
        uint32_t pieces;
        int32_t rows;    // all but attention: rows of a piece
        int32_t tiling;  // attention: index into tilings_
        int32_t panels;  // linear: panels of a piece
        const float *following;  // linear: the next product's weight, or null; the same in every step
    };

    const char *fault(const StepInputs &inputs) const;
    const char *row_fault(const StepInputs &inputs, int32_t row) const;
    void lay_out();
    void cut(bool sampled_only);
    void compute(bool sampled_only);
    int32_t rows_of(int32_t sampled) const { return sampled ? inputs_.sampled_tokens : inputs_.tokens; }
    float *at(int32_t place) const { return place == kNoPlace ? nullptr : places_[place]; }
    void run_piece(size_t index, uint32_t piece) const;
    void run_linear(const Instruction &instruction, const Cut &cut, uint32_t piece) const;
    bool help(size_t index, uint32_t step);

    const Variant &variant_;
    Team &team_;
    const std::vector<Instruction> instructions_;
    const std::vector<Place> layout_;
    int64_t vocabulary_ = INT32_MAX, positions_ = INT32_MAX, blocks_ = INT32_MAX;
    std::vector<Cut> cuts_;
    std::vector<Tiling> tilings_;
    std::unique_ptr<Progress[]> progress_;
    struct Free {
        void operator()(float *memory) const;
    };
    std::unique_ptr<float[], Free> arena_;
    size_t capacity_ = 0;  // floats
    std::vector<size_t> offsets_;  // of places in the arena
    std::vector<float *> places_;
    StepInputs inputs_{};
    uint32_t step_ = 0;
    bool timing_ = false;
    std::array<int64_t, kKinds> nanoseconds_{};
};

}  // namespace tokenloom
