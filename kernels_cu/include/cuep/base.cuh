// The vocabulary of every kernel: integer types, the CUDA built-ins that kernels may use, and the macros that state a
// kernel's tunables and launch facts. On the GPU nearly everything is the compiler's own (NVRTC needs no header); on
// the CPU cpu/runtime.h gives g++ the same names, so that one kernel file serves both.
#pragma once

#ifdef CUEP_CPU
#include <cuep/cpu/runtime.h>
#else

#ifdef __CUDACC_RTC__  // NVRTC has no <cstdint>; these are the types that libcu++ would define
typedef signed char int8_t;
typedef short int16_t;
typedef int int32_t;
typedef long long int64_t;
typedef unsigned char uint8_t;
typedef unsigned short uint16_t;
typedef unsigned int uint32_t;
typedef unsigned long long uint64_t;
typedef unsigned long long uintptr_t;
#else
#include <cstdint>
#endif

#define CUEP_DEVICE __device__ __forceinline__
#define CUEP_DEVICE_COLD static __device__ __noinline__  // what runs hardly ever: kept out of the way of what does

// The block's dynamic shared memory, as many bytes as CUEP_LAUNCH asks for. The GPU fixes its address per kernel.
#define CUEP_DYNAMIC_SMEM(name)                                \
    extern __shared__ __align__(128) uint8_t cuep_smem_base[]; \
    uint8_t* const name = cuep_smem_base

#define CUEP_LAUNCH_FACTS(threads, smem_bytes, is_early) \
    extern "C" __device__ int32_t cuep_launch[3] = {int32_t(threads), int32_t(smem_bytes), is_early};

#endif  // CUEP_CPU

// How a kernel is launched; one of them, beside the kernel. EARLY: its blocks are set up while what comes before it in
// the stream still runs, and it calls wait_for_earlier_kernels() before anything else. It is no cooperative launch: all
// its blocks fit the device, but the driver does not see to it that they start together.
#define CUEP_LAUNCH(threads, smem_bytes) CUEP_LAUNCH_FACTS(threads, smem_bytes, 0)
#define CUEP_LAUNCH_EARLY(threads, smem_bytes) CUEP_LAUNCH_FACTS(threads, smem_bytes, 1)

// A constant that cuep/jit.py defines before it includes the kernel: CUEP_TUNABLE(name, GPU default, CPU default).
#define CUEP_TUNABLE(name, gpu_default, cpu_default) static_assert(name >= 0, #name " must not be negative")

namespace cuep {

constexpr int kWarpSize = 32;

// Blocks are one-dimensional, so both follow from threadIdx.x.
CUEP_DEVICE int lane_idx() {
    return int(threadIdx.x % kWarpSize);
}
CUEP_DEVICE int warp_idx() {
    return int(threadIdx.x / kWarpSize);
}

}  // namespace cuep
