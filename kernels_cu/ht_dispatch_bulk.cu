// serves: layout=flat
// High-throughput dispatch, flat. Each warp brings a row into shared memory once with the bulk-copy engine and stores
// it straight into its final row at every destination; the destinations of a row are interleaved, since warps that
// drift apart destination by destination collide on the links. No staging, no copy afterwards. Where the caller wants
// the rows in an array of its own, its rank asks for a flag behind each row, and half of its warps copy rows out as
// they come. A rank first tells its peers which of its receive buffers to fill: by then its stream is past all readers
// of that buffer.
#include <cuep/base.cuh>
#include <cuep/sync.cuh>
#include <cuep/bulk.cuh>
#include <cuep/operation.cuh>
#include <cuep/row_pipe.cuh>
#include <cuep/ht_receive.cuh>
#include <cuep/ht_walk.cuh>

#ifndef CUEP_JIT  // values for editors; cuep/jit.py gives the real ones
constexpr int kNumRanks = 4, kNumExperts = 256, kNumTopk = 8, kRowBytes = 14336, kNumWarps = 6, kNumStages = 2;
constexpr int kTransport = 0;
constexpr bool kTakesTurns = false;  // every warp has the same number of tokens
constexpr int kSrcBytes = 14336, kTokenBytes = 14336, kQuant = 0, kNumScales = 0, kScaleBytes = 1;
using src_t = cuep::bf16_t;
#endif
// compile: kNumRanks=4 kNumExperts=256 kNumTopk=8 kRowBytes=14336 kSrcBytes=14336 kTokenBytes=14336 kQuant=0 kNumScales=0 kScaleBytes=1 src_t=cuep::bf16_t kTakesTurns=false kTransport=0
// compile: kNumRanks=2 kNumExperts=8 kNumTopk=3 kRowBytes=528 kSrcBytes=528 kTokenBytes=528 kQuant=0 kNumScales=0 kScaleBytes=1 src_t=cuep::bf16_t kTakesTurns=true kTransport=0
// compile: kNumRanks=4 kNumExperts=256 kNumTopk=8 kRowBytes=7392 kSrcBytes=14336 kTokenBytes=7168 kQuant=4 kNumScales=56 kScaleBytes=4 src_t=cuep::bf16_t kTakesTurns=false kTransport=0
// compile: kNumRanks=2 kNumExperts=8 kNumTopk=3 kRowBytes=400 kSrcBytes=1536 kTokenBytes=384 kQuant=1 kNumScales=3 kScaleBytes=1 src_t=float kTakesTurns=true kTransport=0
// compile: kNumRanks=2 kNumExperts=8 kNumTopk=3 kRowBytes=288 kSrcBytes=272 kTokenBytes=272 kQuant=0 kNumScales=5 kScaleBytes=2 src_t=cuep::bf16_t kTakesTurns=false kTransport=0
static_assert(kTransport == cuep::kPushed, "variants named copy... have other memory: cuep/layout.py");
CUEP_TUNABLE(kNumWarps, 6, 2);
CUEP_TUNABLE(kNumStages, 2, 2);
#include <cuep/ht_flat.cuh>

using namespace cuep;

struct Params {
    uint8_t* arena[kNumRanks];    // symmetric memory of every rank; offsets below are bytes into it
    int64_t tokens_offset;        // [num_buffers, max_rows] rows of kRowBytes
    int64_t topk_idx_offset;      // int32 [num_buffers, max_rows, kNumTopk]: expert of the receiver or -1
    int64_t topk_weights_offset;  // float [num_buffers, max_rows, kNumTopk]
    int64_t source_offset;        // int32 [num_buffers, max_rows, 2]: rank, token
    int64_t ready_offset;    // uint64 [kReadyBanks, kNumRanks]: epoch, buffer that this peer receives into, or kRefused
    int64_t arrived_offset;  // uint64 [kNumRanks]: epoch; all rows of this peer are here
    int64_t flags_offset;  // uint64 [kNumRanks, max_tokens]: epoch; a row of this peer is here, where it is copied out
    const uint8_t* x;      // [num_tokens] rows, x_stride bytes apart
    int64_t x_stride;
    const uint8_t* x_scales;  // the caller's scales, [num_tokens, kNumScales] of kScaleBytes, where rows come with them
    int64_t x_scales_row_stride;  // bytes between the scales of two tokens
    int64_t x_scales_stride;      // bytes between two scales of a token
    uint8_t* out;  // null, or [out_rows] rows, out_stride bytes apart: rows go there as well, and what belongs to them
    int64_t out_stride;        // to the next three
    uint8_t* out_scales;       // null, or [max_rows, kNumScales] of kScaleBytes: those of the rows in out
    int32_t* out_topk_idx;     // [max_rows, kNumTopk]
    float* out_topk_weights;   // [max_rows, kNumTopk]
    int32_t* out_source;       // [max_rows, 2]
    const int32_t* rows;       // [max_tokens, kNumRanks]: row at each rank, or -1
    const int32_t* send_base;  // [kNumRanks]: first row of this rank's tokens at each rank
    const int32_t* recv_base;  // [kNumRanks + 1]: first row here of each source rank; last: rows that are received
    const int32_t* ids;        // [max_tokens, kNumTopk]
    const float* weights;      // [max_tokens, kNumTopk]
    const int32_t* total;      // [1]: rows for this rank, of which it receives at most max_rows
    int32_t* high_water;       // [num_buffers]: rows of this rank's buffers that may hold ids
    HandleState* state;
    Control* control;
    Report* report;
    int64_t timeout_ns;
    const uint8_t* num_tokens_at;  // null, or where the device has the number of tokens
    int32_t num_tokens;            // rows of x
    int32_t out_rows;              // fewer than are received: refused
    int32_t max_rows;
    int32_t max_tokens;
    int32_t rank;
    int32_t buffer;  // that this rank receives into
    uint32_t handle;
    uint32_t ticket;
    bool is_count_int64;
    bool is_global_ids;  // experts are numbered as in topk_idx, not from the receiver's first
    bool is_refused;     // publish kRefused instead of a buffer
};

