// High-throughput dispatch, flat. Each warp brings a row into shared memory once with the bulk-copy engine and stores
// it straight into its final row at every destination; the destinations of a row are interleaved, since warps that
// drift apart destination by destination collide on the links. No staging, no copy afterwards. A rank first tells its
// peers which of its receive buffers to fill: by then its stream is past all readers of that buffer.
#include <cuep/base.cuh>
#include <cuep/sync.cuh>
#include <cuep/bulk.cuh>
#include <cuep/operation.cuh>

#ifndef CUEP_JIT  // values for editors; cuep/jit.py gives the real ones
constexpr int kNumRanks = 4, kNumExperts = 256, kNumTopk = 8, kRowBytes = 14336, kNumWarps = 4, kNumStages = 3;
#endif
// compile: kNumRanks=4 kNumExperts=256 kNumTopk=8 kRowBytes=14336
// compile: kNumRanks=2 kNumExperts=8 kNumTopk=3 kRowBytes=528
CUEP_TUNABLE(kNumWarps, 4, 2);
CUEP_TUNABLE(kNumStages, 3, 2);

using namespace cuep;

struct Params {
    uint8_t* arena[kNumRanks];    // symmetric memory of every rank; offsets below are bytes into it
    int64_t tokens_offset;        // [num_buffers, max_rows] rows
    int64_t topk_idx_offset;      // int32 [num_buffers, max_rows, kNumTopk]: local expert or -1
    int64_t topk_weights_offset;  // float [num_buffers, max_rows, kNumTopk]
    int64_t source_offset;        // int32 [num_buffers, max_rows, 2]: rank, token
    int64_t ready_offset;         // uint64 [kNumRanks]: epoch, buffer that this peer receives into, or kRefused
    int64_t arrived_offset;       // uint64 [kNumRanks]: epoch; all rows of this peer are here
    const uint8_t* x;             // [num_tokens] rows, x_stride bytes apart
    int64_t x_stride;
    const int32_t* rows;   // [max_tokens, kNumRanks]: row at each rank, or -1
    const int32_t* ids;    // [max_tokens, kNumTopk]
    const float* weights;  // [max_tokens, kNumTopk]
    const int32_t* total;  // [1]: rows that this rank receives
    int32_t* high_water;   // [num_buffers]: rows of this rank's buffers that may hold ids
    HandleState* state;
    Control* control;
    Report* report;
    int64_t timeout_ns;
    int32_t num_tokens;
    int32_t max_rows;
    int32_t rank;
    int32_t buffer;  // that this rank receives into
    uint32_t handle;
    uint32_t ticket;
    bool is_refused;  // publish kRefused instead of a buffer
};

constexpr int kNumThreads = kNumWarps * 32;
constexpr int kNumLocalExperts = kNumExperts / kNumRanks;
constexpr int kStageBytes = (kRowBytes + 127) / 128 * 128;
constexpr int kSmemBytes = kNumWarps * kNumStages * (kStageBytes + 8);
static_assert(kNumThreads >= kNumRanks, "one thread waits for each rank");
static_assert(kNumStages >= 2 && kNumStages <= 32, "a row is loaded while the one before it is stored");
CUEP_LAUNCH(kNumThreads, kSmemBytes)

CUEP_DEVICE uint64_t* ready_of(const Params& p, int dst, int src) {
    return reinterpret_cast<uint64_t*>(p.arena[dst] + p.ready_offset) + src;
}

CUEP_DEVICE uint64_t* arrived_of(const Params& p, int dst, int src) {
    return reinterpret_cast<uint64_t*>(p.arena[dst] + p.arrived_offset) + src;
}

// Where a row of rank dst's buffer lies in an array with `row_elems` elements a row.
template <class T>
CUEP_DEVICE T* at_row(const Params& p, int64_t offset, int dst, uint32_t buffer, int32_t row, int row_elems) {
    const int64_t index = static_cast<int64_t>(buffer) * p.max_rows + row;
    return reinterpret_cast<T*>(p.arena[dst] + offset) + index * row_elems;
}

// Ids of rows beyond the count are -1, whatever an earlier dispatch left there.
CUEP_DEVICE void clear_tail(const Params& p) {
    const int64_t first = static_cast<int64_t>(*p.total) * kNumTopk;
    const int64_t last = static_cast<int64_t>(p.high_water[p.buffer]) * kNumTopk;
    int32_t* ids = at_row<int32_t>(p, p.topk_idx_offset, p.rank, p.buffer, 0, kNumTopk);
    float* weights = at_row<float>(p, p.topk_weights_offset, p.rank, p.buffer, 0, kNumTopk);
    for (int64_t i = first + blockIdx.x * kNumThreads + threadIdx.x; i < last; i += gridDim.x * kNumThreads) {
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
        at_row<int32_t>(p, p.topk_idx_offset, dst, buffer, row, kNumTopk)[k] = is_there ? e % kNumLocalExperts : -1;
        at_row<float>(p, p.topk_weights_offset, dst, buffer, row, kNumTopk)[k] =
            is_there ? p.weights[static_cast<int64_t>(t) * kNumTopk + k] : 0.0f;
    }
    if (lane < 2) at_row<int32_t>(p, p.source_offset, dst, buffer, row, 2)[lane] = lane == 0 ? p.rank : t;
}

