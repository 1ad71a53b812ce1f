// The order in which warps take the rows between this rank and each of its peers: low slots first, peers interleaved,
// since warps that drift apart peer by peer collide on the links.
#pragma once
#include <cuep/base.cuh>

namespace cuep {

// One warp's share. base[r] and base[r + 1]: first and last + 1 of the rows of peer r, which are its slots 0, 1, ...
// kNumPeers: kRanks, or kRanks - 1 to leave out this rank.
template <int kRanks, int kNumPeers>
struct PeerWalk {
    const int32_t* base;
    int rank, unit, step, end;

    CUEP_DEVICE PeerWalk(int own_rank, const int32_t* first_rows, int warp, int num_warps)
        : base(first_rows),
          rank(own_rank),
          unit(static_cast<int>(warp * gridDim.x + blockIdx.x)),
          step(static_cast<int>(gridDim.x) * num_warps),
          end(0) {
        for (int r = 0; r < kRanks; r++) {
            if (kNumPeers == kRanks || r != rank) end = max(end, (base[r + 1] - base[r]) * kNumPeers);
        }
        settle();
    }

    CUEP_DEVICE bool is_over() const { return unit >= end; }
    CUEP_DEVICE int slot() const { return unit / kNumPeers; }
    CUEP_DEVICE int peer() const { return (rank + 1 + unit % kNumPeers) % kRanks; }
    CUEP_DEVICE int64_t row() const { return base[peer()] + slot(); }

    // To the next unit that is a row, or to the end.
    CUEP_DEVICE void settle() {
        while (unit < end && slot() >= base[peer() + 1] - base[peer()]) unit += step;
    }
    CUEP_DEVICE void advance() {
        unit += step;
        settle();
    }
};

// The rows of peers alone.
template <int kRanks>
using WalkOfPeers = PeerWalk<kRanks, (kRanks > 1 ? kRanks - 1 : 1)>;

// Of lane r: the row, or message, of token t at rank r, or -1.
template <int kRanks, class Params>
CUEP_DEVICE int32_t row_of_lane(const Params& p, int t) {
    return lane_idx() < kRanks ? p.rows[static_cast<int64_t>(t) * kRanks + lane_idx()] : -1;
}

// One warp's share of this rank's tokens.
struct TokenWalk {
    int t, step, end;

    CUEP_DEVICE TokenWalk(int warp, int num_warps, int num_tokens)
        : t(static_cast<int>(warp * gridDim.x + blockIdx.x)),
          step(static_cast<int>(gridDim.x) * num_warps),
          end(num_tokens) {}

    CUEP_DEVICE bool is_over() const { return t >= end; }
    CUEP_DEVICE void advance() { t += step; }
};

}  // namespace cuep
