// Low-latency combine, exact. Every expert row goes home to its own place [token, k] at the token's owner, with one
// flag per (token, rank); the owner waits for the ranks of one token at a time, adds weight * row in order of k in fp32
// and rounds once. So the result is the same bits on every run. Cost: one row over the link per (token, expert), as it
// is or encoded (ll_home.cuh).
// serves: layout=expert_major reduce=exact
#include <cuep/base.cuh>
#include <cuep/sync.cuh>
#include <cuep/convert.cuh>
#include <cuep/operation.cuh>

#ifndef CUEP_JIT  // values for editors; cuep/jit.py gives the real ones
constexpr int kNumRanks = 4, kNumExperts = 256, kNumTopk = 8, kRowBytes = 14336, kNumThreads = 448, kMinBlocks = 1;
constexpr int kCombineCodec = 0, kSentBytes = 14336;  // how rows go home, and what of a slot is theirs
using elem_t = cuep::bf16_t;
constexpr bool kHasLineSlots = false, kHasMask = false, kHasStats = false;
#endif
// compile: kNumRanks=4 kNumExperts=256 kNumTopk=8 kRowBytes=14336 kCombineCodec=0 kSentBytes=14336 elem_t=cuep::bf16_t kHasLineSlots=false kHasMask=false kHasStats=false
// compile: kNumRanks=2 kNumExperts=8 kNumTopk=3 kRowBytes=528 kCombineCodec=0 kSentBytes=528 elem_t=float kHasLineSlots=false kHasMask=true kHasStats=false
// compile: kNumRanks=4 kNumExperts=256 kNumTopk=8 kRowBytes=14336 kCombineCodec=1 kSentBytes=9408 elem_t=cuep::bf16_t kHasLineSlots=false kHasMask=false kHasStats=true
// compile: kNumRanks=2 kNumExperts=8 kNumTopk=3 kRowBytes=1536 kCombineCodec=1 kSentBytes=512 elem_t=float kHasLineSlots=false kHasMask=true kHasStats=true
// compile: kNumRanks=4 kNumExperts=256 kNumTopk=8 kRowBytes=14336 kCombineCodec=2 kSentBytes=7392 elem_t=cuep::fp16_t kHasLineSlots=false kHasMask=false kHasStats=false
CUEP_TUNABLE(kNumThreads, 448, 64);
CUEP_TUNABLE(kMinBlocks, 1, 1);  // resident on one multiprocessor
constexpr bool kIsLine = false;
static_assert(kIsLine == kHasLineSlots, "cuep/layout.py lays out slots of lines for variants named line...");
constexpr int kParts = 1;
#include <cuep/ll_exact.cuh>
#include <cuep/ll_home.cuh>

using namespace cuep;

struct Params {
    uint8_t* arena[kNumRanks];         // symmetric memory of every rank; offsets below are bytes into it
    int64_t rows_offset;               // [num_banks, max_tokens, kNumTopk] rows of kSentBytes
    int64_t flags_offset;              // uint64 [num_banks, kNumRanks, max_tokens]: epoch
    int64_t totals_offset;             // uint64 [num_banks, kNumRanks]: epoch, kind of call or kRefused
    int64_t done_offset;               // uint64 [num_banks, kNumRanks]: epoch that this peer has read
    int64_t mask_offset;               // MaskWords [kNumRanks] and the number of exclusions, with a mask
    int64_t grads_offset;              // float [num_banks, max_tokens, kNumTopk]
    const uint8_t* expert_out;         // [local experts, kNumRanks * max_tokens] rows, as dispatch gave them
    int64_t expert_out_stride;         // bytes between rows
    const int32_t* ids;                // [max_tokens, kNumTopk] routing of this rank's tokens
    const float* weights;              // [num_tokens, kNumTopk], null for ones
    const int32_t* own_slot;           // [max_tokens]
    const int32_t* num_rows;           // [kNumRanks]
    const int32_t* token_idx;          // [kNumRanks, max_tokens]
    const int32_t* row_idx;            // [kNumRanks, max_tokens, kNumTopk]
    const uint32_t* row_weight_grads;  // float bits [local experts, kNumRanks * max_tokens], or null
    uint32_t* weight_grads;            // [num_tokens, kNumTopk], or null
    uint8_t* y;                        // [num_tokens] rows, y_stride bytes apart
    int64_t y_stride;
    const uint8_t* bias[2];  // each [num_tokens] rows that are added to y, or null
    int64_t bias_stride[2];
    HandleState* state;
    Control* control;
    Arrivals* arrivals;  // or null
    Report* report;
    int64_t timeout_ns;
    const uint8_t* num_tokens_at;  // int32 or int64, null: num_tokens counts
    int32_t num_tokens;
    int32_t max_tokens;
    int32_t rank;
    int32_t num_banks;  // a power of two
    uint32_t handle;
    uint32_t ticket;
    uint32_t routing;  // number of the routing that is combined, modulo 32
    bool is_count_int64;
    bool is_send;  // phases of this launch: both are a whole operation
    bool is_receive;
    bool is_refused;  // publish kRefused instead of sending
    bool is_alone;    // no other group shares the device: the next kernel may be set up early
};

