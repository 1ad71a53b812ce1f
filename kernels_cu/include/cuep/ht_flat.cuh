// What flat high-throughput dispatches share: what goes with a row, and where it has come from. Made of the kernel's
// constants: include it behind them.
#pragma once
#include <cuep/ht_source.cuh>
#include <cuep/ht_walk.cuh>

namespace cuep {

constexpr int kNumThreads = kNumWarps * 32;
constexpr int kNumLocalExperts = kNumExperts / kNumRanks;

// Ids of rows beyond the count are -1, whatever an earlier dispatch left there.
CUEP_DEVICE void clear_tail(int32_t* ids, float* weights, int64_t first_row, int64_t end_row) {
    const int64_t step = gridDim.x * kNumThreads;
    for (int64_t i = first_row * kNumTopk + blockIdx.x * kNumThreads + threadIdx.x; i < end_row * kNumTopk; i += step) {
        ids[i] = -1;
        weights[i] = 0.0f;
    }
}

// Ids, weights and origin of token t's row, to where dst has them. The whole warp calls.
template <class Params>
CUEP_DEVICE void store_routing(const Params& p, int t, int dst, int32_t* ids, float* weights, int32_t* source) {
    const int lane = lane_idx();
    for (int k = lane; k < kNumTopk; k += 32) {
        const int e = p.ids[static_cast<int64_t>(t) * kNumTopk + k];
        const bool is_there = e >= 0 && e / kNumLocalExperts == dst;
        const int id = p.is_global_ids ? e : e % kNumLocalExperts;
        ids[k] = is_there ? id : -1;
        weights[k] = is_there ? p.weights[static_cast<int64_t>(t) * kNumTopk + k] : 0.0f;
    }
    if (lane < 2) source[lane] = lane == 0 ? p.rank : t;
}

// The same, to this row of dst's receive buffer.
template <class Params>
CUEP_DEVICE void store_routing(const Params& p, int t, int dst, uint32_t buffer, int64_t row) {
    store_routing(p,
                  t,
                  dst,
                  at_row<int32_t>(p, p.topk_idx_offset, dst, buffer, row, kNumTopk),
                  at_row<float>(p, p.topk_weights_offset, dst, buffer, row, kNumTopk),
                  at_row<int32_t>(p, p.source_offset, dst, buffer, row, 2));
}

// Of this rank's own row, beside `out`.
template <class Params>
CUEP_DEVICE void store_routing_out(const Params& p, int t, int64_t row) {
    store_routing(
        p, t, p.rank, p.out_topk_idx + row * kNumTopk, p.out_topk_weights + row * kNumTopk, p.out_source + row * 2);
}

// Of a peer's row, from the receive buffer to beside `out`. The whole warp calls.
template <class Params>
CUEP_DEVICE void bring_routing_out(const Params& p, int64_t row) {
    const int lane = lane_idx();
    const int32_t* ids = at_row<int32_t>(p, p.topk_idx_offset, p.rank, p.buffer, row, kNumTopk);
    const float* weights = at_row<float>(p, p.topk_weights_offset, p.rank, p.buffer, row, kNumTopk);
    const int32_t* source = at_row<int32_t>(p, p.source_offset, p.rank, p.buffer, row, 2);
    for (int k = lane; k < kNumTopk; k += 32) {
        p.out_topk_idx[row * kNumTopk + k] = ids[k];
        p.out_topk_weights[row * kNumTopk + k] = weights[k];
    }
    if (lane < 2) p.out_source[row * 2 + lane] = source[lane];
}

// What is known of a token before its row is there.
struct Plan {
    int32_t rows;  // row_of_lane
    GivenScales scales;

    template <class Params>
    CUEP_DEVICE Plan(const Params& p, int t) : rows(row_of_lane<kNumRanks>(p, t)), scales(p, t) {}
};

}  // namespace cuep
