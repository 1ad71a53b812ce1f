// Low-latency dispatch, expert-major. A block takes a token, keeps its row in registers and stores it once into every
// rank that owns one of its experts; the slot's flag carries the epoch and the token. One block publishes how many rows
// each expert gets from this rank. The receiver adds up the counts of lower ranks, so each row has its final place
// without atomics: rows of an expert are in order of source rank, token, k. Cost: one row over the link per (token,
// rank) instead of per (token, expert), and one local copy per (token, expert).
#include <cuep/base.cuh>
#include <cuep/sync.cuh>
#include <cuep/operation.cuh>
#include <cuep/topk.cuh>

#ifndef CUEP_JIT  // values for editors; cuep/jit.py gives the real ones
constexpr int kNumRanks = 4, kNumExperts = 256, kNumTopk = 8, kRowBytes = 14336, kNumThreads = 448;
#endif
// compile: kNumRanks=4 kNumExperts=256 kNumTopk=8 kRowBytes=14336
// compile: kNumRanks=2 kNumExperts=8 kNumTopk=3 kRowBytes=528
CUEP_TUNABLE(kNumThreads, 448, 64);

using namespace cuep;

struct Params {
    uint8_t* arena[kNumRanks];  // symmetric memory of every rank; offsets below are bytes into it
    int64_t rows_offset;     // [num_banks, kNumRanks - 1, max_tokens] rows; source s is at (s - rank - 1) mod kNumRanks
    int64_t headers_offset;  // int2 [num_banks, kNumRanks, max_tokens, kNumTopk]: local expert or -1, place
    int64_t flags_offset;    // uint64 [num_banks, kNumRanks, max_tokens]: epoch, token
    int64_t counts_offset;   // uint64 [num_banks, kNumRanks, local experts]: epoch, rows
    int64_t totals_offset;   // uint64 [num_banks, kNumRanks]: epoch, slots used or kRefused
    int64_t done_offset;     // uint64 [kNumRanks]: epoch that this peer has read
    const uint8_t* x;        // [num_tokens] rows, x_stride bytes apart
    int64_t x_stride;
    const uint8_t* topk_idx;    // [num_tokens, kNumTopk] int32 or int64
    const float* topk_weights;  // [num_tokens, kNumTopk] or null
    int32_t* ids;               // handle's copy [max_tokens, kNumTopk]
    float* weights;             // handle's copy [max_tokens, kNumTopk]
    int32_t* own_slot;          // [max_tokens]: slot of a token that this rank keeps, or -1
    int32_t* num_rows;          // [kNumRanks]: slots used by each source rank
    int32_t* token_idx;         // [kNumRanks, max_tokens]: token in each slot
    int32_t* row_idx;           // [kNumRanks, max_tokens, kNumTopk]: row of `tokens`, or -1
    uint8_t* tokens;            // [local experts, kNumRanks * max_tokens] rows
    int32_t* expert_counts;     // [local experts]
    int32_t* src_rank_counts;   // [local experts, kNumRanks]
    int32_t* source;            // [local experts, kNumRanks * max_tokens, 3]: rank, token, k
    int32_t* total;             // [1]
    HandleState* state;
    Control* control;
    Report* report;
    int64_t timeout_ns;
    int32_t num_tokens;
    int32_t max_tokens;
    int32_t rank;
    int32_t num_banks;  // a power of two
    uint32_t handle;
    bool is_int64;
    bool is_refused;  // publish kRefused instead of sending
};

constexpr int kNumLocalExperts = kNumExperts / kNumRanks;
constexpr int kNumPeers = kNumRanks - 1;
constexpr int kRowVecs = kRowBytes / 16;
constexpr int kVecsPerThread = (kRowVecs + kNumThreads - 1) / kNumThreads;
CUEP_LAUNCH(kNumThreads, 0)

struct Shared {
    int32_t place[kNumTopk];       // of the token being sent, among this rank's rows of each of its experts
    int32_t slot[kNumRanks];       // of the token being sent, among this rank's rows to each rank
    int32_t experts[kNumExperts];  // sender: rows per expert; receiver: first row per (local expert, source)
    int32_t num_rows[kNumRanks];   // sender: rows per rank; receiver: slots used per source
    int32_t dst_row[kNumTopk];     // of the row being delivered
    uint32_t token;                // of the row being delivered
    int32_t total;
};

CUEP_DEVICE int32_t expert_at(const Params& p, int64_t token, int k) {
    bool is_bad = false;
    return load_expert<kNumExperts, kNumTopk>(p.topk_idx, p.is_int64, token, k, is_bad);
}

CUEP_DEVICE int64_t slot_at(const Params& p, int bank, int src, int64_t slot) {
    return (static_cast<int64_t>(bank) * kNumRanks + src) * p.max_tokens + slot;
}

