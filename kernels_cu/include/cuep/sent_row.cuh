// Rows of x as they travel in a dispatch, in either mode. Made of the kernel's constants: include it behind them.
#pragma once
#include <cuep/convert.cuh>
#include <cuep/quant.cuh>
#include <cuep/sync.cuh>

namespace cuep {

// A row as it travels: kTokenBytes of values, then kNumScales scales of kScaleBytes each, if it has any. The values are
// those of x, and the scales the caller's, or (kQuant) both are made here: e4m3, and kQuant bytes for each block, which
// are packed by four where kScaleBytes is 4 and kQuant 1.
constexpr bool kIsQuant = kQuant > 0;
constexpr bool kHasScales = kNumScales > 0;
constexpr int kHidden = kSrcBytes / static_cast<int>(sizeof(src_t));  // where it is quantised
constexpr int kNumBlocks = kHidden / kQuantBlock;
static_assert(!kIsQuant || (kHidden % kQuantBlock == 0 && kTokenBytes == kHidden), "values");
static_assert(!kIsQuant || kNumScales * kScaleBytes >= kNumBlocks * kQuant, "scales");
static_assert(kIsQuant || kTokenBytes == kSrcBytes, "values");
static_assert(kTokenBytes % 16 == 0 && kRowBytes >= kTokenBytes + kNumScales * kScaleBytes, "row");
static_assert(kScaleBytes == 1 || kScaleBytes == 2 || kScaleBytes == 4, "a scale lies in one word");
constexpr int kSrcVecs = kSrcBytes / 16;

// A word of token t's scales as they travel; beyond them it is 0. The caller's may lie in any order.
template <class Params>
CUEP_DEVICE uint32_t load_scales(const Params& p, int t, int word) {
    const uint8_t* scales = p.x_scales + t * p.x_scales_row_stride;
    constexpr int kPerWord = 4 / kScaleBytes;
    uint32_t bits = 0;
#pragma unroll
    for (int i = 0; i < kPerWord; i++) {
        const int scale = word * kPerWord + i;
        if (scale >= kNumScales) continue;
        const uint8_t* at = scales + scale * p.x_scales_stride;
        if constexpr (kScaleBytes == 4) bits = load_streaming(reinterpret_cast<const uint32_t*>(at));
        if constexpr (kScaleBytes == 2) bits |= uint32_t{*reinterpret_cast<const uint16_t*>(at)} << (16 * i);
        if constexpr (kScaleBytes == 1) bits |= uint32_t{*at} << (8 * i);
    }
    return bits;
}

// What becomes of 16 bytes of x. By all lanes of a warp.
constexpr int kPerSource = kPerVec<src_t>;
CUEP_DEVICE Quantised<kPerSource> quantise(uint4 source) {
    float x[kPerSource];
    unpack<src_t>(source, x);
    return quantise_values<kQuant == 1>(x);
}

CUEP_DEVICE void store_codes(uint8_t* values, int vec, const uint32_t (&codes)[kPerSource / 4]) {
#pragma unroll
    for (int i = 0; i < kPerSource; i += 4) {
        *reinterpret_cast<uint32_t*>(values + vec * kPerSource + i) = codes[i / 4];
    }
}

CUEP_DEVICE void store_scale(uint8_t* scales, int block, const Scale& scale) {
    uint8_t* stored = scales + block * kQuant;
    if constexpr (kQuant == 4) {
        *reinterpret_cast<uint32_t*>(stored) = scale.bits;
    } else {
        *stored = static_cast<uint8_t>(scale.bits);
    }
}

// The vec-th of a row's pieces; the first lane of a block stores its scale.
CUEP_DEVICE void store_quantised(uint8_t* values, uint8_t* scales, int vec, const Quantised<kPerSource>& quantised) {
    constexpr int kLanes = kQuantBlock / kPerSource;
    store_codes(values, vec, quantised.codes);
    if (vec % kLanes == 0) store_scale(scales, vec / kLanes, quantised.scale);
}

}  // namespace cuep
