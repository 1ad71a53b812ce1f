// serves: layout=expert_major reduce=per_rank
// High-throughput combine of expert_major rows. For every (token, rank) that came here, a push warp adds up the rows of
// this rank's experts, weighted, in fp32 and in order of k, rounds once, and stores the sum straight into the owner's
// staging, with a flag; sum warps add up this rank's own tokens as the ranks' sums arrive. Sums for own tokens take the
// same way, so that they are rounded likewise. Cost: one row over the link per (token, rank), N rows of staging a
// token.
#include <cuep/base.cuh>
#include <cuep/sync.cuh>
#include <cuep/convert.cuh>
#include <cuep/operation.cuh>
#include <cuep/ht_home.cuh>

#ifndef CUEP_JIT  // values for editors; cuep/jit.py gives the real ones
constexpr int kNumRanks = 4, kNumExperts = 256, kNumTopk = 8, kRowBytes = 14336, kNumPushWarps = 8, kNumSumWarps = 12;
using elem_t = cuep::bf16_t;
#endif
// compile: kNumRanks=4 kNumExperts=256 kNumTopk=8 kRowBytes=14336 elem_t=cuep::bf16_t
// compile: kNumRanks=2 kNumExperts=8 kNumTopk=3 kRowBytes=528 elem_t=float
CUEP_TUNABLE(kNumPushWarps, 8, 1);
CUEP_TUNABLE(kNumSumWarps, 12, 1);

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

constexpr int kNumThreads = (kNumPushWarps + kNumSumWarps) * 32;
constexpr int kNumLocalExperts = kNumExperts / kNumRanks;
constexpr int kRowVecs = kRowBytes / 16;
constexpr int kVecsInFlight = 4;  // pieces of a row that a lane of a push warp reads at once
using Rows = Home<kNumRanks, kNumLocalExperts, kNumTopk, kRowBytes, elem_t, true>;
CUEP_LAUNCH(kNumThreads, 0)

// The weighted sum of rows slot(k) of expert_out, for the lanes k in `filled`, to `to`. The whole warp calls.
CUEP_DEVICE void push_sum(const Params& p, uint32_t filled, int32_t slot, float weight, uint4* to) {
    constexpr int kElemsPerVec = kPerVec<elem_t>;
    for (int first_vec = lane_idx(); first_vec - lane_idx() < kRowVecs; first_vec += 32 * kVecsInFlight) {
        float sum[kVecsInFlight][kElemsPerVec];
#pragma unroll
        for (int j = 0; j < kVecsInFlight; j++) {
#pragma unroll
            for (int c = 0; c < kElemsPerVec; c++) sum[j][c] = 0.0f;
        }
        for (uint32_t rest = filled; rest != 0; rest &= rest - 1) {
            const int k = __ffs(static_cast<int>(rest)) - 1;
            const int64_t row = __shfl_sync(0xffffffffu, slot, k);
            const float w = __shfl_sync(0xffffffffu, weight, k);
            const uint4* from = reinterpret_cast<const uint4*>(p.expert_out + row * p.expert_out_stride);
            uint4 v[kVecsInFlight];
#pragma unroll
            for (int j = 0; j < kVecsInFlight; j++) {
                if (first_vec + 32 * j < kRowVecs) v[j] = load_16(from + first_vec + 32 * j);
            }
#pragma unroll
            for (int j = 0; j < kVecsInFlight; j++) {
                if (first_vec + 32 * j >= kRowVecs) continue;
                float term[kElemsPerVec];
                unpack<elem_t>(v[j], term);
#pragma unroll
                for (int c = 0; c < kElemsPerVec; c++) sum[j][c] = __fadd_rn(sum[j][c], __fmul_rn(w, term[c]));
            }
        }
#pragma unroll
        for (int j = 0; j < kVecsInFlight; j++) {
            const int vec = first_vec + 32 * j;
            if (vec < kRowVecs) store_16(to + vec, pack<elem_t>(sum[j]));
        }
    }
}

// One push warp's share of the messages that this rank answers.
CUEP_DEVICE void push_sums(const Params& p, const Operation& op, const int32_t* recv_base, int warp) {
    const int lane = lane_idx();
    for (Rows::Walk walk(p.rank, recv_base, warp, kNumPushWarps); !walk.is_over(); walk.advance()) {
        const int dst = walk.peer(), slot_there = walk.slot();
        const int64_t at = walk.row() * kNumTopk + lane;
        const int32_t slot = lane < kNumTopk ? p.message_slots[at] : -1;
        const float weight = slot >= 0 && p.is_weighted ? p.message_weights[at] : 1.0f;
        const uint32_t filled = __ballot_sync(0xffffffffu, slot >= 0);
        push_sum(p, filled, slot, weight, reinterpret_cast<uint4*>(Rows::staged_row(p, dst, p.rank, slot_there)));
        if (p.row_weight_grads != nullptr && lane < kNumTopk) {
            Rows::staged_grads(p, dst, p.rank, slot_there)[lane] = slot < 0 ? 0.0f : p.row_weight_grads[slot];
        }
        __syncwarp();  // what all lanes stored is released by one; pairs with the wait in sum_token
        if (lane == 0) st_release_sys(Rows::flag_of(p, dst, p.rank, slot_there), tagged(op, 0));
    }
}

extern "C" __global__ void __launch_bounds__(kNumThreads, 1) ht_combine_partial(const __grid_constant__ Params p) {
    if (is_skipped(p, Op::kCombine, (p.state->refused | p.state->unrouted) != 0)) return;
    Rows::combine<kNumPushWarps, kNumSumWarps>(
        p,
        p.expert_offsets[kNumLocalExperts],
        p.is_weighted,
        [&](const Operation& op, const int32_t* recv_base, int warp) { push_sums(p, op, recv_base, warp); },
        [&](int64_t) { return static_cast<const uint8_t*>(nullptr); },  // own sums are staged as well
        [&](int64_t message, int k) {
            const int32_t slot = p.message_slots[message * kNumTopk + k];
            return slot < 0 ? 0.0f : p.row_weight_grads[slot];
        });
}
