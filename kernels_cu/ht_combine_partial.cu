// serves: layout=expert_major reduce=per_rank
// High-throughput combine of expert_major rows. For every (token, rank) that came here, a push warp adds up the rows of
// this rank's experts, which the bulk-copy engine brings into shared memory piece by piece, weighted, in fp32 and in
// order of k, rounds once, and stores the sum straight into the owner's staging, with a flag; sum warps add up this
// rank's own tokens as the ranks' sums arrive. Sums for own tokens take the same way, so that they are rounded
// likewise. Cost: one row over the link per (token, rank), N rows of staging a token.
#include <cuep/base.cuh>
#include <cuep/sync.cuh>
#include <cuep/bulk.cuh>
#include <cuep/convert.cuh>
#include <cuep/operation.cuh>
#include <cuep/row_pipe.cuh>
#include <cuep/ht_home.cuh>

#ifndef CUEP_JIT  // values for editors; cuep/jit.py gives the real ones
constexpr int kTransport = 0;
constexpr int kNumRanks = 4, kNumExperts = 256, kNumTopk = 8, kRowBytes = 14336;
constexpr int kNumPushWarps = 7, kNumTellWarps = 1, kNumSumWarps = 8, kNumStages = 8, kMostPieceBytes = 3584;
using elem_t = cuep::bf16_t;
#endif
// compile: kNumRanks=4 kNumExperts=256 kNumTopk=8 kRowBytes=14336 elem_t=cuep::bf16_t kTransport=0
// compile: kNumRanks=2 kNumExperts=8 kNumTopk=3 kRowBytes=528 elem_t=float kTransport=0
CUEP_TUNABLE(kNumPushWarps, 7, 1);
CUEP_TUNABLE(kNumTellWarps, 1, 0);
CUEP_TUNABLE(kNumSumWarps, 8, 1);
CUEP_TUNABLE(kNumStages, 8, 3);
CUEP_TUNABLE(kMostPieceBytes, 3584, 64);

static_assert(kTransport == cuep::kPushed, "variants named pull... and copy... have other memory: cuep/layout.py");

using namespace cuep;

struct Params {
    uint8_t* arena[kNumRanks];  // symmetric memory of every rank; offsets below are bytes into it
    int64_t rows_offset;        // [kNumRanks, max_tokens] rows; source s is at (s - rank - 1) mod kNumRanks
    int64_t grads_offset;       // float [kNumRanks, max_tokens, kNumTopk], likewise
    int64_t flags_offset;       // uint64 [kNumRanks, max_tokens]: epoch
    int64_t totals_offset;      // uint64 [kNumRanks]: epoch, rows that this peer pushes | kHasGrads, or kRefused
    int64_t done_offset;        // uint64 [kNumRanks]: epoch that this peer has read
    const uint8_t* expert_out;  // rows in the order of dispatch, expert_out_stride bytes apart
    int64_t expert_out_stride;
    const float* row_weight_grads;  // null, or [num_rows]: they come home with the sums
    float* weight_grads;            // [num_tokens, kNumTopk]: where they go
    const uint8_t* bias[2];         // null, or [num_tokens] rows that are added to the sums, bias_stride bytes apart
    int64_t bias_stride[2];
    const int32_t* message_slots;   // [messages, kNumTopk]: row here of each k of a (token, rank) that came, or -1
    const float* message_weights;   // [messages, kNumTopk]
    const int32_t* ids;             // [max_tokens, kNumTopk]
    const int32_t* rows;            // [max_tokens, kNumRanks]: message at each rank, or -1
    const int32_t* send_base;       // [kNumRanks]: first message of this rank's tokens at each rank
    const int32_t* recv_base;       // [kNumRanks + 1]: first message here of each source rank
    const int32_t* expert_offsets;  // [local experts + 1]; last: rows here
    uint8_t* y;                     // [num_tokens] rows, y_stride bytes apart
    int64_t y_stride;
    HandleState* state;
    Control* control;
    Report* report;
    int64_t timeout_ns;
    const uint8_t* num_tokens_at;  // null, or where the device has the number of tokens
    int32_t num_tokens;
    int32_t num_rows;  // of expert_out; fewer than are there: refused
    int32_t max_tokens;
    int32_t rank;
    uint32_t handle;
    uint32_t ticket;
    bool is_count_int64;
    bool is_weighted;  // false: weights count as 1
    bool is_refused;   // publish kRefused instead of pushing
};

constexpr int kNumThreads = (kNumPushWarps + kNumTellWarps + kNumSumWarps) * 32;
constexpr int kNumLocalExperts = kNumExperts / kNumRanks;
using RowPieces = Pieces<kRowBytes, kMostPieceBytes>;  // of a row that is added up
constexpr int kVecsPerLane = (RowPieces::kBytes / 16 + 31) / 32;
using Rows = Home<kNumRanks, kNumLocalExperts, kNumTopk, kRowBytes, elem_t, true>;
using Pipe = RowPipe<RowPieces::kBytes, kNumStages>;
using FlagsOfRows = Brought<(kNumTellWarps > 0)>;
CUEP_LAUNCH(kNumThreads, kNumPushWarps* Pipe::kSmemBytes)

// Rows that make up the answer to a message: lane k has that of k, or -1. The whole warp calls.
CUEP_DEVICE int32_t slot_of_lane(const Params& p, const Rows::Walk& walk) {
    return lane_idx() < kNumTopk ? p.message_slots[walk.row() * kNumTopk + lane_idx()] : -1;
}

// The pieces that one push warp needs, in the order in which it needs them: by message, by piece, by k.
struct PieceWalk {
    Rows::Walk walk;
    int32_t slot;
    uint32_t filled, rest;  // lanes with a row; those whose piece is still to come
    int piece;

