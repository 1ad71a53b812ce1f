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
constexpr bool kIsPacket = false;
constexpr int kParts = 1;
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

// This rank's part of a token's sum: where its terms are. rank-major: rows[0] alone.
struct Partial {
    const uint4* rows[kNumTopk];  // null where there is none
    float weights[kNumTopk];
};

struct Shared {
    Partial answer;                // of the received token that is being answered
    Partial own;                   // of the token that is being summed
    const uint4* rows[kNumRanks];  // its rows of the peers, null where there is none
    bool has_own;
};

// By the first warp; the others know it behind a barrier. row, weight: of k = threadIdx.x, expert-major; at: of the
// received row, src * max_tokens + slot.
CUEP_DEVICE void show_partial(const Params& p, int64_t at, int32_t row, float weight, Partial& partial) {
    const int tid = threadIdx.x;
    if constexpr (kIsRankMajor) {
        if (tid == 0) partial.rows[0] = expert_row(p, at);
    } else if (tid < kNumTopk) {
        partial.rows[tid] = row < 0 ? nullptr : expert_row(p, row);
        partial.weights[tid] = weight;
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

CUEP_DEVICE void look_up(const Params& p, Answer& answer) {
    answer.token = p.token_idx[answer.at];
    if (kIsRankMajor || threadIdx.x >= kNumTopk) return;
    const int64_t at = answer.at * kNumTopk + threadIdx.x;
    answer.row = p.row_idx[at];
    answer.weight = p.is_weighted ? p.recv_weights[at] : 1.0f;
}

CUEP_DEVICE void show(const Params& p, const Answer& answer, Shared& s) {
    show_partial(p, answer.at, answer.row, answer.weight, s.answer);
}

// This thread's pieces of an answer.
CUEP_DEVICE void load_part(const Shared& s, uint4 (&part)[kPiecesPerThread]) {
#pragma unroll kIsRankMajor ? kPiecesPerThread : 1
    for (int j = 0; j < kPiecesPerThread; j++) {
        const int vec = threadIdx.x + j * kNumThreads;
        if (vec < kRowVecs) part[j] = partial_sum(s.answer, vec);
    }
}

// From `answer` on, whose rows are known. The next part is made before the flag of the one before it is released.
CUEP_DEVICE void send_answers(const Params& p, const Operation& op, int bank, int most, Answer& answer, Shared& s) {
    const int tid = threadIdx.x;
    uint4 part[kPiecesPerThread];
    load_part(s, part);
    for (bool is_any = true; is_any;) {
        uint4* home = staged_row(p, answer.src, bank, p.rank, answer.token);
#pragma unroll
        for (int j = 0; j < kPiecesPerThread; j++) {
            if (tid + j * kNumThreads < kRowVecs) store_16(home + tid + j * kNumThreads, part[j]);
        }
        if (p.row_weight_grads != nullptr && tid < kNumTopk) {
            send_grad(p, answer.src, bank, answer.token, grad_row(p, answer.at));
        }
        uint64_t* flag = flag_of(p, answer.src, bank, p.rank, answer.token);
        answer.unit += num_teams();
        is_any = find_answer(p, most, answer);
        __syncthreads();
        if (is_any) {
            look_up(p, answer);
            show(p, answer, s);
            __syncthreads();
            load_part(s, part);
        }
        if (tid == 0) st_release_sys(flag, tagged(op, 0));  // pairs with wait_ranks
    }
}

CUEP_DEVICE void look_up_term(const Params& p, int t, Term& term) {
    if (threadIdx.x < kNumTopk) term.expert = p.ids[t * kNumTopk + threadIdx.x];
    term.own_slot = p.own_slot[t];
}

CUEP_DEVICE void follow(const Params& p, Term& term) {
    const int64_t own = own_row_of(p, term);
    if (kIsRankMajor || threadIdx.x >= kNumTopk || own < 0) return;
    term.own_row = p.row_idx[own * kNumTopk + threadIdx.x];
    term.weight = p.is_weighted ? p.recv_weights[own * kNumTopk + threadIdx.x] : 1.0f;
}

// Where the rows of a token are.
CUEP_DEVICE void find_rows(const Params& p, int bank, int t, Term& term, Shared& s) {
    if (warp_idx() != 0) return;
    find_ranks(term);
    const int tid = threadIdx.x;
    const bool is_own = (term.rank_mask >> p.rank & 1u) != 0;
    if (tid < kNumRanks) {
        const bool is_peer = tid != p.rank && (term.rank_mask >> tid & 1u);
        s.rows[tid] = is_peer ? staged_row(p, p.rank, bank, tid, t) : nullptr;
    }
    if (tid == 0) s.has_own = is_own;
    if (is_own) show_partial(p, own_row_of(p, term), term.own_row, term.weight, s.own);
}

// y[t]: waits for the ranks that answer token t, then adds in order of rank. False: gave up.
CUEP_DEVICE bool sum_token(const Params& p, const Operation& op, int bank, int t, const Term& term, Shared& s) {
    const int tid = threadIdx.x;
    if (!wait_ranks(p, op, bank, t, term)) return false;
    if (p.weight_grads != nullptr && tid < kNumTopk) {
        take_grad(p, bank, t, s.has_own ? grad_row(p, own_row_of(p, term)) : -1);
    }
    const bool has_own = s.has_own;
#pragma unroll 1
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
                if (first + i < kNumRanks && s.rows[first + i] != nullptr) v[i] = load_16(s.rows[first + i] + vec);
            }
            if (first == 0 && has_own) own = partial_sum(s.own, vec);  // while the peers' rows come in
#pragma unroll
            for (int i = 0; i < kRanksInFlight; i++) {
                const int r = first + i;
                if (r >= kNumRanks) continue;
                if (s.rows[r] != nullptr) {
                    add(sum, v[i]);
                } else if (r == p.rank && has_own) {
                    add(sum, own);
                }
            }
        }
        write_sum(p, t, vec, sum);
    }
    return true;
}

extern "C" __global__ void __launch_bounds__(kNumThreads, kMinBlocks)
    ll_combine_partial(const __grid_constant__ Params p) {
    __shared__ Shared s;
    combine(
        p,
        kIsRankMajor || p.is_weighted,
        [&](Answer& answer) { look_up(p, answer); },
        [&](const Answer& answer) { show(p, answer, s); },
        [&](const Operation& op, int bank, int most, Answer& answer) { send_answers(p, op, bank, most, answer, s); },
        [&](int t, Term& term) { look_up_term(p, t, term); },
        [&](Term& term) { follow(p, term); },
        [&](int bank, int t, Term& term) { find_rows(p, bank, t, term, s); },
        [&](const Operation& op, int bank, int t, const Term& term) { return sum_token(p, op, bank, t, term, s); });
}
