// Copies between global and shared memory by the bulk-copy engine (sm_90 and newer), one warp at a time. All 32 lanes
// make each call together; lane 0 issues. A call first synchronises the warp, so what all lanes did before it is before
// the copy, and a wait synchronises it afterwards. Addresses and sizes are multiples of 16 bytes.
//
// Loading. A barrier (8 bytes of shared memory) stands for one load at a time:
//     mbarrier_init(bar); ... bulk_load(smem, gmem, bytes, bar); ... mbarrier_wait(bar, parity);
//   with parity 0 for the first load of this barrier, 1 for the second, 0 for the third, ... Other warps may wait as
//   well.
// Storing. Stores since the last commit form a group; the waits leave the newest N groups pending:
//     bulk_store(gmem, smem, bytes); bulk_commit(); ... bulk_wait_read<N>(); ... bulk_wait<N>();
//   After wait_read the shared memory may be written again; only after wait has the data arrived. So the flag that
//   tells another rank about it may be released after bulk_wait<0>() alone, by a lane of this warp or behind a barrier.
// Proxies. The engine and ordinary instructions see memory through different paths, which need a fence between them:
//   fence_proxy_async_shared(): by every lane that wrote or read shared memory with ordinary instructions, before the
//     bulk_store that reads it or the bulk_load that refills it.
//   fence_proxy_async(): after the acquire, before a bulk_load of what other threads stored to global memory in this
//     kernel's time, and before a bulk_store over what was read there.
//   The waits need no fence after them: what a finished copy wrote is visible to ordinary instructions.
//
// Older GPUs copy in the call itself. The CPU copies at a random time that these rules allow, to find code that breaks
// them: see cpu/bulk.h.
#pragma once

#include <cuep/base.cuh>

namespace cuep {

#ifdef CUEP_CPU

CUEP_DEVICE void mbarrier_init(uint64_t* bar, CUEP_CPU_CALLER) {
    cpu::mbarrier_init(bar, {file, line});
}

CUEP_DEVICE void bulk_load(void* smem, const void* gmem, uint32_t bytes, uint64_t* bar, CUEP_CPU_CALLER) {
    cpu::bulk_load(smem, gmem, bytes, bar, {file, line});
}

CUEP_DEVICE void mbarrier_wait(uint64_t* bar, uint32_t parity, CUEP_CPU_CALLER) {
    cpu::mbarrier_wait(bar, parity, {file, line});
}

CUEP_DEVICE void bulk_store(void* gmem, const void* smem, uint32_t bytes, CUEP_CPU_CALLER) {
    cpu::bulk_store(gmem, smem, bytes, {file, line});
}

CUEP_DEVICE void bulk_commit(CUEP_CPU_CALLER) {
    cpu::bulk_commit({file, line});
}

template <int N>
CUEP_DEVICE void bulk_wait_read(CUEP_CPU_CALLER) {
    cpu::bulk_wait(N, cpu::Copy::kRead, {file, line});
}

template <int N>
CUEP_DEVICE void bulk_wait(CUEP_CPU_CALLER) {
    cpu::bulk_wait(N, cpu::Copy::kDone, {file, line});
}

CUEP_DEVICE void fence_proxy_async() {
    cpu::delay_point();
}
CUEP_DEVICE void fence_proxy_async_shared() {
    cpu::delay_point();
}

#else

namespace detail {

CUEP_DEVICE uint32_t shared_address(const void* ptr) {
    return uint32_t(__cvta_generic_to_shared(ptr));
}

// 16 bytes per lane, for GPUs without the engine.
CUEP_DEVICE void copy_with_lanes(void* dst, const void* src, uint32_t bytes) {
    for (uint32_t i = uint32_t(lane_idx()) * 16; i < bytes; i += kWarpSize * 16) {
        *reinterpret_cast<uint4*>(static_cast<uint8_t*>(dst) + i) =
            *reinterpret_cast<const uint4*>(static_cast<const uint8_t*>(src) + i);
    }
}

}  // namespace detail

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
#define CUEP_HAS_BULK_ENGINE 1
#else
#define CUEP_HAS_BULK_ENGINE 0
#endif

// Behind it the block needs a __syncthreads() if other warps use the barrier.
CUEP_DEVICE void mbarrier_init(uint64_t* bar) {
    if (lane_idx() == 0) {
        asm volatile("mbarrier.init.shared.b64 [%0], 1;" ::"r"(detail::shared_address(bar)) : "memory");
#if CUEP_HAS_BULK_ENGINE
        // The engine must see the barrier initialised.
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
    }
    __syncwarp();
}

CUEP_DEVICE void bulk_load(void* smem, const void* gmem, uint32_t bytes, uint64_t* bar) {
    __syncwarp();
#if CUEP_HAS_BULK_ENGINE
    if (lane_idx() == 0) {
        const uint32_t bar_address = detail::shared_address(bar);
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar_address), "r"(bytes)
                     : "memory");
        asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                         detail::shared_address(smem)),
                     "l"(gmem),
                     "r"(bytes),
                     "r"(bar_address)
                     : "memory");
    }
#else
    detail::copy_with_lanes(smem, gmem, bytes);
    __syncwarp();  // so that lane 0 releases what all lanes wrote
    if (lane_idx() == 0) {
        asm volatile(
            "{\n.reg .b64 state;\nmbarrier.arrive.shared.b64 state, [%0];\n}" ::"r"(detail::shared_address(bar))
            : "memory");
    }
#endif
}

// Every lane polls by itself: who sees the phase complete also sees what was copied.
CUEP_DEVICE void mbarrier_wait(uint64_t* bar, uint32_t parity) {
    uint32_t is_complete = 0;
    while (!is_complete) {
#if CUEP_HAS_BULK_ENGINE
        asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
                     : "=r"(is_complete)
                     : "r"(detail::shared_address(bar)), "r"(parity)
                     : "memory");
#else
        asm volatile("{\n.reg .pred p;\nmbarrier.test_wait.parity.shared.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
                     : "=r"(is_complete)
                     : "r"(detail::shared_address(bar)), "r"(parity)
                     : "memory");
#endif
    }
    __syncwarp();
}

CUEP_DEVICE void bulk_store(void* gmem, const void* smem, uint32_t bytes) {
    __syncwarp();
#if CUEP_HAS_BULK_ENGINE
    if (lane_idx() == 0) {
        asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(gmem),
                     "r"(detail::shared_address(smem)),
                     "r"(bytes)
                     : "memory");
    }
#else
    detail::copy_with_lanes(gmem, smem, bytes);
#endif
}

CUEP_DEVICE void bulk_commit() {
#if CUEP_HAS_BULK_ENGINE
    if (lane_idx() == 0) asm volatile("cp.async.bulk.commit_group;" ::: "memory");
#endif
}

template <int N>
CUEP_DEVICE void bulk_wait_read() {
#if CUEP_HAS_BULK_ENGINE
    if (lane_idx() == 0) asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(N) : "memory");
#endif
    __syncwarp();
}

template <int N>
CUEP_DEVICE void bulk_wait() {
#if CUEP_HAS_BULK_ENGINE
    if (lane_idx() == 0) asm volatile("cp.async.bulk.wait_group %0;" ::"n"(N) : "memory");
#endif
    __syncwarp();
}

CUEP_DEVICE void fence_proxy_async() {
#if CUEP_HAS_BULK_ENGINE
    asm volatile("fence.proxy.async;" ::: "memory");
#endif
}

CUEP_DEVICE void fence_proxy_async_shared() {
#if CUEP_HAS_BULK_ENGINE
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

#endif  // CUEP_CPU

}  // namespace cuep
