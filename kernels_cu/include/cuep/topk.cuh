// Reading a router's output: expert ids of either width, checked, and the ranks that own them.
#pragma once
#include <cuep/base.cuh>

namespace cuep {

// -1 for "none" and for ids outside [-1, num_experts), which set `is_bad`.
template <int kNumExperts>
CUEP_DEVICE int32_t checked_expert(int64_t id, bool& is_bad) {
    if (id < -1 || id >= kNumExperts) is_bad = true;
    return id < 0 || id >= kNumExperts ? -1 : static_cast<int32_t>(id);
}

// The expert at [token, k] of [num_tokens, kNumTopk] int32 or int64 ids.
template <int kNumExperts, int kNumTopk>
CUEP_DEVICE int32_t load_expert(const uint8_t* topk_idx, bool is_int64, int64_t token, int k) {
    const int64_t at = token * kNumTopk + k;
    bool is_bad = false;
    return checked_expert<kNumExperts>(is_int64 ? reinterpret_cast<const int64_t*>(topk_idx)[at]
                                                : int64_t{reinterpret_cast<const int32_t*>(topk_idx)[at]},
                                       is_bad);
}

// All experts of a token, in 16-byte pieces where size and address allow. Returns how many ids are out of range.
template <int kNumExperts, int kNumTopk>
CUEP_DEVICE uint32_t load_experts(const uint8_t* topk_idx, bool is_int64, int64_t token, int32_t (&experts)[kNumTopk]) {
    int64_t ids[kNumTopk];
    const uint8_t* row = topk_idx + token * kNumTopk * (is_int64 ? 8 : 4);
    const bool is_aligned = reinterpret_cast<uint64_t>(topk_idx) % 16 == 0;
    if (kNumTopk % 4 == 0 && !is_int64 && is_aligned) {
#pragma unroll
        for (int k = 0; k + 3 < kNumTopk; k += 4) {
            const int4 piece = reinterpret_cast<const int4*>(row)[k / 4];
            ids[k] = piece.x;
            ids[k + 1] = piece.y;
            ids[k + 2] = piece.z;
            ids[k + 3] = piece.w;
        }
    } else {
#pragma unroll
        for (int k = 0; k < kNumTopk; k++) {
            ids[k] =
                is_int64 ? reinterpret_cast<const int64_t*>(row)[k] : int64_t{reinterpret_cast<const int32_t*>(row)[k]};
        }
    }
    uint32_t num_bad = 0;
#pragma unroll
    for (int k = 0; k < kNumTopk; k++) {
        bool is_bad = false;
        experts[k] = checked_expert<kNumExperts>(ids[k], is_bad);
        num_bad += is_bad;
    }
    return num_bad;
}

// Bit r: one of the experts belongs to rank r.
template <int kNumLocalExperts, int kNumTopk>
CUEP_DEVICE uint32_t ranks_of(const int32_t (&experts)[kNumTopk]) {
    uint32_t rank_mask = 0;
#pragma unroll
    for (int k = 0; k < kNumTopk; k++) {
        if (experts[k] >= 0) rank_mask |= 1u << (experts[k] / kNumLocalExperts);
    }
    return rank_mask;
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
