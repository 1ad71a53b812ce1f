// High-throughput combine. Some warps of a block push the rows that this rank answers into the owners' staging, each
// row with its flag; the others add up this rank's own tokens as their rows arrive: fp32, in order of rank, rounded
// once. So any array can be combined without copying it into symmetric memory first, and sums overlap with the links.
// Cost: one row over the link per (token, rank), and staging of N - 1 rows a token.
#include <cuep/base.cuh>
#include <cuep/sync.cuh>
#include <cuep/bulk.cuh>
#include <cuep/convert.cuh>
#include <cuep/operation.cuh>

#ifndef CUEP_JIT  // values for editors; cuep/jit.py gives the real ones
constexpr int kNumRanks = 4, kRowBytes = 14336, kNumPushWarps = 7, kNumSumWarps = 12, kNumStages = 2;
using elem_t = cuep::bf16_t;
#endif
// compile: kNumRanks=4 kRowBytes=14336 elem_t=cuep::bf16_t
// compile: kNumRanks=2 kRowBytes=528 elem_t=float
CUEP_TUNABLE(kNumPushWarps, 7, 1);
CUEP_TUNABLE(kNumSumWarps, 12, 1);
CUEP_TUNABLE(kNumStages, 2, 2);

using namespace cuep;

struct Params {
    uint8_t* arena[kNumRanks];  // symmetric memory of every rank; offsets below are bytes into it
    int64_t rows_offset;        // [kNumRanks - 1, max_tokens] rows; source s is at (s - rank - 1) mod kNumRanks
    int64_t flags_offset;       // uint64 [kNumRanks, max_tokens]: epoch
    int64_t totals_offset;      // uint64 [kNumRanks]: epoch, rows that this peer pushes, or kRefused
    int64_t done_offset;        // uint64 [kNumRanks]: epoch that this peer has read
    const uint8_t* expert_out;  // rows in the order of dispatch, expert_out_stride bytes apart
    int64_t expert_out_stride;
    const int32_t* rows;       // [max_tokens, kNumRanks]: row at each rank, or -1
    const int32_t* send_base;  // [kNumRanks]: first row of this rank's tokens at each rank
    const int32_t* recv_base;  // [kNumRanks + 1]: first row here of each source rank
    uint8_t* y;                // [num_tokens] rows
    HandleState* state;
    Control* control;
    Report* report;
    int64_t timeout_ns;
    int32_t num_tokens;
    int32_t num_rows;  // of expert_out; fewer than were received: refused
    int32_t max_tokens;
    int32_t rank;
    uint32_t handle;
    uint32_t ticket;
    bool is_refused;  // publish kRefused instead of pushing
};

constexpr int kNumThreads = (kNumPushWarps + kNumSumWarps) * 32;
constexpr int kNumPeers = kNumRanks - 1;
constexpr int kRowVecs = kRowBytes / 16;
constexpr int kElemsPerVec = kPerVec<elem_t>;
constexpr int kStageBytes = (kRowBytes + 127) / 128 * 128;
constexpr int kSmemBytes = kNumPushWarps * kNumStages * (kStageBytes + 8);
constexpr int kRanksInFlight = kNumRanks < 8 ? kNumRanks : 8;                         // rows that a lane reads at once
constexpr int kVecsInFlight = kRanksInFlight <= 2 ? 4 : kRanksInFlight <= 4 ? 3 : 2;  // pieces of each
static_assert(kNumThreads > kNumRanks, "one thread for each rank, and one for the sum");
static_assert(kNumStages >= 2 && kNumStages <= 32, "a row is loaded while the one before it is stored");
CUEP_LAUNCH(kNumThreads, kSmemBytes)

// Row of source rank src's answer to its slot-th token of rank dst, in dst's staging.
CUEP_DEVICE uint8_t* staged_row(const Params& p, int dst, int src, int64_t slot) {
    const int peer = (src - dst - 1 + kNumRanks) % kNumRanks;
    return p.arena[dst] + p.rows_offset + (static_cast<int64_t>(peer) * p.max_tokens + slot) * kRowBytes;
}

CUEP_DEVICE uint64_t* flag_of(const Params& p, int dst, int src, int64_t slot) {
    return reinterpret_cast<uint64_t*>(p.arena[dst] + p.flags_offset) + static_cast<int64_t>(src) * p.max_tokens + slot;
}

CUEP_DEVICE uint64_t* total_of(const Params& p, int dst, int src) {
    return reinterpret_cast<uint64_t*>(p.arena[dst] + p.totals_offset) + src;
}

CUEP_DEVICE uint64_t* done_of(const Params& p, int dst, int reader) {
    return reinterpret_cast<uint64_t*>(p.arena[dst] + p.done_offset) + reader;
}

// The rows that one push warp answers: low slots first, peers interleaved.
struct PushWalk {
    int unit, step, end;

