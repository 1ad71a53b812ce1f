// High-throughput routing. One block counts, 32 tokens of a warp at a time with one ballot per rank, how many tokens go
// to each rank; ranks exchange the matrix of counts; a prefix sum over it gives every (token, rank) the final row that
// it will have there. No atomics decide an order: rows are in order of source rank, then token. A second block counts
// and exchanges the pairs of each expert, the others copy the routing into the handle. Cost: two passes over topk_idx
// in one block, beside them the copy, and one exchange of small words.
#include <cuep/base.cuh>
#include <cuep/sync.cuh>
#include <cuep/operation.cuh>
#include <cuep/topk.cuh>

#ifndef CUEP_JIT  // values for editors; cuep/jit.py gives the real ones
constexpr int kNumRanks = 4, kNumExperts = 256, kNumTopk = 8, kNumThreads = 1024;
#endif
// compile: kNumRanks=4 kNumExperts=256 kNumTopk=8
// compile: kNumRanks=2 kNumExperts=8 kNumTopk=3
CUEP_TUNABLE(kNumThreads, 1024, 64);

using namespace cuep;

struct Params {
    uint8_t* arena[kNumRanks];  // symmetric memory of every rank; offsets below are bytes into it
    int64_t matrix_offset;  // uint64 [kNumBanks, kNumRanks (source), kNumRanks (destination)]: epoch, rows or kRefused
    int64_t counts_offset;  // uint64 [kNumBanks, kNumRanks (source), local experts]: epoch, (token, k) pairs
    const uint8_t* topk_idx;    // [num_tokens, kNumTopk] int32 or int64
    const float* topk_weights;  // [num_tokens, kNumTopk] or null
    int32_t* ids;               // handle's copy [max_tokens, kNumTopk]
    float* weights;             // handle's copy [max_tokens, kNumTopk]
    int32_t* rows;              // [max_tokens, kNumRanks]: row of a token at each rank, or -1
    int32_t* send_base;         // [kNumRanks]: first row of this rank's tokens at each rank
    int32_t* recv_base;         // [kNumRanks + 1]: first row here of each source rank; last: all rows
    int32_t* src_rank_counts;   // [kNumRanks]
    int32_t* expert_counts;     // [local experts]
    int32_t* total;             // [1]
    HandleState* state;
    Control* control;
    Report* report;
    int64_t timeout_ns;
    int32_t num_tokens;
    int32_t rank;
    uint32_t handle;
    uint32_t ticket;
    bool is_int64;
    bool is_refused;  // publish kRefused instead of counts
};

constexpr int kNumLocalExperts = kNumExperts / kNumRanks;
constexpr int kNumWarps = kNumThreads / 32;
constexpr int kNumBanks = 2;  // ROUTE_BANKS of cuep/layout.py
CUEP_LAUNCH(kNumThreads, 0)

struct Shared {
    int32_t experts[kNumExperts];  // pairs of this rank per expert, then those of each (source, local expert)
    int32_t warp_rows[kNumWarps][kNumRanks];  // rows of each warp's tokens to each rank, then those of earlier warps
    uint32_t matrix[kNumRanks][kNumRanks];    // rows from each rank to each rank, or kRefused
};

CUEP_DEVICE uint64_t* matrix_of(const Params& p, int dst, int bank, int src) {
    return reinterpret_cast<uint64_t*>(p.arena[dst] + p.matrix_offset) + (bank * kNumRanks + src) * kNumRanks;
}

CUEP_DEVICE uint64_t* counts_of(const Params& p, int dst, int bank, int src) {
    return reinterpret_cast<uint64_t*>(p.arena[dst] + p.counts_offset) + (bank * kNumRanks + src) * kNumLocalExperts;
}

CUEP_DEVICE uint32_t ranks_of_token(const Params& p, int t) {
    if (t >= p.num_tokens) return 0;
    int32_t experts[kNumTopk];
    load_experts<kNumExperts>(p.topk_idx, p.is_int64, t, experts);
    return ranks_of<kNumLocalExperts>(experts);
}

// First and last + 1 of the tokens of a warp: whole groups of 32, in order.
CUEP_DEVICE int2 tokens_of_warp(const Params& p) {
    const int num_groups = (p.num_tokens + 31) / 32, per_warp = (num_groups + kNumWarps - 1) / kNumWarps;
    const int first = warp_idx() * per_warp * 32;
    return make_int2(first, min(first + per_warp * 32, (p.num_tokens + 31) / 32 * 32));
}

