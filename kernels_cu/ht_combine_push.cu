// serves: layout=flat
// High-throughput combine. Some warps of a block push the rows that this rank answers into the owners' staging, each
// row with its flag; the others add up this rank's own tokens as their rows arrive: fp32, in order of rank, rounded
// once. So any array can be combined without copying it into symmetric memory first, and sums overlap with the links.
// Cost: one row over the link per (token, rank), and staging of N - 1 rows a token.
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
constexpr int kNumPushWarps = 7, kNumTellWarps = 0, kNumSumWarps = 12, kNumStages = 2, kMostPieceBytes = 131072;
using elem_t = cuep::bf16_t;
#endif
// compile: kNumRanks=4 kNumExperts=256 kNumTopk=8 kRowBytes=14336 elem_t=cuep::bf16_t kTransport=0
// compile: kNumRanks=2 kNumExperts=8 kNumTopk=3 kRowBytes=528 elem_t=float kTransport=0
CUEP_TUNABLE(kNumPushWarps, 7, 2);
CUEP_TUNABLE(kNumTellWarps, 0, 1);
CUEP_TUNABLE(kNumSumWarps, 12, 1);
CUEP_TUNABLE(kNumStages, 2, 4);
CUEP_TUNABLE(kMostPieceBytes, 131072, 256);  // of a row that is pushed

static_assert(kTransport == cuep::kPushed, "variants named pull... and copy... have other memory: cuep/layout.py");

using namespace cuep;

struct Params {
    uint8_t* arena[kNumRanks];  // symmetric memory of every rank; offsets below are bytes into it
    int64_t rows_offset;        // [kNumRanks - 1, max_tokens] rows; source s is at (s - rank - 1) mod kNumRanks
    int64_t grads_offset;       // float [kNumRanks - 1, max_tokens, kNumTopk], likewise
    int64_t flags_offset;       // uint64 [kNumRanks, max_tokens]: epoch
    int64_t totals_offset;      // uint64 [kNumRanks]: epoch, rows that this peer pushes | kHasGrads, or kRefused
    int64_t done_offset;        // uint64 [kNumRanks]: epoch that this peer has read
    const uint8_t* expert_out;  // rows in the order of dispatch, expert_out_stride bytes apart
    int64_t expert_out_stride;
    const float* row_weight_grads;  // null, or [num_rows, kNumTopk]: they come home with the rows
    float* weight_grads;            // [num_tokens, kNumTopk]: where they go
    const uint8_t* bias[2];         // null, or [num_tokens] rows that are added to the sums, bias_stride bytes apart
    int64_t bias_stride[2];
    const int32_t* ids;        // [max_tokens, kNumTopk]
    const int32_t* rows;       // [max_tokens, kNumRanks]: row at each rank, or -1
    const int32_t* send_base;  // [kNumRanks]: first row of this rank's tokens at each rank
    const int32_t* recv_base;  // [kNumRanks + 1]: first row here of each source rank
    uint8_t* y;                // [num_tokens] rows, y_stride bytes apart
    int64_t y_stride;
    HandleState* state;
    Control* control;
    Report* report;
    int64_t timeout_ns;
    const uint8_t* num_tokens_at;  // null, or where the device has the number of tokens
    int32_t num_tokens;
    int32_t num_rows;  // of expert_out; fewer than were received: refused
    int32_t max_tokens;
    int32_t rank;
    uint32_t handle;
    uint32_t ticket;
    bool is_count_int64;
    bool is_refused;  // publish kRefused instead of pushing
};

constexpr int kNumThreads = (kNumPushWarps + kNumTellWarps + kNumSumWarps) * 32;
using RowPieces = Pieces<kRowBytes, kMostPieceBytes>;
using Pipe = RowPipe<RowPieces::kBytes, kNumStages>;
using Rows = Home<kNumRanks, kNumExperts / kNumRanks, kNumTopk, kRowBytes, elem_t, false>;
using FlagsOfRows = Brought<(kNumTellWarps > 0)>;
CUEP_LAUNCH(kNumThreads, kNumPushWarps* Pipe::kSmemBytes)

// The pieces of the rows that a push warp answers, row by row.
struct PieceWalk {
    Rows::Walk walk;
    int piece = 0;

    CUEP_DEVICE bool is_over() const { return walk.is_over(); }
    CUEP_DEVICE bool is_last() const { return piece == RowPieces::kCount - 1; }
    CUEP_DEVICE int offset() const { return piece * RowPieces::kBytes; }
    CUEP_DEVICE void advance() {
        if (!is_last()) {
            piece++;
        } else {
            piece = 0;
            walk.advance();
        }
    }
};

// One push warp's share of the rows that this rank answers.
CUEP_DEVICE void push_rows(
    const Params& p, const Operation& op, const int32_t* recv_base, int warp, FlagsOfRows brought, Pipe pipe) {
    const int lane = lane_idx();
    pipe.move_and_tell(
        PieceWalk{Rows::Walk(p.rank, recv_base, warp, kNumPushWarps)},
        [&](const PieceWalk& at) { return p.expert_out + at.walk.row() * p.expert_out_stride + at.offset(); },
        [&](const PieceWalk& at) { return RowPieces::bytes(at.piece); },
        [&](const PieceWalk& at, const uint8_t* staged) {
            const int dst = at.walk.peer(), slot = at.walk.slot();
            uint8_t* row = Rows::staged_row(p, dst, p.rank, slot);
            bulk_store(row + at.offset(), staged, RowPieces::bytes(at.piece));
            if (at.is_last() && p.row_weight_grads != nullptr && lane < kNumTopk) {
                Rows::staged_grads(p, dst, p.rank, slot)[lane] = p.row_weight_grads[at.walk.row() * kNumTopk + lane];
            }
        },
        [&](const PieceWalk& at) {
            if (!at.is_last()) return;
            fence_proxy_async();
            brought.note(
                [&] { st_release_sys(Rows::flag_of(p, at.walk.peer(), p.rank, at.walk.slot()), tagged(op, 0)); });
        });
}

extern "C" __global__ void __launch_bounds__(kNumThreads, 1) ht_combine_push(const __grid_constant__ Params p) {
    CUEP_DYNAMIC_SMEM(smem);
    if (is_skipped(p, Op::kCombine, (p.state->refused | p.state->unrouted) != 0)) return;
    Rows::combine<kNumPushWarps, kNumTellWarps, kNumSumWarps>(
        p,
        p.recv_base[kNumRanks],
        true,
        [&](const Operation& op, const int32_t* recv_base, int warp, FlagsOfRows brought) {
            push_rows(p, op, recv_base, warp, brought, Pipe(smem, warp, kNumPushWarps));
        },
        [&](int64_t row) { return p.expert_out + row * p.expert_out_stride; },
        [&](int64_t row, int k) { return p.row_weight_grads[row * kNumTopk + k]; });
}
