// Low-latency combine, exact. Every expert row goes home to its own place [token, k] at the token's owner, with one
// flag per (token, rank); the owner waits for the ranks of one token at a time, adds weight * row in order of k in fp32
// and rounds once. So the result is the same bits on every run. Cost: one row over the link per (token, expert).
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

using namespace cuep;

struct Params {
    uint8_t* arena[kNumRanks];  // symmetric memory of every rank; offsets below are bytes into it
    int64_t rows_offset;        // [num_banks, max_tokens, kNumTopk] rows
    int64_t flags_offset;       // uint64 [num_banks, kNumRanks, max_tokens]: epoch
    int64_t totals_offset;      // uint64 [num_banks, kNumRanks]: epoch, tokens answered or kRefused
    int64_t done_offset;        // uint64 [kNumRanks]: epoch that this peer has read
    const uint8_t* expert_out;  // [local experts, kNumRanks * max_tokens] rows, as dispatch gave them
    const int32_t* ids;         // [max_tokens, kNumTopk] routing of this rank's tokens
    const float* weights;       // [max_tokens, kNumTopk]
    const int32_t* own_slot;    // [max_tokens]
    const int32_t* num_rows;    // [kNumRanks]
    const int32_t* token_idx;   // [kNumRanks, max_tokens]
    const int32_t* row_idx;     // [kNumRanks, max_tokens, kNumTopk]
    uint8_t* y;                 // [num_tokens] rows
    HandleState* state;
    Control* control;
    Report* report;
    int64_t timeout_ns;
    int32_t num_tokens;
    int32_t max_tokens;
    int32_t rank;
    int32_t num_banks;  // a power of two
    uint32_t handle;
    uint32_t ticket;
    bool is_refused;  // publish kRefused instead of sending
};

constexpr int kNumLocalExperts = kNumExperts / kNumRanks;
constexpr int kNumPeers = kNumRanks - 1;
constexpr int kRowVecs = kRowBytes / 16;
constexpr int kVecsPerThread = (kRowVecs + kNumThreads - 1) / kNumThreads;
constexpr int kRowsInFlight = kNumTopk < 4 ? kNumTopk : 4;   // rows that a thread loads before it stores the first
constexpr int kTermsInFlight = kNumTopk < 8 ? kNumTopk : 8;  // terms of a sum that a thread loads before it adds
constexpr int kElemsPerVec = kPerVec<elem_t>;
static_assert(kNumThreads >= kNumRanks && kNumThreads >= kNumTopk, "one thread for each rank, and for each k");
CUEP_LAUNCH(kNumThreads, 0)

CUEP_DEVICE uint4* home_row(const Params& p, int dst, int bank, int64_t token, int k) {
    const int64_t at = (static_cast<int64_t>(bank) * p.max_tokens + token) * kNumTopk + k;
    return reinterpret_cast<uint4*>(p.arena[dst] + p.rows_offset + at * kRowBytes);
}

CUEP_DEVICE uint64_t* flag_of(const Params& p, int dst, int bank, int src, int64_t token) {
    return reinterpret_cast<uint64_t*>(p.arena[dst] + p.flags_offset) +
           (static_cast<int64_t>(bank) * kNumRanks + src) * p.max_tokens + token;
}

CUEP_DEVICE uint64_t* total_of(const Params& p, int dst, int bank, int src) {
    return reinterpret_cast<uint64_t*>(p.arena[dst] + p.totals_offset) + bank * kNumRanks + src;
}

CUEP_DEVICE uint64_t* done_of(const Params& p, int dst, int reader) {
    return reinterpret_cast<uint64_t*>(p.arena[dst] + p.done_offset) + reader;
}

CUEP_DEVICE const uint4* expert_row(const Params& p, int32_t row) {
    return reinterpret_cast<const uint4*>(p.expert_out + static_cast<int64_t>(row) * kRowBytes);
}

// Sends home the rows of one received token, from all its experts here.
CUEP_DEVICE void send_answer(const Params& p, const Operation& op, int bank, int src, int slot) {
    const int64_t at = static_cast<int64_t>(src) * p.max_tokens + slot;
    const int64_t token = p.token_idx[at];
    int32_t rows[kNumTopk];
#pragma unroll
    for (int k = 0; k < kNumTopk; k++) rows[k] = p.row_idx[at * kNumTopk + k];
#pragma unroll
    for (int first = 0; first < kNumTopk; first += kRowsInFlight) {
        uint4 v[kRowsInFlight][kVecsPerThread];
#pragma unroll
        for (int i = 0; i < kRowsInFlight; i++) {
            const int k = first + i;
            if (k >= kNumTopk || rows[k] < 0) continue;
#pragma unroll
            for (int j = 0; j < kVecsPerThread; j++) {
                const int vec = threadIdx.x + j * kNumThreads;
                if (vec < kRowVecs) v[i][j] = load_streaming(expert_row(p, rows[k]) + vec);
            }
        }
#pragma unroll
        for (int i = 0; i < kRowsInFlight; i++) {
            const int k = first + i;
            if (k >= kNumTopk || rows[k] < 0) continue;
            uint4* dst = home_row(p, src, bank, token, k);
#pragma unroll
            for (int j = 0; j < kVecsPerThread; j++) {
                const int vec = threadIdx.x + j * kNumThreads;
                if (vec < kRowVecs) store_16(dst + vec, v[i][j]);
            }
        }
    }
    __syncthreads();
    if (threadIdx.x == 0) st_release_sys(flag_of(p, src, bank, p.rank, token), tagged(op, 0));  // pairs with sum_token
}

