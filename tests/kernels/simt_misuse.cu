// Errors that the CPU runtime must find. Which one is a run-time choice, so that one build serves all. The tests look
// for the markers in this file to know the line that the message must name.
#include <cuep/base.cuh>
#include <cuep/bulk.cuh>
#include <cuep/sync.cuh>

CUEP_TUNABLE(kNumThreads, 64, 64);

using namespace cuep;

struct Params {
    uint32_t* word;    // [1]: never becomes 1 by itself
    const uint8_t* x;  // [64], 16-byte aligned
    uint8_t* y;        // [64]
    int32_t mode;
};

constexpr int kSmemBytes = 256;
CUEP_LAUNCH(kNumThreads, kSmemBytes)

// Enough stack to run past the guard page. Not inlined, so that only those who call it need the stack.
__device__ __attribute__((noinline)) uint32_t use_stack(const uint8_t* x, int depth) {
    volatile uint8_t local[4096];
    for (int i = 0; i < 4096; i += 64) local[i] = x[depth % 64];
    return depth == 0 ? local[64] : use_stack(x, depth - 1) + local[128];
}

extern "C" __global__ void __launch_bounds__(kNumThreads, 1) simt_misuse(const __grid_constant__ Params p) {
    constexpr unsigned kAll = 0xffffffffu;
    CUEP_DYNAMIC_SMEM(smem);
    uint64_t* bar = reinterpret_cast<uint64_t*>(smem + 128);
    const int tid = threadIdx.x, lane = lane_idx();
    uint32_t v = 0;
    // Block 1 waits for a flag that never comes: it has to be brought down with the other.
    while (blockIdx.x == 1 && ld_acquire_sys(p.word) == 0) relax();

    if (p.mode == 1) {  // masks that overlap
        if (lane < 16) {
            __syncwarp();
        } else {
            __syncwarp(0xffffff00u);  // mark 1
        }
    }
    if (p.mode == 2) {  // a warp parts
        if (lane < 7) {
            v = __shfl_sync(kAll, tid, 0);
        } else {
            v = __ballot_sync(kAll, tid);  // mark 2
        }
    }
    if (p.mode == 3 && lane != 9) __syncwarp();  // mark 3
    if (p.mode == 3) return;
    if (p.mode == 4) {
        if (tid == 3) __syncthreads();  // mark 4
        __syncwarp();
    }
    if (p.mode == 5) v = __shfl_sync(0xfffffffeu, tid, 1);  // mark 5
    if (p.mode == 6) {
        if (tid < 32) {
            __syncthreads();
        } else {
            __syncthreads();  // mark 6
        }
    }
    if (p.mode == 7) smem[kSmemBytes] = 1;
    if (p.mode == 8) bulk_load(smem, p.x, 16, bar);  // mark 8
    if (p.mode == 9 || p.mode == 10) {
        if (tid < 32) mbarrier_init(bar);
        __syncthreads();
        if (tid < 32 && p.mode == 9) bulk_load(smem, p.x + 8, 16, bar);  // mark 9
        if (tid >= 32 && p.mode == 10) mbarrier_wait(bar, 0);            // mark 10
    }
    if (p.mode == 11 && tid < 32) bulk_store(p.y, smem, 64);  // mark 11
    if (p.mode == 12 && tid < 32) {
        mbarrier_init(bar);
        bulk_load(smem, p.x, 64, bar);  // mark 12
    }
    if (p.mode == 13 && tid < 32) {
        mbarrier_init(bar);
        bulk_load(smem, p.x, 64, bar);
        bulk_load(smem, p.x, 64, bar);  // mark 13
    }
    if (p.mode == 14) v = use_stack(p.x, 64);
    if (v == 12345) p.y[0] = 1;
}