// Row of a slot in dst's arena; a rank has no slots for its own rows.
CUEP_DEVICE uint4* staged_row(const Params& p, int dst, int bank, int src, int64_t slot) {
    const int peer = (src - dst - 1 + kNumRanks) % kNumRanks;
    const int64_t at = (static_cast<int64_t>(bank) * kNumPeers + peer) * p.max_tokens + slot;
    return reinterpret_cast<uint4*>(p.arena[dst] + p.rows_offset + at * kRowBytes);
}

CUEP_DEVICE int2* header_of(const Params& p, int dst, int bank, int src, int64_t slot) {
    return reinterpret_cast<int2*>(p.arena[dst] + p.headers_offset) + slot_at(p, bank, src, slot) * kNumTopk;
}

CUEP_DEVICE uint64_t* flag_of(const Params& p, int dst, int bank, int src, int64_t slot) {
    return reinterpret_cast<uint64_t*>(p.arena[dst] + p.flags_offset) + slot_at(p, bank, src, slot);
}

CUEP_DEVICE uint64_t* counts_of(const Params& p, int dst, int bank, int src) {
    return reinterpret_cast<uint64_t*>(p.arena[dst] + p.counts_offset) + (bank * kNumRanks + src) * kNumLocalExperts;
}

CUEP_DEVICE uint64_t* total_of(const Params& p, int dst, int bank, int src) {
    return reinterpret_cast<uint64_t*>(p.arena[dst] + p.totals_offset) + bank * kNumRanks + src;
}

CUEP_DEVICE uint64_t* done_of(const Params& p, int dst, int reader) {
    return reinterpret_cast<uint64_t*>(p.arena[dst] + p.done_offset) + reader;
}

// How many rows every expert gets from this rank, and every rank; zero tokens and refused calls publish too.
CUEP_DEVICE void publish_counts(const Params& p, const Operation& op, int bank, Shared& s) {
    const int tid = threadIdx.x;
    for (int e = tid; e < kNumExperts; e += kNumThreads) s.experts[e] = 0;
    if (tid < kNumRanks) s.num_rows[tid] = 0;
    __syncthreads();
    bool is_bad = false;
    for (int first = 0; first < p.num_tokens; first += kNumThreads) {
        const int t = first + tid;
        uint32_t rank_mask = 0;
        if (t < p.num_tokens) {
#pragma unroll
            for (int k = 0; k < kNumTopk; k++) {
                bool is_bad_id = false;
                const int e = load_expert<kNumExperts, kNumTopk>(p.topk_idx, p.is_int64, t, k, is_bad_id);
                if (is_bad_id) atom_add_relaxed_sys(&p.report->num_bad_ids, 1u);
                if (e >= 0) {
                    atomicAdd(&s.experts[e], 1);
                    rank_mask |= 1u << (e / kNumLocalExperts);
                }
            }
        }
        count_ranks<kNumRanks>(rank_mask, s.num_rows);
    }
    __syncthreads();
    for (int e = tid; e < kNumExperts; e += kNumThreads) {  // pairs with wait_counts
        uint64_t* counts = counts_of(p, e / kNumLocalExperts, bank, p.rank);
        st_relaxed_sys(counts + e % kNumLocalExperts, tagged(op, static_cast<uint32_t>(s.experts[e])));
    }
    if (tid < kNumRanks) {  // pairs with wait_counts
        const uint32_t total = p.is_refused ? kRefused : static_cast<uint32_t>(s.num_rows[tid]);
        st_relaxed_sys(total_of(p, tid, bank, p.rank), tagged(op, total));
    }
    __syncthreads();
}

// Places of token t: rows of the same expert, and to the same rank, that come before it on this rank.
CUEP_DEVICE void find_places(const Params& p, int t, const int32_t (&ids)[kNumTopk], Shared& s) {
    const int tid = threadIdx.x;
    for (int first = 0; first <= t; first += kNumThreads) {
        const int i = first + tid;
        uint32_t rank_mask = 0;
        if (i <= t) {
#pragma unroll
            for (int q = 0; q < kNumTopk; q++) {
                const int e = expert_at(p, i, q);
                if (e < 0) continue;
                if (i < t) rank_mask |= 1u << (e / kNumLocalExperts);
#pragma unroll
                for (int k = 0; k < kNumTopk; k++) {
                    if (e == ids[k] && (i < t || q < k)) atomicAdd(&s.place[k], 1);
                }
            }
        }
        count_ranks<kNumRanks>(rank_mask, s.slot);
    }
}

