// Low-latency combine, per_rank. Each rank sends one row per token home, into its slot at the token's owner, with a
// flag: in rank-major the caller's row as it is; in expert-major the sum of weight * row over this rank's experts, in
// order of k in fp32, rounded once. The owner waits for the ranks of one token at a time and adds their rows, its own
// among them, in order of rank in fp32. Cost: one row over the link per (token, rank).
// serves: reduce=per_rank
#include <cuep/base.cuh>
#include <cuep/sync.cuh>
#include <cuep/convert.cuh>
#include <cuep/operation.cuh>

#ifndef CUEP_JIT  // values for editors; cuep/jit.py gives the real ones
constexpr int kNumRanks = 4, kNumExperts = 256, kNumTopk = 8, kRowBytes = 14336, kNumThreads = 448, kMinBlocks = 1;
constexpr bool kIsRankMajor = false;
using elem_t = cuep::bf16_t;
#endif
// compile: kNumRanks=4 kNumExperts=256 kNumTopk=8 kRowBytes=14336 kIsRankMajor=false elem_t=cuep::bf16_t
// compile: kNumRanks=4 kNumExperts=256 kNumTopk=8 kRowBytes=14336 kIsRankMajor=true elem_t=cuep::bf16_t
// compile: kNumRanks=2 kNumExperts=8 kNumTopk=3 kRowBytes=528 kIsRankMajor=false elem_t=float
CUEP_TUNABLE(kNumThreads, 448, 64);
CUEP_TUNABLE(kMinBlocks, 1, 1);  // resident on one multiprocessor
#include <cuep/ll_combine.cuh>

using namespace cuep;

struct Params {
    uint8_t* arena[kNumRanks];  // symmetric memory of every rank; offsets below are bytes into it
    int64_t rows_offset;    // [num_banks, kNumRanks - 1, max_tokens] rows; rank s is at (s - rank - 1) mod kNumRanks
    int64_t flags_offset;   // uint64 [num_banks, kNumRanks, max_tokens]: epoch
    int64_t totals_offset;  // uint64 [num_banks, kNumRanks]: epoch, tokens answered | kHasGrads, or kRefused
    int64_t done_offset;    // uint64 [num_banks, kNumRanks]: epoch that this peer has read
    int64_t grads_offset;   // float [num_banks, max_tokens, kNumTopk]
    const uint8_t* expert_out;  // [local experts, kNumRanks * max_tokens] or, rank-major, [kNumRanks, max_tokens] rows
    int64_t expert_out_stride;  // bytes between rows
    const int32_t* ids;         // [max_tokens, kNumTopk] routing of this rank's tokens
    const int32_t* own_slot;    // [max_tokens]
    const int32_t* num_rows;    // [kNumRanks]
    const int32_t* token_idx;   // [kNumRanks, max_tokens]
    const int32_t* row_idx;     // expert-major [kNumRanks, max_tokens, kNumTopk]: row of expert_out, or -1
    const float* recv_weights;  // expert-major [kNumRanks, max_tokens, kNumTopk]: from dispatch
    const int32_t* recv_topk_idx;  // rank-major [kNumRanks, max_tokens, kNumTopk]: -1 where the expert is not here
    const uint32_t*
        row_weight_grads;    // float bits; one per row of expert_out or, rank-major, one per row and k; or null
    uint32_t* weight_grads;  // [num_tokens, kNumTopk], or null
    uint8_t* y;              // [num_tokens] rows, y_stride bytes apart
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
    bool is_weighted;  // false: weights count as 1
    bool is_send;      // phases of this launch: both are a whole operation
    bool is_receive;
    bool is_refused;  // publish kRefused instead of sending
};

constexpr int kRanksInFlight = kNumRanks < 8 ? kNumRanks : 8;  // rows of ranks that a thread loads before it adds
CUEP_LAUNCH_EARLY(kNumThreads, 0)

// This rank's part of a token's sum: where its terms are.
struct Partial {
    const uint4* rows[kNumTopk];  // null where there is none; rank-major: rows[0] alone
    float weights[kNumTopk];
};

// at: of the received row, src * max_tokens + slot.
CUEP_DEVICE void find_partial(const Params& p, int64_t at, Partial& partial) {
    if constexpr (kIsRankMajor) {
        partial.rows[0] = expert_row(p, at);
    } else {
#pragma unroll
        for (int k = 0; k < kNumTopk; k++) {
            const int32_t row = p.row_idx[at * kNumTopk + k];
            partial.rows[k] = row < 0 ? nullptr : expert_row(p, row);
            partial.weights[k] = p.is_weighted ? p.recv_weights[at * kNumTopk + k] : 1.0f;
        }
    }
}

// A vector of this rank's part, rounded as it travels.
CUEP_DEVICE uint4 partial_sum(const Partial& partial, int vec) {
    if constexpr (kIsRankMajor) return load_streaming(partial.rows[0] + vec);
    float sum[kElemsPerVec];
#pragma unroll
    for (int i = 0; i < kElemsPerVec; i++) sum[i] = 0.0f;
#pragma unroll
    for (int first = 0; first < kNumTopk; first += kTermsInFlight) {
        uint4 v[kTermsInFlight];
#pragma unroll
        for (int i = 0; i < kTermsInFlight; i++) {
            if (first + i < kNumTopk && partial.rows[first + i] != nullptr) {
                v[i] = load_streaming(partial.rows[first + i] + vec);
            }
        }
#pragma unroll
        for (int i = 0; i < kTermsInFlight; i++) {
            if (first + i < kNumTopk && partial.rows[first + i] != nullptr) {
                add_weighted(sum, partial.weights[first + i], v[i]);
            }
        }
    }
    return pack<elem_t>(sum);
}

