// Rows of x to y through shared memory, two in flight, then checked by the other blocks. kMissing leaves out a wait.
// compile: kRowBytes=512 kMissing=0
#include <cuep/base.cuh>
#include <cuep/bulk.cuh>
#include <cuep/sync.cuh>

CUEP_TUNABLE(kNumWarps, 4, 2);

using namespace cuep;

struct Params {
    const uint8_t* x;   // [num_rows] rows
    uint8_t* y;         // [num_rows] rows
    uint32_t* arrived;  // [1]: blocks that have stored all their rows
    uint32_t* wrong;    // [1]: 16-byte words of y that were not there when they should have been
    int32_t num_rows;
};

constexpr int kNumThreads = kNumWarps * 32;
constexpr int kNumStages = 3;
constexpr int kSmemBytes = kNumWarps * kNumStages * (kRowBytes + 8);
CUEP_LAUNCH(kNumThreads, kSmemBytes)

CUEP_DEVICE void copy_rows(const Params& p, uint8_t* stages, uint64_t* loaded) {
    const int first = warp_idx() * gridDim.x + blockIdx.x, step = gridDim.x * kNumWarps;
    int next = first, num_loads = 0;
    auto load_next = [&]() {
        const int stage = num_loads++ % kNumStages;
        bulk_load(stages + stage * kRowBytes, p.x + static_cast<int64_t>(next) * kRowBytes, kRowBytes, loaded + stage);
        next += step;
    };
    while (num_loads < kNumStages - 1 && next < p.num_rows) load_next();
    int num_stores = 0;
    for (int row = first; row < p.num_rows; row += step) {
        const int stage = num_stores % kNumStages;
        if (kMissing != 1) mbarrier_wait(loaded + stage, num_stores / kNumStages & 1);
        bulk_store(p.y + static_cast<int64_t>(row) * kRowBytes, stages + stage * kRowBytes, kRowBytes);
        bulk_commit();
        num_stores++;
        if (next >= p.num_rows) continue;
        if (kMissing != 2) bulk_wait_read<1>();  // the stage that is refilled was stored one row ago
        load_next();
    }
    if (kMissing == 3) bulk_wait_read<0>();
    if (kMissing != 3) bulk_wait<0>();
}

extern "C" __global__ void __launch_bounds__(kNumThreads, 1) simt_bulk(const __grid_constant__ Params p) {
    CUEP_DYNAMIC_SMEM(smem);
    uint8_t* stages = smem + warp_idx() * kNumStages * kRowBytes;
    uint64_t* loaded = reinterpret_cast<uint64_t*>(smem + kNumWarps * kNumStages * kRowBytes) + warp_idx() * kNumStages;
    for (int stage = 0; stage < kNumStages; stage++) mbarrier_init(loaded + stage);
    copy_rows(p, stages, loaded);
    __syncthreads();
    if (threadIdx.x == 0) {
        red_add_release_sys(p.arrived, 1u);
        while (ld_acquire_sys(p.arrived) != gridDim.x) relax();
    }
    __syncthreads();
    const int num_words = p.num_rows * (kRowBytes / 16);
    for (int i = blockIdx.x * kNumThreads + threadIdx.x; i < num_words; i += gridDim.x * kNumThreads) {
        const uint4 a = load_16(reinterpret_cast<const uint4*>(p.y) + i);
        const uint4 b = load_streaming(reinterpret_cast<const uint4*>(p.x) + i);
        if (a.x != b.x || a.y != b.y || a.z != b.z || a.w != b.w) atomicAdd(p.wrong, 1u);
    }
}
