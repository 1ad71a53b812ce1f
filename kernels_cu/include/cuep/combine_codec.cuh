// Codecs of rows on their way home (GroupConfig.combine_quant): what a thread's values of a row become, and back.
//
// A thread has kPer = 8 or 4 neighbouring values, the elements of 16 bytes of the row, and the lanes of a block of 128
// values lie next to one another, so that a block's largest and smallest value are found by shuffles. It stores its own
// codes and loads them again, without shared memory: each kind of code has a plane in the row, in which the threads of
// a warp are neighbours. All arithmetic is integer, or float in single rounded steps without contraction: the same bits
// on every machine.
//
// LogFmt10 (DeepSeek's LogFMT-nBit with n = 10): a sign and a code of 9 bits; code 0 is zero, code c > 0 the level base
// + c * step, where a level is a logarithm in units of 2^-23, so that adding 2^23 doubles a value. Logarithms are
// piecewise: a float's bits without the sign, read as an integer, are its logarithm to base 2 (biased by 127 * 2^23) up
// to a correction that depends on the mantissa f alone and vanishes at 0 and 1: f (1 - f) (a + b f), within 8e-4
// octaves of what the decoder's own undoes. That holds on below 2^-126: subnormal numbers count as one more binade, in
// which levels are about as far apart as in the one above it, so they need no case of their own.
//
// In each block: top = the largest logarithm, low = the smallest of a value that is not 0, but at least top - 32
// octaves and at least top / 1000 (which matters to subnormals only, and keeps the levels away from 0); step = (top -
// low) / 510, rounded down to whole units; base = top - 511 * step. A value takes the nearest level in the logarithm;
// what lies more than half a step below low becomes 0 and keeps its sign. A block with an infinity, a NaN or a float of
// at least 2^128 - 2^110 comes out as NaN in all places: its base is a NaN's bits, its step 0, and no code is 0.
//   row: uint8 [H] lowest bits of the codes; [H / kPer] of 2 kPer bits: {highest bit of the code, sign} of kPer values,
//   first of the even, then of the odd ones; {int32 base, int32 step} [H / 128]; padded to 16 bytes
//
// Fp8Block128: e4m3 values and a float scale, as quant.cuh makes them, decoded as value * scale.
//   row: uint8 [H] values; float [H / 128] scales; padded to 16 bytes
#pragma once
#include <cuep/quant.cuh>
#include <cuep/sync.cuh>

namespace cuep {

// What a thread holds of an encoded row, or 16 bytes of one that is not.
struct Coded {
    uint4 v;
    uint32_t step;  // LogFmt10
};

namespace detail {

// Codes of a thread: 4 or 8 bytes of a plane of bytes.
template <int kPer>
CUEP_DEVICE void store_codes(uint8_t* row, int piece, const uint4& v) {
    if constexpr (kPer == 8) store_8(reinterpret_cast<uint2*>(row) + piece, make_uint2(v.x, v.y));
    if constexpr (kPer == 4) store_4(reinterpret_cast<uint32_t*>(row) + piece, v.x);
}

template <int kPer>
CUEP_DEVICE void load_codes(const uint8_t* row, int piece, uint4& v) {
    if constexpr (kPer == 8) {
        const uint2 codes = load_8(reinterpret_cast<const uint2*>(row) + piece);
        v.x = codes.x;
        v.y = codes.y;
    } else {
        v.x = load_4(reinterpret_cast<const uint32_t*>(row) + piece);
    }
}

}  // namespace detail

template <int kPer, int kNumValues>
struct LogFmt10 {
    static_assert((kPer == 8 || kPer == 4) && kNumValues % kQuantBlock == 0);
    static constexpr int kLanes = kQuantBlock / kPer;
    static constexpr int kUpperAt = kNumValues, kHeadersAt = kNumValues + kNumValues / 4;
    static constexpr int kBytes = (kHeadersAt + kNumValues / kQuantBlock * 8 + 15) / 16 * 16;

