// Rows of one element type to float, and float back to rows.
// compile: elem_t=cuep::bf16_t
// compile: elem_t=cuep::fp16_t
// compile: elem_t=float
#include <cuep/base.cuh>
#include <cuep/convert.cuh>
#include <cuep/sync.cuh>

CUEP_TUNABLE(kNumThreads, 64, 64);

using namespace cuep;

struct Params {
    const uint4* narrow;  // [num_vecs] vectors of elem_t
    float* widened;       // [num_vecs, kPerVec]
    const float* wide;    // [num_vecs, kPerVec]
    uint4* narrowed;      // [num_vecs]
    int32_t num_vecs;
};

CUEP_LAUNCH(kNumThreads, 0)

extern "C" __global__ void __launch_bounds__(kNumThreads, 1) simt_convert(const __grid_constant__ Params p) {
    constexpr int kWidth = kPerVec<elem_t>;
    for (int i = blockIdx.x * kNumThreads + threadIdx.x; i < p.num_vecs; i += gridDim.x * kNumThreads) {
        float f[kWidth];
        unpack<elem_t>(load_streaming(p.narrow + i), f);
        for (int j = 0; j < kWidth; j++) p.widened[i * kWidth + j] = f[j];
        for (int j = 0; j < kWidth; j++) f[j] = p.wide[i * kWidth + j];
        store_16(p.narrowed + i, pack<elem_t>(f));
    }
}