CUEP_DEVICE void send_token(const Params& p, const Operation& op, int bank, int t, Shared& s) {
    const int tid = threadIdx.x;
    const uint4* row = reinterpret_cast<const uint4*>(p.x + t * p.x_stride);
    uint4 v[kVecsPerThread];
#pragma unroll
    for (int j = 0; j < kVecsPerThread; j++) {
        if (tid + j * kNumThreads < kRowVecs) v[j] = load_streaming(row + tid + j * kNumThreads);
    }
    int32_t ids[kNumTopk];
    uint32_t rank_mask = 0;
#pragma unroll
    for (int k = 0; k < kNumTopk; k++) {
        ids[k] = expert_at(p, t, k);
        if (ids[k] >= 0) rank_mask |= 1u << (ids[k] / kNumLocalExperts);
    }
    if (tid < kNumTopk) s.place[tid] = 0;
    if (tid < kNumRanks) s.slot[tid] = 0;
    __syncthreads();
    find_places(p, t, ids, s);
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kNumPeers; i++) {
        const int dst = (p.rank + 1 + i) % kNumRanks;
        if (rank_mask >> dst & 1u) {
            uint4* staged = staged_row(p, dst, bank, p.rank, s.slot[dst]);
#pragma unroll
            for (int j = 0; j < kVecsPerThread; j++) {
                if (tid + j * kNumThreads < kRowVecs) store_16(staged + tid + j * kNumThreads, v[j]);
            }
        }
    }
    for (int i = tid; i < kNumRanks * kNumTopk; i += kNumThreads) {
        const int dst = i / kNumTopk, k = i % kNumTopk;
        if (rank_mask >> dst & 1u) {
            const int e = expert_at(p, t, k);
            const bool is_there = e >= 0 && e / kNumLocalExperts == dst;
            header_of(p, dst, bank, p.rank, s.slot[dst])[k] =
                make_int2(is_there ? e % kNumLocalExperts : -1, s.place[k]);
        }
    }
    if (tid == 0) p.own_slot[t] = rank_mask >> p.rank & 1u ? s.slot[p.rank] : -1;
    if (tid < kNumTopk && p.topk_idx != reinterpret_cast<const uint8_t*>(p.ids)) {
        p.ids[t * kNumTopk + tid] = expert_at(p, t, tid);
        p.weights[t * kNumTopk + tid] = p.topk_weights == nullptr ? 1.0f : p.topk_weights[t * kNumTopk + tid];
    }
    __syncthreads();
    if (tid < kNumRanks && tid != p.rank && (rank_mask >> tid & 1u)) {  // pairs with the wait in receive_rows
        st_release_sys(flag_of(p, tid, bank, p.rank, s.slot[tid]), tagged(op, static_cast<uint32_t>(t)));
    }
}

// Waits for every rank's counts and turns them into the first row of each (local expert, source). False: gave up.
CUEP_DEVICE bool wait_counts(const Params& p, const Operation& op, int bank, Shared& s) {
    const int tid = threadIdx.x;
    bool is_ok = true;
    for (int i = tid; i < kNumExperts; i += kNumThreads) {
        const int src = i / kNumLocalExperts, e = i % kNumLocalExperts;
        uint32_t count = 0;
        is_ok &= wait_tagged(op, counts_of(p, p.rank, bank, src) + e, Phase::kCounts, src, count);
        s.experts[e * kNumRanks + src] = static_cast<int32_t>(count);
    }
    if (tid < kNumRanks) {
        uint32_t total = 0;
        is_ok &= wait_tagged(op, total_of(p, p.rank, bank, tid), Phase::kCounts, tid, total);
        s.num_rows[tid] = static_cast<int32_t>(total);
    }
    if (tid == 0) s.total = 0;
    if (block_any(!is_ok)) return false;
    const bool is_writer = blockIdx.x == 0;
    for (int e = tid; e < kNumLocalExperts; e += kNumThreads) {
        int32_t first_row = 0;
        for (int src = 0; src < kNumRanks; src++) {
            const int32_t count = s.experts[e * kNumRanks + src];
            if (is_writer) p.src_rank_counts[e * kNumRanks + src] = count;
            s.experts[e * kNumRanks + src] = first_row;
            first_row += count;
        }
        if (is_writer) {
            p.expert_counts[e] = first_row;
            atomicAdd(&s.total, first_row);
        }
    }
    __syncthreads();
    if (is_writer && tid < kNumRanks) p.num_rows[tid] = s.num_rows[tid];
    if (is_writer && tid == 0) *p.total = s.total;
    return true;
}

CUEP_DEVICE int refusing_rank(const Shared& s) {
    for (int r = 0; r < kNumRanks; r++) {
        if (static_cast<uint32_t>(s.num_rows[r]) == kRefused) return r;
    }
    return -1;
}

