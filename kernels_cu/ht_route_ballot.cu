// serves: layout=flat
// High-throughput routing. One block counts, 32 tokens of a warp at a time with one ballot per rank, how many tokens go
// to each rank; ranks exchange the matrix of counts; a prefix sum over it gives every (token, rank) the final row that
// it will have there. No atomics decide an order: rows are in order of source rank, then token. A second block counts
// and exchanges the pairs of each expert, the others copy the routing into the handle. Cost: two passes over topk_idx
// in one block, beside them the copy, and one exchange of small words. All ranks see in the matrix which rank would
// receive more rows than it has: then the routing is refused, or rows behind the last one are left out.
#include <cuep/base.cuh>
#include <cuep/sync.cuh>
#include <cuep/operation.cuh>
#include <cuep/topk.cuh>
#include <cuep/ht_route.cuh>

#ifndef CUEP_JIT  // values for editors; cuep/jit.py gives the real ones
constexpr int kNumRanks = 4, kNumExperts = 256, kNumTopk = 8, kNumThreads = 1024;
#endif
// compile: kNumRanks=4 kNumExperts=256 kNumTopk=8
// compile: kNumRanks=2 kNumExperts=8 kNumTopk=3
CUEP_TUNABLE(kNumThreads, 1024, 64);

using namespace cuep;

struct Params {
    uint8_t* arena[kNumRanks];  // symmetric memory of every rank; offsets below are bytes into it
    int64_t
        matrix_offset;  // uint64 [kRouteBanks, kNumRanks (source), kNumRanks (destination)]: epoch, rows or kRefused
    int64_t counts_offset;      // uint64 [kRouteBanks, kNumRanks (source), local experts]: epoch, (token, k) pairs
    const uint8_t* topk_idx;    // [num_tokens, kNumTopk] int32 or int64
    const float* topk_weights;  // [num_tokens, kNumTopk] or null
    int32_t* ids;               // handle's copy [max_tokens, kNumTopk]
    float* weights;             // handle's copy [max_tokens, kNumTopk]
    int32_t* rows;              // [max_tokens, kNumRanks]: row of a token at each rank, or -1: none, or left out
    int32_t* send_base;         // [kNumRanks]: first row of this rank's tokens at each rank
    int32_t* recv_base;         // [kNumRanks + 1]: first row here of each source rank; last: rows that are received
    int32_t* src_rank_counts;   // [kNumRanks]: rows that are received
    int32_t* expert_counts;     // [local experts]: pairs of rows that are received
    int32_t* total;             // [1]: rows for this rank, also those that are left out
    HandleState* state;
    Control* control;
    Report* report;
    int64_t timeout_ns;
    const uint8_t* num_tokens_at;  // null, or where the device has the number of tokens
    int32_t num_tokens;            // rows of topk_idx
    int32_t max_rows;              // that a rank can receive
    int32_t rank;
    uint32_t handle;
    uint32_t ticket;
    bool is_count_int64;
    bool is_int64;
    bool is_drop;     // rows beyond max_rows are left out; otherwise the routing is refused
    bool is_refused;  // publish kRefused instead of counts
};

constexpr int kNumLocalExperts = kNumExperts / kNumRanks;
using Places = Matrix<kNumRanks, kNumLocalExperts, kNumTopk, kNumThreads>;
CUEP_LAUNCH(kNumThreads, 0)

struct Shared {
    Places places;
    int32_t experts[kNumExperts];  // pairs of this rank per expert, then those of each (source, local expert)
};

CUEP_DEVICE uint64_t* counts_of(const Params& p, int dst, int bank, int src) {
    return reinterpret_cast<uint64_t*>(p.arena[dst] + p.counts_offset) + (bank * kNumRanks + src) * kNumLocalExperts;
}

CUEP_DEVICE Outcome judge(const Params& p, const Brought& own, const Places& places) {
    int full_rank = -1;
    int32_t num_needed = 0;
    for (int r = 0; r < kNumRanks && full_rank < 0; r++) {
        num_needed = places.rows_before(kNumRanks, r);
        if (num_needed > p.max_rows) full_rank = r;
    }
    return judge_routing(p, own, places.refusing_rank(), full_rank, num_needed);
}

