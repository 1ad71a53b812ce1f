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

// Ids as they were loaded. Checking them waits for the loads, so that comes later, when others are on their way too.
template <int kCount>
struct RawIds {
    int32_t low[kCount], high[kCount];  // high: of int64
};

// kCount ids from the first-th on. 16-byte pieces where size and address allow.
template <int kCount>
CUEP_DEVICE void load_raw(const uint8_t* ids, bool is_int64, int64_t first, RawIds<kCount>& raw) {
    const int32_t* words = reinterpret_cast<const int32_t*>(ids) + first * (is_int64 ? 2 : 1);
    if (is_int64) {
#pragma unroll
        for (int i = 0; i < kCount; i++) {
            raw.low[i] = words[2 * i];
            raw.high[i] = words[2 * i + 1];
        }
    } else if (kCount % 4 == 0 && reinterpret_cast<uint64_t>(words) % 16 == 0) {
#pragma unroll
        for (int i = 0; i + 3 < kCount; i += 4) {
            const int4 piece = reinterpret_cast<const int4*>(words)[i / 4];
            raw.low[i] = piece.x;
            raw.low[i + 1] = piece.y;
            raw.low[i + 2] = piece.z;
            raw.low[i + 3] = piece.w;
        }
    } else {
#pragma unroll
        for (int i = 0; i < kCount; i++) raw.low[i] = words[i];
    }
}

// Their experts, -1 for none. Returns how many are out of range.
template <int kNumExperts, int kCount>
CUEP_DEVICE uint32_t check_ids(const RawIds<kCount>& raw, bool is_int64, int32_t (&experts)[kCount]) {
    uint32_t num_bad = 0;
#pragma unroll
    for (int i = 0; i < kCount; i++) {
        bool is_bad = false;
        experts[i] = checked_expert<kNumExperts>(raw.low[i], is_int64 ? raw.high[i] : raw.low[i] >> 31, is_bad);
        num_bad += is_bad;
    }
    return num_bad;
}

// All experts of a token.
template <int kNumExperts, int kNumTopk>
CUEP_DEVICE uint32_t load_experts(const uint8_t* topk_idx, bool is_int64, int64_t token, int32_t (&experts)[kNumTopk]) {
    RawIds<kNumTopk> raw;
    load_raw(topk_idx, is_int64, token * kNumTopk, raw);
    return check_ids<kNumExperts>(raw, is_int64, experts);
}

// The expert of the i-th (token, k) pair.
template <int kNumExperts>
CUEP_DEVICE int32_t load_expert(const uint8_t* topk_idx, bool is_int64, int64_t i) {
    RawIds<1> raw;
    load_raw(topk_idx, is_int64, i, raw);
    int32_t expert[1];
    check_ids<kNumExperts>(raw, is_int64, expert);
    return expert[0];
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
