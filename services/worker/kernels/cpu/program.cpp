#include "program.h"

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <new>

namespace tokenloom {

namespace {

// Rows of a piece: enough that claiming costs nothing, few enough that it takes some 10 to 50 us. Members then end an operation at about
// the same time: who waits longer than it spins gives its core to a busy neighbour, if there is one, for milliseconds.
constexpr int kMostRowsAtOnce = 16;
constexpr int kLinearRowsAtOnce = 64;
// Panels of a piece: several only where a product has so few rows that one takes no time.
constexpr int kMostPanelsAtOnce = 4, kMostIntegerPanelsAtOnce = 16;
constexpr int kFewRows = 8;
// Pieces that a product should have per member, so that all of them end at about the same time.
constexpr int kPiecesPerMember = 8;
// Pieces per member below which the rows of a product are cut too: a narrow product for many members.
constexpr int kLeastPiecesPerMember = 3;
constexpr size_t kAlignment = 64;

int ceil_div(int a, int b) { return (a + b - 1) / b; }

Range part(int piece, int size, int all) { return {piece * size, std::min(all, (piece + 1) * size)}; }

}  // namespace

void Program::Free::operator()(float *memory) const { std::free(memory); }

Program::Program(const Variant &variant, Team &team, const Instruction *instructions, int count, const Place *places, int place_count)
    : variant_(variant),
      team_(team),
      instructions_(instructions, instructions + count),
      layout_(places, places + place_count),
      cuts_(count),
      progress_(new Progress[count]),
      offsets_(place_count),
      places_(place_count) {
    const float *following = nullptr;
    for (size_t index = instructions_.size(); index-- > 0;) {
        cuts_[index].following = following;
        if (instructions_[index].kind == Kind::kLinear) following = instructions_[index].weight;
    }
    for (size_t index = 0; index < instructions_.size(); ++index) {
        const Instruction &item = instructions_[index];
        Cut &cut = cuts_[index];
        if (item.kind == Kind::kEmbedding) vocabulary_ = std::min<int64_t>(vocabulary_, item.bound);
        if (item.kind == Kind::kRopeCache) positions_ = std::min<int64_t>(positions_, item.bound);
        if (item.kind == Kind::kRopeCache || item.kind == Kind::kAttention) blocks_ = std::min<int64_t>(blocks_, item.blocks);
        if (item.kind != Kind::kAttention) continue;
        const auto same = std::find_if(tilings_.begin(), tilings_.end(), [&](const Tiling &tiling) {
            return tiling.serves(item.query_heads, item.kv_heads, item.head_dim);
        });
        cut.tiling = static_cast<int32_t>(same - tilings_.begin());
        if (same == tilings_.end()) tilings_.emplace_back(item.query_heads, item.kv_heads, item.head_dim);
    }
}

Program::~Program() { team_.quiesce(); }

const char *Program::run(const StepInputs &inputs) {
    if (const char *what = fault(inputs)) return what;
    inputs_ = inputs;
    compute(false);
    return nullptr;
}

const char *Program::again(const int64_t *sampled, int32_t count, float *out) {
    if (count < 0 || count > kMostAgain) return "more of them than are taken at once";
    for (int32_t index = 0; index < count; ++index) {
        if (sampled[index] < 0 || sampled[index] >= inputs_.tokens) return "one is not in the step";
    }
    inputs_.sampled = sampled;
    inputs_.sampled_tokens = count;
    inputs_.out = out;
    compute(true);
    return nullptr;
}

void Program::compute(bool sampled_only) {
    ++step_;
    lay_out();
    cut(sampled_only);
    team_.run(*this, step_);
}

const char *Program::fault(const StepInputs &inputs) const {
    for (int32_t token = 0; token < inputs.tokens; ++token) {
        if (inputs.token_ids[token] < 0 || inputs.token_ids[token] >= vocabulary_) return "a token id lies outside the vocabulary";
        if (inputs.positions[token] < 0 || inputs.positions[token] >= positions_) return "a position lies beyond the model's";
        if (inputs.cache_slots[token] < 0 || inputs.cache_slots[token] >= blocks_ * kBlock) return "a token's slot lies outside the cache";
    }
    for (int32_t index = 0; index < inputs.sampled_tokens; ++index) {
        if (inputs.sampled[index] < 0 || inputs.sampled[index] >= inputs.tokens) return "a sampled token is not in the step";
    }
    if (inputs.query_starts[0] != 0 || inputs.query_starts[inputs.rows] != inputs.tokens) return "the rows are not the step's tokens";
    for (int32_t row = 0; row < inputs.rows; ++row) {
        if (const char *what = row_fault(inputs, row)) return what;
    }
    return nullptr;
}

const char *Program::row_fault(const StepInputs &inputs, int32_t row) const {
    const int32_t tokens = inputs.query_starts[row + 1] - inputs.query_starts[row], length = inputs.kv_lengths[row];
    if (tokens < 0 || tokens > inputs.tokens || length < tokens) return "a row is shorter than its tokens";
    const int64_t used = (static_cast<int64_t>(length) + kBlock - 1) / kBlock;
    if (used > inputs.table_width) return "a row has fewer blocks than it needs";
    const int32_t *table = inputs.tables + static_cast<int64_t>(row) * inputs.table_width;
    for (int64_t at = 0; at < used; ++at) {
        if (table[at] < 0 || table[at] >= blocks_) return "a block lies outside the cache";
    }
    return nullptr;
}

// Gives each place its memory for this step; the arena grows where it must. First those of all tokens, then those of the sampled ones, with
// room for `again`: so it finds the former where they were, and never has the arena grow.
void Program::lay_out() {
    constexpr size_t line = kAlignment / sizeof(float);
    size_t end = 0;
    for (int32_t sampled = 0; sampled < 2; ++sampled) {
        const size_t rows = sampled ? std::max(inputs_.sampled_tokens, kMostAgain) : inputs_.tokens;
        for (size_t place = kOutputPlace + 1; place < layout_.size(); ++place) {
            if (layout_[place].sampled != sampled) continue;
            offsets_[place] = end;
            end += (rows * layout_[place].width + line - 1) / line * line;
        }
    }
    if (end > capacity_) {
        arena_.reset();  // first, so that both are never held at once
        capacity_ = 0;
        arena_.reset(static_cast<float *>(std::aligned_alloc(kAlignment, end * sizeof(float))));
        if (!arena_) throw std::bad_alloc();
        capacity_ = end;
    }
    for (size_t place = 0; place < layout_.size(); ++place) places_[place] = arena_.get() + offsets_[place];
    places_[kOutputPlace] = inputs_.out;
}

// Cuts this step's work into pieces; `sampled_only`: operations on all tokens have none.
void Program::cut(bool sampled_only) {
    for (Tiling &tiling : tilings_) {
        if (sampled_only) break;  // the rows that it would read are no longer the caller's
        tiling.cut(inputs_.query_starts, inputs_.kv_lengths, inputs_.rows, team_.size());
    }
    for (size_t index = 0; index < instructions_.size(); ++index) {
        const Instruction &item = instructions_[index];
        Cut &cut = cuts_[index];
        const int32_t rows = rows_of(item.sampled);
        if (sampled_only && !item.sampled) {
            progress_[index].begin(step_, 0);
            continue;
        }
        if (item.kind == Kind::kLinear || item.kind == Kind::kIntegerLinear) {
            const int panels = panels_of(item.outputs, item.gated);
            const int wanted = std::min(ceil_div(rows, kFewRows), ceil_div(kLeastPiecesPerMember * team_.size(), panels));
            const int across = std::max(ceil_div(rows, kLinearRowsAtOnce), wanted);
            cut.rows = ceil_div(rows, std::max(across, 1));
            const bool few = rows <= (item.kind == Kind::kLinear ? kFewRows : kLinearRowsAtOnce);
            const int most = item.kind == Kind::kLinear ? kMostPanelsAtOnce : kMostIntegerPanelsAtOnce;
            cut.panels = few ? std::clamp(panels / (kPiecesPerMember * team_.size()), 1, most) : 1;
            cut.pieces = static_cast<uint32_t>(across) * ceil_div(panels, cut.panels);
        } else if (item.kind == Kind::kAttention) {
            cut.pieces = tilings_[cut.tiling].pieces();
        } else {
            cut.rows = std::clamp(ceil_div(rows, 2 * team_.size()), 1, kMostRowsAtOnce);
            cut.pieces = ceil_div(rows, cut.rows);
        }
        progress_[index].begin(step_, cut.pieces);
    }
}

void Program::work(uint32_t step) {
    for (size_t index = 0; index < instructions_.size(); ++index) {
        if (!help(index, step)) return;
    }
}

void Program::lead(uint32_t step) {
    if (!timing_) return work(step);
    auto before = std::chrono::steady_clock::now();
    for (size_t index = 0; index < instructions_.size(); ++index) {
        help(index, step);
        const auto now = std::chrono::steady_clock::now();
        nanoseconds_[static_cast<int>(instructions_[index].kind)] += std::chrono::nanoseconds(now - before).count();
        before = now;
    }
}

// Takes pieces of an instruction while there are any and waits for those of others; false: the step is over.
bool Program::help(size_t index, uint32_t step) {
    Progress &progress = progress_[index];
    while (const uint32_t left = progress.claim(step)) {
        run_piece(index, cuts_[index].pieces - left);
        progress.finish();
    }
    return progress.wait(step);
}

void Program::run_piece(size_t index, uint32_t piece) const {
    const Instruction &item = instructions_[index];
    const Range rows = part(static_cast<int>(piece), cuts_[index].rows, rows_of(item.sampled));
    const float *from = at(item.from);
    float *to = at(item.to);
    switch (item.kind) {
        case Kind::kEmbedding:
            return variant_.gather({to, item.weight, inputs_.token_ids, item.outputs}, rows);
        case Kind::kGather:
            return variant_.gather({to, from, inputs_.sampled, item.outputs}, rows);
        case Kind::kLinear:
        case Kind::kIntegerLinear:
            return run_linear(item, cuts_[index], piece);
        case Kind::kNorm:
            return variant_.norm({to, from, item.weight, item.outputs, item.number}, rows);
        case Kind::kRopeCache:
            return variant_.rope_cache({to, from, item.weight, inputs_.positions, inputs_.cache_slots, item.keys, item.values,
                                        item.block_stride, item.query_heads, item.kv_heads, item.head_dim},
                                       rows);
        case Kind::kAttention:
            return tilings_[cuts_[index].tiling].run(
                variant_,
                {to, from, item.keys, item.values, inputs_.query_starts, inputs_.kv_lengths, inputs_.tables, item.block_stride,
                 inputs_.table_width, item.query_heads, item.kv_heads, item.head_dim, item.number},
                piece);
        case Kind::kQuantize:
            return variant_.quantize({to, from, item.inputs}, rows);
    }
}

// Pieces of the same rows follow one another, so that the rows stay in the second-level cache while panels pass through it. A panel that is
// read ahead is the one that this member would take next if all took turns.
void Program::run_linear(const Instruction &item, const Cut &cut, uint32_t piece) const {
    const int all = panels_of(item.outputs, item.gated), down = ceil_div(all, cut.panels);
    const Range panels = part(static_cast<int>(piece) % down, cut.panels, all);
    const Range rows = part(static_cast<int>(piece) / down, cut.rows, rows_of(item.sampled));
    const int ahead = cut.panels > 1 ? 1 : team_.size();
    const float *following = rows.last < rows_of(item.sampled) ? item.weight : cut.following;
    const Epilogue epilogue = {at(item.to), at(item.residual), item.outputs, item.gated};
    if (item.kind == Kind::kIntegerLinear) {
        const auto *codes = reinterpret_cast<const uint8_t *>(item.weight);
        const int32_t skip = cut.panels * (team_.size() - 1), groups = item.inputs / kQuantizedGroup;
        return variant_.integer_linear[item.format]({epilogue, at(item.from), codes, item.bias, groups, skip}, panels, rows);
    }
    variant_.linear({epilogue, at(item.from), item.weight, item.bias, item.inputs, following, ahead, all}, panels, rows);
}

}  // namespace tokenloom