    CUEP_DEVICE int slot() const { return unit / kNumPeers; }
    CUEP_DEVICE int dst(const Params& p) const { return (p.rank + 1 + unit % kNumPeers) % kNumRanks; }
    CUEP_DEVICE bool is_row(const Params& p, const int32_t* recv_base) const {
        const int to = dst(p);
        return slot() < recv_base[to + 1] - recv_base[to];
    }
    // To the next unit that is a row, or to the end.
    CUEP_DEVICE void settle(const Params& p, const int32_t* recv_base) {
        while (unit < end && !is_row(p, recv_base)) unit += step;
    }
    CUEP_DEVICE void advance(const Params& p, const int32_t* recv_base) {
        unit += step;
        settle(p, recv_base);
    }
};

// One push warp: kNumStages - 1 rows are loaded ahead, and a flag is released kNumStages - 1 rows late, when its row is
// there.
CUEP_DEVICE void push_rows(
    const Params& p, const Operation& op, const int32_t* recv_base, int warp, uint8_t* stages, uint64_t* loaded) {
    constexpr int kLate = kNumStages - 1;
    int most = 0;
    for (int r = 0; r < kNumRanks; r++) {
        if (r != p.rank) most = max(most, recv_base[r + 1] - recv_base[r]);
    }
    const int step = gridDim.x * kNumPushWarps;
    PushWalk load{static_cast<int>(warp * gridDim.x + blockIdx.x), step, most * kNumPeers};
    load.settle(p, recv_base);
    PushWalk store = load, flag = load;
    auto load_next = [&](int stage) {
        const int64_t row = recv_base[load.dst(p)] + load.slot();
        bulk_load(stages + stage * kStageBytes, p.expert_out + row * p.expert_out_stride, kRowBytes, loaded + stage);
        load.advance(p, recv_base);
    };
    auto release_flag = [&]() {  // pairs with the wait in sum_token
        if (lane_idx() == 0) st_release_sys(flag_of(p, flag.dst(p), p.rank, flag.slot()), tagged(op, 0));
        flag.advance(p, recv_base);
    };
    for (int stage = 0; stage < kNumStages - 1 && load.unit < load.end; stage++) load_next(stage);
    uint32_t parity = 0;  // bit s: of the next load into stage s
    int stage = 0, num_pending = 0;
    while (store.unit < store.end) {
        mbarrier_wait(loaded + stage, parity >> stage & 1u);
        parity ^= 1u << stage;
        bulk_store(staged_row(p, store.dst(p), p.rank, store.slot()), stages + stage * kStageBytes, kRowBytes);
        bulk_commit();
        store.advance(p, recv_base);
        if (++num_pending > kLate) {
            bulk_wait<kLate>();  // all the way, not only read: the flag says that the row is there
            fence_proxy_async();
            release_flag();
            num_pending--;
        }
        if (load.unit < load.end) {
            bulk_wait_read<1>();  // the stage that is refilled was stored one row ago
            load_next(stage == 0 ? kNumStages - 1 : stage - 1);
        }
        stage = stage + 1 == kNumStages ? 0 : stage + 1;
    }
    bulk_wait<0>();
    fence_proxy_async();
    while (num_pending-- > 0) release_flag();
}

// y[t]. The whole warp calls; false: gave up.
CUEP_DEVICE bool sum_token(const Params& p, const Operation& op, int t) {
    const int lane = lane_idx();
    bool is_ok = true;
    const int32_t own_row = lane < kNumRanks ? p.rows[static_cast<int64_t>(t) * kNumRanks + lane] : -1;
    const int32_t slot = lane < kNumRanks ? own_row - p.send_base[lane] : 0;
    if (own_row >= 0 && lane != p.rank) {
        uint32_t unused = 0;
        is_ok = wait_flag(op, flag_of(p, p.rank, lane, slot), Phase::kRows, lane, unused);
    }
    if (!__all_sync(0xffffffffu, is_ok)) return false;
    __syncwarp();                   // a vote orders no memory: now every lane may read what one lane has waited for
    const uint4* terms[kNumRanks];  // null: this rank has none of the token's experts
#pragma unroll
    for (int r = 0; r < kNumRanks; r++) {
        const int32_t row = __shfl_sync(0xffffffffu, own_row, r), at = __shfl_sync(0xffffffffu, slot, r);
        const uint8_t* term = r == p.rank ? p.expert_out + row * p.expert_out_stride : staged_row(p, p.rank, r, at);
        terms[r] = row < 0 ? nullptr : reinterpret_cast<const uint4*>(term);
    }
    uint4* y = reinterpret_cast<uint4*>(p.y + static_cast<int64_t>(t) * kRowBytes);
    for (int first_vec = lane; first_vec < kRowVecs; first_vec += 32 * kVecsInFlight) {
        float sum[kVecsInFlight][kElemsPerVec];
#pragma unroll
        for (int j = 0; j < kVecsInFlight; j++) {
#pragma unroll
            for (int c = 0; c < kElemsPerVec; c++) sum[j][c] = 0.0f;
        }
#pragma unroll
        for (int first = 0; first < kNumRanks; first += kRanksInFlight) {
            uint4 v[kRanksInFlight][kVecsInFlight];
#pragma unroll
            for (int i = 0; i < kRanksInFlight; i++) {
                if (first + i >= kNumRanks || terms[first + i] == nullptr) continue;
#pragma unroll
                for (int j = 0; j < kVecsInFlight; j++) {
                    if (first_vec + 32 * j < kRowVecs) v[i][j] = load_16(terms[first + i] + first_vec + 32 * j);
                }
            }
#pragma unroll
            for (int i = 0; i < kRanksInFlight; i++) {
                if (first + i >= kNumRanks || terms[first + i] == nullptr) continue;
#pragma unroll
                for (int j = 0; j < kVecsInFlight; j++) {
                    if (first_vec + 32 * j >= kRowVecs) continue;
                    float term[kElemsPerVec];
                    unpack<elem_t>(v[i][j], term);
#pragma unroll
                    for (int c = 0; c < kElemsPerVec; c++) sum[j][c] = __fadd_rn(sum[j][c], term[c]);
                }
            }
        }
#pragma unroll
        for (int j = 0; j < kVecsInFlight; j++) {
            const int vec = first_vec + 32 * j;
            if (vec < kRowVecs) store_16(y + vec, pack<elem_t>(sum[j]));
        }
    }
    return true;
}

