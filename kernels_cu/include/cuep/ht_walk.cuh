// Which warp takes what. Rows between this rank and each of its peers: low slots first, peers interleaved, since warps
// that drift apart peer by peer collide on the links. This rank's tokens: in order, or by turns.
#pragma once
#include <cuep/base.cuh>
#include <cuep/operation.cuh>
#include <cuep/sync.cuh>

namespace cuep {

enum Transport : int { kPushed, kPulled, kCopied };  // how rows come to another rank: TRANSPORTS of cuep/layout.py

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

// One warp's share of this rank's tokens, the same number for every warp.
struct TokenWalk {
    int t, step, end;

    TokenWalk() = default;
    CUEP_DEVICE TokenWalk(int warp, int num_warps, int num_tokens)
        : t(static_cast<int>(warp * gridDim.x + blockIdx.x)),
          step(static_cast<int>(gridDim.x) * num_warps),
          end(num_tokens) {}

    CUEP_DEVICE bool is_over() const { return t >= end; }
    CUEP_DEVICE void ask() {}
    CUEP_DEVICE void advance() { t += step; }
};

// One warp's share of this rank's tokens: its own first, then by turns whatever is next, since some multiprocessors get
// much more of the links than others. Control counts the turns, from 0. The whole warp calls.
struct TokenTurns {
    uint32_t* turns;
    int t, end, num_warps;
    uint32_t turn;  // of lane 0

    TokenTurns() = default;
    CUEP_DEVICE TokenTurns(const Operation& op, int warp, int num_warps_of_block, int num_tokens)
        : turns(&op.control->ops[static_cast<int>(op.op)].turns),
          t(static_cast<int>(warp * gridDim.x + blockIdx.x)),
          end(num_tokens),
          num_warps(static_cast<int>(gridDim.x) * num_warps_of_block),
          turn(0) {}

    CUEP_DEVICE bool is_over() const { return t >= end; }

    // For what advance() goes to. What is done between them hides how long the answer takes.
    CUEP_DEVICE void ask() {
        if (!is_over() && lane_idx() == 0) turn = atom_add_relaxed_gpu(turns, 1u);
    }
    CUEP_DEVICE void advance() {
        if (!is_over()) t = num_warps + static_cast<int>(__shfl_sync(0xffffffffu, turn, 0));
    }
};

// The one or the other.
template <bool kTakesTurns>
struct TokenShare : TokenTurns {
    using TokenTurns::TokenTurns;
};
template <>
struct TokenShare<false> : TokenWalk {
    TokenShare() = default;
    CUEP_DEVICE TokenShare(const Operation&, int warp, int num_warps, int num_tokens)
        : TokenWalk(warp, num_warps, num_tokens) {}
};

}  // namespace cuep