// One warp's share of the tokens, kNumStages - 1 rows ahead.
CUEP_DEVICE void send_rows(const Params& p, const uint32_t* buffers, uint8_t* stages, uint64_t* loaded) {
    const int lane = lane_idx();
    const int first = warp_idx() * gridDim.x + blockIdx.x, step = gridDim.x * kNumWarps;
    int next = first;
    auto load_next = [&](int stage) {
        bulk_load(stages + stage * kStageBytes, p.x + next * p.x_stride, kRowBytes, loaded + stage);
        next += step;
    };
    for (int stage = 0; stage < kNumStages - 1 && next < p.num_tokens; stage++) load_next(stage);
    uint32_t parity = 0;  // bit s: of the next load into stage s
    int stage = 0;
    for (int t = first; t < p.num_tokens; t += step) {
        const int32_t rows = lane < kNumRanks ? p.rows[static_cast<int64_t>(t) * kNumRanks + lane] : -1;
        mbarrier_wait(loaded + stage, parity >> stage & 1u);
        parity ^= 1u << stage;
#pragma unroll
        for (int i = 1; i <= kNumRanks; i++) {
            const int dst = (p.rank + i) % kNumRanks;
            const int32_t row = __shfl_sync(0xffffffffu, rows, dst);
            if (row < 0) continue;
            bulk_store(at_row<uint8_t>(p, p.tokens_offset, dst, buffers[dst], row, kRowBytes),
                       stages + stage * kStageBytes,
                       kRowBytes);
        }
        bulk_commit();
        for (int i = 1; i <= kNumRanks; i++) {
            const int dst = (p.rank + i) % kNumRanks;
            const int32_t row = __shfl_sync(0xffffffffu, rows, dst);
            if (row >= 0) send_routing(p, t, dst, buffers[dst], row);
        }
        if (next < p.num_tokens) {
            bulk_wait_read<1>();  // the stage that is refilled was stored one row ago
            load_next(stage == 0 ? kNumStages - 1 : stage - 1);
        }
        stage = stage + 1 == kNumStages ? 0 : stage + 1;
    }
    bulk_wait<0>();  // all the way, not only read: the flag that follows says that the rows are there
    fence_proxy_async();
}

extern "C" __global__ void __launch_bounds__(kNumThreads, 1) ht_dispatch_bulk(const __grid_constant__ Params p) {
    CUEP_DYNAMIC_SMEM(smem);
    __shared__ uint32_t buffers[kNumRanks];
    const int tid = threadIdx.x;
    if (is_skipped(p, p.state->unrouted != 0)) return;
    const Operation op = begin_operation(p, Op::kDispatch);
    uint8_t* stages = smem + warp_idx() * kNumStages * kStageBytes;
    uint64_t* loaded =
        reinterpret_cast<uint64_t*>(smem + kNumWarps * kNumStages * kStageBytes) + warp_idx() * kNumStages;
    for (int stage = 0; stage < kNumStages; stage++) mbarrier_init(loaded + stage);

    if (block_any(is_broken(op))) return;

    // ready: what this rank's stream read from the buffer is read, so peers may fill it (pairs with the wait below)
    if (blockIdx.x == 0 && tid < kNumRanks) {
        const uint32_t buffer = p.is_refused ? kRefused : static_cast<uint32_t>(p.buffer);
        st_release_sys(ready_of(p, tid, p.rank), tagged(op, buffer));
    }
    bool is_ok = true;
    if (tid < kNumRanks) is_ok = wait_flag(op, ready_of(p, p.rank, tid), Phase::kReuse, tid, buffers[tid]);
    if (block_any(!is_ok)) return;
    fence_proxy_async();  // what peers read from their buffers comes before the bulk copies that write them
    int refused_by = p.is_refused ? p.rank : -1;
    for (int r = 0; r < kNumRanks; r++) {
        if (refused_by < 0 && buffers[r] == kRefused) refused_by = r;
    }

    // send
    if (refused_by < 0) {
        clear_tail(p);
        send_rows(p, buffers, stages, loaded);
    }

    // arrived: one flag per peer, from the last block, after all rows of all blocks (pairs with the wait below)
    if (!is_last_block(op)) return;
    if (tid < kNumRanks) {
        fence_acq_rel_sys();
        st_release_sys(arrived_of(p, tid, p.rank), tagged(op, 0));
        uint32_t unused = 0;
        is_ok = wait_flag(op, arrived_of(p, p.rank, tid), Phase::kRows, tid, unused);
    }
    if (block_any(!is_ok)) return;
    if (tid == 0) {
        p.state->refused = 0;
        if (refused_by >= 0) {
            mark_refused(p, Op::kDispatch, refused_by, Cause::kCall);
        } else {
            p.high_water[p.buffer] = *p.total;
        }
        end_operation(op);
    }
}
