// The least that a high-throughput combine must do, to compare with: the rows of a token are read from the ranks that
// have them and added up in fp32, in order of rank. No flags, no waits, no bias. No operation uses it: `python -m cuep
// bench ht --floor` times it.
#include <cuep/base.cuh>
#include <cuep/sync.cuh>
#include <cuep/convert.cuh>
#include <cuep/operation.cuh>
#include <cuep/ht_home.cuh>

#ifndef CUEP_JIT  // values for editors; cuep/jit.py gives the real ones
constexpr int kNumRanks = 4, kRowBytes = 14336, kNumWarps = 32;
using elem_t = cuep::bf16_t;
#endif
// compile: kNumRanks=4 kRowBytes=14336 elem_t=cuep::bf16_t
CUEP_TUNABLE(kNumWarps, 32, 2);

using namespace cuep;

struct Params {
    uint8_t* arena[kNumRanks];  // symmetric memory of every rank
    int64_t rows_offset;        // bytes into it: rows, row_stride bytes apart
    int64_t row_stride;
    const int32_t* rows;  // [num_tokens, kNumRanks]: row at each rank, or -1
    uint8_t* y;           // [num_tokens] rows, y_stride bytes apart
    int64_t y_stride;
    int32_t num_tokens;
};

constexpr int kNumThreads = kNumWarps * 32;
using Rows = Home<kNumRanks, 1, 1, kRowBytes, elem_t, false>;
CUEP_LAUNCH(kNumThreads, 0)

extern "C" __global__ void __launch_bounds__(kNumThreads, 1) floor_combine_pull(const __grid_constant__ Params p) {
    const int step = gridDim.x * kNumWarps;
    for (int t = warp_idx() * gridDim.x + blockIdx.x; t < p.num_tokens; t += step) {
        const int32_t lane_row = row_of_lane<kNumRanks>(p, t);
        const uint4* terms[kNumRanks];
#pragma unroll
        for (int r = 0; r < kNumRanks; r++) {
            const int64_t row = __shfl_sync(0xffffffffu, lane_row, r);
            const uint8_t* term = p.arena[r] + p.rows_offset + row * p.row_stride;
            terms[r] = row < 0 ? nullptr : reinterpret_cast<const uint4*>(term);
        }
        const uint4* biases[2] = {};
        Rows::sum_terms<Rows::kVecsOfManyWarps>(terms, biases, reinterpret_cast<uint4*>(p.y + t * p.y_stride));
    }
}
