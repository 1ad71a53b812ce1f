// Low-latency dispatch, expert-major. A block takes a token, keeps its row in registers and stores it once into every
// rank that owns one of its experts; the slot's flag carries the epoch and the token. One block publishes how many rows
// each expert gets from this rank. The receiver adds up the counts of lower ranks, so each row has its final place
// without atomics: rows of an expert are in order of source rank, token, k. Cost: one row over the link per (token,
// rank) instead of per (token, expert), and one local copy per (token, expert).
// serves: layout=expert_major
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
    int64_t headers_offset;  // int2 [num_banks, kNumRanks, max_tokens, kNumTopk]: local expert or -1, place
    int64_t weights_offset;  // float [num_banks, kNumRanks, max_tokens, kNumTopk], where recv_weights is not null
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
    int32_t* row_idx;           // [kNumRanks, max_tokens, kNumTopk]: row of `tokens`, or -1
    float* recv_weights;        // [kNumRanks, max_tokens, kNumTopk] or null: weights of the received rows
    uint8_t* tokens;            // [local experts, kNumRanks * max_tokens] rows, tokens_stride bytes apart
    int64_t tokens_stride;
    int32_t* expert_counts;    // [local experts]
    int32_t* src_rank_counts;  // [local experts, kNumRanks]
    int32_t* source;           // [local experts, kNumRanks * max_tokens, 3]: rank, token, k
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
    bool is_send;  // phases of this launch: both are a whole operation
    bool is_receive;
    bool is_refused;  // publish kRefused instead of sending
};

CUEP_LAUNCH_EARLY(kNumThreads, 0)

struct Shared {
    Outgoing out;
    Counts counts;
    int32_t dst_row[kNumTopk];  // of the row being delivered
    uint32_t token;             // of the row being received
    int32_t total;              // rows of all experts
};

// What travels beside a row for each k, and stays with this rank for its own.
struct Header {
    int2 place;    // local expert or -1, place among the source's rows of it
    float weight;  // where recv_weights is not null
};

CUEP_DEVICE float* weight_of(const Params& p, int dst, int bank, int src, int64_t slot) {
    return reinterpret_cast<float*>(p.arena[dst] + p.weights_offset) + slot_at(p, bank, src, slot) * kNumTopk;
}

// What this rank received in all.
CUEP_DEVICE void write_counts(const Params& p, Shared& s) {
    const int tid = threadIdx.x;
    if (tid == 0) s.total = 0;
    __syncthreads();
    for (int e = tid; e < kNumLocalExperts; e += kNumThreads) {
        int32_t num_rows = 0;
        for (int src = 0; src < kNumRanks; src++) {
            const int32_t count = s.counts.experts[e * kNumRanks + src];
            p.src_rank_counts[e * kNumRanks + src] = count;
            num_rows += count;
        }
        p.expert_counts[e] = num_rows;
        atomicAdd(&s.total, num_rows);
    }
    __syncthreads();
    if (tid < kNumRanks) p.num_rows[tid] = static_cast<int32_t>(s.counts.totals.of[tid]);
    if (tid == 0) *p.total = s.total;
}

// First row of an expert here that comes from src.
CUEP_DEVICE int32_t first_row(const Params& p, int32_t local_expert, int src, const Counts& counts) {
    int32_t row = local_expert * kNumRanks * p.max_tokens;
    for (int lower = 0; lower < src; lower++) row += counts.experts[local_expert * kNumRanks + lower];
    return row;
}

