// What shuffles, votes, barriers and atomics give to each thread, for comparison with NumPy.
#include <cuep/base.cuh>

CUEP_TUNABLE(kNumThreads, 96, 96);

using namespace cuep;

constexpr int kNumResults = 18;

struct Params {
    const int32_t* in;  // [num_blocks, kNumThreads]
    int64_t* out;       // [kNumResults, num_blocks, kNumThreads]
    int32_t* winners;   // [num_blocks]: threads that were the first to replace -1
    int32_t* exchange;  // [num_blocks]: what thread 0 left, after the exchange of thread 1
};

constexpr int kSmemBytes = kNumThreads * 4;
CUEP_LAUNCH(kNumThreads, kSmemBytes)

extern "C" __global__ void __launch_bounds__(kNumThreads, 1) simt_collectives(const __grid_constant__ Params p) {
    constexpr unsigned kAll = 0xffffffffu;
    CUEP_DYNAMIC_SMEM(smem);
    __shared__ int32_t sum, largest, first;
    __shared__ float float_sum;
    int32_t* row = reinterpret_cast<int32_t*>(smem);
    const int tid = threadIdx.x, lane = lane_idx();
    const int64_t at = static_cast<int64_t>(blockIdx.x) * blockDim.x + tid;
    const int32_t v = p.in[at];
    int64_t results[kNumResults] = {};

    if (tid == 0) {
        sum = 0;
        largest = -1000000;
        first = -1;
        float_sum = 0.0f;
    }
    row[tid] = v;
    __syncthreads();
    results[0] = row[kNumThreads - 1 - tid];
    results[1] = __shfl_sync(kAll, v, 5);
    results[2] = __shfl_sync(kAll, static_cast<int64_t>(v) << 33, lane + 1, 8);
    results[3] = __shfl_up_sync(kAll, v, 3);
    results[4] = __shfl_down_sync(kAll, v, 3, 16);
    results[5] = __shfl_xor_sync(kAll, v, 17);
    results[6] = __ballot_sync(kAll, v & 1);
    results[7] = __any_sync(kAll, v > 90) * 2 + __all_sync(kAll, v > -90);
    if (lane < 12) {  // part of a warp
        results[8] = __shfl_sync(0xfffu, v, lane == 0 ? 11 : lane - 1);
        results[9] = __ballot_sync(0xfffu, v > 0);
    }
    __syncwarp();
    atomicAdd(&sum, v);
    atomicMax(&largest, v);
    atomicAdd(&float_sum, 0.5f);
    results[10] = __syncthreads_count(v > 0);
    results[11] = __syncthreads_or(v > 98) * 2 + __syncthreads_and(v > -99);
    results[12] = sum;
    results[13] = largest;
    results[14] = static_cast<int64_t>(float_sum);
    results[15] = __popc(v) + 100 * __ffs(v) + 10000 * __clz(v) + 1000000 * min(v, 7) + 100000000ll * max(v, 7);
    results[16] = static_cast<int32_t>(__reduce_add_sync(kAll, static_cast<unsigned>(v)));
    results[17] = __reduce_or_sync(kAll, 1u << (v & 31));
    for (int i = 0; i < kNumResults; i++) p.out[i * static_cast<int64_t>(gridDim.x) * blockDim.x + at] = results[i];
    if (atomicCAS(&first, -1, tid) == -1) atomicAdd(p.winners + blockIdx.x, 1);
    if (tid == 40) return;  // no longer counts for the barrier
    __syncthreads();
    if (tid == 0) first = 77;
    __syncthreads();
    if (tid == 1) p.exchange[blockIdx.x] = atomicExch(&first, 78) * 100 + first;
}