// Where this thread's k of a received row has its gradient, -1 if it is not served here.
CUEP_DEVICE int64_t grad_row(const Params& p, int64_t at) {
    const int64_t i = at * kNumTopk + threadIdx.x;
    if constexpr (kIsRankMajor) return p.recv_topk_idx[i] < 0 ? -1 : i;
    return p.row_idx[i];
}

// This rank's part of the sum of a received row. It is loaded before the flag of the one before it is released, and the
// first before anything is waited for.
struct Answer {
    AnswerPlace place;
    Partial partial;
    uint4 part[kVecsPerThread];  // this thread's pieces
};

CUEP_DEVICE void look_up(const Params& p, Answer& answer) {
    answer.place.token = p.token_idx[answer.place.at];
    find_partial(p, answer.place.at, answer.partial);
}

CUEP_DEVICE void load_answer(Answer& answer) {
#pragma unroll
    for (int j = 0; j < kVecsPerThread; j++) {
        const int vec = threadIdx.x + j * kNumThreads;
        if (vec < kRowVecs) answer.part[j] = partial_sum(answer.partial, vec);
    }
}

// From the row on that has been loaded.
CUEP_DEVICE void send_answers(const Params& p, const Operation& op, int bank, int most, Answer& answer) {
    const int tid = threadIdx.x;
    for (bool is_any = true; is_any;) {
        const int src = answer.place.src;
        const int32_t token = answer.place.token;
        uint4* home = staged_row(p, src, bank, p.rank, token);
#pragma unroll
        for (int j = 0; j < kVecsPerThread; j++) {
            if (tid + j * kNumThreads < kRowVecs) store_16(home + tid + j * kNumThreads, answer.part[j]);
        }
        if (p.row_weight_grads != nullptr && tid < kNumTopk)
            send_grad(p, src, bank, token, grad_row(p, answer.place.at));
        answer.place.unit += gridDim.x;
        is_any = find_answer(p, most, answer.place);
        if (is_any) {
            look_up(p, answer);
            load_answer(answer);
        }
        __syncthreads();
        if (tid == 0) st_release_sys(flag_of(p, src, bank, p.rank, token), tagged(op, 0));  // pairs with wait_ranks
    }
}

// y[t]: waits for the ranks that answer token t, then adds in order of rank. False: gave up.
CUEP_DEVICE bool sum_token(const Params& p, const Operation& op, int bank, int t) {
    const int tid = threadIdx.x;
    uint32_t rank_mask = 0;
#pragma unroll
    for (int k = 0; k < kNumTopk; k++) {
        const int32_t id = p.ids[t * kNumTopk + k];
        if (id >= 0) rank_mask |= 1u << (id / kNumLocalExperts);
    }
    const bool is_own = rank_mask >> p.rank & 1u;
    const int64_t own_at = static_cast<int64_t>(p.rank) * p.max_tokens + p.own_slot[t];
    Partial partial;
    if (is_own) find_partial(p, own_at, partial);
    if (!wait_ranks(p, op, bank, t, rank_mask)) return false;
    if (p.weight_grads != nullptr && tid < kNumTopk) take_grad(p, bank, t, is_own ? grad_row(p, own_at) : -1);
    for (int vec = tid; vec < kRowVecs; vec += kNumThreads) {
        float sum[kElemsPerVec];
#pragma unroll
        for (int i = 0; i < kElemsPerVec; i++) sum[i] = 0.0f;
        uint4 own = make_uint4(0, 0, 0, 0);
#pragma unroll
        for (int first = 0; first < kNumRanks; first += kRanksInFlight) {
            uint4 v[kRanksInFlight];
#pragma unroll
            for (int i = 0; i < kRanksInFlight; i++) {
                const int r = first + i;
                if (r < kNumRanks && r != p.rank && (rank_mask >> r & 1u)) {
                    v[i] = load_16(staged_row(p, p.rank, bank, r, t) + vec);
                }
            }
            if (first == 0 && is_own) own = partial_sum(partial, vec);  // while the peers' rows come in
#pragma unroll
            for (int i = 0; i < kRanksInFlight; i++) {
                const int r = first + i;
                if (r < kNumRanks && (rank_mask >> r & 1u)) add(sum, r == p.rank ? own : v[i]);
            }
        }
        write_sum(p, t, vec, sum);
    }
    return true;
}

extern "C" __global__ void __launch_bounds__(kNumThreads, kMinBlocks)
    ll_combine_partial(const __grid_constant__ Params p) {
    combine<Answer>(
        p,
        kIsRankMajor || p.is_weighted,
        [&](Answer& answer) { look_up(p, answer); },
        [&](Answer& answer) { load_answer(answer); },
        [&](const Operation& op, int bank, int most, Answer& answer) { send_answers(p, op, bank, most, answer); },
        [&](const Operation& op, int bank, int t) { return sum_token(p, op, bank, t); });
}
