// Low-latency dispatch, rank-major. As ll_dispatch_direct: a block takes a token, keeps its row in registers and stores
// it once into a slot of every rank that owns one of its experts. Slots of a source are dense and in order of its
// tokens, so a row's place at the receiver is its slot: it waits for no counts, only the block that writes them does.
// Cost: one row over the link, and one local copy, per (token, rank).
// serves: layout=rank_major
#include <cuep/base.cuh>
#include <cuep/sync.cuh>
#include <cuep/operation.cuh>

#ifndef CUEP_JIT  // values for editors; cuep/jit.py gives the real ones
constexpr int kNumRanks = 4, kNumExperts = 256, kNumTopk = 8, kRowBytes = 14336, kNumThreads = 448, kMinBlocks = 1;
#endif
// compile: kNumRanks=4 kNumExperts=256 kNumTopk=8 kRowBytes=14336
// compile: kNumRanks=2 kNumExperts=8 kNumTopk=3 kRowBytes=528
CUEP_TUNABLE(kNumThreads, 448, 64);
CUEP_TUNABLE(kMinBlocks, 1, 1);  // resident on one multiprocessor
#include <cuep/ll_dispatch.cuh>

using namespace cuep;

struct Params {
    uint8_t* arena[kNumRanks];  // symmetric memory of every rank; offsets below are bytes into it
    int64_t rows_offset;     // [num_banks, kNumRanks - 1, max_tokens] rows; source s is at (s - rank - 1) mod kNumRanks
    int64_t headers_offset;  // int2 [num_banks, kNumRanks, max_tokens, kNumTopk]: local expert or -1, weight's bits
    int64_t flags_offset;    // uint64 [num_banks, kNumRanks, max_tokens]: epoch, token
    int64_t counts_offset;   // uint64 [num_banks, kNumRanks, local experts]: epoch, rows
    int64_t totals_offset;   // uint64 [num_banks, kNumRanks]: epoch, slots used or kRefused
    int64_t done_offset;     // uint64 [num_banks, kNumRanks]: epoch that this peer has read
    const uint8_t* x;        // [num_tokens] rows, x_stride bytes apart
    int64_t x_stride;
    const uint8_t* topk_idx;    // [num_tokens, kNumTopk] int32 or int64; the caller's or `ids`
    const float* topk_weights;  // [num_tokens, kNumTopk], null for ones; the caller's or `weights`
    int32_t* ids;               // handle's copy [max_tokens, kNumTopk]
    float* weights;             // handle's copy [max_tokens, kNumTopk]
    int32_t* own_slot;          // [max_tokens]: slot of a token that this rank keeps, or -1
    int32_t* num_rows;          // [kNumRanks]: slots used by each source rank
    int32_t* token_idx;         // [kNumRanks, max_tokens]: token in each slot
    uint8_t* tokens;            // [kNumRanks, max_tokens] rows, tokens_stride bytes apart
    int64_t tokens_stride;
    int32_t* recv_topk_idx;    // [kNumRanks, max_tokens, kNumTopk]: expert here, or -1; -1 in rows beyond the counts
    float* recv_topk_weights;  // [kNumRanks, max_tokens, kNumTopk], 0 where recv_topk_idx is -1 in a received row
    int32_t* expert_counts;    // [local experts]: (row, k) pairs
    int32_t* src_rank_counts;  // [kNumRanks]
    int32_t* source;           // [kNumRanks, max_tokens, 2]: rank, token
    int32_t* total;            // [1]
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
    uint32_t routing;  // number of the routing that is dispatched, modulo 32
    bool is_count_int64;
    bool is_int64;
    bool is_global_ids;  // recv_topk_idx counts experts of all ranks
    bool is_send;        // phases of this launch: both are a whole operation
    bool is_receive;
    bool is_refused;  // publish kRefused instead of sending
};

CUEP_LAUNCH_EARLY(kNumThreads, 0)

struct Shared {
    Outgoing out;
    Counts counts;
    uint32_t token;  // of the row being received; only thread 0 reads it
    int32_t num_pairs[kNumLocalExperts];
};

// What travels beside a row for each k: local expert or -1, and the weight, 0 with -1.
CUEP_DEVICE int2 header_for(const Outgoing& out, int dst, int k) {
    const int32_t expert = local_expert_at(out, dst, k);
    return make_int2(expert, expert < 0 ? 0 : __float_as_int(out.weight[k]));
}

// A row to its place. header: of k = threadIdx.x, where that is below kNumTopk; token: thread 0 knows it.
CUEP_DEVICE void deliver(
    const Params& p, int src, int slot, uint32_t token, int2 header, const uint4 (&row)[kVecsPerThread]) {
    const int tid = threadIdx.x;
    const int64_t at = static_cast<int64_t>(src) * p.max_tokens + slot;
    if (tid < kNumTopk) {
        const int32_t first = p.is_global_ids ? p.rank * kNumLocalExperts : 0;
        p.recv_topk_idx[at * kNumTopk + tid] = header.x < 0 ? -1 : first + header.x;
        p.recv_topk_weights[at * kNumTopk + tid] = __int_as_float(header.y);
    }
    if (tid == 0) {
        p.token_idx[at] = static_cast<int32_t>(token);
        p.source[at * 2] = src;
        p.source[at * 2 + 1] = static_cast<int32_t>(token);
    }
    uint4* dst = reinterpret_cast<uint4*>(p.tokens + at * p.tokens_stride);
#pragma unroll
    for (int j = 0; j < kVecsPerThread; j++) {
        if (tid + j * kNumThreads < kRowVecs) store_16(dst + tid + j * kNumThreads, row[j]);
    }
}

