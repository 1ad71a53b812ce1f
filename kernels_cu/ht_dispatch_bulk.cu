// serves: layout=flat
// High-throughput dispatch, flat. Each warp brings a row into shared memory once with the bulk-copy engine and stores
// it straight into its final row at every destination; the destinations of a row are interleaved, since warps that
// drift apart destination by destination collide on the links. No staging, no copy afterwards, unless the caller wants
// the rows in an array of its own. A rank first tells its peers which of its receive buffers to fill: by then its
// stream is past all readers of that buffer.
#include <cuep/base.cuh>
#include <cuep/sync.cuh>
#include <cuep/bulk.cuh>
#include <cuep/operation.cuh>
#include <cuep/row_pipe.cuh>
#include <cuep/ht_receive.cuh>

#ifndef CUEP_JIT  // values for editors; cuep/jit.py gives the real ones
constexpr int kNumRanks = 4, kNumExperts = 256, kNumTopk = 8, kRowBytes = 14336, kNumWarps = 4, kNumStages = 3;
constexpr int kSrcBytes = 14336, kTokenBytes = 14336, kQuant = 0, kNumScales = 0, kScaleBytes = 1;
using src_t = cuep::bf16_t;
#endif
// compile: kNumRanks=4 kNumExperts=256 kNumTopk=8 kRowBytes=14336 kSrcBytes=14336 kTokenBytes=14336 kQuant=0 kNumScales=0 kScaleBytes=1 src_t=cuep::bf16_t
// compile: kNumRanks=2 kNumExperts=8 kNumTopk=3 kRowBytes=528 kSrcBytes=528 kTokenBytes=528 kQuant=0 kNumScales=0 kScaleBytes=1 src_t=cuep::bf16_t
// compile: kNumRanks=4 kNumExperts=256 kNumTopk=8 kRowBytes=7392 kSrcBytes=14336 kTokenBytes=7168 kQuant=4 kNumScales=56 kScaleBytes=4 src_t=cuep::bf16_t
// compile: kNumRanks=2 kNumExperts=8 kNumTopk=3 kRowBytes=400 kSrcBytes=1536 kTokenBytes=384 kQuant=1 kNumScales=3 kScaleBytes=1 src_t=float
// compile: kNumRanks=2 kNumExperts=8 kNumTopk=3 kRowBytes=288 kSrcBytes=272 kTokenBytes=272 kQuant=0 kNumScales=5 kScaleBytes=2 src_t=cuep::bf16_t
CUEP_TUNABLE(kNumWarps, 4, 2);
CUEP_TUNABLE(kNumStages, 3, 2);
#include <cuep/ht_source.cuh>

using namespace cuep;

struct Params {
    uint8_t* arena[kNumRanks];    // symmetric memory of every rank; offsets below are bytes into it
    int64_t tokens_offset;        // [num_buffers, max_rows] rows of kRowBytes
    int64_t topk_idx_offset;      // int32 [num_buffers, max_rows, kNumTopk]: expert of the receiver or -1
    int64_t topk_weights_offset;  // float [num_buffers, max_rows, kNumTopk]
    int64_t source_offset;        // int32 [num_buffers, max_rows, 2]: rank, token
    int64_t ready_offset;    // uint64 [kReadyBanks, kNumRanks]: epoch, buffer that this peer receives into, or kRefused
    int64_t arrived_offset;  // uint64 [kNumRanks]: epoch; all rows of this peer are here
    const uint8_t* x;        // [num_tokens] rows, x_stride bytes apart
    int64_t x_stride;
    const uint8_t* x_scales;  // the caller's scales, [num_tokens, kNumScales] of kScaleBytes, where rows come with them
    int64_t x_scales_row_stride;  // bytes between the scales of two tokens
    int64_t x_scales_stride;      // bytes between two scales of a token
    uint8_t* out;  // null, or [out_rows] rows, out_stride bytes apart: rows go there as well, and what belongs to them
    int64_t out_stride;       // to the next three
    uint8_t* out_scales;      // null, or [max_rows, kNumScales] of kScaleBytes: those of the rows in out
    int32_t* out_topk_idx;    // [max_rows, kNumTopk]
    float* out_topk_weights;  // [max_rows, kNumTopk]
    int32_t* out_source;      // [max_rows, 2]
    const int32_t* rows;      // [max_tokens, kNumRanks]: row at each rank, or -1
    const int32_t* ids;       // [max_tokens, kNumTopk]
    const float* weights;     // [max_tokens, kNumTopk]
    const int32_t* total;     // [1]: rows for this rank, of which it receives at most max_rows
    int32_t* high_water;      // [num_buffers]: rows of this rank's buffers that may hold ids
    HandleState* state;
    Control* control;
    Report* report;
    int64_t timeout_ns;
    const uint8_t* num_tokens_at;  // null, or where the device has the number of tokens
    int32_t num_tokens;            // rows of x
    int32_t out_rows;              // fewer than are received: refused
    int32_t max_rows;
    int32_t rank;
    int32_t buffer;  // that this rank receives into
    uint32_t handle;
    uint32_t ticket;
    bool is_count_int64;
    bool is_global_ids;  // experts are numbered as in topk_idx, not from the receiver's first
    bool is_refused;     // publish kRefused instead of a buffer
};