CUEP_DEVICE void write_counts(const Params& p, const Places& places) {
    const int src = threadIdx.x;
    if (src == 0) *p.total = places.rows_before(kNumRanks, p.rank);
    if (src >= kNumRanks) return;
    const int32_t first = places.rows_before(src, p.rank), last = places.rows_before(src + 1, p.rank);
    p.src_rank_counts[src] = min(last, p.max_rows) - min(first, p.max_rows);
}

// (token, k) pairs of every local expert, from all ranks. kIsCut: only pairs of rows that are received, which this
// block has placed. False: gave up.
template <bool kIsCut>
CUEP_DEVICE bool count_experts(const Params& p, const Operation& op, int num_tokens, Shared& s) {
    for (int e = threadIdx.x; e < kNumExperts; e += kNumThreads) s.experts[e] = 0;
    __syncthreads();
    for (int t = threadIdx.x; t < num_tokens; t += kNumThreads) {
        int32_t experts[kNumTopk];
        const uint32_t num_bad = load_experts<kNumExperts>(p.topk_idx, p.is_int64, t, experts);
        if (num_bad != 0) atom_add_relaxed_sys(&p.report->num_bad_ids, num_bad);
#pragma unroll
        for (int k = 0; k < kNumTopk; k++) {
            const int e = experts[k];
            if (e < 0) continue;
            if (kIsCut && p.rows[static_cast<int64_t>(t) * kNumRanks + e / kNumLocalExperts] < 0) continue;
            atomicAdd(&s.experts[e], 1);
        }
    }
    __syncthreads();
    for (int e = threadIdx.x; e < kNumExperts; e += kNumThreads) {  // pairs with the wait below
        uint64_t* counts = counts_of(p, e / kNumLocalExperts, bank_of(op), p.rank);
        st_relaxed_sys(counts + e % kNumLocalExperts, tagged(op, static_cast<uint32_t>(s.experts[e])));
    }
    __syncthreads();
    bool is_ok = true;
    for (int i = threadIdx.x; i < kNumExperts; i += kNumThreads) {
        const int src = i / kNumLocalExperts;
        uint32_t count = 0;
        is_ok &= wait_word(op, counts_of(p, p.rank, bank_of(op), src) + i % kNumLocalExperts, src, count);
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

extern "C" __global__ void __launch_bounds__(kNumThreads, 1) ht_route_ballot(const __grid_constant__ Params p) {
    __shared__ Shared s;
    const int block = blockIdx.x, num_blocks = gridDim.x;
    const Operation op = begin_operation(p, Op::kRoute);
    if (block_any(is_broken(op))) return;
    const Brought own = brought_tokens(p);

    // each block its part; with few blocks the last one has several
    bool is_cut = false;
    if (block == 0) {
        if (!s.places.exchange(p, op, own)) return;
        const Outcome outcome = judge(p, own, s.places);
        if (outcome.refused_by < 0) {
            s.places.write_bases(p, p.max_rows);
            write_counts(p, s.places);
            s.places.place(p, own.num_tokens, p.max_rows);
        }
        if (threadIdx.x == 0) write_state(p, own, outcome);
        is_cut = outcome.is_cut;
        __syncthreads();  // all rows are placed: those that are left out are not counted
        if (is_cut && !count_experts<true>(p, op, own.num_tokens, s)) return;
    }
    if (block == min(1, num_blocks - 1)) {
        if (p.is_drop && block != 0) {  // whether the first block has to count
            if (!s.places.wait(p, op)) return;
            is_cut = judge(p, own, s.places).is_cut;
        }
        if (!is_cut && !count_experts<false>(p, op, own.num_tokens, s)) return;
    }
    const int first_copier = min(2, num_blocks - 1);
    if (block >= first_copier) {
        copy_routing<kNumExperts, kNumTopk, kNumThreads>(
            p, own.num_tokens, block - first_copier, num_blocks - first_copier);
    }

    if (is_last_block(op) && threadIdx.x == 0) end_kernel(op);
}
