// Low-latency dispatch for some hundred tokens at most: as ll_dispatch_direct, but rows travel as lines, and headers as
// packets, that carry their own flags (line.cuh), so the sender releases nothing and the receiver polls the row itself.
// Cost: 128 bytes over the link for 120 of a row per (token, rank), and local copies as there.
// serves: layout=expert_major,rank_major in_place=0
#include <cuep/base.cuh>
#include <cuep/sync.cuh>
#include <cuep/operation.cuh>

#ifndef CUEP_JIT  // values for editors; cuep/jit.py gives the real ones
constexpr int kNumRanks = 4, kNumExperts = 256, kNumTopk = 8, kRowBytes = 14336, kNumThreads = 320, kMinBlocks = 1;
constexpr int kParts = 4;
constexpr int kSrcBytes = 14336, kTokenBytes = 14336, kQuant = 0, kNumScales = 0, kScaleBytes = 1;
constexpr bool kHasScaleColumns = false, kHasInPlace = false;
constexpr bool kIsRankMajor = false;
constexpr bool kHasLineSlots = true, kHasMask = false, kHasStats = false;
using src_t = cuep::bf16_t;
#endif
// compile: kNumRanks=4 kNumExperts=256 kNumTopk=8 kRowBytes=14336 kIsRankMajor=false kSrcBytes=14336 kTokenBytes=14336 kQuant=0 kNumScales=0 kScaleBytes=1 kHasScaleColumns=false src_t=cuep::bf16_t kHasLineSlots=true kHasMask=false kHasStats=false kHasInPlace=false
// compile: kNumRanks=4 kNumExperts=256 kNumTopk=8 kRowBytes=14336 kIsRankMajor=true kSrcBytes=14336 kTokenBytes=14336 kQuant=0 kNumScales=0 kScaleBytes=1 kHasScaleColumns=false src_t=cuep::bf16_t kHasLineSlots=true kHasMask=true kHasStats=false kHasInPlace=false
// compile: kNumRanks=4 kNumExperts=256 kNumTopk=8 kRowBytes=7392 kIsRankMajor=false kSrcBytes=14336 kTokenBytes=7168 kQuant=4 kNumScales=56 kScaleBytes=4 kHasScaleColumns=false src_t=cuep::bf16_t kHasLineSlots=true kHasMask=false kHasStats=true kHasInPlace=false
// compile: kNumRanks=2 kNumExperts=8 kNumTopk=3 kRowBytes=400 kIsRankMajor=true kSrcBytes=1536 kTokenBytes=384 kQuant=1 kNumScales=3 kScaleBytes=1 kHasScaleColumns=false src_t=float kHasLineSlots=true kHasMask=true kHasStats=true kHasInPlace=false
// compile: kNumRanks=2 kNumExperts=8 kNumTopk=3 kRowBytes=528 kIsRankMajor=false kSrcBytes=528 kTokenBytes=528 kQuant=0 kNumScales=0 kScaleBytes=1 kHasScaleColumns=false src_t=float kHasLineSlots=true kHasMask=false kHasStats=false kHasInPlace=false
// compile: kNumRanks=4 kNumExperts=256 kNumTopk=8 kRowBytes=7232 kIsRankMajor=false kSrcBytes=14336 kTokenBytes=7168 kQuant=1 kNumScales=14 kScaleBytes=4 kHasScaleColumns=true src_t=cuep::bf16_t kHasLineSlots=true kHasMask=true kHasStats=false kHasInPlace=false
// compile: kNumRanks=2 kNumExperts=8 kNumTopk=3 kRowBytes=288 kIsRankMajor=true kSrcBytes=272 kTokenBytes=272 kQuant=0 kNumScales=5 kScaleBytes=2 kHasScaleColumns=false src_t=cuep::bf16_t kHasLineSlots=true kHasMask=false kHasStats=true kHasInPlace=false
CUEP_TUNABLE(kNumThreads, 320, 64);
CUEP_TUNABLE(kParts, 4, 2);      // blocks that share a row
CUEP_TUNABLE(kMinBlocks, 1, 1);  // resident on one multiprocessor
constexpr bool kIsLine = true;
static_assert(kIsLine == kHasLineSlots, "cuep/layout.py lays out slots of lines for variants named line...");
#include <cuep/ll_deliver.cuh>
#include <cuep/line.cuh>

using namespace cuep;

