// Rows move as 16-byte vectors of bfloat16, IEEE half or float elements; sums are taken in float. Conversions to an
// element type round to nearest even, keep subnormals, overflow to infinity and turn any NaN into 0x7fff, on the GPU by
// its own instructions and on the CPU by integer arithmetic with the same results (any g++ has that, unlike _Float16).
#pragma once

#include <cuep/base.cuh>

namespace cuep {

struct bf16_t {
    uint16_t bits;
};
struct fp16_t {
    uint16_t bits;
};

template <class E>
constexpr int kPerVec = int(16 / sizeof(E));  // elements in a 16-byte vector

namespace detail {

#ifdef CUEP_CPU

CUEP_DEVICE uint32_t float_bits(float value) {
    uint32_t bits;
    __builtin_memcpy(&bits, &value, sizeof(bits));
    return bits;
}

CUEP_DEVICE float bits_float(uint32_t bits) {
    float value;
    __builtin_memcpy(&value, &bits, sizeof(value));
    return value;
}

CUEP_DEVICE bool is_nan_bits(uint32_t bits) {
    return (bits & 0x7fffffffu) > 0x7f800000u;
}

// Drops the lowest `count` bits (1 to 31), rounding to nearest, ties to even.
CUEP_DEVICE uint32_t shift_right_rounded(uint32_t value, int count) {
    const uint32_t half = (1u << (count - 1)) - 1 + (value >> count & 1);
    return uint32_t((uint64_t(value) + half) >> count);
}

CUEP_DEVICE float to_float(bf16_t value) {
    return bits_float(uint32_t(value.bits) << 16);
}

CUEP_DEVICE float to_float(fp16_t value) {
    const uint32_t sign = uint32_t(value.bits & 0x8000) << 16;
    const uint32_t exponent = value.bits >> 10 & 0x1f;
    const uint32_t mantissa = value.bits & 0x3ff;
    if (exponent == 0x1f) return bits_float(sign | 0x7f800000u | mantissa << 13);
    if (exponent == 0) {  // zero or subnormal: mantissa * 2^-24, which a float holds exactly
        const float magnitude = float(mantissa) * 0x1p-24f;
        return sign ? -magnitude : magnitude;
    }
    return bits_float(sign | (exponent + 127 - 15) << 23 | mantissa << 13);
}

CUEP_DEVICE bf16_t from_float(float value, bf16_t) {
    const uint32_t bits = float_bits(value);
    if (is_nan_bits(bits)) return {0x7fff};
    return {uint16_t(shift_right_rounded(bits, 16))};  // a carry out of the mantissa is the next exponent, or infinity
}

CUEP_DEVICE fp16_t from_float(float value, fp16_t) {
    const uint32_t bits = float_bits(value);
    if (is_nan_bits(bits)) return {0x7fff};
    const uint32_t sign = bits >> 16 & 0x8000;
    const uint32_t magnitude = bits & 0x7fffffffu;
    const int exponent = int(magnitude >> 23) - 127 + 15;  // of the half; below 1 it is subnormal
    if (exponent >= 31) return {uint16_t(sign | 0x7c00)};
    if (exponent >= 1) return {uint16_t(sign | shift_right_rounded(magnitude - ((127 - 15) << 23), 13))};
    if (exponent < -10) return {uint16_t(sign)};  // below half of the smallest subnormal
    return {uint16_t(sign | shift_right_rounded((magnitude & 0x7fffff) | 0x800000, 14 - exponent))};
}

// The 32-bit word that holds elements `lo` (first in memory) and `hi`.
template <class E>
CUEP_DEVICE void unpack_pair(uint32_t word, float& lo, float& hi) {
    lo = to_float(E{uint16_t(word)});
    hi = to_float(E{uint16_t(word >> 16)});
}

template <class E>
CUEP_DEVICE uint32_t pack_pair(float lo, float hi) {
    return from_float(lo, E{}).bits | uint32_t(from_float(hi, E{}).bits) << 16;
}

CUEP_DEVICE float word_float(uint32_t word) {
    return bits_float(word);
}
CUEP_DEVICE uint32_t float_word(float value) {
    return float_bits(value);
}

#else

template <class E>
CUEP_DEVICE void unpack_pair(uint32_t word, float& lo, float& hi);
template <class E>
CUEP_DEVICE uint32_t pack_pair(float lo, float hi);

template <>
CUEP_DEVICE void unpack_pair<bf16_t>(uint32_t word, float& lo, float& hi) {
    lo = __uint_as_float(word << 16);
    hi = __uint_as_float(word & 0xffff0000u);
}

template <>
CUEP_DEVICE void unpack_pair<fp16_t>(uint32_t word, float& lo, float& hi) {
    asm("{\n.reg .b16 l, h;\nmov.b32 {l, h}, %2;\ncvt.f32.f16 %0, l;\ncvt.f32.f16 %1, h;\n}"
        : "=f"(lo), "=f"(hi)
        : "r"(word));
}

template <>
CUEP_DEVICE uint32_t pack_pair<bf16_t>(float lo, float hi) {
    uint32_t word;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(hi), "f"(lo));  // the first operand is the upper half
    return word;
}

template <>
CUEP_DEVICE uint32_t pack_pair<fp16_t>(float lo, float hi) {
    uint32_t word;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(hi), "f"(lo));
    return word;
}