CUEP_DEVICE void count_tokens(const Params& p, Shared& s) {
    const int2 range = tokens_of_warp(p);
    int32_t num_rows = 0;  // of rank lane_idx()
    for (int first = range.x; first < range.y; first += 32) {
        const uint32_t rank_mask = ranks_of_token(p, first + lane_idx());
#pragma unroll
        for (int r = 0; r < kNumRanks; r++) {
            const uint32_t lanes = __ballot_sync(0xffffffffu, rank_mask >> r & 1u);
            if (lane_idx() == r) num_rows += __popc(lanes);
        }
    }
    if (lane_idx() < kNumRanks) s.warp_rows[warp_idx()][lane_idx()] = num_rows;
}

// Exclusive sums over warps; the sums over all of them are this rank's line of the matrix.
CUEP_DEVICE void add_up_warps(const Params& p, Shared& s) {
    const int r = threadIdx.x;
    if (r >= kNumRanks) return;
    int32_t sum = 0;
    for (int w = 0; w < kNumWarps; w++) {
        const int32_t num_rows = s.warp_rows[w][r];
        s.warp_rows[w][r] = sum;
        sum += num_rows;
    }
    s.matrix[p.rank][r] = p.is_refused ? kRefused : static_cast<uint32_t>(sum);
}

CUEP_DEVICE void publish_matrix(const Params& p, const Operation& op, int bank, Shared& s) {
    for (int i = threadIdx.x; i < kNumRanks * kNumRanks; i += kNumThreads) {  // pairs with wait_matrix
        st_relaxed_sys(matrix_of(p, i / kNumRanks, bank, p.rank) + i % kNumRanks,
                       tagged(op, s.matrix[p.rank][i % kNumRanks]));
    }
    __syncthreads();
}

// Every rank's line. False: gave up.
CUEP_DEVICE bool wait_matrix(const Params& p, const Operation& op, int bank, Shared& s) {
    bool is_ok = true;
    for (int i = threadIdx.x; i < kNumRanks * kNumRanks; i += kNumThreads) {
        const int src = i / kNumRanks;
        is_ok &= wait_word(op, matrix_of(p, p.rank, bank, src) + i % kNumRanks, src, s.matrix[src][i % kNumRanks]);
    }
    return !block_any(!is_ok);
}

CUEP_DEVICE void write_counts(const Params& p, const Shared& s) {
    const int tid = threadIdx.x;
    if (tid <= kNumRanks) {
        int32_t first_row = 0;
        for (int src = 0; src < tid; src++) first_row += static_cast<int32_t>(s.matrix[src][p.rank]);
        p.recv_base[tid] = first_row;
        if (tid == kNumRanks) *p.total = first_row;
    }
    if (tid < kNumRanks) {
        int32_t first_row = 0;
        for (int src = 0; src < p.rank; src++) first_row += static_cast<int32_t>(s.matrix[src][tid]);
        p.send_base[tid] = first_row;
        p.src_rank_counts[tid] = static_cast<int32_t>(s.matrix[tid][p.rank]);
    }
}

CUEP_DEVICE void place_tokens(const Params& p, const Shared& s) {
    const int2 range = tokens_of_warp(p);
    const int lane = lane_idx();
    int32_t next_row = 0;  // at rank lane_idx(), of the next token that goes there
    if (lane < kNumRanks) {
        next_row = s.warp_rows[warp_idx()][lane];
        for (int src = 0; src < p.rank; src++) next_row += static_cast<int32_t>(s.matrix[src][lane]);
    }
    for (int first = range.x; first < range.y; first += 32) {
        const int t = first + lane;
        const uint32_t rank_mask = ranks_of_token(p, t);
        int32_t rows[kNumRanks];
#pragma unroll
        for (int r = 0; r < kNumRanks; r++) {
            const uint32_t lanes = __ballot_sync(0xffffffffu, rank_mask >> r & 1u);
            const int32_t row = __shfl_sync(0xffffffffu, next_row, r) + __popc(lanes & ((1u << lane) - 1u));
            rows[r] = rank_mask >> r & 1u ? row : -1;
            if (lane == r) next_row += __popc(lanes);
        }
        if (t < p.num_tokens) {
#pragma unroll
            for (int r = 0; r < kNumRanks; r++) p.rows[static_cast<int64_t>(t) * kNumRanks + r] = rows[r];
        }
    }
}