constexpr int kNumThreads = kNumWarps * 32;
constexpr int kNumLocalExperts = kNumExperts / kNumRanks;
using Pipe = RowPipe<kSrcBytes, kNumStages, kStageRoom>;
static_assert(kNumThreads >= kNumRanks, "one thread waits for each rank");
CUEP_LAUNCH(kNumThreads, kNumWarps* Pipe::kSmemBytes)

// Ids of rows beyond the count are -1, whatever an earlier dispatch left there.
CUEP_DEVICE void clear_tail(int32_t* ids, float* weights, int64_t first_row, int64_t end_row) {
    const int64_t step = gridDim.x * kNumThreads;
    for (int64_t i = first_row * kNumTopk + blockIdx.x * kNumThreads + threadIdx.x; i < end_row * kNumTopk; i += step) {
        ids[i] = -1;
        weights[i] = 0.0f;
    }
}

// Ids, weights and origin of token t's row at dst. The whole warp calls.
CUEP_DEVICE void send_routing(const Params& p, int t, int dst, uint32_t buffer, int32_t row) {
    const int lane = lane_idx();
    for (int k = lane; k < kNumTopk; k += 32) {
        const int e = p.ids[static_cast<int64_t>(t) * kNumTopk + k];
        const bool is_there = e >= 0 && e / kNumLocalExperts == dst;
        const int id = p.is_global_ids ? e : e % kNumLocalExperts;
        at_row<int32_t>(p, p.topk_idx_offset, dst, buffer, row, kNumTopk)[k] = is_there ? id : -1;
        at_row<float>(p, p.topk_weights_offset, dst, buffer, row, kNumTopk)[k] =
            is_there ? p.weights[static_cast<int64_t>(t) * kNumTopk + k] : 0.0f;
    }
    if (lane < 2) at_row<int32_t>(p, p.source_offset, dst, buffer, row, 2)[lane] = lane == 0 ? p.rank : t;
}

// This warp's share of the tokens.
CUEP_DEVICE void send_rows(const Params& p, const uint32_t* buffers, Pipe& pipe) {
    const int lane = lane_idx(), first = warp_idx() * gridDim.x + blockIdx.x;
    pipe.move(
        first,
        gridDim.x * kNumWarps,
        kept_tokens_of(p),
        [&](int t) { return p.x + t * p.x_stride; },
        [&](int t) { return lane < kNumRanks ? p.rows[static_cast<int64_t>(t) * kNumRanks + lane] : -1; },
        [&](int t, int32_t rows, uint8_t* staged) {
            finish_row(p, t, staged);
#pragma unroll
            for (int i = 1; i <= kNumRanks; i++) {
                const int dst = (p.rank + i) % kNumRanks;
                const int32_t row = __shfl_sync(0xffffffffu, rows, dst);
                if (row < 0) continue;
                bulk_store(at_row<uint8_t>(p, p.tokens_offset, dst, buffers[dst], row, kRowBytes), staged, kRowBytes);
            }
        },
        [&](int t, int32_t rows) {
            for (int i = 1; i <= kNumRanks; i++) {
                const int dst = (p.rank + i) % kNumRanks;
                const int32_t row = __shfl_sync(0xffffffffu, rows, dst);
                if (row >= 0) send_routing(p, t, dst, buffers[dst], row);
            }
        });
    fence_proxy_async();
}

