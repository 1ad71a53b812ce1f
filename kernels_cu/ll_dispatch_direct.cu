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
constexpr int kNumRanks = 4, kNumExperts = 256, kNumTopk = 8, kRowBytes = 14336, kNumThreads = 448, kMinBlocks = 1;
#endif
// compile: kNumRanks=4 kNumExperts=256 kNumTopk=8 kRowBytes=14336
// compile: kNumRanks=2 kNumExperts=8 kNumTopk=3 kRowBytes=528
CUEP_TUNABLE(kNumThreads, 448, 64);
CUEP_TUNABLE(kMinBlocks, 1, 1);  // resident on one multiprocessor

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
    uint32_t ticket;
    bool is_int64;
    bool is_refused;  // publish kRefused instead of sending
};

constexpr int kNumLocalExperts = kNumExperts / kNumRanks;
constexpr int kNumPeers = kNumRanks - 1;
constexpr int kRowVecs = kRowBytes / 16;
constexpr int kVecsPerThread = (kRowVecs + kNumThreads - 1) / kNumThreads;
static_assert(kNumThreads >= kNumRanks && kNumThreads >= kNumTopk, "one thread for each rank, and for each k");
CUEP_LAUNCH(kNumThreads, 0)

struct Shared {
    int32_t expert[kNumTopk];      // of the token being sent
    int32_t place[kNumTopk];       // of the token being sent, among this rank's rows of each of its experts
    int32_t slot[kNumRanks];       // of the token being sent, among this rank's rows to each rank
    int32_t experts[kNumExperts];  // sender: rows per expert; receiver: first row per (local expert, source)
    int32_t num_rows[kNumRanks];   // sender: rows per rank; receiver: slots used per source
    int32_t dst_row[kNumTopk];     // of the row being delivered
    uint32_t token;                // of the row being delivered
    int32_t total;
};

// A token on its way out: its row in registers, and where it goes.
struct Token {
    uint4 row[kVecsPerThread];  // this thread's pieces
    int32_t experts[kNumTopk];
    uint32_t rank_mask;
};

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
    for (int first = 0; first < p.num_tokens; first += kNumThreads) {
        const int t = first + tid;
        uint32_t rank_mask = 0;
        if (t < p.num_tokens) {
            int32_t experts[kNumTopk];
            const uint32_t num_bad = load_experts<kNumExperts>(p.topk_idx, p.is_int64, t, experts);
            if (num_bad != 0) atom_add_relaxed_sys(&p.report->num_bad_ids, num_bad);
#pragma unroll
            for (int k = 0; k < kNumTopk; k++) {
                if (experts[k] >= 0) atomicAdd(&s.experts[experts[k]], 1);
            }
            rank_mask = ranks_of<kNumLocalExperts>(experts);
        }
        count_ranks<kNumRanks>(rank_mask, s.num_rows);
    }
    __syncthreads();
    // a zone has max_tokens rows for each source; only an expert that is named twice by a token can need more
    bool is_over = false;
    for (int e = tid; e < kNumExperts; e += kNumThreads) is_over |= s.experts[e] > p.max_tokens;
    is_over = block_any(is_over);
    for (int e = tid; e < kNumExperts; e += kNumThreads) {  // pairs with wait_counts
        uint64_t* counts = counts_of(p, e / kNumLocalExperts, bank, p.rank);
        st_relaxed_sys(counts + e % kNumLocalExperts, tagged(op, static_cast<uint32_t>(s.experts[e])));
    }
    if (tid < kNumRanks) {  // pairs with wait_totals; last, since who sees it asks for the counts next
        const uint32_t total = p.is_refused || is_over ? kRefused : static_cast<uint32_t>(s.num_rows[tid]);
        st_relaxed_sys(total_of(p, tid, bank, p.rank), tagged(op, total));
    }
    __syncthreads();
}

CUEP_DEVICE void load_token(const Params& p, int t, Token& token) {
    const uint4* row = reinterpret_cast<const uint4*>(p.x + t * p.x_stride);
#pragma unroll
    for (int j = 0; j < kVecsPerThread; j++) {
        const int vec = threadIdx.x + j * kNumThreads;
        if (vec < kRowVecs) token.row[j] = load_streaming(row + vec);
    }
    load_experts<kNumExperts>(p.topk_idx, p.is_int64, t, token.experts);
    token.rank_mask = ranks_of<kNumLocalExperts>(token.experts);
}

// Before find_places: a token's own duplicates count, everything else is to be added.
CUEP_DEVICE void begin_places(const Token& token, Shared& s) {
#pragma unroll
    for (int k = 0; k < kNumTopk; k++) {
        if (threadIdx.x != k) continue;
        int32_t num_before = 0;
#pragma unroll
        for (int q = 0; q < k; q++) num_before += token.experts[q] == token.experts[k];
        s.expert[k] = token.experts[k];
        s.place[k] = num_before;
    }
    if (threadIdx.x < kNumRanks) s.slot[threadIdx.x] = 0;
}