struct Params {
    uint8_t* arena[kNumRanks];  // symmetric memory of every rank; offsets below are bytes into it
    int64_t rows_offset;    // [num_banks, kNumRanks - 1, max_tokens] slots; source s is at (s - rank - 1) mod kNumRanks
    int64_t counts_offset;  // uint64 [num_banks, kNumRanks, local experts]: epoch, rows
    int64_t totals_offset;  // uint64 [num_banks, kNumRanks]: epoch, slots used or kRefused
    int64_t done_offset;    // uint64 [num_banks, kNumRanks]: epoch that this peer has read
    int64_t mask_offset;    // MaskWords [kNumRanks] and the number of exclusions, with a mask
    int64_t ready_offset;   // uint64 [num_banks, kNumRanks]: epoch for which this peer's rows may be put in place
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

// A slot: the row, then for each k {expert, place, weight}, then {token}.
constexpr int kSlotBytes = slot_pieces(kNumTopk + 1) * 16;

CUEP_DEVICE uint4* slot_of(const Params& p, int dst, int bank, int src, int64_t slot) {
    return staged_row<kSlotBytes>(p, dst, bank, src, slot);
}

// Stores token t, whose slots are known, at every rank that owns one of its experts.
CUEP_DEVICE void send(const Params& p, const Operation& op, int bank, int t, const Token& token, const Outgoing& out) {
    const uint32_t rank_mask = out.rank_mask, epoch = static_cast<uint32_t>(op.epoch);
    for (int i = threadIdx.x; part() == 0 && i < kNumRanks * (kNumTopk + 1); i += kNumThreads) {
        const int dst = i / (kNumTopk + 1), k = i % (kNumTopk + 1);
        if (dst == p.rank || !(rank_mask >> dst & 1u)) continue;
        Header header{t, 0, 0.0f};
        if (k < kNumTopk) header = header_for(out, dst, k);
        st_packet(slot_of(p, dst, bank, p.rank, out.slot[dst]) + kNumPieces + k,
                  {static_cast<uint32_t>(header.expert),
                   static_cast<uint32_t>(header.place),
                   static_cast<uint32_t>(__float_as_int(header.weight)),
                   epoch});
    }
#pragma unroll
    for (int i = 0; i < kNumPeers; i++) {
        const int dst = (p.rank + 1 + i) % kNumRanks;
        if (rank_mask >> dst & 1u) store_lines(slot_of(p, dst, bank, p.rank, out.slot[dst]), token.row, epoch);
    }
}

// Own tokens: the one that this launch sent last is still known; of the others all is worked out again, as the blocks
// of a team share none of it.
CUEP_DEVICE void receive_own(const Params& p, const Operation& op, int num_tokens, int last, Token& token, Shared& s) {
    if (last >= 0 && (s.out.rank_mask >> p.rank & 1u)) deliver_own(p, last, token, s);
    if (team() == last || team() >= num_tokens) return;  // the only one, or none
    begin_counting(s.counted);
    for (int t = team(); t < num_tokens; t += num_teams()) {
        if (t == last) continue;
        Earlier earlier;
        load_token(p, t, token);
        load_earlier(p, num_tokens, !kIsRankMajor, earlier);
        __syncthreads();  // the row before this one has been delivered
        begin_outgoing(p, op, token, s.out);
        stage(token, s.staging);
        __syncthreads();
        unstage(s.staging, token);
        count_before(p, op, t, earlier, s.counted, s.out);
        if (s.out.rank_mask >> p.rank & 1u) deliver_own(p, t, token, s);
    }
}

CUEP_DEVICE bool take(const Params& p, const Operation& op, int bank, int src, int slot, uint32_t& token, Shared& s) {
    const int tid = threadIdx.x;
    const uint4* from = slot_of(p, p.rank, bank, src, slot);
    uint4 row[kPiecesPerThread];
    uint4 beside = make_uint4(0, 0, 0, 0);  // of this thread's k, or the token
    const bool is_ok = wait_lines(op, [&](Missing& missing) {
#pragma unroll
        for (int j = 0; j < kPiecesPerThread; j++) row[j] = load_line(from, piece_to_ask(piece_at(j)));
        if (tid <= kNumTopk) beside = ld_packet(from + kNumPieces + tid);
#pragma unroll
        for (int j = 0; j < kPiecesPerThread; j++) note_line(op, row[j], piece_to_ask(piece_at(j)), src, missing);
        if (tid <= kNumTopk) note_packet(op, beside, src, missing);
    });
    const Header header{
        static_cast<int>(beside.x), static_cast<int>(beside.y), __int_as_float(static_cast<int>(beside.z))};
    if (tid == kNumTopk) token = beside.x;
    if (block_any(!is_ok)) return false;
    deliver(p, src, slot, token, header, row, s);
    return true;
}

extern "C" __global__ void __launch_bounds__(kNumThreads, kMinBlocks)
    ll_dispatch_line(const __grid_constant__ Params p) {
    __shared__ Shared s;
    dispatch(
        p,
        s.out,
        s.staging,
        s.counted,
        s.counts,
        [&](const Operation& op, int bank, int t, bool, const Token& token) { send(p, op, bank, t, token, s.out); },
        [&](const Operation& op, int bank, int num_tokens, int last, Token& token) {
            receive_own(p, op, num_tokens, last, token, s);
            int turn = 0;  // two words by turns: one may still be read when the next is written
            return receive(
                p, op, bank, s, [&](int src, int slot) { return take(p, op, bank, src, slot, s.token[turn ^= 1], s); });
        });
}