// Copies one received row to all its experts here.
CUEP_DEVICE void deliver(const Params& p, int bank, int src, int slot, uint32_t token, const uint4* row, Shared& s) {
    const int tid = threadIdx.x;
    uint4 v[kVecsPerThread];
#pragma unroll
    for (int j = 0; j < kVecsPerThread; j++) {
        if (tid + j * kNumThreads < kRowVecs) v[j] = load_16(row + tid + j * kNumThreads);
    }
    const int64_t at = static_cast<int64_t>(src) * p.max_tokens + slot;
    if (tid < kNumTopk) {
        const int2 header = header_of(p, p.rank, bank, src, slot)[tid];
        int32_t dst_row = -1;
        if (header.x >= 0) {
            dst_row = header.x * kNumRanks * p.max_tokens + s.experts[header.x * kNumRanks + src] + header.y;
            int32_t* source = p.source + static_cast<int64_t>(dst_row) * 3;
            source[0] = src;
            source[1] = static_cast<int32_t>(token);
            source[2] = tid;
        }
        s.dst_row[tid] = dst_row;
        p.row_idx[at * kNumTopk + tid] = dst_row;
    }
    if (tid == 0) p.token_idx[at] = static_cast<int32_t>(token);
    __syncthreads();
    for (int k = 0; k < kNumTopk; k++) {
        if (s.dst_row[k] < 0) continue;
        uint4* dst = reinterpret_cast<uint4*>(p.tokens + static_cast<int64_t>(s.dst_row[k]) * kRowBytes);
#pragma unroll
        for (int j = 0; j < kVecsPerThread; j++) {
            if (tid + j * kNumThreads < kRowVecs) store_16(dst + tid + j * kNumThreads, v[j]);
        }
    }
    __syncthreads();
}

// Own tokens need no slot and no flag: this block wrote their headers itself.
CUEP_DEVICE void receive_own(const Params& p, int bank, Shared& s) {
    for (int t = blockIdx.x; t < p.num_tokens; t += gridDim.x) {
        const int slot = p.own_slot[t];
        if (slot < 0) continue;
        const uint4* row = reinterpret_cast<const uint4*>(p.x + t * p.x_stride);
        deliver(p, bank, p.rank, slot, static_cast<uint32_t>(t), row, s);
    }
}

// Rows of all peers, low slots first, as they arrive.
CUEP_DEVICE bool receive_rows(const Params& p, const Operation& op, int bank, Shared& s) {
    int most = 0;
    for (int r = 0; r < kNumRanks; r++) {
        if (r != p.rank) most = max(most, s.num_rows[r]);
    }
    for (int u = blockIdx.x; u < most * kNumPeers; u += gridDim.x) {
        const int src = (p.rank + 1 + u % kNumPeers) % kNumRanks, slot = u / kNumPeers;
        if (slot >= s.num_rows[src]) continue;
        bool is_ok = true;
        if (threadIdx.x == 0) {
            is_ok = wait_tagged(op, flag_of(p, p.rank, bank, src, slot), Phase::kRows, src, s.token);
        }
        if (block_any(!is_ok)) return false;
        deliver(p, bank, src, slot, s.token, staged_row(p, p.rank, bank, src, slot), s);
    }
    return true;
}

extern "C" __global__ void __launch_bounds__(kNumThreads, 1) ll_dispatch_direct(const __grid_constant__ Params p) {
    __shared__ Shared s;
    const int tid = threadIdx.x;
    const Operation op = begin_operation(p.control, p.report, p.timeout_ns, Op::kDispatch);
    const int bank = static_cast<int>(op.epoch) & (p.num_banks - 1);

    // the bank must have been read by every peer before it is written again
    bool is_ok = true;
    if (tid < kNumRanks && tid != p.rank) is_ok = wait_bank_free(op, done_of(p, p.rank, tid), p.num_banks, tid);
    if (block_any(!is_ok)) return;

    // send all that this block owes before it waits for rows
    if (blockIdx.x == gridDim.x - 1) publish_counts(p, op, bank, s);
    for (int t = blockIdx.x; t < p.num_tokens; t += gridDim.x) send_token(p, op, bank, t, s);
    __syncthreads();

    // receive
    if (!wait_counts(p, op, bank, s)) return;
    const int refused_by = p.is_refused ? p.rank : refusing_rank(s);
    if (refused_by < 0) {
        receive_own(p, bank, s);
        if constexpr (kNumPeers > 0) {
            if (!receive_rows(p, op, bank, s)) return;
        }
    }

    // done: peers may write this bank again (pairs with wait_bank_free)
    if (!is_last_block(op)) return;
    if (tid < kNumRanks && tid != p.rank) st_release_sys(done_of(p, tid, p.rank), tagged(op, 0));
    if (tid == 0) {
        p.state->refused = refused_by >= 0;
        p.state->refused_by = static_cast<uint32_t>(refused_by);
        if (refused_by >= 0) report_refusal(p.report, Op::kDispatch, refused_by, p.handle);
        end_operation(op);
    }
}
