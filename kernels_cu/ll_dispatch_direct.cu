// Low-latency dispatch. A block takes a token, keeps its row in registers and stores it once into a slot of every rank
// that owns one of its experts; the slot's flag carries the epoch and the token. Slots of a source are dense and in
// order of its tokens. One block publishes how many rows each expert gets from this rank. Cost: one row over the link
// per (token, rank), and one local copy per (token, expert) or, rank-major, per (token, rank).
// serves: layout=expert_major,rank_major
#include <cuep/base.cuh>
#include <cuep/sync.cuh>
#include <cuep/operation.cuh>

#ifndef CUEP_JIT  // values for editors; cuep/jit.py gives the real ones
constexpr int kNumRanks = 4, kNumExperts = 256, kNumTopk = 8, kRowBytes = 14336, kNumThreads = 448, kMinBlocks = 1;
constexpr int kFlagBatch = 4;
constexpr int kSrcBytes = 14336, kTokenBytes = 14336, kQuant = 0, kNumScales = 0, kScaleBytes = 1;
constexpr bool kHasScaleColumns = false, kHasInPlace = false;
constexpr bool kIsRankMajor = false;
constexpr bool kHasLineSlots = false, kHasMask = false, kHasStats = false;
using src_t = cuep::bf16_t;
#endif
// compile: kNumRanks=4 kNumExperts=256 kNumTopk=8 kRowBytes=14336 kIsRankMajor=false kSrcBytes=14336 kTokenBytes=14336 kQuant=0 kNumScales=0 kScaleBytes=1 kHasScaleColumns=false src_t=cuep::bf16_t kHasLineSlots=false kHasMask=false kHasStats=false kHasInPlace=false
// compile: kNumRanks=4 kNumExperts=256 kNumTopk=8 kRowBytes=14336 kIsRankMajor=true kSrcBytes=14336 kTokenBytes=14336 kQuant=0 kNumScales=0 kScaleBytes=1 kHasScaleColumns=false src_t=cuep::bf16_t kHasLineSlots=false kHasMask=true kHasStats=false kHasInPlace=true
// compile: kNumRanks=4 kNumExperts=256 kNumTopk=8 kRowBytes=7392 kIsRankMajor=false kSrcBytes=14336 kTokenBytes=7168 kQuant=4 kNumScales=56 kScaleBytes=4 kHasScaleColumns=false src_t=cuep::bf16_t kHasLineSlots=false kHasMask=false kHasStats=true kHasInPlace=false
// compile: kNumRanks=2 kNumExperts=8 kNumTopk=3 kRowBytes=400 kIsRankMajor=true kSrcBytes=1536 kTokenBytes=384 kQuant=1 kNumScales=3 kScaleBytes=1 kHasScaleColumns=false src_t=float kHasLineSlots=false kHasMask=true kHasStats=true kHasInPlace=true
// compile: kNumRanks=2 kNumExperts=8 kNumTopk=3 kRowBytes=528 kIsRankMajor=false kSrcBytes=528 kTokenBytes=528 kQuant=0 kNumScales=0 kScaleBytes=1 kHasScaleColumns=false src_t=float kHasLineSlots=false kHasMask=false kHasStats=false kHasInPlace=false
// compile: kNumRanks=4 kNumExperts=256 kNumTopk=8 kRowBytes=7232 kIsRankMajor=false kSrcBytes=14336 kTokenBytes=7168 kQuant=1 kNumScales=14 kScaleBytes=4 kHasScaleColumns=true src_t=cuep::bf16_t kHasLineSlots=false kHasMask=true kHasStats=false kHasInPlace=false
// compile: kNumRanks=2 kNumExperts=8 kNumTopk=3 kRowBytes=288 kIsRankMajor=true kSrcBytes=272 kTokenBytes=272 kQuant=0 kNumScales=5 kScaleBytes=2 kHasScaleColumns=false src_t=cuep::bf16_t kHasLineSlots=false kHasMask=false kHasStats=true kHasInPlace=true
CUEP_TUNABLE(kNumThreads, 448, 64);
CUEP_TUNABLE(kMinBlocks, 1, 1);  // resident on one multiprocessor
CUEP_TUNABLE(kFlagBatch, 4, 2);  // tokens of a block whose flags are released together, behind one fence
constexpr bool kIsLine = false;
static_assert(kIsLine == kHasLineSlots, "cuep/layout.py lays out slots of lines for variants named line...");
constexpr int kParts = 1;
#include <cuep/ll_deliver.cuh>

using namespace cuep;

