// Low-latency combine, exact. Every expert row goes home to its own place [token, k] at the token's owner, with one
// flag per (token, rank); the owner waits for the ranks of one token at a time, adds weight * row in order of k in fp32
// and rounds once. So the result is the same bits on every run. Cost: one row over the link per (token, expert).
// serves: layout=expert_major reduce=exact
#include <cuep/base.cuh>
#include <cuep/sync.cuh>
#include <cuep/convert.cuh>
#include <cuep/operation.cuh>

#ifndef CUEP_JIT  // values for editors; cuep/jit.py gives the real ones
constexpr int kNumRanks = 4, kNumExperts = 256, kNumTopk = 8, kRowBytes = 14336, kNumThreads = 448, kMinBlocks = 1;
using elem_t = cuep::bf16_t;
#endif
// compile: kNumRanks=4 kNumExperts=256 kNumTopk=8 kRowBytes=14336 elem_t=cuep::bf16_t
// compile: kNumRanks=2 kNumExperts=8 kNumTopk=3 kRowBytes=528 elem_t=float
CUEP_TUNABLE(kNumThreads, 448, 64);
CUEP_TUNABLE(kMinBlocks, 1, 1);  // resident on one multiprocessor
#include <cuep/ll_combine.cuh>

using namespace cuep;

struct Params {
    uint8_t* arena[kNumRanks];         // symmetric memory of every rank; offsets below are bytes into it
    int64_t rows_offset;               // [num_banks, max_tokens, kNumTopk] rows
    int64_t flags_offset;              // uint64 [num_banks, kNumRanks, max_tokens]: epoch
    int64_t totals_offset;             // uint64 [num_banks, kNumRanks]: epoch, tokens answered | kHasGrads, or kRefused
    int64_t done_offset;               // uint64 [num_banks, kNumRanks]: epoch that this peer has read
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
    Report* report;
    int64_t timeout_ns;
    const uint8_t* num_tokens_at;  // int32 or int64, null: num_tokens counts
    int32_t num_tokens;
    int32_t max_tokens;
    int32_t rank;
    int32_t num_banks;  // a power of two
    uint32_t handle;
    uint32_t ticket;
    bool is_count_int64;
    bool is_send;  // phases of this launch: both are a whole operation
    bool is_receive;
    bool is_refused;  // publish kRefused instead of sending
};

constexpr int kRowsInFlight = kNumTopk < 4 ? kNumTopk : 4;  // rows that a thread loads before it stores the first
CUEP_LAUNCH_EARLY(kNumThreads, 0)

CUEP_DEVICE uint4* home_row(const Params& p, int dst, int bank, int64_t token, int k) {
    const int64_t at = (static_cast<int64_t>(bank) * p.max_tokens + token) * kNumTopk + k;
    return reinterpret_cast<uint4*>(p.arena[dst] + p.rows_offset + at * kRowBytes);
}

// The rows of one received token, from all its experts here. The first few are loaded before the flag of the token
// before it is released, and those of the first token before anything is waited for.
struct Answer {
    AnswerPlace place;
    int32_t rows[kNumTopk];                       // of expert_out, or -1
    uint4 loaded[kRowsInFlight][kVecsPerThread];  // this thread's pieces
};

// Rows of k = first, first + 1, ...
CUEP_DEVICE void load_rows(const Params& p, int first, Answer& answer) {
#pragma unroll
    for (int i = 0; i < kRowsInFlight; i++) {
        const int k = first + i;
        if (k >= kNumTopk || answer.rows[k] < 0) continue;
#pragma unroll
        for (int j = 0; j < kVecsPerThread; j++) {
            const int vec = threadIdx.x + j * kNumThreads;
            if (vec < kRowVecs) answer.loaded[i][j] = load_streaming(expert_row(p, answer.rows[k]) + vec);
        }
    }
}

CUEP_DEVICE void look_up(const Params& p, Answer& answer) {
    answer.place.token = p.token_idx[answer.place.at];
#pragma unroll
    for (int k = 0; k < kNumTopk; k++) answer.rows[k] = p.row_idx[answer.place.at * kNumTopk + k];
}

