// A barrier over all ranks, made of NVSHMEM signals: every rank sets its word on every peer to the barrier's number and
// waits until each peer's word here has it. What a rank's stream wrote or put before the barrier is seen by every rank
// after it. The number lives on the device, so that replays of a CUDA graph count on. Goes wherever NVSHMEM's
// transports go, not only over NVLink. One block; cost: one signal per peer and one flag latency.
#include <cuep/base.cuh>
#include <cuep/sync.cuh>
#include <cuep/nvshmem.cuh>

#ifndef CUEP_JIT  // values for editors; cuep/jit.py gives the real ones
constexpr int kNumRanks = 4, kNumThreads = 32;
#endif
// compile: kNumRanks=4
CUEP_TUNABLE(kNumThreads, 32, 32);

using namespace cuep;

struct Params {
    uint64_t* signals;  // symmetric [kNumRanks]: number of the last barrier that each rank has reached
    uint64_t* epoch;    // [1], device: number of the last barrier that this rank has passed
    uint64_t* report;   // [4], pinned: 1 after a timeout, then peer, expected, seen
    int64_t timeout_ns;
    int32_t rank;
};
CUEP_LAUNCH(kNumThreads, 0)

// False: the peer did not come in time. A peer that is one barrier ahead has been through this one.
CUEP_DEVICE bool wait_for(const Params& p, int peer, uint64_t epoch) {
    const uint64_t start_ns = now_ns();
    while (true) {
        const uint64_t seen = nvshmem_signal_fetch(p.signals + peer);
        if (seen - epoch <= 1) return true;
        if (now_ns() - start_ns > static_cast<uint64_t>(p.timeout_ns)) {
            p.report[1] = peer;
            p.report[2] = epoch;
            p.report[3] = seen;
            st_release_sys(p.report, uint64_t{1});  // pairs with the host's read in cuep/barrier.py
            return false;
        }
        relax();
    }
}

extern "C" __global__ void __launch_bounds__(kNumThreads, 1) barrier_nvshmem(const __grid_constant__ Params p) {
    const uint64_t epoch = *p.epoch + 1;

    // Everything before the barrier, of this rank: puts have arrived and stores are visible to other GPUs.
    if (threadIdx.x == 0) {
        nvshmem_quiet();
        fence_acq_rel_sys();
    }
    __syncthreads();

    for (int peer = threadIdx.x; peer < kNumRanks; peer += kNumThreads) {
        fence_acq_rel_sys();  // by the thread that signals
        if (peer != p.rank) nvshmemx_signal_op(p.signals + p.rank, epoch, NVSHMEM_SIGNAL_SET, peer);
    }
    for (int peer = threadIdx.x; peer < kNumRanks; peer += kNumThreads) {
        if (peer != p.rank) wait_for(p, peer, epoch);
    }
    fence_acq_rel_sys();  // what peers wrote before their signals is visible to this thread, and by the barrier to all
    __syncthreads();
    if (threadIdx.x == 0) *p.epoch = epoch;
}