// Places of token t: rows of the same expert, and to the same rank, that come before it on this rank.
CUEP_DEVICE void find_places(const Params& p, int t, const Token& token, Shared& s) {
    for (int first = 0; first < t; first += kNumThreads) {
        const int i = first + threadIdx.x;
        uint32_t rank_mask = 0;
        if (i < t) {
            int32_t experts[kNumTopk];
            load_experts<kNumExperts>(p.topk_idx, p.is_int64, i, experts);
            rank_mask = ranks_of<kNumLocalExperts>(experts);
#pragma unroll
            for (int q = 0; q < kNumTopk; q++) {
#pragma unroll
                for (int k = 0; k < kNumTopk; k++) {
                    if (experts[q] >= 0 && experts[q] == token.experts[k]) atomicAdd(&s.place[k], 1);
                }
            }
        }
        count_ranks<kNumRanks>(rank_mask, s.slot);
    }
    __syncthreads();
}

// Stores token t, whose places are known, at every rank that owns one of its experts, and releases its flags.
CUEP_DEVICE void send_token(const Params& p, const Operation& op, int bank, int t, const Token& token, Shared& s) {
    const int tid = threadIdx.x;
#pragma unroll
    for (int i = 0; i < kNumPeers; i++) {
        const int dst = (p.rank + 1 + i) % kNumRanks;
        if (token.rank_mask >> dst & 1u) {
            uint4* staged = staged_row(p, dst, bank, p.rank, s.slot[dst]);
#pragma unroll
            for (int j = 0; j < kVecsPerThread; j++) {
                const int vec = tid + j * kNumThreads;
                if (vec < kRowVecs) store_16(staged + vec, token.row[j]);
            }
        }
    }
    for (int i = tid; i < kNumRanks * kNumTopk; i += kNumThreads) {
        const int dst = i / kNumTopk, k = i % kNumTopk;
        if (token.rank_mask >> dst & 1u) {
            const int e = s.expert[k];
            const bool is_there = e >= 0 && e / kNumLocalExperts == dst;
            header_of(p, dst, bank, p.rank, s.slot[dst])[k] =
                make_int2(is_there ? e % kNumLocalExperts : -1, s.place[k]);
        }
    }
    if (tid == 0) p.own_slot[t] = token.rank_mask >> p.rank & 1u ? s.slot[p.rank] : -1;
    if (tid < kNumTopk && p.topk_idx != reinterpret_cast<const uint8_t*>(p.ids)) {
        const int64_t at = static_cast<int64_t>(t) * kNumTopk + tid;
        p.ids[at] = s.expert[tid];
        p.weights[at] = p.topk_weights == nullptr ? 1.0f : p.topk_weights[at];
    }
    __syncthreads();
    if (tid < kNumRanks && tid != p.rank && (token.rank_mask >> tid & 1u)) {  // pairs with the wait in receive_rows
        st_release_sys(flag_of(p, tid, bank, p.rank, s.slot[tid]), tagged(op, static_cast<uint32_t>(t)));
    }
}

// How many slots each rank has filled here, or kRefused. False: gave up.
CUEP_DEVICE bool wait_totals(const Params& p, const Operation& op, int bank, Shared& s) {
    const int tid = threadIdx.x;
    bool is_ok = true;
    if (tid < kNumRanks) {
        uint32_t total = 0;
        is_ok = wait_word(op, total_of(p, p.rank, bank, tid), tid, total);
        s.num_rows[tid] = static_cast<int32_t>(total);
    }
    return !block_any(!is_ok);
}

