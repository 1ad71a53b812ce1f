// The least that a high-throughput dispatch must do, to compare with: each row is brought into shared memory once and
// stored straight to its final row at every destination, destinations interleaved. No flags, no waits, nothing beside
// the rows. No operation uses it: `python -m cuep bench ht --floor` times it.
#include <cuep/base.cuh>
#include <cuep/sync.cuh>
#include <cuep/bulk.cuh>
#include <cuep/row_pipe.cuh>
#include <cuep/ht_walk.cuh>

#ifndef CUEP_JIT  // values for editors; cuep/jit.py gives the real ones
constexpr int kNumRanks = 4, kRowBytes = 14336, kNumWarps = 4, kNumStages = 3;
#endif
// compile: kNumRanks=4 kRowBytes=14336
CUEP_TUNABLE(kNumWarps, 4, 2);
CUEP_TUNABLE(kNumStages, 3, 2);

using namespace cuep;

struct Params {
    uint8_t* arena[kNumRanks];  // symmetric memory of every rank
    int64_t rows_offset;        // bytes into it: rows, row_stride bytes apart
    int64_t row_stride;
    const uint8_t* x;  // [num_tokens] rows, x_stride bytes apart
    int64_t x_stride;
    const int32_t* rows;  // [num_tokens, kNumRanks]: row at each rank, or -1
    int32_t num_tokens;
    int32_t rank;
};

constexpr int kNumThreads = kNumWarps * 32;
using Pipe = RowPipe<kRowBytes, kNumStages>;
CUEP_LAUNCH(kNumThreads, kNumWarps* Pipe::kSmemBytes)

extern "C" __global__ void __launch_bounds__(kNumThreads, 1) floor_dispatch_push(const __grid_constant__ Params p) {
    CUEP_DYNAMIC_SMEM(smem);
    const int warp = warp_idx();
    Pipe pipe(smem, warp, kNumWarps);
    const TokenWalk share(warp, kNumWarps, p.num_tokens);
    pipe.move(
        share,
        [&](const TokenWalk& walk) { return p.x + walk.t * p.x_stride; },
        [&](const TokenWalk& walk) { return row_of_lane<kNumRanks>(p, walk.t); },
        [&](const TokenWalk&, int32_t rows, const uint8_t* staged) {
#pragma unroll
            for (int i = 1; i <= kNumRanks; i++) {
                const int dst = (p.rank + i) % kNumRanks;
                const int64_t row = __shfl_sync(0xffffffffu, rows, dst);
                if (row >= 0) bulk_store(p.arena[dst] + p.rows_offset + row * p.row_stride, staged, kRowBytes);
            }
        },
        [](const TokenWalk&, int32_t) {});
}