CUEP_DEVICE float word_float(uint32_t word) {
    return __uint_as_float(word);
}
CUEP_DEVICE uint32_t float_word(float value) {
    return __float_as_uint(value);
}

#endif  // CUEP_CPU

// 1 to 2: the number with the lowest 23 bits as its mantissa.
CUEP_DEVICE float significand(uint32_t bits) {
#ifdef CUEP_CPU
    return word_float((bits & 0x7fffffu) | 0x3f800000u);
#else
    uint32_t word;  // in one instruction; the compiler makes two of it
    asm("lop3.b32 %0, %1, 0x7fffff, %2, 0xea;" : "=r"(word) : "r"(bits), "r"(0x3f800000u));
    return word_float(word);
#endif
}

// The e4m3 code nearest to a value, ties to even, at most 448 in size; any NaN is 0x7f. As cvt.rn.satfinite.e4m3x2.
CUEP_DEVICE uint32_t e4m3_bits(float value) {
    const uint32_t bits = float_word(value), magnitude = bits & 0x7fffffffu, sign = bits >> 24 & 0x80u;
    if (magnitude > 0x7f800000u) return 0x7f;
    const int exponent = int(magnitude >> 23) - 127 + 7;  // of the code; below 1 it is subnormal
    const bool is_normal = exponent >= 1;
    if (exponent < -3) return sign;  // below half of the smallest subnormal
    const uint32_t significand = is_normal ? magnitude - ((127 - 7) << 23) : (magnitude & 0x7fffffu) | 0x800000u;
    const int drop = is_normal ? 20 : 21 - exponent;
    const uint32_t half = (1u << (drop - 1)) - 1 + (significand >> drop & 1);
    const uint32_t code = exponent > 15 ? 0x7eu : uint32_t((uint64_t(significand) + half) >> drop);
    return sign | (code < 0x7eu ? code : 0x7eu);
}

// What an e4m3 code stands for. Its exponent and mantissa, moved to where a float has them, are 2^120 times too small,
// also where they are a subnormal.
CUEP_DEVICE float e4m3_float(uint32_t code) {
    const uint32_t magnitude = code & 0x7fu;
    const float value = magnitude == 0x7fu ? word_float(0x7fc00000u) : __fmul_rn(word_float(magnitude << 20), 0x1p120f);
    return word_float(float_word(value) | (code & 0x80u) << 24);
}

template <class E>
struct Vec16 {  // bf16_t, fp16_t
    static CUEP_DEVICE void unpack(const uint32_t (&word)[4], float (&out)[8]) {
#pragma unroll
        for (int i = 0; i < 4; ++i) unpack_pair<E>(word[i], out[2 * i], out[2 * i + 1]);
    }
    static CUEP_DEVICE void pack(const float (&in)[8], uint32_t (&word)[4]) {
#pragma unroll
        for (int i = 0; i < 4; ++i) word[i] = pack_pair<E>(in[2 * i], in[2 * i + 1]);
    }
};

template <>
struct Vec16<float> {
    static CUEP_DEVICE void unpack(const uint32_t (&word)[4], float (&out)[4]) {
#pragma unroll
        for (int i = 0; i < 4; ++i) out[i] = word_float(word[i]);
    }
    static CUEP_DEVICE void pack(const float (&in)[4], uint32_t (&word)[4]) {
#pragma unroll
        for (int i = 0; i < 4; ++i) word[i] = float_word(in[i]);
    }
};

}  // namespace detail

template <class E>
CUEP_DEVICE void unpack(uint4 vec, float (&out)[kPerVec<E>]) {
    const uint32_t word[4] = {vec.x, vec.y, vec.z, vec.w};
    detail::Vec16<E>::unpack(word, out);
}

template <class E>
CUEP_DEVICE uint4 pack(const float (&in)[kPerVec<E>]) {
    uint32_t word[4];
    detail::Vec16<E>::pack(in, word);
    return make_uint4(word[0], word[1], word[2], word[3]);
}

}  // namespace cuep
