// Floats to e4m3, four at a time.
#include <cuep/base.cuh>
#include <cuep/quant.cuh>

// compile:
CUEP_TUNABLE(kNumThreads, 64, 64);

using namespace cuep;

struct Params {
    const float* wide;   // [num_words, 4]
    uint32_t* narrowed;  // [num_words]
    int32_t num_words;
};

CUEP_LAUNCH(kNumThreads, 0)

extern "C" __global__ void __launch_bounds__(kNumThreads, 1) simt_e4m3(const __grid_constant__ Params p) {
    for (int i = blockIdx.x * kNumThreads + threadIdx.x; i < p.num_words; i += gridDim.x * kNumThreads) {
        const float* f = p.wide + 4 * i;
        p.narrowed[i] = pack_e4m3(f[0], f[1], f[2], f[3]);
    }
}