    static constexpr float kUnits = 8388608.0f;                                          // of an octave: 2^23
    static constexpr float kLogA = 0.42283598f * kUnits, kLogB = -0.15928389f * kUnits;  // of a logarithm's correction
    static constexpr float kExpA = 0.30457565f * kUnits, kExpB = 0.07826797f * kUnits;   // of the way back
    static constexpr float kMostOctaves = 32.0f;
    static constexpr float kInfinite = 2139095040.0f;  // 0x7f800000, the bits of infinity
    static constexpr uint32_t kNan = 0x7fc00000u;
    static constexpr int kLevels = 511;
    static constexpr uint32_t kUpperBits = (1u << 2 * kPer) - 1;

    // f (1 - f) (a + b f) of the mantissa that the lowest 23 bits are.
    static CUEP_DEVICE float correction(uint32_t bits, float a, float b) {
        const float significand = detail::significand(bits);
        const float f = __fadd_rn(significand, -1.0f), rest = __fadd_rn(2.0f, -significand);
        return __fmul_rn(__fmul_rn(f, rest), __fadd_rn(__fmul_rn(b, f), a));
    }

    // 0 for 0, at least 1 for anything else.
    static CUEP_DEVICE float logarithm(uint32_t magnitude) {
        const float bits = static_cast<float>(static_cast<int32_t>(magnitude));
        return __fadd_rn(bits, correction(magnitude, kLogA, kLogB));
    }

    // By all lanes of a warp.
    static CUEP_DEVICE Coded encode(const float (&x)[kPer]) {
        float y[kPer];
        uint32_t most = 0, least = 0xffffffffu;  // bits of logarithms; of the least, less 1, so that 0 is no least
#pragma unroll
        for (int i = 0; i < kPer; i++) {
            y[i] = logarithm(detail::float_word(x[i]) & 0x7fffffffu);
            most = max(most, detail::float_word(y[i]));
            least = min(least, detail::float_word(y[i]) - 1);
        }
#pragma unroll
        for (int d = kLanes / 2; d > 0; d /= 2) {
            most = max(most, __shfl_xor_sync(0xffffffffu, most, d));
            least = min(least, __shfl_xor_sync(0xffffffffu, least, d));
        }
        const float top = detail::word_float(most), smallest = detail::word_float(least + 1);
        const float deepest = max(__fadd_rn(top, -kMostOctaves * kUnits), __fmul_rn(top, 0.001f));
        const float low = max(max(smallest, 1.0f), deepest);
        const bool is_finite = top < kInfinite;
        const float scale = is_finite ? __fdiv_rn(kLevels - 1, max(__fadd_rn(top, -low), 1.0f)) : 0.0f;

        uint32_t pairs[kPer / 2], upper = 0;  // of 16 bits: code, sign
#pragma unroll
        for (int i = 0; i < kPer; i += 2) {
            uint32_t code[2];
#pragma unroll
            for (int c = 0; c < 2; c++) {  // added to 2^23 + 1 a number is rounded to a whole one, in the low bits
                const float place = max(__fmul_rn(__fadd_rn(y[i + c], -low), scale), -1.0f);
                code[c] = detail::float_word(__fadd_rn(place, 8388609.0f));
            }
            const uint32_t signs = __byte_perm(detail::float_word(x[i]), detail::float_word(x[i + 1]), 0x7632);
            pairs[i / 2] = __byte_perm(code[0], code[1], 0x5410) | (signs >> 6 & 0x02000200u);
            upper |= pairs[i / 2] >> (8 - i) & (0x00030003u << i);
        }
        uint32_t codes[2] = {0, 0};
#pragma unroll
        for (int i = 0; i < kPer; i += 4) codes[i / 4] = __byte_perm(pairs[i / 2], pairs[i / 2 + 1], 0x6420);
        const int32_t range =
            static_cast<int32_t>(is_finite ? top : 0.0f) - static_cast<int32_t>(is_finite ? low : 0.0f);
        const int32_t step = max(range, 0) / (kLevels - 1);
        const int32_t base = static_cast<int32_t>(is_finite ? top : 0.0f) - kLevels * step;
        const uint32_t header = is_finite ? static_cast<uint32_t>(base) : kNan;
        return {make_uint4(codes[0], codes[1], (upper | upper >> (16 - kPer)) & kUpperBits, header),
                static_cast<uint32_t>(step)};
    }