// Turns every rank's counts into the first row of each (local expert, source). False: gave up.
CUEP_DEVICE bool wait_counts(const Params& p, const Operation& op, int bank, bool is_writer, Shared& s) {
    const int tid = threadIdx.x;
    bool is_ok = true;
    for (int i = tid; i < kNumExperts; i += kNumThreads) {
        const int src = i / kNumLocalExperts, e = i % kNumLocalExperts;
        uint32_t count = 0;
        is_ok &= wait_word(op, counts_of(p, p.rank, bank, src) + e, src, count);
        s.experts[e * kNumRanks + src] = static_cast<int32_t>(count);
    }
    if (tid == 0) s.total = 0;
    if (block_any(!is_ok)) return false;
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

// Copies a received row to all its experts here. header: of k = threadIdx.x, where that is below kNumTopk.
CUEP_DEVICE void deliver(
    const Params& p, int src, int slot, uint32_t token, int2 header, const uint4 (&row)[kVecsPerThread], Shared& s) {
    const int tid = threadIdx.x;
    const int64_t at = static_cast<int64_t>(src) * p.max_tokens + slot;
    if (tid < kNumTopk) {
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
    int2 header = make_int2(-1, 0);
    if (tid < kNumTopk) header = header_of(p, p.rank, bank, src, slot)[tid];
    deliver(p, src, slot, token, header, v, s);
}

// Own tokens need no slot and no flag. The one sent last is still in registers, for the others this block wrote
// headers.
CUEP_DEVICE void receive_own(const Params& p, int bank, int last, const Token& token, Shared& s) {
    const int tid = threadIdx.x;
    if (last < 0) return;
    if (token.rank_mask >> p.rank & 1u) {
        int2 header = make_int2(-1, 0);
        if (tid < kNumTopk) {
            const int e = s.expert[tid];
            header = make_int2(e >= 0 && e / kNumLocalExperts == p.rank ? e % kNumLocalExperts : -1, s.place[tid]);
        }
        deliver(p, p.rank, s.slot[p.rank], static_cast<uint32_t>(last), header, token.row, s);
    }
    for (int t = last - gridDim.x; t >= 0; t -= gridDim.x) {
        const int slot = p.own_slot[t];
        if (slot < 0) continue;
        __syncthreads();  // the row before this one has been delivered
        deliver_from(p, bank, p.rank, slot, t, reinterpret_cast<const uint4*>(p.x + t * p.x_stride), s);
    }
}

// Slots filled by the peer that filled most.
CUEP_DEVICE int most_rows(const Params& p, const Shared& s) {
    int most = 0;
    for (int r = 0; r < kNumRanks; r++) {
        if (r != p.rank) most = max(most, s.num_rows[r]);
    }
    return most;
}

// Rows of all peers, low slots first, as they arrive. The barrier of each wait also keeps rows of one block apart.
CUEP_DEVICE bool receive_rows(const Params& p, const Operation& op, int bank, Shared& s) {
    const int most = most_rows(p, s);
    for (int u = blockIdx.x; u < most * kNumPeers; u += gridDim.x) {
        const int src = (p.rank + 1 + u % kNumPeers) % kNumRanks, slot = u / kNumPeers;
        if (slot >= s.num_rows[src]) continue;
        bool is_ok = true;
        if (threadIdx.x == 0) {
            is_ok = wait_flag(op, flag_of(p, p.rank, bank, src, slot), Phase::kRows, src, s.token);
        }
        if (block_any(!is_ok)) return false;
        deliver_from(p, bank, src, slot, s.token, staged_row(p, p.rank, bank, src, slot), s);
    }
    return true;
}

extern "C" __global__ void __launch_bounds__(kNumThreads, kMinBlocks)
    ll_dispatch_direct(const __grid_constant__ Params p) {
    __shared__ Shared s;
    const int tid = threadIdx.x;
    const bool is_writer = blockIdx.x == gridDim.x - 1;  // of counts: the block with the fewest tokens
    const Operation op = begin_operation(p, Op::kDispatch);
    const int bank = static_cast<int>(op.epoch) & (p.num_banks - 1);

    // the bank must have been read by every peer before it is written again; meanwhile the first token comes in
    Token token;
    token.rank_mask = 0;
    int last = -1;  // token of this block that it sent last
    if (static_cast<int>(blockIdx.x) < p.num_tokens) {
        load_token(p, blockIdx.x, token);
        begin_places(token, s);
    }
    const bool is_off = is_stopped(op);
    bool is_ok = true;
    if (tid < kNumRanks && tid != p.rank) is_ok = wait_bank_free(op, done_of(p, p.rank, tid), p.num_banks, tid);
    if (block_any(!is_ok || is_off)) return stop(op);

    // send all that this block owes before it waits for rows
    if (is_writer) publish_counts(p, op, bank, s);
    for (int t = blockIdx.x; t < p.num_tokens; t += gridDim.x) {
        if (last >= 0) {
            load_token(p, t, token);
            __syncthreads();
            begin_places(token, s);
            __syncthreads();
        }
        find_places(p, t, token, s);
        send_token(p, op, bank, t, token, s);
        last = t;
    }
    __syncthreads();

    // receive; a block without rows need not know where rows go
    if (!wait_totals(p, op, bank, s)) return;
    const int refused_by = p.is_refused ? p.rank : refusing_rank(s);
    const int num_units = max(most_rows(p, s) * kNumPeers, p.num_tokens);
    if (refused_by < 0 && (is_writer || static_cast<int>(blockIdx.x) < num_units)) {
        if (!wait_counts(p, op, bank, is_writer, s)) return;
        receive_own(p, bank, last, token, s);
        if constexpr (kNumPeers > 0) {
            if (!receive_rows(p, op, bank, s)) return;
        }
    }

    // done: peers may write this bank again (pairs with wait_bank_free)
    if (!is_last_block(op)) return;
    if (tid < kNumRanks && tid != p.rank) st_release_sys(done_of(p, tid, p.rank), tagged(op, 0));
    if (tid == 0) {
        p.state->refused = 0;
        if (refused_by >= 0) mark_refused(p, Op::kDispatch, refused_by, Cause::kZoneFull);
        end_operation(op);
    }
}
