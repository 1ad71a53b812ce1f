// Every thread reads what its neighbour wrote to shared memory, with or without the barrier that this needs.
// compile: kHasBarrier=1
#include <cuep/base.cuh>

CUEP_TUNABLE(kNumThreads, 64, 64);

using namespace cuep;

struct Params {
    uint32_t* out;      // [num_blocks, kNumThreads]
    uint32_t* garbage;  // [num_blocks, 2]: first words of static and dynamic shared memory as the kernel finds them
};

constexpr int kSmemBytes = kNumThreads * 4;
CUEP_LAUNCH(kNumThreads, kSmemBytes)

extern "C" __global__ void __launch_bounds__(kNumThreads, 1) simt_race(const __grid_constant__ Params p) {
    CUEP_DYNAMIC_SMEM(smem);
    __shared__ uint32_t row[kNumThreads];
    volatile uint32_t* copy = reinterpret_cast<volatile uint32_t*>(smem);
    const int tid = threadIdx.x;
    if (tid == 0) {
        p.garbage[2 * blockIdx.x] = *const_cast<volatile uint32_t*>(row);
        p.garbage[2 * blockIdx.x + 1] = *copy;
    }
    __syncthreads();
    row[tid] = tid;
    copy[tid] = tid;
    if (kHasBarrier) __syncthreads();
    const int neighbour = (tid + kNumThreads - 1) % kNumThreads;
    p.out[blockIdx.x * kNumThreads + tid] = *const_cast<volatile uint32_t*>(row + neighbour) + copy[neighbour];
}