    static CUEP_DEVICE void store(uint8_t* row, int piece, const Coded& coded) {
        detail::store_codes<kPer>(row, piece, coded.v);
        uint8_t* upper = row + kUpperAt;
        if constexpr (kPer == 8) store_2(reinterpret_cast<uint16_t*>(upper) + piece, coded.v.z);
        if constexpr (kPer == 4) store_1(upper + piece, coded.v.z);
        if (piece % kLanes != 0) return;
        store_8(reinterpret_cast<uint2*>(row + kHeadersAt) + piece / kLanes, make_uint2(coded.v.w, coded.step));
    }

    static CUEP_DEVICE Coded load(const uint8_t* row, int piece) {
        Coded coded;
        detail::load_codes<kPer>(row, piece, coded.v);
        const uint8_t* upper = row + kUpperAt;
        if constexpr (kPer == 8) coded.v.z = load_2(reinterpret_cast<const uint16_t*>(upper) + piece);
        if constexpr (kPer == 4) coded.v.z = load_1(upper + piece);
        const uint2 header = load_8(reinterpret_cast<const uint2*>(row + kHeadersAt) + piece / kLanes);
        coded.v.w = header.x;
        coded.step = header.y;
        return coded;
    }

    static CUEP_DEVICE void decode(const Coded& coded, float (&x)[kPer]) {
        const uint32_t codes[2] = {coded.v.x, coded.v.y}, magic = detail::float_word(kUnits);
        const uint32_t upper = coded.v.z | coded.v.z << (16 - kPer);  // of each half the lowest kPer bits count
#pragma unroll
        for (int i = 0; i < kPer; i++) {
            const uint32_t low = __byte_perm(codes[i / 4], 0, i % 4 < 2 ? 0x4140 : 0x4342);
            const uint32_t pair = low | (upper << (8 - i / 2 * 2) & 0x03000300u);
            const uint32_t code = pair >> (16 * (i % 2)) & 0x1ffu;
            const uint32_t level = code == 0 ? 0 : coded.v.w + code * coded.step;   // that of 0 is 0 itself
            const float less = __fadd_rn(correction(level, kExpA, kExpB), kUnits);  // rounded, in the low bits
            const uint32_t magnitude = level + magic - detail::float_word(less);
            x[i] = detail::word_float(magnitude | (pair << (i % 2 == 0 ? 22 : 6) & 0x80000000u));
        }
    }
};

template <int kPer, int kNumValues>
struct Fp8Block128 {
    static_assert((kPer == 8 || kPer == 4) && kNumValues % kQuantBlock == 0);
    static constexpr int kLanes = kQuantBlock / kPer;
    static constexpr int kScalesAt = kNumValues;
    static constexpr int kBytes = (kScalesAt + kNumValues / kQuantBlock * 4 + 15) / 16 * 16;

    // By all lanes of a warp.
    static CUEP_DEVICE Coded encode(const float (&x)[kPer]) {
        const Quantised<kPer> quantised = quantise_values<false>(x);
        const uint32_t rest = kPer == 8 ? quantised.codes[kPer / 4 - 1] : 0;
        return {make_uint4(quantised.codes[0], rest, quantised.scale.bits, 0), 0};
    }

    static CUEP_DEVICE void store(uint8_t* row, int piece, const Coded& coded) {
        detail::store_codes<kPer>(row, piece, coded.v);
        if (piece % kLanes != 0) return;
        store_4(reinterpret_cast<uint32_t*>(row + kScalesAt) + piece / kLanes, coded.v.z);
    }

    static CUEP_DEVICE Coded load(const uint8_t* row, int piece) {
        Coded coded;
        detail::load_codes<kPer>(row, piece, coded.v);
        coded.v.z = load_4(reinterpret_cast<const uint32_t*>(row + kScalesAt) + piece / kLanes);
        return coded;
    }

    static CUEP_DEVICE void decode(const Coded& coded, float (&x)[kPer]) {
        const uint32_t codes[2] = {coded.v.x, coded.v.y};
        const float scale = detail::word_float(coded.v.z);
#pragma unroll
        for (int i = 0; i < kPer; i += 4) {
            unpack_e4m3(codes[i / 4], x + i);
#pragma unroll
            for (int c = 0; c < 4; c++) x[i + c] = __fmul_rn(x[i + c], scale);
        }
    }
};

}  // namespace cuep