struct Params {
    uint8_t* arena[kNumRanks];  // symmetric memory of every rank; offsets below are bytes into it
    int64_t rows_offset;     // [num_banks, kNumRanks - 1, max_tokens] rows; source s is at (s - rank - 1) mod kNumRanks
    int64_t headers_offset;  // int4 [num_banks, kNumRanks, max_tokens, kNumTopk]: see header_of
    int64_t flags_offset;    // uint64 [num_banks, kNumRanks, max_tokens]: epoch, token
    int64_t counts_offset;   // uint64 [num_banks, kNumRanks, local experts]: epoch, rows
    int64_t totals_offset;   // uint64 [num_banks, kNumRanks]: epoch, slots used or kRefused
    int64_t done_offset;     // uint64 [num_banks, kNumRanks]: epoch that this peer has read
    int64_t mask_offset;     // MaskWords [kNumRanks] and the number of exclusions, with a mask
    int64_t ready_offset;    // uint64 [num_banks, kNumRanks]: epoch for which this peer's rows may be put in place
    int64_t in_place_offset;  // [kNumRanks, max_tokens] rows of kRowBytes where this handle's rows are put, or -1
    const uint8_t* x;         // [num_tokens] rows, x_stride bytes apart
    int64_t x_stride;
    const uint8_t* x_scales;  // the caller's scales, [num_tokens, kNumScales] of kScaleBytes, where rows come with them
    int64_t x_scales_row_stride;  // bytes between the scales of two tokens
    int64_t x_scales_stride;      // bytes between two scales of a token
    const uint8_t* topk_idx;      // [num_tokens, kNumTopk] int32 or int64; the caller's or `ids`
    const float* topk_weights;    // [num_tokens, kNumTopk], null for ones; the caller's or `weights`
    int32_t* ids;                 // handle's copy [max_tokens, kNumTopk]
    float* weights;               // handle's copy [max_tokens, kNumTopk]
    int32_t* own_slot;            // [max_tokens]: slot of a token that this rank keeps, or -1
    int32_t* num_rows;            // [kNumRanks]: slots used by each source rank
    int32_t* token_idx;           // [kNumRanks, max_tokens]: token in each slot
    uint8_t* tokens;         // [local experts, kNumRanks * max_tokens] or, rank-major, [kNumRanks, max_tokens] rows
    int64_t tokens_stride;   // bytes between rows
    uint8_t* scales;         // [rows, kNumScales] of kScaleBytes, or by columns: see place_of
    int64_t scales_stride;   // bytes between those of two rows, where they do not lie by columns
    int32_t* row_idx;        // expert-major [kNumRanks, max_tokens, kNumTopk]: row of `tokens`, or -1
    float* recv_weights;     // expert-major [kNumRanks, max_tokens, kNumTopk] or null: weights of the received rows
    int32_t* recv_topk_idx;  // rank-major [kNumRanks, max_tokens, kNumTopk]: expert here, or -1, also beyond the counts
    float* recv_topk_weights;  // rank-major, the same shape, 0 where recv_topk_idx is -1
    int32_t* expert_counts;    // [local experts]: rows or, rank-major, (row, k) pairs
    int32_t* src_rank_counts;  // [local experts, kNumRanks] or, rank-major, [kNumRanks]
    int32_t* source;           // [rows, 3]: rank, token, k or, rank-major, [rows, 2]: rank, token
    int32_t* total;            // [1]
    HandleState* state;
    Control* control;
    Arrivals* arrivals;  // or null
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
    bool is_alone;    // no other group shares the device: the next kernel may be set up early
};

CUEP_LAUNCH_EARLY(kNumThreads, 0)

// Flags that are still to be released; each thread's own column.
struct Unreleased {
    uint64_t* flag[kFlagBatch][kNumRanks];  // null: no row for that rank
    uint32_t token[kFlagBatch][kNumRanks];
};

// Headers of rows in slots, and of this rank's own rows: {expert, place, weight's bits, unused} for each k.
CUEP_DEVICE int4* header_of(const Params& p, int dst, int bank, int src, int64_t slot) {
    return reinterpret_cast<int4*>(p.arena[dst] + p.headers_offset) + slot_at(p, bank, src, slot) * kNumTopk;
}

