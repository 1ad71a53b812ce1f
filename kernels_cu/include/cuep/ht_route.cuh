// What high-throughput routings share: how many tokens go from each rank to each rank, the place of every (token, rank)
// among what that rank receives, the handle's copy of the routing, and how a routing ends. Params is that of any ht
// route kernel; all have these fields.
#pragma once
#include <cuep/base.cuh>
#include <cuep/sync.cuh>
#include <cuep/operation.cuh>
#include <cuep/topk.cuh>

namespace cuep {

constexpr int kRouteBanks = 2;  // ROUTE_BANKS of cuep/layout.py

// Two banks are enough: a rank that gets here has seen every peer start its previous routing.
CUEP_DEVICE int bank_of(const Operation& op) {
    return static_cast<int>(op.epoch) & (kRouteBanks - 1);
}

// What this rank brings to a routing.
struct Brought {
    int num_tokens;
    bool is_refused;  // by the host, or for a count on the device that does not fit
    Cause cause;      // if it was the device
};

template <class Params>
CUEP_DEVICE Brought brought_tokens(const Params& p) {
    const int num_tokens = tokens_of(p);
    const bool is_bad = num_tokens == kBadTokenCount;
    return {max(num_tokens, 0), p.is_refused || is_bad, is_bad && !p.is_refused ? Cause::kTokenCount : Cause::kCall};
}

// How a routing ended. Every block that has all ranks' counts comes to the same.
struct Outcome {
    int refused_by;  // the rank whose part was refused, or that would receive too many rows, or -1
    Cause cause;
    int32_t num_needed;  // rows that it would receive
    bool is_cut;         // some rank gets fewer rows than were for it
};

// refused_by: the rank that published kRefused, or -1; full_rank: that needs num_needed rows, more than it has, or -1.
template <class Params>
CUEP_DEVICE Outcome
judge_routing(const Params& p, const Brought& own, int refused_by, int full_rank, int32_t num_needed) {
    if (own.is_refused) return {p.rank, own.cause, 0, false};
    if (refused_by >= 0) return {refused_by, Cause::kCall, 0, false};
    if (full_rank < 0 || p.is_drop) return {-1, Cause::kCall, 0, full_rank >= 0};
    return {full_rank, Cause::kOverflow, num_needed, false};
}

// One thread: what the handle's next operations, and the host, are to know.
template <class Params>
CUEP_DEVICE void write_state(const Params& p, const Brought& own, const Outcome& outcome) {
    p.state->refused = 0;
    p.state->num_tokens = own.num_tokens;
    p.state->unrouted = outcome.refused_by >= 0;
    p.state->refused_by = static_cast<uint32_t>(outcome.refused_by);
    if (outcome.refused_by < 0) return;
    const uint32_t num_needed = static_cast<uint32_t>(outcome.num_needed);
    report_refusal(p, Op::kRoute, outcome.cause, p.state->refused_by, num_needed);
}

// First and last + 1 of the tokens of a warp: whole groups of 32, in order.
CUEP_DEVICE int2 tokens_of_warp(int num_tokens, int warp, int num_warps) {
    const int num_groups = (num_tokens + 31) / 32, per_warp = (num_groups + num_warps - 1) / num_warps;
    const int first = min(warp * per_warp, num_groups), last = min(first + per_warp, num_groups);
    return make_int2(first * 32, last * 32);
}

// The handle's own copy of the routing: one of num_blocks blocks.
template <int kNumExperts, int kTopk, int kThreads, class Params>
CUEP_DEVICE void copy_routing(const Params& p, int num_tokens, int block, int num_blocks) {
    for (int64_t i = block * kThreads + threadIdx.x; i < int64_t{num_tokens} * kTopk; i += num_blocks * kThreads) {
        p.ids[i] = load_expert<kNumExperts>(p.topk_idx, p.is_int64, i);
        p.weights[i] = p.topk_weights == nullptr ? 1.0f : p.topk_weights[i];
    }
}

// Rows from each rank to each rank, and by it the place of every (token, rank). One block.
template <int kRanks, int kExpertsPerRank, int kTopk, int kThreads>
struct Matrix {
    static constexpr int kNumWarps = kThreads / 32;

    int32_t warp_rows[kNumWarps][kRanks];  // rows of each warp's tokens to each rank, then those of earlier warps
    uint32_t words[kRanks][kRanks];        // rows from each rank to each rank, or kRefused

    template <class Params>
    static CUEP_DEVICE uint64_t* words_of(const Params& p, int dst, int bank, int src) {
        return reinterpret_cast<uint64_t*>(p.arena[dst] + p.matrix_offset) + (bank * kRanks + src) * kRanks;
    }

    template <class Params>
    static CUEP_DEVICE uint32_t ranks_of_token(const Params& p, int num_tokens, int t) {
        if (t >= num_tokens) return 0;
        int32_t experts[kTopk];
        load_experts<kRanks * kExpertsPerRank>(p.topk_idx, p.is_int64, t, experts);
        return ranks_of<kExpertsPerRank>(experts);
    }

