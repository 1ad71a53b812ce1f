// Two launches, as of two ranks, hand a message back and forth: data by 16-byte stores, then a flag. Also a counter
// that all blocks of both increment with every kind of atomic.
#include <cuep/base.cuh>
#include <cuep/sync.cuh>

CUEP_TUNABLE(kNumThreads, 64, 64);

using namespace cuep;

struct Params {
    uint4* data;         // [2, num_blocks, kNumThreads]: what rank r writes
    uint64_t* flags;     // [4, num_blocks]: round that rank r has written (r), has read (2 + r)
    uint32_t* counters;  // [4]
    uint32_t* wrong;     // [1]
    int32_t rank;        // 0 or 1
    int32_t num_rounds;
};

CUEP_LAUNCH(kNumThreads, 0)

extern "C" __global__ void __launch_bounds__(kNumThreads, 1) simt_flags(const __grid_constant__ Params p) {
    const int block = blockIdx.x, tid = threadIdx.x, peer = 1 - p.rank;
    auto data_of = [&](int rank) { return p.data + (static_cast<int64_t>(rank) * gridDim.x + block) * kNumThreads; };
    auto flag_of = [&](int rank) { return p.flags + rank * gridDim.x + block; };
    for (uint32_t round = 1; round <= static_cast<uint32_t>(p.num_rounds); round++) {
        const uint32_t stamp = round * 1000 + tid;
        store_16(data_of(p.rank) + tid, make_uint4(stamp, stamp, p.rank, block));
        __syncthreads();
        if (tid == 0) {
            st_release_sys(flag_of(p.rank), static_cast<uint64_t>(round));  // pairs with the load of the peer
            while (ld_acquire_sys(flag_of(peer)) < round) relax();
        }
        __syncthreads();
        const uint4 v = load_16(data_of(peer) + tid);
        if (v.x != stamp || v.y != stamp || v.z != static_cast<uint32_t>(peer)) atomicAdd(p.wrong, 1u);
        __syncthreads();
        if (tid == 0) {  // the peer must have read before the data is written again
            st_release_gpu(flag_of(2 + p.rank), static_cast<uint64_t>(round));
            while (ld_acquire_gpu(flag_of(2 + peer)) < round) relax();
        }
        __syncthreads();
    }
    atom_add_acq_rel_gpu(p.counters, 1u);
    atom_add_relaxed_sys(p.counters + 1, 2u);
    red_add_release_sys(p.counters + 2, 3u);
    uint32_t seen = ld_relaxed_sys(p.counters + 3);
    for (uint32_t old; (old = atom_cas_acq_rel_gpu(p.counters + 3, seen, seen + 1)) != seen;) {
        seen = old;
        relax();
    }
    fence_acq_rel_gpu();
    fence_acq_rel_sys();
    if (atom_cas_relaxed_sys(p.wrong, 0xffffffffu, 0u) == 0xffffffffu) st_relaxed_sys(p.wrong, 1u);
    if (now_ns() == 0) atomicAdd(p.wrong, 1u);
}
