// Reading a router's output: expert ids of either width, checked, and the ranks that own them.
#pragma once
#include <cuep/base.cuh>

namespace cuep {

// -1 for "none" and for ids outside [-1, kNumExperts), which set `is_bad`. low, high: the two words of an int64; of an
// int32 the high word is the sign.
template <int kNumExperts>
CUEP_DEVICE int32_t checked_expert(int32_t low, int32_t high, bool& is_bad) {
    const bool is_expert = high == 0 && static_cast<uint32_t>(low) < static_cast<uint32_t>(kNumExperts);
    is_bad = !is_expert && (low & high) != -1;
    return is_expert ? low : -1;
}

// The expert at [token, k] of [num_tokens, kNumTopk] int32 or int64 ids.
template <int kNumExperts, int kNumTopk>
CUEP_DEVICE int32_t load_expert(const uint8_t* topk_idx, bool is_int64, int64_t token, int k) {
    const int32_t* words = reinterpret_cast<const int32_t*>(topk_idx);
    const int64_t at = token * kNumTopk + k;
    bool is_bad = false;
    const int32_t low = words[is_int64 ? 2 * at : at];
    return checked_expert<kNumExperts>(low, is_int64 ? words[2 * at + 1] : low >> 31, is_bad);
}

// All experts of a token, in 16-byte pieces where size and address allow. Returns how many ids are out of range.
template <int kNumExperts, int kNumTopk>
CUEP_DEVICE uint32_t load_experts(const uint8_t* topk_idx, bool is_int64, int64_t token, int32_t (&experts)[kNumTopk]) {
    int32_t low[kNumTopk], high[kNumTopk];
    const int32_t* row = reinterpret_cast<const int32_t*>(topk_idx) + token * kNumTopk * (is_int64 ? 2 : 1);
    if (is_int64) {
#pragma unroll
        for (int k = 0; k < kNumTopk; k++) {
            low[k] = row[2 * k];
            high[k] = row[2 * k + 1];
        }
    } else {
        if (kNumTopk % 4 == 0 && reinterpret_cast<uint64_t>(topk_idx) % 16 == 0) {
#pragma unroll
            for (int k = 0; k + 3 < kNumTopk; k += 4) {
                const int4 piece = reinterpret_cast<const int4*>(row)[k / 4];
                low[k] = piece.x;
                low[k + 1] = piece.y;
                low[k + 2] = piece.z;
                low[k + 3] = piece.w;
            }
        } else {
#pragma unroll
            for (int k = 0; k < kNumTopk; k++) low[k] = row[k];
        }
#pragma unroll
        for (int k = 0; k < kNumTopk; k++) high[k] = low[k] >> 31;
    }
    uint32_t num_bad = 0;
#pragma unroll
    for (int k = 0; k < kNumTopk; k++) {
        bool is_bad = false;
        experts[k] = checked_expert<kNumExperts>(low[k], high[k], is_bad);
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