using Pipe = RowPipe<kSrcBytes, kNumStages, kStageRoom>;
using PeerRows = WalkOfPeers<kNumRanks>;
static_assert(kNumThreads >= kNumRanks, "one thread waits for each rank");
using Tokens = TokenShare<kTakesTurns>;
CUEP_LAUNCH(kNumThreads, kNumWarps* Pipe::kSmemBytes)

CUEP_DEVICE uint64_t* flag_of(const Params& p, int dst, int src, int64_t slot) {
    return reinterpret_cast<uint64_t*>(p.arena[dst] + p.flags_offset) + int64_t{src} * p.max_tokens + slot;
}

// Rows of this rank's tokens, and what belongs to them, to each of their ranks; its own, with `out`, straight there.
struct Sender {
    const Params& p;
    const uint32_t* buffers;

    CUEP_DEVICE bool is_out(int dst) const { return dst == p.rank && p.out != nullptr; }

    CUEP_DEVICE void store_rows(const Plan& plan, uint8_t* staged) const {
        finish_row(p, plan.scales, staged);
#pragma unroll
        for (int i = 1; i <= kNumRanks; i++) {
            const int dst = (p.rank + i) % kNumRanks;
            const int32_t row = __shfl_sync(0xffffffffu, plan.rows, dst);
            if (row < 0) continue;
            if (is_out(dst)) {
                store_out(p, row, staged);
            } else {
                const uint32_t buffer = buffer_of(buffers[dst]);
                bulk_store(at_row<uint8_t>(p, p.tokens_offset, dst, buffer, row, kRowBytes), staged, kRowBytes);
            }
        }
    }

    CUEP_DEVICE void store_routings(int t, int32_t rows) const {
        for (int i = 1; i <= kNumRanks; i++) {
            const int dst = (p.rank + i) % kNumRanks;
            const int64_t row = __shfl_sync(0xffffffffu, rows, dst);
            if (row < 0) continue;
            if (is_out(dst)) {
                store_routing_out(p, t, row);
            } else {
                store_routing(p, t, dst, buffer_of(buffers[dst]), row);
            }
        }
    }
};

CUEP_DEVICE void send_rows(const Params& p, const uint32_t* buffers, const Tokens& share, Pipe& pipe) {
    const Sender sender{p, buffers};
    pipe.move(
        share,
        [&](const Tokens& at) { return p.x + at.t * p.x_stride; },
        [&](const Tokens& at) { return Plan(p, at.t); },
        [&](const Tokens&, const Plan& plan, uint8_t* staged) { sender.store_rows(plan, staged); },
        [&](const Tokens& at, const Plan& plan) { sender.store_routings(at.t, plan.rows); });
    fence_proxy_async();
}

// The same, with a flag behind each row for the ranks that copy it out as it comes.
CUEP_DEVICE void send_rows_with_flags(
    const Params& p, const Operation& op, const uint32_t* buffers, const Tokens& share, Pipe& pipe) {
    const Sender sender{p, buffers};
    const int lane = lane_idx();
    const bool has_flags = lane < kNumRanks && lane != p.rank && wants_flags(buffers[lane < kNumRanks ? lane : 0]);
    const int32_t base = lane < kNumRanks ? p.send_base[lane] : 0;
    pipe.move(
        share,
        [&](const Tokens& at) { return p.x + at.t * p.x_stride; },
        [&](const Tokens& at) { return Plan(p, at.t); },
        [&](const Tokens&, const Plan& plan, uint8_t* staged) { sender.store_rows(plan, staged); },
        [&](const Tokens& at, const Plan& plan) { sender.store_routings(at.t, plan.rows); },
        [&](const Tokens& at) {  // a lane for each rank; pairs with the wait in receive_row
            fence_proxy_async();
            const int32_t row = row_of_lane<kNumRanks>(p, at.t);
            if (has_flags && row >= 0) st_release_sys(flag_of(p, lane, p.rank, row - base), tagged(op, 0));
        });
}