// Copies a received row to all its experts here. header: of k = threadIdx.x, where that is below kNumTopk.
CUEP_DEVICE void deliver(const Params& p,
                         int src,
                         int slot,
                         uint32_t token,
                         const Header& header,
                         const uint4 (&row)[kVecsPerThread],
                         Shared& s) {
    const int tid = threadIdx.x;
    const int64_t at = static_cast<int64_t>(src) * p.max_tokens + slot;
    if (tid < kNumTopk) {
        const int32_t expert = header.place.x;
        int32_t dst_row = -1;
        if (expert >= 0) {
            dst_row = first_row(p, expert, src, s.counts) + header.place.y;
            int32_t* source = p.source + static_cast<int64_t>(dst_row) * 3;
            source[0] = src;
            source[1] = static_cast<int32_t>(token);
            source[2] = tid;
        }
        s.dst_row[tid] = dst_row;
        p.row_idx[at * kNumTopk + tid] = dst_row;
        if (p.recv_weights != nullptr) p.recv_weights[at * kNumTopk + tid] = header.weight;
    }
    if (tid == 0) p.token_idx[at] = static_cast<int32_t>(token);
    __syncthreads();
#pragma unroll 1
    for (int k = 0; k < kNumTopk; k++) {
        if (s.dst_row[k] < 0) continue;
        uint4* dst = reinterpret_cast<uint4*>(p.tokens + s.dst_row[k] * p.tokens_stride);
#pragma unroll
        for (int j = 0; j < kVecsPerThread; j++) {
            if (tid + j * kNumThreads < kRowVecs) store_16(dst + tid + j * kNumThreads, row[j]);
        }
    }
}

// A row that lies in this rank's memory, with its header.
CUEP_DEVICE void deliver_from(
    const Params& p, int bank, int src, int slot, uint32_t token, const uint4* row, Shared& s) {
    const int tid = threadIdx.x;
    uint4 v[kVecsPerThread];
#pragma unroll
    for (int j = 0; j < kVecsPerThread; j++) {
        if (tid + j * kNumThreads < kRowVecs) v[j] = load_16(row + tid + j * kNumThreads);
    }
    Header header{make_int2(-1, 0), 0.0f};
    if (tid < kNumTopk) {
        header.place = header_of(p, p.rank, bank, src, slot)[tid];
        if (p.recv_weights != nullptr) header.weight = weight_of(p, p.rank, bank, src, slot)[tid];
    }
    deliver(p, src, slot, token, header, v, s);
}

// Own tokens need no slot and no flag. The one that this launch sent last is still in registers, for the others the
// send has left headers.
CUEP_DEVICE void receive_own(const Params& p, int bank, int num_tokens, int last, const Token& token, Shared& s) {
    const int tid = threadIdx.x;
    if (last >= 0 && (s.out.rank_mask >> p.rank & 1u)) {
        Header header{make_int2(-1, 0), 0.0f};
        if (tid < kNumTopk)
            header = {make_int2(local_expert_at(s.out, p.rank, tid), s.out.place[tid]), s.out.weight[tid]};
        deliver(p, p.rank, s.out.slot[p.rank], static_cast<uint32_t>(last), header, token.row, s);
    }
    for (int t = blockIdx.x; t < num_tokens; t += gridDim.x) {
        const int slot = t == last ? -1 : p.own_slot[t];
        if (slot < 0) continue;
        __syncthreads();  // the row before this one has been delivered
        deliver_from(p, bank, p.rank, slot, t, reinterpret_cast<const uint4*>(p.x + t * p.x_stride), s);
    }
}

// All that this block receives. False: gave up.
CUEP_DEVICE bool receive(
    const Params& p, const Operation& op, int bank, int num_tokens, int last, const Token& token, Shared& s) {
    receive_own(p, bank, num_tokens, last, token, s);
    if constexpr (kNumPeers > 0) {
        const bool is_ok = receive_rows(p, op, bank, s.counts, s.token, [&](int src, int slot) {
            deliver_from(p, bank, src, slot, s.token, staged_row(p, p.rank, bank, src, slot), s);
        });
        if (!is_ok) return false;
    }
    if (is_clerk()) write_counts(p, s);
    return true;
}

extern "C" __global__ void __launch_bounds__(kNumThreads, kMinBlocks)
    ll_dispatch_direct(const __grid_constant__ Params p) {
    __shared__ Shared s;
    dispatch<true>(
        p,
        p.max_tokens,
        s.out,
        s.counts,
        [&](int bank, int dst, int k) {
            const int64_t slot = s.out.slot[dst];
            header_of(p, dst, bank, p.rank, slot)[k] = make_int2(local_expert_at(s.out, dst, k), s.out.place[k]);
            if (p.recv_weights != nullptr) weight_of(p, dst, bank, p.rank, slot)[k] = s.out.weight[k];
        },
        [&](const Operation& op, int bank, int num_tokens, int last, const Token& token) {
            return receive(p, op, bank, num_tokens, last, token, s);
        });
}