CUEP_LAUNCH_EARLY(kNumThreads, 0)

CUEP_DEVICE uint4* home_row(const Params& p, int dst, int bank, int64_t token, int k) {
    const int64_t at = (static_cast<int64_t>(bank) * p.max_tokens + token) * kNumTopk + k;
    return reinterpret_cast<uint4*>(p.arena[dst] + p.rows_offset + at * kSentBytes);
}

CUEP_DEVICE void send(const Params& p, const Operation& op, int bank, int most, Answer& answer, Shared& s) {
    send_answers(
        p,
        most,
        answer,
        s,
        [&](const Answer& to, int k, const uint4(&row)[kPiecesPerThread]) {
            if (is_fenced(p, op)) return;
            uint4* home = home_row(p, to.src, bank, to.token, k);
#pragma unroll
            for (int j = 0; j < kPiecesPerThread; j++) store_home(home, piece_at(j), row[j]);
            const bool has_grad = p.row_weight_grads != nullptr && threadIdx.x == 0;
            if (has_grad) *grad_of(p, to.src, bank, to.token, k) = p.row_weight_grads[p.row_idx[to.at * kNumTopk + k]];
        },
        [&](const Answer& sent) {          // behind a barrier; pairs with wait_ranks
            if (is_fenced(p, op)) return;  // then rows may have been left out
            if (threadIdx.x == 0) st_release_sys(flag_of(p, sent.src, bank, p.rank, sent.token), tagged(op, 0));
        });
}

// y[t]: waits for the ranks that answer token t, then adds in order of k. False: gave up.
CUEP_DEVICE bool sum_token(const Params& p, const Operation& op, int bank, int t, const Term& term, Shared& s) {
    const int tid = threadIdx.x;
    if (!wait_ranks(p, op, bank, t, term)) return false;
    if (p.weight_grads != nullptr && tid < kNumTopk) {
        take_grad(p, bank, t, term, s.own_terms >> tid & 1u ? term.own_row : -1);
    }
#pragma unroll 1
    for (int vec = tid; vec < kRowVecs; vec += kNumThreads) {
        float sum[kElemsPerVec];
#pragma unroll
        for (int i = 0; i < kElemsPerVec; i++) sum[i] = 0.0f;
#pragma unroll
        for (int first = 0; first < kNumTopk; first += kTermsInFlight) {
            HomePiece v[kTermsInFlight];
#pragma unroll
            for (int i = 0; i < kTermsInFlight; i++) {
                const int k = first + i;
                if (k < kNumTopk && s.terms[k] != nullptr) load_home(s.terms[k], vec, s.own_terms >> k & 1u, v[i]);
            }
#pragma unroll
            for (int i = 0; i < kTermsInFlight; i++) {
                const int k = first + i;
                if (k >= kNumTopk || s.terms[k] == nullptr) continue;
                float term[kElemsPerVec];
                values_of(v[i], s.own_terms >> k & 1u, term);
                add_weighted(sum, s.weights[k], term);
            }
        }
        write_sum(p, t, vec, sum);
    }
    return true;
}

extern "C" __global__ void __launch_bounds__(kNumThreads, kMinBlocks)
    ll_combine_direct(const __grid_constant__ Params p) {
    __shared__ Shared s;
    combine(
        p,
        true,
        [&](Answer& answer) { look_up(p, answer); },
        [&](const Answer& answer) { show(p, answer, s); },
        [&](const Operation& op, int bank, int most, Answer& answer) { send(p, op, bank, most, answer, s); },
        [&](int t, Term& term) { look_up_term(p, t, term); },
        [&](Term& term) { follow(p, term); },
        [&](int bank, int t, Term& term) {
            find_terms(p, term, s, [&](int k) { return home_row(p, p.rank, bank, t, k); });
        },
        [&](const Operation& op, int bank, int t, const Term& term) { return sum_token(p, op, bank, t, term, s); });
}
