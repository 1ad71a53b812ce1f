// How long this rank waits for each of its peers (GroupConfig.arrival_stats), for who wants to know which are late.
// Made of the kernel's constants: include it behind them.
//
// A kernel notes for each peer when its last wait for that was over, in one of two sets by turns; the next kernel adds
// it up while it notes in the other.
#pragma once
#include <cuep/operation.cuh>

namespace cuep {

struct Arrivals {
    uint64_t newest[2][2][kNumRanks];  // [turn][dispatch, combine]: ns since the kernel began, 0: it waited for none
    uint64_t num_waits[2][kNumRanks];  // kernels that had to wait
    uint64_t sum_ns[2][kNumRanks], longest_ns[2][kNumRanks];
    uint64_t turn;
};

// With the control words.
template <class Params>
CUEP_DEVICE void begin_arrivals(const Params& p, Operation& op) {
    if constexpr (kHasStats) {
        op.waits = p.arrivals->newest[p.arrivals->turn][op.op == Op::kCombine];
        op.begin_ns = now_ns();
    }
}

// One block: what the kernel before has noted.
template <class Params>
CUEP_DEVICE void add_up_arrivals(const Params& p) {
    static_assert(kNumThreads >= 2 * kNumRanks);
    const int i = threadIdx.x;
    if (!kHasStats || i >= 2 * kNumRanks) return;
    Arrivals* all = p.arrivals;
    uint64_t* newest = all->newest[1 - all->turn][0] + i;
    const uint64_t ns = *newest;
    if (ns == 0) return;
    *newest = 0;
    all->num_waits[0][i]++;
    all->sum_ns[0][i] += ns;
    all->longest_ns[0][i] = max(all->longest_ns[0][i], ns);
}

// One thread, when all blocks are past begin_arrivals.
template <class Params>
CUEP_DEVICE void end_arrivals(const Params& p) {
    if constexpr (kHasStats) p.arrivals->turn ^= 1;
}

}  // namespace cuep