// This warp's share of what arrived, into the caller's array.
CUEP_DEVICE void copy_out(const Params& p, int num_rows, Pipe& pipe) {
    const int lane = lane_idx();
    const int32_t* ids = at_row<int32_t>(p, p.topk_idx_offset, p.rank, p.buffer, 0, kNumTopk);
    const float* weights = at_row<float>(p, p.topk_weights_offset, p.rank, p.buffer, 0, kNumTopk);
    const int32_t* source = at_row<int32_t>(p, p.source_offset, p.rank, p.buffer, 0, 2);
    clear_tail(p.out_topk_idx, p.out_topk_weights, num_rows, p.max_rows);
    pipe.move<kRowBytes>(
        warp_idx() * gridDim.x + blockIdx.x,
        gridDim.x * kNumWarps,
        num_rows,
        [&](int row) { return at_row<uint8_t>(p, p.tokens_offset, p.rank, p.buffer, row, kRowBytes); },
        [&](int row) { return int64_t{row}; },
        [&](int, int64_t row, const uint8_t* staged) {
            bulk_store(p.out + row * p.out_stride, staged, kTokenBytes);
            if constexpr (kHasScales) {
                copy_scales(p, staged, row);
                fence_proxy_async_shared();
            }
        },
        [&](int, int64_t row) {
            for (int k = lane; k < kNumTopk; k += 32) {
                p.out_topk_idx[row * kNumTopk + k] = ids[row * kNumTopk + k];
                p.out_topk_weights[row * kNumTopk + k] = weights[row * kNumTopk + k];
            }
            if (lane < 2) p.out_source[row * 2 + lane] = source[row * 2 + lane];
        });
}

extern "C" __global__ void __launch_bounds__(kNumThreads, 1) ht_dispatch_bulk(const __grid_constant__ Params p) {
    CUEP_DYNAMIC_SMEM(smem);
    __shared__ uint32_t buffers[kNumRanks];
    if (is_skipped(p, Op::kDispatch, p.state->unrouted != 0)) return;
    const Operation op = begin_operation(p, Op::kDispatch);
    Pipe pipe(smem, warp_idx(), kNumWarps);
    if (block_any(is_broken(op))) return;

    const int num_rows = min(*p.total, p.max_rows);
    const bool is_refused = p.is_refused || (p.out != nullptr && p.out_rows < num_rows);  // of this rank
    if (!exchange_buffers<kNumRanks>(p, op, is_refused, buffers)) return;
    fence_proxy_async();  // what peers read from their buffers comes before the bulk copies that write them
    const int refused_by = refusing_rank<kNumRanks>(p, is_refused, buffers);

    // send
    if (refused_by < 0) {
        clear_tail(at_row<int32_t>(p, p.topk_idx_offset, p.rank, p.buffer, 0, kNumTopk),
                   at_row<float>(p, p.topk_weights_offset, p.rank, p.buffer, 0, kNumTopk),
                   num_rows,
                   p.high_water[p.buffer]);
        send_rows(p, buffers, pipe);
    }

    // arrived: waited for by the last block, or by all where all copy
    if (p.out == nullptr || refused_by >= 0) {
        if (!is_last_block(op)) return;
        release_arrived<kNumRanks>(p, op);
        if (!wait_arrived<kNumRanks>(p, op)) return;
    } else {
        if (is_last_to_send(op)) release_arrived<kNumRanks>(p, op);
        if (!wait_arrived<kNumRanks>(p, op)) return;
        fence_proxy_async();  // what peers stored comes before the bulk copies that read it
        copy_out(p, num_rows, pipe);
        if (!is_last_block(op)) return;
    }

    if (threadIdx.x == 0) {
        p.state->refused = 0;
        if (refused_by >= 0) {
            mark_refused(p, Op::kDispatch, refused_by, Cause::kTooFewRows);
        } else {
            p.high_water[p.buffer] = num_rows;
        }
        end_kernel(op);
    }
}