extern "C" __global__ void __launch_bounds__(kNumThreads, 1) ht_combine_push(const __grid_constant__ Params p) {
    CUEP_DYNAMIC_SMEM(smem);
    __shared__ int32_t recv_base[kNumRanks + 1];
    __shared__ uint32_t totals[kNumRanks];
    const int tid = threadIdx.x, warp = warp_idx();
    if (is_skipped(p, (p.state->refused | p.state->unrouted) != 0)) return;
    const bool is_refused = p.is_refused || p.recv_base[kNumRanks] > p.num_rows;  // of this rank
    const Operation op = begin_operation(p, Op::kCombine);
    if (tid <= kNumRanks) recv_base[tid] = p.recv_base[tid];

    // staging must have been read by its owners before it is written again
    const bool is_off = is_broken(op);
    bool is_ok = true;
    if (tid < kNumRanks && tid != p.rank) is_ok = wait_bank_free(op, done_of(p, p.rank, tid), 1, tid);
    if (block_any(!is_ok || is_off)) return;
    fence_proxy_async();  // what peers read from staging comes before the bulk copies that write it
    if (blockIdx.x == 0 && tid < kNumRanks) {  // pairs with the wait for totals below
        const uint32_t total = is_refused ? kRefused : static_cast<uint32_t>(recv_base[tid + 1] - recv_base[tid]);
        st_relaxed_sys(total_of(p, tid, p.rank), tagged(op, total));
    }

    // push warps send all they owe and wait for nobody; sum warps first hear from every rank
    if (warp < kNumPushWarps) {
        if constexpr (kNumPeers > 0) {
            uint8_t* stages = smem + warp * kNumStages * kStageBytes;
            uint64_t* loaded =
                reinterpret_cast<uint64_t*>(smem + kNumPushWarps * kNumStages * kStageBytes) + warp * kNumStages;
            for (int stage = 0; stage < kNumStages; stage++) mbarrier_init(loaded + stage);
            if (!is_refused) push_rows(p, op, recv_base, warp, stages, loaded);
        }
    } else {
        const int lane = lane_idx(), sum_warp = warp - kNumPushWarps;
        uint32_t total = 0;
        if (lane < kNumRanks) is_ok = wait_word(op, total_of(p, p.rank, lane), lane, total);
        if (sum_warp == 0 && lane < kNumRanks) totals[lane] = total;
        is_ok = __all_sync(0xffffffffu, is_ok);
        const bool is_any_refused = is_refused || __any_sync(0xffffffffu, total == kRefused);
        const int step = gridDim.x * kNumSumWarps;
        for (int t = sum_warp * gridDim.x + blockIdx.x; is_ok && !is_any_refused && t < p.num_tokens; t += step) {
            is_ok = sum_token(p, op, t);
        }
    }
    if (block_any(!is_ok)) return;

    // done: peers may write this staging again (pairs with wait_bank_free)
    if (!is_last_block(op)) return;
    if (tid < kNumRanks && tid != p.rank) st_release_sys(done_of(p, tid, p.rank), tagged(op, 0));
    if (tid == 0) {
        int refused_by = is_refused ? p.rank : -1;
        for (int r = 0; r < kNumRanks; r++) {
            if (refused_by < 0 && totals[r] == kRefused) refused_by = r;
        }
        if (refused_by >= 0) mark_refused(p, Op::kCombine, refused_by, Cause::kTooFewRows);
        end_operation(op);
    }
}