// A row that lies in this rank's memory, with its header.
CUEP_DEVICE void deliver_from(const Params& p, int bank, int src, int slot, uint32_t token, const uint4* row) {
    const int tid = threadIdx.x;
    uint4 v[kVecsPerThread];
#pragma unroll
    for (int j = 0; j < kVecsPerThread; j++) {
        if (tid + j * kNumThreads < kRowVecs) v[j] = load_16(row + tid + j * kNumThreads);
    }
    int2 header = make_int2(-1, 0);
    if (tid < kNumTopk) header = header_of(p, p.rank, bank, src, slot)[tid];
    deliver(p, src, slot, token, header, v);
}

// Own tokens need no slot and no flag. The one that this launch sent last is still in registers, for the others the
// send has left headers.
CUEP_DEVICE void receive_own(const Params& p, int bank, int num_tokens, int last, const Token& token, Shared& s) {
    const int tid = threadIdx.x;
    if (last >= 0 && (s.out.rank_mask >> p.rank & 1u)) {
        int2 header = make_int2(-1, 0);
        if (tid < kNumTopk) header = header_for(s.out, p.rank, tid);
        deliver(p, p.rank, s.out.slot[p.rank], static_cast<uint32_t>(last), header, token.row);
    }
    for (int t = blockIdx.x; t < num_tokens; t += gridDim.x) {
        const int slot = t == last ? -1 : p.own_slot[t];
        if (slot >= 0) deliver_from(p, bank, p.rank, slot, t, reinterpret_cast<const uint4*>(p.x + t * p.x_stride));
    }
}

// Rows beyond the counts name no expert, whatever an earlier dispatch left there.
CUEP_DEVICE void clear_unused(const Params& p, const Counts& counts) {
    const int64_t end = static_cast<int64_t>(p.max_tokens) * kNumTopk;
    for (int src = 0; src < kNumRanks; src++) {
        int64_t i = static_cast<int64_t>(counts.totals.of[src]) * kNumTopk + blockIdx.x * kNumThreads + threadIdx.x;
        for (; i < end; i += gridDim.x * kNumThreads) {
            p.recv_topk_idx[src * end + i] = -1;
            p.recv_topk_weights[src * end + i] = 0.0f;
        }
    }
}

// What this rank received in all. False: gave up.
CUEP_DEVICE bool write_counts(const Params& p, const Operation& op, int bank, Shared& s) {
    const int tid = threadIdx.x;
    for (int e = tid; e < kNumLocalExperts; e += kNumThreads) s.num_pairs[e] = 0;
    __syncthreads();
    bool is_ok = true;
    for (int i = tid; i < kNumExperts; i += kNumThreads) {
        const int src = i / kNumLocalExperts, e = i % kNumLocalExperts;
        int32_t count = 0;
        is_ok &= wait_count(p, op, bank, src, e, count);
        atomicAdd(&s.num_pairs[e], count);
    }
    if (block_any(!is_ok)) return false;
    for (int e = tid; e < kNumLocalExperts; e += kNumThreads) p.expert_counts[e] = s.num_pairs[e];
    if (tid < kNumRanks) {
        p.num_rows[tid] = static_cast<int32_t>(s.counts.totals.of[tid]);
        p.src_rank_counts[tid] = static_cast<int32_t>(s.counts.totals.of[tid]);
    }
    if (tid == 0) {
        int32_t total = 0;
        for (int r = 0; r < kNumRanks; r++) total += static_cast<int32_t>(s.counts.totals.of[r]);
        *p.total = total;
    }
    return true;
}

// All that this block receives. False: gave up.
CUEP_DEVICE bool receive(
    const Params& p, const Operation& op, int bank, int num_tokens, int last, const Token& token, Shared& s) {
    receive_own(p, bank, num_tokens, last, token, s);
    if constexpr (kNumPeers > 0) {
        const bool is_ok = receive_rows(p, op, bank, s.counts, s.token, [&](int src, int slot) {
            const uint32_t token = threadIdx.x == 0 ? s.token : 0;
            deliver_from(p, bank, src, slot, token, staged_row(p, p.rank, bank, src, slot));
        });
        if (!is_ok) return false;
    }
    clear_unused(p, s.counts);
    return !is_clerk() || write_counts(p, op, bank, s);
}

extern "C" __global__ void __launch_bounds__(kNumThreads, kMinBlocks)
    ll_dispatch_rank(const __grid_constant__ Params p) {
    __shared__ Shared s;
    dispatch<false>(
        p,
        p.max_tokens * kNumTopk,
        s.out,
        s.counts,
        [&](int bank, int dst, int k) {
            header_of(p, dst, bank, p.rank, s.out.slot[dst])[k] = header_for(s.out, dst, k);
        },
        [&](const Operation& op, int bank, int num_tokens, int last, const Token& token) {
            return receive(p, op, bank, num_tokens, last, token, s);
        });
}
