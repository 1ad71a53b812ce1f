// CUDA's keywords, vector types and arithmetic built-ins for a plain C++ compiler.
#pragma once

#include <cstddef>
#include <cstdint>

// Hidden: a function's static variables must never be merged with those of another kernel's shared object, as the
// dynamic linker does for visible inline functions even across RTLD_LOCAL. Their sizes differ between kernel shapes.
#define __device__ __attribute__((visibility("hidden")))
#define __global__ __attribute__((visibility("hidden")))
#define __host__
#define __forceinline__ inline __attribute__((always_inline))
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __launch_bounds__(...)
#define __grid_constant__
#define __shared__ static thread_local  // a block is an OS thread

#define CUEP_DEVICE __device__ __forceinline__
#define CUEP_DEVICE_COLD [[maybe_unused]] static __attribute__((noinline))

#define CUEP_DYNAMIC_SMEM(name) uint8_t* const name = ::cuep::cpu::current->block->dynamic_smem

#define CUEP_LAUNCH_FACTS(threads, smem_bytes, is_early)                        \
    extern "C" {                                                                \
    int32_t cuep_launch[3] = {int32_t(threads), int32_t(smem_bytes), is_early}; \
    }

// Parameters that name the place of the call in error messages.
#define CUEP_CPU_CALLER const char *file = __builtin_FILE(), int line = __builtin_LINE()

struct __align__(8) int2 {
    int x, y;
};
struct __align__(8) uint2 {
    unsigned x, y;
};
struct __align__(8) float2 {
    float x, y;
};
struct __align__(16) int4 {
    int x, y, z, w;
};
struct __align__(16) uint4 {
    unsigned x, y, z, w;
};
struct __align__(16) float4 {
    float x, y, z, w;
};
struct uint3 {
    unsigned x, y, z;
};
struct dim3 {
    unsigned x, y, z;
    constexpr dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};

CUEP_DEVICE int2 make_int2(int x, int y) {
    return {x, y};
}
CUEP_DEVICE uint2 make_uint2(unsigned x, unsigned y) {
    return {x, y};
}
CUEP_DEVICE float2 make_float2(float x, float y) {
    return {x, y};
}
CUEP_DEVICE int4 make_int4(int x, int y, int z, int w) {
    return {x, y, z, w};
}
CUEP_DEVICE uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) {
    return {x, y, z, w};
}
CUEP_DEVICE float4 make_float4(float x, float y, float z, float w) {
    return {x, y, z, w};
}

template <class T>
CUEP_DEVICE T min(T a, T b) {
    return b < a ? b : a;
}
template <class T>
CUEP_DEVICE T max(T a, T b) {
    return a < b ? b : a;
}

// Byte i of the result is the one of {y, x} that the i-th hexadecimal digit of the selector names.
CUEP_DEVICE unsigned __byte_perm(unsigned x, unsigned y, unsigned selector) {
    const unsigned long long bytes = (unsigned long long)(y) << 32 | x;
    unsigned result = 0;
    for (int i = 0; i < 4; i++) result |= unsigned(bytes >> 8 * (selector >> 4 * i & 7) & 0xff) << 8 * i;
    return result;
}

CUEP_DEVICE int __popc(unsigned x) {
    return __builtin_popcount(x);
}
CUEP_DEVICE int __popcll(unsigned long long x) {
    return __builtin_popcountll(x);
}
CUEP_DEVICE int __ffs(int x) {
    return __builtin_ffs(x);
}
CUEP_DEVICE int __ffsll(long long x) {
    return __builtin_ffsll(x);
}
CUEP_DEVICE int __clz(int x) {
    return x == 0 ? 32 : __builtin_clz(unsigned(x));
}

// Built with -ffp-contract=off, so a product and a sum stay two roundings.
CUEP_DEVICE float __fadd_rn(float a, float b) {
    return a + b;
}
CUEP_DEVICE float __fdiv_rn(float a, float b) {
    return a / b;
}
CUEP_DEVICE float __fmul_rn(float a, float b) {
    return a * b;
}
CUEP_DEVICE float __fmaf_rn(float a, float b, float c) {
    return __builtin_fmaf(a, b, c);
}
CUEP_DEVICE float __int_as_float(int bits) {
    float value;
    __builtin_memcpy(&value, &bits, sizeof(value));
    return value;
}
CUEP_DEVICE float __uint_as_float(unsigned bits) {
    return __int_as_float(int(bits));
}
CUEP_DEVICE int __float_as_int(float value) {
    int bits;
    __builtin_memcpy(&bits, &value, sizeof(bits));
    return bits;
}
CUEP_DEVICE unsigned __float_as_uint(float value) {
    return unsigned(__float_as_int(value));
}
