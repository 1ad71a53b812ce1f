// Rows of e4m3 values with one scale for each block of 128, made of bfloat16, half or float rows.
//
// In each block: amax = max(|x|, 1e-4); scale = amax / 448, with ue8m0 rounded up to a power of two; value = e4m3(x *
// (1 / scale)), to nearest even, at most 448 in size. The floor of amax (as in DeepEP, so that quantised rows are the
// same) keeps the scales of zero and tiny blocks positive and finite. Values of at most 2^-10 of the scale become 0. A
// block with a NaN or an infinity comes out as NaN in all places where x * 0 or x * NaN is NaN, and its scale is
// infinite or NaN.
#pragma once
#include <cuep/convert.cuh>

namespace cuep {

constexpr int kQuantBlock = 128;
constexpr float kMaxE4m3 = 448.0f;
constexpr float kLeastAmax = 1e-4f;

// A block's scale: what travels, a float's bits or (ue8m0) an exponent, and its inverse.
struct Scale {
    uint32_t bits;
    float inverse;
};

// amax_bits: the largest of the block's absolute values, as bits: NaN is larger than infinity.
template <bool kIsUe8m0>
CUEP_DEVICE Scale scale_of(uint32_t amax_bits) {
    const uint32_t least = detail::float_word(kLeastAmax);
    const float amax = detail::word_float(amax_bits > least ? amax_bits : least);
    if constexpr (kIsUe8m0) {
        const uint32_t bits = detail::float_word(__fmul_rn(amax, 1.0f / kMaxE4m3));
        const uint32_t exponent = min((bits >> 23) + ((bits & 0x7fffffu) != 0), 255u);  // 255: NaN
        return {exponent, detail::word_float(exponent < 254 ? (254 - exponent) << 23 : 0x7fc00000u)};
    }
    return {detail::float_word(__fmul_rn(amax, 1.0f / kMaxE4m3)), __fdiv_rn(kMaxE4m3, amax)};
}

template <int kPer>
struct Quantised {
    uint32_t codes[kPer / 4];
    Scale scale;  // of the block that they are in
};

// Four e4m3 values, the first in the lowest byte.
CUEP_DEVICE uint32_t pack_e4m3(float a, float b, float c, float d) {
#if !defined(CUEP_CPU) && __CUDA_ARCH__ >= 890
    uint32_t low, high;
    asm("{\n.reg .b16 pair;\ncvt.rn.satfinite.e4m3x2.f32 pair, %1, %2;\ncvt.u32.u16 %0, pair;\n}"
        : "=r"(low)
        : "f"(b), "f"(a));  // the first operand is the upper half
    asm("{\n.reg .b16 pair;\ncvt.rn.satfinite.e4m3x2.f32 pair, %1, %2;\ncvt.u32.u16 %0, pair;\n}"
        : "=r"(high)
        : "f"(d), "f"(c));
    return low | high << 16;
#else
    const float values[4] = {a, b, c, d};
    uint32_t word = 0;
    for (int i = 0; i < 4; i++) word |= detail::e4m3_bits(values[i]) << (8 * i);
    return word;
#endif
}

// What four codes stand for, exactly.
CUEP_DEVICE void unpack_e4m3(uint32_t word, float* out) {
#if !defined(CUEP_CPU) && __CUDA_ARCH__ >= 890
    uint32_t low, high;  // pairs of halves, which hold every e4m3 value
    asm("{\n.reg .b16 l, h;\nmov.b32 {l, h}, %2;\ncvt.rn.f16x2.e4m3x2 %0, l;\ncvt.rn.f16x2.e4m3x2 %1, h;\n}"
        : "=r"(low), "=r"(high)
        : "r"(word));
    detail::unpack_pair<fp16_t>(low, out[0], out[1]);
    detail::unpack_pair<fp16_t>(high, out[2], out[3]);
#else
    for (int i = 0; i < 4; i++) out[i] = detail::e4m3_float(word >> (8 * i) & 0xffu);
#endif
}

// The largest absolute value, as bits.
template <int kPer>
CUEP_DEVICE uint32_t amax_of(const float (&x)[kPer]) {
    uint32_t amax = 0;
#pragma unroll
    for (int i = 0; i < kPer; i++) amax = max(amax, detail::float_word(x[i]) & 0x7fffffffu);
    return amax;
}

template <int kPer>
CUEP_DEVICE void multiply_out(const float (&x)[kPer], float inverse, uint32_t (&codes)[kPer / 4]) {
#pragma unroll
    for (int i = 0; i < kPer; i += 4) {
        float q[4];
#pragma unroll
        for (int c = 0; c < 4; c++) q[c] = __fmul_rn(x[i + c], inverse);
        codes[i / 4] = pack_e4m3(q[0], q[1], q[2], q[3]);
    }
}

// kPer neighbouring values of a block, by all lanes of a warp: those of the block's other values lie next to this one.
template <bool kIsUe8m0, int kPer>
CUEP_DEVICE Quantised<kPer> quantise_values(const float (&x)[kPer]) {
    uint32_t amax = amax_of(x);
#pragma unroll
    for (int d = kQuantBlock / kPer / 2; d > 0; d /= 2) amax = max(amax, __shfl_xor_sync(0xffffffffu, amax, d));
    Quantised<kPer> result;
    result.scale = scale_of<kIsUe8m0>(amax);
    multiply_out(x, result.scale.inverse, result.codes);
    return result;
}

constexpr int kBlocksAtOnce = 4;

// Scales of four blocks that the same lanes have values of: each quarter of these lanes has one of them.
template <int kPer>
struct BlockScales {
    static constexpr int kLanes = kQuantBlock / kPer, kQuarter = kLanes / kBlocksAtOnce;
    Scale scale;
    int which;      // of the four blocks
    bool is_first;  // lane of its quarter

    CUEP_DEVICE float inverse(int block) const {
        return __shfl_sync(0xffffffffu, scale.inverse, (lane_idx() & ~(kLanes - 1)) + block * kQuarter);
    }
};

// kPer neighbouring values of each of four blocks, by all lanes of a warp. Half of the lanes drops half of the blocks
// at each of the first two steps, so this takes 5 exchanges and one division, not 16 and four.
template <bool kIsUe8m0, int kPer>
CUEP_DEVICE BlockScales<kPer> scales_of(const float (&x)[kBlocksAtOnce][kPer]) {
    using Result = BlockScales<kPer>;
    const int lane = lane_idx() & (Result::kLanes - 1);
    const bool is_upper = (lane & Result::kLanes / 2) != 0, is_odd = (lane & Result::kQuarter) != 0;
    const uint32_t first = amax_of(x[0]), second = amax_of(x[1]), third = amax_of(x[2]), fourth = amax_of(x[3]);
    const auto larger = [](uint32_t kept, uint32_t dropped, int d) {
        return max(kept, __shfl_xor_sync(0xffffffffu, dropped, d));
    };
    const uint32_t even = larger(is_upper ? third : first, is_upper ? first : third, Result::kLanes / 2);
    const uint32_t odd = larger(is_upper ? fourth : second, is_upper ? second : fourth, Result::kLanes / 2);
    uint32_t amax = larger(is_odd ? odd : even, is_odd ? even : odd, Result::kQuarter);
#pragma unroll
    for (int d = Result::kQuarter / 2; d > 0; d /= 2) amax = larger(amax, amax, d);
    return {scale_of<kIsUe8m0>(amax), lane / Result::kQuarter, lane % Result::kQuarter == 0};
}

}  // namespace cuep