struct Row {
    const uint8_t* row;
    int64_t number;
};

// Waits for a row of a peer and copies out what belongs to it. The whole warp calls; false: gave up.
CUEP_DEVICE bool receive_row(const Params& p, const Operation& op, const PeerRows& walk, Row& received) {
    const int lane = lane_idx(), src = walk.peer();
    const int64_t row = walk.row();
    bool is_ok = true;
    uint32_t unused = 0;
    if (lane == 0) is_ok = wait_flag(op, flag_of(p, p.rank, src, walk.slot()), Phase::kRows, src, unused);
    if (!__all_sync(0xffffffffu, is_ok)) return false;
    __syncwarp();  // a vote orders no memory: now every lane may read what one lane has waited for
    received = {at_row<uint8_t>(p, p.tokens_offset, p.rank, p.buffer, row, kRowBytes), row};
    bring_routing_out(p, row);
    return true;
}

// A warp's share of the rows of peers, into the caller's array as they come. False: gave up.
CUEP_DEVICE bool copy_out(const Params& p, const Operation& op, const PeerRows& walk, Pipe& pipe) {
    return pipe.move_as_they_come<kRowBytes, Row>(
        walk,
        [&](const PeerRows& next, Row& row) { return receive_row(p, op, next, row); },
        [&](const Row& row, const uint8_t* staged) { store_out(p, row.number, staged); });
}

extern "C" __global__ void __launch_bounds__(kNumThreads, 1) ht_dispatch_bulk(const __grid_constant__ Params p) {
    CUEP_DYNAMIC_SMEM(smem);
    __shared__ uint32_t buffers[kNumRanks];
    __shared__ int32_t recv_base[kNumRanks + 1];
    if (is_skipped(p, Op::kDispatch, p.state->unrouted != 0)) return;
    const Operation op = begin_operation(p, Op::kDispatch);
    Pipe pipe(smem, warp_idx(), kNumWarps);
    for (int r = threadIdx.x; r <= kNumRanks; r += kNumThreads) recv_base[r] = p.recv_base[r];
    if (block_any(is_broken(op))) return;

    const int num_rows = min(*p.total, p.max_rows), warp = warp_idx();
    const bool is_out = p.out != nullptr;
    const bool is_refused = p.is_refused || (is_out && p.out_rows < num_rows);  // of this rank
    if (!exchange_buffers<kNumRanks>(p, op, is_refused, is_out ? kWantsFlags : 0, buffers)) return;
    fence_proxy_async();  // what peers read from their buffers comes before the bulk copies that write them
    const int refused_by = refusing_rank<kNumRanks>(p, is_refused, buffers);

    // send warps send all they owe and wait for nobody; with `out`, half of the warps copy rows out as they come
    bool is_ok = true;
    if (refused_by < 0) {
        if (is_out) {
            clear_tail(p.out_topk_idx, p.out_topk_weights, num_rows, p.max_rows);
        }
        clear_tail(at_row<int32_t>(p, p.topk_idx_offset, p.rank, p.buffer, 0, kNumTopk),
                   at_row<float>(p, p.topk_weights_offset, p.rank, p.buffer, 0, kNumTopk),
                   num_rows,
                   p.high_water[p.buffer]);
        const int num_senders = is_out ? kNumSendWarps : kNumWarps;
        if (warp < num_senders) {
            const Tokens share(op, warp, num_senders, kept_tokens_of(p));
            if (is_any_flagged<kNumRanks>(p, buffers)) {
                send_rows_with_flags(p, op, buffers, share, pipe);
            } else {
                send_rows(p, buffers, share, pipe);
            }
        }
        if (kNumRanks > 1 && is_out && warp >= kFirstReceiver) {
            is_ok = copy_out(p, op, PeerRows(p.rank, recv_base, warp - kFirstReceiver, kNumReceivers), pipe);
        }
    }
    if (block_any(!is_ok)) return;

    // arrived: waited for by the last block, where rows stay where peers put them
    if (!is_last_block(op)) return;
    release_arrived<kNumRanks>(p, op);
    if (!(is_out && refused_by < 0) && !wait_arrived<kNumRanks>(p, op)) return;

    if (threadIdx.x == 0) {
        p.state->refused = 0;
        if (refused_by >= 0) {
            mark_refused(p, Op::kDispatch, refused_by, Cause::kTooFewRows, num_rows);
        } else {
            p.high_water[p.buffer] = num_rows;
        }
        end_kernel(op);
    }
}
