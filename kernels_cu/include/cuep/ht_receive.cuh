// What high-throughput dispatches share: how ranks tell each other where they receive, and that all rows are there.
// Params is that of any ht dispatch kernel; all have these fields.
#pragma once
#include <cuep/base.cuh>
#include <cuep/sync.cuh>
#include <cuep/operation.cuh>

namespace cuep {

constexpr int kReadyBanks = 2;  // READY_BANKS of cuep/layout.py

// Two banks: a rank may be through with this dispatch, and be ready for the next one, before a late block of a peer has
// looked. It is not ready for the one after that before that peer, too, is ready for the next.
template <int kNumRanks, class Params>
CUEP_DEVICE uint64_t* ready_of(const Params& p, const Operation& op, int dst, int src) {
    const int bank = static_cast<int>(op.epoch) & (kReadyBanks - 1);
    return reinterpret_cast<uint64_t*>(p.arena[dst] + p.ready_offset) + bank * kNumRanks + src;
}

template <class Params>
CUEP_DEVICE uint64_t* arrived_of(const Params& p, int dst, int src) {
    return reinterpret_cast<uint64_t*>(p.arena[dst] + p.arrived_offset) + src;
}

// Where a row of rank dst's buffer lies in an array of all buffers with `row_elems` elements a row.
template <class T, class Params>
CUEP_DEVICE T* at_row(const Params& p, int64_t offset, int dst, uint32_t buffer, int64_t row, int row_elems) {
    const int64_t index = static_cast<int64_t>(buffer) * p.max_rows + row;
    return reinterpret_cast<T*>(p.arena[dst] + offset) + index * row_elems;
}

constexpr uint32_t kWantsFlags = 1u << 30;  // beside the number of a buffer: its rank copies rows out as they come

CUEP_DEVICE bool wants_flags(uint32_t ready) {
    return ready != kRefused && (ready & kWantsFlags) != 0;
}
CUEP_DEVICE uint32_t buffer_of(uint32_t ready) {
    return ready & ~kWantsFlags;
}

// ready: what this rank's stream read from its buffer, and what earlier dispatches left beside it, is read, so peers
// may fill it. buffers[r]: where rank r receives, with its wishes, or kRefused. False: gave up. All threads of every
// block call.
template <int kNumRanks, class Params>
CUEP_DEVICE bool exchange_buffers(
    const Params& p, const Operation& op, bool is_refused, uint32_t wishes, uint32_t* buffers) {
    const int tid = threadIdx.x;
    if (blockIdx.x == 0 && tid < kNumRanks) {  // pairs with the wait below
        const uint32_t buffer = is_refused ? kRefused : static_cast<uint32_t>(p.buffer) | wishes;
        st_release_sys(ready_of<kNumRanks>(p, op, tid, p.rank), tagged(op, buffer));
    }
    bool is_ok = true;
    if (tid < kNumRanks)
        is_ok = wait_flag(op, ready_of<kNumRanks>(p, op, p.rank, tid), Phase::kReuse, tid, buffers[tid]);
    return !block_any(!is_ok);
}

// The rank that refused its part of this dispatch, this one first, or -1.
template <int kNumRanks, class Params>
CUEP_DEVICE int refusing_rank(const Params& p, bool is_refused, const uint32_t* buffers) {
    int refused_by = is_refused ? p.rank : -1;
    for (int r = 0; r < kNumRanks; r++) {
        if (refused_by < 0 && buffers[r] == kRefused) refused_by = r;
    }
    return refused_by;
}

// Whether any peer wants flags behind its rows. buffers: without refusals.
template <int kNumRanks, class Params>
CUEP_DEVICE bool is_any_flagged(const Params& p, const uint32_t* buffers) {
    bool is_any = false;
    for (int r = 0; r < kNumRanks; r++) is_any |= r != p.rank && wants_flags(buffers[r]);
    return is_any;
}

// One flag per peer, after all rows of all blocks: only the last block calls.
template <int kNumRanks, class Params>
CUEP_DEVICE void release_arrived(const Params& p, const Operation& op) {
    if (threadIdx.x >= kNumRanks) return;
    fence_acq_rel_sys();
    st_release_sys(arrived_of(p, threadIdx.x, p.rank), tagged(op, 0));  // pairs with the wait in wait_arrived
}

// All rows of all peers are here. False: gave up. All threads of a block call.
template <int kNumRanks, class Params>
CUEP_DEVICE bool wait_arrived(const Params& p, const Operation& op) {
    const int tid = threadIdx.x;
    uint32_t unused = 0;
    bool is_ok = true;
    if (tid < kNumRanks) is_ok = wait_flag(op, arrived_of(p, p.rank, tid), Phase::kRows, tid, unused);
    return !block_any(!is_ok);
}

}  // namespace cuep