    // This rank's line, then everybody's. False: gave up.
    template <class Params>
    CUEP_DEVICE bool exchange(const Params& p, const Operation& op, const Brought& own) {
        count(p, own.num_tokens);
        __syncthreads();
        add_up_warps(p, own.is_refused);
        __syncthreads();
        for (int i = threadIdx.x; i < kRanks * kRanks; i += kThreads) {  // pairs with wait
            st_relaxed_sys(words_of(p, i / kRanks, bank_of(op), p.rank) + i % kRanks,
                           tagged(op, words[p.rank][i % kRanks]));
        }
        __syncthreads();
        return wait(p, op);
    }

    template <class Params>
    CUEP_DEVICE void count(const Params& p, int num_tokens) {
        const int2 range = tokens_of_warp(num_tokens, warp_idx(), kNumWarps);
        int32_t num_rows = 0;  // of rank lane_idx()
        for (int first = range.x; first < range.y; first += 32) {
            const uint32_t rank_mask = ranks_of_token(p, num_tokens, first + lane_idx());
#pragma unroll
            for (int r = 0; r < kRanks; r++) {
                const uint32_t lanes = __ballot_sync(0xffffffffu, rank_mask >> r & 1u);
                if (lane_idx() == r) num_rows += __popc(lanes);
            }
        }
        if (lane_idx() < kRanks) warp_rows[warp_idx()][lane_idx()] = num_rows;
    }

    // Exclusive sums over warps; the sums over all of them are this rank's line.
    template <class Params>
    CUEP_DEVICE void add_up_warps(const Params& p, bool is_refused) {
        const int r = threadIdx.x;
        if (r >= kRanks) return;
        int32_t sum = 0;
        for (int w = 0; w < kNumWarps; w++) {
            const int32_t num_rows = warp_rows[w][r];
            warp_rows[w][r] = sum;
            sum += num_rows;
        }
        words[p.rank][r] = is_refused ? kRefused : static_cast<uint32_t>(sum);
    }

    // Every rank's line. False: gave up.
    template <class Params>
    CUEP_DEVICE bool wait(const Params& p, const Operation& op) {
        bool is_ok = true;
        for (int i = threadIdx.x; i < kRanks * kRanks; i += kThreads) {
            const int src = i / kRanks, dst = i % kRanks;
            is_ok &= wait_word(op, words_of(p, p.rank, bank_of(op), src) + dst, src, words[src][dst]);
        }
        return !block_any(!is_ok);
    }

    CUEP_DEVICE int refusing_rank() const {
        for (int r = 0; r < kRanks; r++) {
            if (words[r][0] == kRefused) return r;
        }
        return -1;
    }

    // Rows for rank dst of the first num_src ranks, also those that are left out.
    CUEP_DEVICE int32_t rows_before(int num_src, int dst) const {
        int32_t num_rows = 0;
        for (int src = 0; src < num_src; src++) num_rows += static_cast<int32_t>(words[src][dst]);
        return num_rows;
    }

    // Where rows of each source begin here, and this rank's at each rank; rows behind max_rows are left out.
    template <class Params>
    CUEP_DEVICE void write_bases(const Params& p, int32_t max_rows) const {
        const int tid = threadIdx.x;
        if (tid <= kRanks) p.recv_base[tid] = min(rows_before(tid, p.rank), max_rows);
        if (tid < kRanks) p.send_base[tid] = rows_before(p.rank, tid);
    }

    // The row of every (token, rank).
    template <class Params>
    CUEP_DEVICE void place(const Params& p, int num_tokens, int32_t max_rows) const {
        const int2 range = tokens_of_warp(num_tokens, warp_idx(), kNumWarps);
        const int lane = lane_idx();
        int32_t next_row = 0;  // at rank lane_idx(), of the next token that goes there
        if (lane < kRanks) next_row = warp_rows[warp_idx()][lane] + rows_before(p.rank, lane);
        for (int first = range.x; first < range.y; first += 32) {
            const int t = first + lane;
            const uint32_t rank_mask = ranks_of_token(p, num_tokens, t);
            int32_t rows[kRanks];
#pragma unroll
            for (int r = 0; r < kRanks; r++) {
                const uint32_t lanes = __ballot_sync(0xffffffffu, rank_mask >> r & 1u);
                const int32_t row = __shfl_sync(0xffffffffu, next_row, r) + __popc(lanes & ((1u << lane) - 1u));
                rows[r] = (rank_mask >> r & 1u) != 0 && row < max_rows ? row : -1;
                if (lane == r) next_row += __popc(lanes);
            }
            if (t < num_tokens) {
#pragma unroll
                for (int r = 0; r < kRanks; r++) p.rows[static_cast<int64_t>(t) * kRanks + r] = rows[r];
            }
        }
    }
};

}  // namespace cuep