// Stores token t, whose slots are known, at every rank that owns one of its experts. num_sent: tokens whose flags are
// still to be released, which the last one of a block must do.
CUEP_DEVICE void send(const Params& p,
                      const Operation& op,
                      int bank,
                      int t,
                      bool is_last,
                      const Token& token,
                      const Outgoing& out,
                      int& num_sent,
                      Unreleased& unreleased) {
    const int tid = threadIdx.x;
    const uint32_t rank_mask = out.rank_mask;
#pragma unroll
    for (int i = 0; i < kNumPeers; i++) {
        const int dst = (p.rank + 1 + i) % kNumRanks;
        if (rank_mask >> dst & 1u) {
            uint4* staged = row_at(p, dst, bank, p.rank, out.slot[dst]);
#pragma unroll
            for (int j = 0; j < kPiecesPerThread; j++) {
                if (piece_at(j) < kNumPieces) store_16(staged + piece_at(j), token.row[j]);
            }
        }
    }
    for (int i = tid; i < kNumRanks * kNumTopk; i += kNumThreads) {
        const int dst = i / kNumTopk, k = i % kNumTopk;
        if (!(rank_mask >> dst & 1u)) continue;
        const Header header = header_for(out, dst, k);
        header_of(p, dst, bank, p.rank, out.slot[dst])[k] =
            make_int4(header.expert, header.place, __float_as_int(header.weight), 0);
    }
    if (tid < kNumRanks) {
        const bool has_row = tid != p.rank && (rank_mask >> tid & 1u);
        unreleased.flag[num_sent][tid] = has_row ? flag_of(p, tid, bank, p.rank, out.slot[tid]) : nullptr;
        unreleased.token[num_sent][tid] = static_cast<uint32_t>(t);
    }
    num_sent++;
    if (num_sent < kFlagBatch && !is_last) return;
    __syncthreads();
    if (tid < kNumRanks) {
        fence_acq_rel_sys();  // with the stores behind it a release; pairs with the wait in take
        for (int i = 0; i < num_sent; i++) {
            uint64_t* flag = unreleased.flag[i][tid];
            if (flag != nullptr) st_relaxed_sys(flag, tagged(op, unreleased.token[i][tid]));
        }
    }
    num_sent = 0;
}

// Of this thread's k, beside a row that lies in this rank's memory.
CUEP_DEVICE Header stored_header(const Params& p, int bank, int src, int slot) {
    if (threadIdx.x >= kNumTopk) return {-1, 0, 0.0f};
    const int4 sent = header_of(p, p.rank, bank, src, slot)[threadIdx.x];
    return {sent.x, sent.y, __int_as_float(sent.z)};
}

// A row that lies in this rank's memory, with its header.
CUEP_DEVICE void deliver_from(
    const Params& p, int bank, int src, int slot, uint32_t token, const uint4* row, Shared& s) {
    uint4 v[kPiecesPerThread];
#pragma unroll
    for (int j = 0; j < kPiecesPerThread; j++) {
        if (piece_at(j) < kNumPieces) v[j] = load_16(row + piece_at(j));
    }
    deliver(p, src, slot, token, stored_header(p, bank, src, slot), v, s);
}

// Own tokens need no slot and no flag. The one that this launch sent last is still in registers, for the others the
// send has left headers.
CUEP_DEVICE void receive_own(const Params& p, int bank, int num_tokens, int last, Token& token, Shared& s) {
    if (last >= 0 && (s.out.rank_mask >> p.rank & 1u)) deliver_own(p, last, token, s);
    for (int t = team(); t < num_tokens; t += num_teams()) {
        const int slot = t == last ? -1 : p.own_slot[t];
        if (slot < 0) continue;
        __syncthreads();  // the row before this one has been delivered
        if constexpr (kHasScales) {
            load_token(p, t, token);
            stage(token, s.staging);
            __syncthreads();
            unstage(s.staging, token);
            deliver(p, p.rank, slot, t, stored_header(p, bank, p.rank, slot), token.row, s);
        } else {
            deliver_from(p, bank, p.rank, slot, t, reinterpret_cast<const uint4*>(p.x + t * p.x_stride), s);
        }
    }
}

CUEP_DEVICE bool take(const Params& p, const Operation& op, int bank, int src, int slot, Shared& s) {
    bool is_ok = true;
    if (threadIdx.x == 0)
        is_ok = wait_flag<kHasStats>(op, flag_of(p, p.rank, bank, src, slot), Phase::kRows, src, s.token[0]);
    if (block_any(!is_ok)) return false;
    const uint4* row = row_at(p, p.rank, bank, src, slot);
    if constexpr (kHasInPlace) {
        const int64_t at = static_cast<int64_t>(src) * p.max_tokens + slot;
        if (reinterpret_cast<const uint4*>(p.tokens + at * p.tokens_stride) == row) {  // it is where it belongs
            note_row(p, src, at, s.token[0], stored_header(p, bank, src, slot));
            return true;
        }
    }
    deliver_from(p, bank, src, slot, s.token[0], row, s);
    return true;
}

extern "C" __global__ void __launch_bounds__(kNumThreads, kMinBlocks)
    ll_dispatch_direct(const __grid_constant__ Params p) {
    __shared__ Shared s;
    __shared__ Unreleased unreleased;
    int num_sent = 0;
    dispatch(
        p,
        s.out,
        s.staging,
        s.counted,
        s.counts,
        [&](const Operation& op, int bank, int t, bool is_last, const Token& token) {
            send(p, op, bank, t, is_last, token, s.out, num_sent, unreleased);
        },
        [&](const Operation& op, int bank, int num_tokens, int last, Token& token) {
            receive_own(p, bank, num_tokens, last, token, s);
            return receive(p, op, bank, s, [&](int src, int slot) { return take(p, op, bank, src, slot, s); });
        });
}