// The first block: rows of every (token, rank). False: gave up. refused_by: the rank that refused, or -1.
CUEP_DEVICE bool route_tokens(const Params& p, const Operation& op, int bank, Shared& s, int& refused_by) {
    count_tokens(p, s);
    __syncthreads();
    add_up_warps(p, s);
    __syncthreads();
    publish_matrix(p, op, bank, s);
    if (!wait_matrix(p, op, bank, s)) return false;
    refused_by = p.is_refused ? p.rank : -1;
    for (int r = 0; r < kNumRanks; r++) {
        if (refused_by < 0 && s.matrix[r][0] == kRefused) refused_by = r;
    }
    if (refused_by < 0) {
        write_counts(p, s);
        place_tokens(p, s);
    }
    return true;
}

// The second block: (token, k) pairs of every local expert. False: gave up.
CUEP_DEVICE bool count_experts(const Params& p, const Operation& op, int bank, Shared& s) {
    for (int e = threadIdx.x; e < kNumExperts; e += kNumThreads) s.experts[e] = 0;
    __syncthreads();
    for (int t = threadIdx.x; t < p.num_tokens; t += kNumThreads) {
        int32_t experts[kNumTopk];
        const uint32_t num_bad = load_experts<kNumExperts>(p.topk_idx, p.is_int64, t, experts);
        if (num_bad != 0) atom_add_relaxed_sys(&p.report->num_bad_ids, num_bad);
#pragma unroll
        for (int k = 0; k < kNumTopk; k++) {
            if (experts[k] >= 0) atomicAdd(&s.experts[experts[k]], 1);
        }
    }
    __syncthreads();
    for (int e = threadIdx.x; e < kNumExperts; e += kNumThreads) {  // pairs with the wait below
        uint64_t* counts = counts_of(p, e / kNumLocalExperts, bank, p.rank);
        st_relaxed_sys(counts + e % kNumLocalExperts, tagged(op, static_cast<uint32_t>(s.experts[e])));
    }
    __syncthreads();
    bool is_ok = true;
    for (int i = threadIdx.x; i < kNumExperts; i += kNumThreads) {
        const int src = i / kNumLocalExperts;
        uint32_t count = 0;
        is_ok &= wait_word(op, counts_of(p, p.rank, bank, src) + i % kNumLocalExperts, src, count);
        s.experts[i] = static_cast<int32_t>(count);
    }
    if (block_any(!is_ok)) return false;
    for (int e = threadIdx.x; e < kNumLocalExperts; e += kNumThreads) {
        int32_t num_pairs = 0;
        for (int src = 0; src < kNumRanks; src++) num_pairs += s.experts[src * kNumLocalExperts + e];
        p.expert_counts[e] = num_pairs;
    }
    return true;
}

// The other blocks: the handle's own copy of the routing.
CUEP_DEVICE void copy_routing(const Params& p, int block, int num_blocks) {
    for (int64_t i = block * kNumThreads + threadIdx.x; i < int64_t{p.num_tokens} * kNumTopk;
         i += num_blocks * kNumThreads) {
        p.ids[i] = load_expert<kNumExperts, kNumTopk>(p.topk_idx, p.is_int64, i / kNumTopk, i % kNumTopk);
        p.weights[i] = p.topk_weights == nullptr ? 1.0f : p.topk_weights[i];
    }
}

extern "C" __global__ void __launch_bounds__(kNumThreads, 1) ht_route_ballot(const __grid_constant__ Params p) {
    __shared__ Shared s;
    const int block = blockIdx.x, num_blocks = gridDim.x;
    const Operation op = begin_operation(p, Op::kRoute);
    // two banks are enough: a rank that gets here has seen every peer start its previous routing
    const int bank = static_cast<int>(op.epoch) & (kNumBanks - 1);

    if (block_any(is_broken(op))) return;

    // each block its part; with few blocks the last one has several
    int refused_by = -1;
    if (block == 0) {
        if (!route_tokens(p, op, bank, s, refused_by)) return;
        if (threadIdx.x == 0) {
            p.state->refused = 0;
            p.state->unrouted = refused_by >= 0;
            p.state->refused_by = static_cast<uint32_t>(refused_by);
            if (refused_by >= 0) report_refusal(p, Op::kRoute, Cause::kCall, p.state->refused_by);
        }
        __syncthreads();
    }
    if (block == min(1, num_blocks - 1)) {
        if (!count_experts(p, op, bank, s)) return;
    }
    const int first_copier = min(2, num_blocks - 1);
    if (block >= first_copier) copy_routing(p, block - first_copier, num_blocks - first_copier);

    if (is_last_block(op) && threadIdx.x == 0) end_operation(op);
}