// From the row on that has been loaded.
CUEP_DEVICE void send_answers(const Params& p, const Operation& op, int bank, int most, Answer& answer) {
    const int tid = threadIdx.x;
    for (bool is_any = true; is_any;) {
        const int src = answer.place.src;
        const int32_t token = answer.place.token;
#pragma unroll
        for (int first = 0; first < kNumTopk; first += kRowsInFlight) {
            if (first > 0) load_rows(p, first, answer);
#pragma unroll
            for (int i = 0; i < kRowsInFlight; i++) {
                const int k = first + i;
                if (k >= kNumTopk || answer.rows[k] < 0) continue;
                uint4* home = home_row(p, src, bank, token, k);
#pragma unroll
                for (int j = 0; j < kVecsPerThread; j++) {
                    if (tid + j * kNumThreads < kRowVecs) store_16(home + tid + j * kNumThreads, answer.loaded[i][j]);
                }
            }
        }
        if (p.row_weight_grads != nullptr && tid < kNumTopk) {
            send_grad(p, src, bank, token, p.row_idx[answer.place.at * kNumTopk + tid]);
        }
        answer.place.unit += gridDim.x;
        is_any = find_answer(p, most, answer.place);
        if (is_any) {
            look_up(p, answer);
            load_rows(p, 0, answer);
        }
        __syncthreads();
        if (tid == 0) st_release_sys(flag_of(p, src, bank, p.rank, token), tagged(op, 0));  // pairs with wait_ranks
    }
}

// y[t]: waits for the ranks that answer token t, then adds in order of k. False: gave up.
CUEP_DEVICE bool sum_token(const Params& p, const Operation& op, int bank, int t) {
    const int tid = threadIdx.x;
    const int64_t own_at = (static_cast<int64_t>(p.rank) * p.max_tokens + p.own_slot[t]) * kNumTopk;
    int32_t ids[kNumTopk];
    float weights[kNumTopk];
    uint32_t rank_mask = 0;
#pragma unroll
    for (int k = 0; k < kNumTopk; k++) {
        ids[k] = p.ids[t * kNumTopk + k];
        weights[k] = p.weights == nullptr ? 1.0f : p.weights[t * kNumTopk + k];
        if (ids[k] >= 0) rank_mask |= 1u << (ids[k] / kNumLocalExperts);
    }
    const uint4* terms[kNumTopk];
#pragma unroll
    for (int k = 0; k < kNumTopk; k++) {
        const bool is_own = ids[k] >= 0 && ids[k] / kNumLocalExperts == p.rank;
        terms[k] = is_own ? expert_row(p, p.row_idx[own_at + k]) : home_row(p, p.rank, bank, t, k);
    }
    if (!wait_ranks(p, op, bank, t, rank_mask)) return false;
    if (p.weight_grads != nullptr && tid < kNumTopk) {
        take_grad(p, bank, t, rank_mask >> p.rank & 1u ? p.row_idx[own_at + tid] : -1);
    }
    for (int vec = tid; vec < kRowVecs; vec += kNumThreads) {
        float sum[kElemsPerVec];
#pragma unroll
        for (int i = 0; i < kElemsPerVec; i++) sum[i] = 0.0f;
#pragma unroll
        for (int first = 0; first < kNumTopk; first += kTermsInFlight) {
            uint4 v[kTermsInFlight];
#pragma unroll
            for (int i = 0; i < kTermsInFlight; i++) {
                if (first + i < kNumTopk && ids[first + i] >= 0) v[i] = load_16(terms[first + i] + vec);
            }
#pragma unroll
            for (int i = 0; i < kTermsInFlight; i++) {
                if (first + i < kNumTopk && ids[first + i] >= 0) add_weighted(sum, weights[first + i], v[i]);
            }
        }
        write_sum(p, t, vec, sum);
    }
    return true;
}

extern "C" __global__ void __launch_bounds__(kNumThreads, kMinBlocks)
    ll_combine_direct(const __grid_constant__ Params p) {
    combine<Answer>(
        p,
        true,
        [&](Answer& answer) { look_up(p, answer); },
        [&](Answer& answer) { load_rows(p, 0, answer); },
        [&](const Operation& op, int bank, int most, Answer& answer) { send_answers(p, op, bank, most, answer); },
        [&](const Operation& op, int bank, int t) { return sum_token(p, op, bank, t); });
}
