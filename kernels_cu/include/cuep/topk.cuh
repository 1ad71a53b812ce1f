// Reading a router's output: expert ids of either width, checked, and the ranks that own them.
#pragma once
#include <cuep/base.cuh>

namespace cuep {

// The expert at [token, k], or -1 for "none" and for ids outside [-1, num_experts), which set `is_bad`.
template <int kNumExperts, int kNumTopk>
CUEP_DEVICE int32_t load_expert(const uint8_t* topk_idx, bool is_int64, int64_t token, int k, bool& is_bad) {
    const int64_t at = token * kNumTopk + k;
    const int64_t id = is_int64 ? reinterpret_cast<const int64_t*>(topk_idx)[at]
                                : static_cast<int64_t>(reinterpret_cast<const int32_t*>(topk_idx)[at]);
    if (id < -1 || id >= kNumExperts) is_bad = true;
    return id < 0 || id >= kNumExperts ? -1 : static_cast<int32_t>(id);
}

// Adds to counters[r], for every rank r, how many of the warp's lanes have bit r set. All 32 lanes call.
template <int kNumRanks>
CUEP_DEVICE void count_ranks(uint32_t rank_mask, int32_t* counters) {
#pragma unroll
    for (int r = 0; r < kNumRanks; r++) {
        const uint32_t lanes = __ballot_sync(0xffffffffu, rank_mask >> r & 1u);
        if (lane_idx() == 0 && lanes != 0) atomicAdd(&counters[r], __popc(lanes));
    }
}

}  // namespace cuep