    CUEP_DEVICE PieceWalk(const Params& p, const Rows::Walk& first) : walk(first) { begin_message(p); }

    CUEP_DEVICE bool is_over() const { return walk.is_over(); }

    // To the first message from here on that has rows.
    CUEP_DEVICE void begin_message(const Params& p) {
        for (filled = 0; !walk.is_over(); walk.advance()) {
            slot = slot_of_lane(p, walk);
            filled = __ballot_sync(0xffffffffu, slot >= 0);
            if (filled != 0) break;
        }
        rest = filled;
        piece = 0;
    }

    CUEP_DEVICE const uint8_t* address(const Params& p) const {
        const int64_t row = __shfl_sync(0xffffffffu, slot, __ffs(static_cast<int>(rest)) - 1);
        return p.expert_out + row * p.expert_out_stride + piece * RowPieces::kBytes;
    }

    CUEP_DEVICE void advance(const Params& p) {
        rest &= rest - 1;
        if (rest != 0) return;
        rest = filled;
        if (++piece < RowPieces::kCount) return;
        walk.advance();
        begin_message(p);
    }
};

// Adds weight * piece of a row to the sums of this lane. kIsWhole: each lane has all kVecsPerLane, and need not ask, so
// that its loads run beside one another.
template <bool kIsWhole>
CUEP_DEVICE void add_piece(const uint8_t* staged,
                           int num_vecs,
                           float weight,
                           float (&sum)[kVecsPerLane][kPerVec<elem_t>]) {
#pragma unroll
    for (int j = 0; j < kVecsPerLane; j++) {
        const int vec = lane_idx() + 32 * j;
        if (!kIsWhole && vec >= num_vecs) continue;
        float term[kPerVec<elem_t>];
        unpack<elem_t>(reinterpret_cast<const uint4*>(staged)[vec], term);
#pragma unroll
        for (int c = 0; c < kPerVec<elem_t>; c++) sum[j][c] = __fadd_rn(sum[j][c], __fmul_rn(weight, term[c]));
    }
}

// One push warp's share of the messages that this rank answers. Pieces are brought into shared memory kNumStages ahead,
// across the messages.
CUEP_DEVICE void push_sums(
    const Params& p, const Operation& op, const int32_t* recv_base, int warp, FlagsOfRows brought, Pipe pipe) {
    const int lane = lane_idx();
    Rows::Walk walk(p.rank, recv_base, warp, kNumPushWarps);
    PieceWalk ahead(p, walk);
    auto load_next = [&](int stage) {
        if (ahead.is_over()) return;
        pipe.load(stage, ahead.address(p), RowPieces::bytes(ahead.piece));
        ahead.advance(p);
    };
    for (int stage = 0; stage < kNumStages; stage++) load_next(stage);
    for (int stage = 0; !walk.is_over(); walk.advance()) {
        const int dst = walk.peer(), slot_there = walk.slot();
        const int32_t slot = slot_of_lane(p, walk);
        const float weight = slot >= 0 && p.is_weighted ? p.message_weights[walk.row() * kNumTopk + lane] : 1.0f;
        const uint32_t filled = __ballot_sync(0xffffffffu, slot >= 0);
        uint8_t* to = Rows::staged_row(p, dst, p.rank, slot_there);
        for (int piece = 0; piece < RowPieces::kCount; piece++) {
            const int num_vecs = static_cast<int>(RowPieces::bytes(piece)) / 16;
            float sum[kVecsPerLane][kPerVec<elem_t>] = {};
            for (uint32_t rest = filled; rest != 0; rest &= rest - 1) {
                const float w = __shfl_sync(0xffffffffu, weight, __ffs(static_cast<int>(rest)) - 1);
                pipe.wait(stage);
                if (num_vecs == 32 * kVecsPerLane) {
                    add_piece<true>(pipe.stage_at(stage), num_vecs, w, sum);
                } else {
                    add_piece<false>(pipe.stage_at(stage), num_vecs, w, sum);
                }
                fence_proxy_async_shared();  // what lanes have read is refilled
                load_next(stage);
                stage = Pipe::after(stage);
            }
            uint4* vecs = reinterpret_cast<uint4*>(to + piece * RowPieces::kBytes);
#pragma unroll
            for (int j = 0; j < kVecsPerLane; j++) {
                if (lane + 32 * j < num_vecs) store_16(vecs + lane + 32 * j, pack<elem_t>(sum[j]));
            }
        }
        if (p.row_weight_grads != nullptr && lane < kNumTopk) {
            Rows::staged_grads(p, dst, p.rank, slot_there)[lane] = slot < 0 ? 0.0f : p.row_weight_grads[slot];
        }
        brought.note([&] { st_release_sys(Rows::flag_of(p, dst, p.rank, slot_there), tagged(op, 0)); });
    }
}

extern "C" __global__ void __launch_bounds__(kNumThreads, 1) ht_combine_partial(const __grid_constant__ Params p) {
    CUEP_DYNAMIC_SMEM(smem);
    if (is_skipped(p, Op::kCombine, (p.state->refused | p.state->unrouted) != 0)) return;
    Rows::combine<kNumPushWarps, kNumTellWarps, kNumSumWarps>(
        p,
        p.expert_offsets[kNumLocalExperts],
        p.is_weighted,
        [&](const Operation& op, const int32_t* recv_base, int warp, FlagsOfRows brought) {
            push_sums(p, op, recv_base, warp, brought, Pipe(smem, warp, kNumPushWarps));
        },
        [&](int64_t) { return static_cast<const uint8_t*>(nullptr); },  // own sums are staged as well
        [&](int64_t message, int k) {
            const int32_t slot = p.message_slots[message * kNumTopk + k];
            return slot < 0 ? 0.0f : p.row_weight_grads[slot];
        });
}
