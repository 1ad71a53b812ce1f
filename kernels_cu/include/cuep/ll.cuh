// What the low-latency kernels share: where the words and slots of a bank lie, the phases of an operation, and what the
// ranks tell each other first. Made of the kernel's constants: include it behind them.
//
// An operation has two phases, which one kernel runs or two: a send phase takes the epoch, a receive phase ends it.
// They may lie far apart, with other operations between them, so everything that a bank needs is kept per bank.
#pragma once
#include <cuep/base.cuh>
#include <cuep/sync.cuh>
#include <cuep/operation.cuh>

namespace cuep {

constexpr int kNumLocalExperts = kNumExperts / kNumRanks;
constexpr int kNumPeers = kNumRanks - 1;
constexpr int kRowVecs = kRowBytes / 16;
constexpr int kVecsPerThread = (kRowVecs + kNumThreads - 1) / kNumThreads;
static_assert(kNumThreads >= kNumRanks && kNumThreads >= kNumTopk, "one thread for each rank, and for each k");

// The operation of this kernel: a new one if it sends, else the one that the handle's send began.
template <class Params>
CUEP_DEVICE Operation begin_phase(const Params& p, Op op) {
    return p.is_send ? begin_operation(p, op) : resume_operation(p, op);
}

template <class Params>
CUEP_DEVICE int bank_of(const Params& p, const Operation& op) {
    return static_cast<int>(op.epoch) & (p.num_banks - 1);
}

// Place of a slot, or of a token, in [num_banks, kNumRanks, max_tokens].
template <class Params>
CUEP_DEVICE int64_t slot_at(const Params& p, int bank, int src, int64_t slot) {
    return (static_cast<int64_t>(bank) * kNumRanks + src) * p.max_tokens + slot;
}

template <class Params>
CUEP_DEVICE uint64_t* flag_of(const Params& p, int dst, int bank, int src, int64_t slot) {
    return reinterpret_cast<uint64_t*>(p.arena[dst] + p.flags_offset) + slot_at(p, bank, src, slot);
}

template <class Params>
CUEP_DEVICE uint64_t* total_of(const Params& p, int dst, int bank, int src) {
    return reinterpret_cast<uint64_t*>(p.arena[dst] + p.totals_offset) + bank * kNumRanks + src;
}

template <class Params>
CUEP_DEVICE uint64_t* done_of(const Params& p, int dst, int bank, int reader) {
    return reinterpret_cast<uint64_t*>(p.arena[dst] + p.done_offset) + bank * kNumRanks + reader;
}

// Row of a slot in dst's arena, [num_banks, kNumPeers, max_tokens]: a rank has no slots for its own rows.
template <class Params>
CUEP_DEVICE uint4* staged_row(const Params& p, int dst, int bank, int src, int64_t slot) {
    const int peer = (src - dst - 1 + kNumRanks) % kNumRanks;
    const int64_t at = (static_cast<int64_t>(bank) * kNumPeers + peer) * p.max_tokens + slot;
    return reinterpret_cast<uint4*>(p.arena[dst] + p.rows_offset + at * kRowBytes);
}

// A first look at the done words of a bank, of this rank and of peer threadIdx.x, asked together. An acquire holds up
// the loads behind it, so those that are wanted at the same time are issued before.
struct BankLook {
    uint64_t own, peer;
};

template <class Params>
CUEP_DEVICE BankLook look_at_bank(const Params& p, int bank) {
    const int tid = threadIdx.x;
    if (!p.is_send || tid >= kNumRanks) return {0, 0};
    const uint64_t own = ld_relaxed_sys(done_of(p, p.rank, bank, p.rank));
    return {own, ld_acquire_sys(done_of(p, p.rank, bank, tid))};
}

// What a kernel that sends finds in its bank, for all threads alike.
enum class Bank { kFree, kTaken, kStop };

// Before a send: waits until every peer has read what was last in the bank. kTaken: this rank itself has yet to receive
// it, and so have all ranks, as they do the same operations in the same order; only the device knows which of them a
// refusal made none. (Of dispatches the host knows it; should replays of graphs deceive it, the peers' words are waited
// for, in vain.) kStop: the group is over.
template <bool kMayBeTaken, class Params>
CUEP_DEVICE Bank wait_bank(const Params& p, const Operation& op, int bank, const BankLook& look, bool is_off) {
    __shared__ bool is_taken;
    const int tid = threadIdx.x;
    bool is_ok = true;
    if (p.is_send && tid < kNumRanks) {
        const bool is_own_free = is_in_window(op, look.own, p.num_banks);
        if (tid == p.rank) is_taken = !is_own_free;
        if ((is_own_free || !kMayBeTaken) && !is_in_window(op, look.peer, p.num_banks)) {
            is_ok = wait_bank_free(op, done_of(p, p.rank, bank, tid), p.num_banks, tid);
        }
    }
    if (block_any(!is_ok || is_off)) return Bank::kStop;
    return kMayBeTaken && p.is_send && is_taken ? Bank::kTaken : Bank::kFree;
}

// What every rank says of its part, into shared memory: how much it sends, or kRefused. False: gave up.
// decode(word) is what is kept of it.
template <class Params, class Decode>
CUEP_DEVICE bool wait_totals(
    const Params& p, const Operation& op, int bank, uint32_t (&totals)[kNumRanks], Decode decode) {
    const int tid = threadIdx.x;
    bool is_ok = true;
    if (tid < kNumRanks) {
        uint32_t total = 0;
        is_ok = wait_word(op, total_of(p, p.rank, bank, tid), tid, total);
        totals[tid] = decode(total);
    }
    return !block_any(!is_ok);
}

// The rank that refused its part, this one if it did, or -1.
template <class Params>
CUEP_DEVICE int refusing_rank(const Params& p, const uint32_t (&totals)[kNumRanks]) {
    if (p.is_refused) return p.rank;
    for (int r = 0; r < kNumRanks; r++) {
        if (totals[r] == kRefused) return r;
    }
    return -1;
}

// The last block, when the bank has been read: peers may write it again (pairs with wait_bank_free).
template <class Params>
CUEP_DEVICE void publish_done(const Params& p, const Operation& op, int bank) {
    const int tid = threadIdx.x;
    if (p.is_receive && tid < kNumRanks) {
        st_release_sys(done_of(p, tid, bank, p.rank), tagged(op, 0));
    }
}

// One thread of the last block.
template <class Params>
CUEP_DEVICE void end_phase(const Params& p, const Operation& op) {
    if (p.is_receive) {
        end_kernel(op);
    } else {
        end_send(p, op);
    }
}

}  // namespace cuep
