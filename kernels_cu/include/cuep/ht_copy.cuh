// What the high-throughput kernels have in common beside which the host copies rows.
#pragma once
#include <cuep/base.cuh>
#include <cuep/operation.cuh>

namespace cuep {

template <class Params>
CUEP_DEVICE uint64_t* word_of(const Params& p, int64_t offset, int dst, int index) {
    return reinterpret_cast<uint64_t*>(p.arena[dst] + offset) + index;
}

// What this rank's call comes to by itself. is_short: an array of the caller's has too few rows. All threads call.
template <int kRanks>
struct OwnCall {
    bool is_refused;
    Cause cause;

    template <class Params>
    CUEP_DEVICE OwnCall(const Params& p, bool is_short) {
        const int r =
            threadIdx.x;  // does the host, which had the counts of a routing, copy as many rows as this one has?
        const bool is_stale =
            block_any(kRanks > 1 && r < kRanks && p.recv_base[r + 1] - p.recv_base[r] != p.num_copied[r]);
        is_refused = p.is_refused || is_short || is_stale;
        cause = is_short ? Cause::kTooFewRows : Cause::kStaleCounts;
    }
};

}  // namespace cuep