// y[t]: waits for the ranks that answer token t, then adds in order of k. False: gave up.
CUEP_DEVICE bool sum_token(const Params& p, const Operation& op, int bank, int t) {
    const int tid = threadIdx.x;
    const int own_slot = p.own_slot[t];
    int32_t ids[kNumTopk];
    float weights[kNumTopk];
    uint32_t rank_mask = 0;
#pragma unroll
    for (int k = 0; k < kNumTopk; k++) {
        ids[k] = p.ids[t * kNumTopk + k];
        weights[k] = p.weights[t * kNumTopk + k];
        if (ids[k] >= 0) rank_mask |= 1u << (ids[k] / kNumLocalExperts);
    }
    const uint4* terms[kNumTopk];
#pragma unroll
    for (int k = 0; k < kNumTopk; k++) {
        const bool is_own = ids[k] >= 0 && ids[k] / kNumLocalExperts == p.rank;
        const int64_t at = static_cast<int64_t>(p.rank) * p.max_tokens + own_slot;
        terms[k] = is_own ? expert_row(p, p.row_idx[at * kNumTopk + k]) : home_row(p, p.rank, bank, t, k);
    }
    bool is_ok = true;
    if (tid < kNumRanks && tid != p.rank && (rank_mask >> tid & 1u)) {
        uint32_t unused = 0;
        is_ok = wait_flag(op, flag_of(p, p.rank, bank, tid, t), Phase::kRows, tid, unused);
    }
    if (block_any(!is_ok)) return false;
    uint4* y = reinterpret_cast<uint4*>(p.y + static_cast<int64_t>(t) * kRowBytes);
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
                if (first + i >= kNumTopk || ids[first + i] < 0) continue;
                float term[kElemsPerVec];
                unpack<elem_t>(v[i], term);
#pragma unroll
                for (int c = 0; c < kElemsPerVec; c++)
                    sum[c] = __fadd_rn(sum[c], __fmul_rn(weights[first + i], term[c]));
            }
        }
        store_16(y + vec, pack<elem_t>(sum));
    }
    return true;
}

extern "C" __global__ void __launch_bounds__(kNumThreads, kMinBlocks)
    ll_combine_direct(const __grid_constant__ Params p) {
    __shared__ uint32_t totals[kNumRanks];
    const int tid = threadIdx.x;
    const bool is_off_handle = p.state->refused != 0;  // asked early, used late: loads run beside one another
    int most = 0;                                      // rows of the peer that is sent most
    for (int r = 0; r < kNumRanks; r++) {
        if (r != p.rank && !p.is_refused) most = max(most, p.num_rows[r]);
    }
    const Operation op = begin_operation(p, Op::kCombine);
    const int bank = static_cast<int>(op.epoch) & (p.num_banks - 1);

    if (is_skipped(p, is_off_handle)) return;

    // the bank must have been read by every peer before it is written again
    const bool is_off = is_stopped(op);
    bool is_ok = true;
    if (tid < kNumRanks && tid != p.rank) is_ok = wait_bank_free(op, done_of(p, p.rank, tid), p.num_banks, tid);
    if (block_any(!is_ok || is_off)) return stop(op);

    // send all that this block owes before it waits for rows
    if (blockIdx.x == gridDim.x - 1 && tid < kNumRanks) {  // pairs with the wait for totals below
        const uint32_t total = p.is_refused ? kRefused : static_cast<uint32_t>(p.num_rows[tid]);
        st_relaxed_sys(total_of(p, tid, bank, p.rank), tagged(op, total));
    }
    if constexpr (kNumPeers > 0) {
        for (int u = blockIdx.x; u < most * kNumPeers; u += gridDim.x) {
            const int src = (p.rank + 1 + u % kNumPeers) % kNumRanks, slot = u / kNumPeers;
            if (slot < p.num_rows[src]) send_answer(p, op, bank, src, slot);
        }
    }

    // every rank says how much it sends, or that it refused
    if (tid < kNumRanks) {
        uint32_t total = 0;
        is_ok = wait_word(op, total_of(p, p.rank, bank, tid), tid, total);
        totals[tid] = total;
    }
    if (block_any(!is_ok)) return;
    int refused_by = p.is_refused ? p.rank : -1;
    for (int r = 0; r < kNumRanks; r++) {
        if (refused_by < 0 && totals[r] == kRefused) refused_by = r;
    }

    // sum, token by token as they arrive
    if (refused_by < 0) {
        for (int t = blockIdx.x; t < p.num_tokens; t += gridDim.x) {
            if (!sum_token(p, op, bank, t)) return;
        }
    }

    // done: peers may write this bank again (pairs with wait_bank_free)
    if (!is_last_block(op)) return;
    if (tid < kNumRanks && tid != p.rank) st_release_sys(done_of(p, tid, p.rank), tagged(op, 0));
    if (tid == 0) {
        if (refused_by >= 0) mark_refused(p, Op::kCombine, refused_by, Cause::kCall);
        end_operation(op);
    }
}
