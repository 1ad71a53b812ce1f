// What all operations of a group share: epochs, tagged words, bounded waits, reports to the host, and the end of a
// kernel.
#pragma once
#include <cuep/base.cuh>
#include <cuep/sync.cuh>

namespace cuep {

enum class Op : uint32_t { kRoute = 0, kDispatch = 1, kCombine = 2 };
enum class Phase : uint32_t { kReuse = 0, kCounts = 1, kRows = 2 };  // cuep/status.py has the same names

constexpr uint32_t kRefused = 0xffffffffu;  // published instead of a count by a rank whose call was refused

// Device memory of one rank, one per group. Only the last block of a kernel writes epochs, so that every block of one
// kernel reads the same.
struct Control {
    uint64_t epoch[3];   // last finished epoch of each Op
    uint32_t blocks[3];  // blocks of the running kernel that are through
    uint32_t broken;     // a wait has timed out: the group is over
};

// Host memory of one rank that the host reads without waiting (cuep/status.py).
struct Report {
    uint32_t timed_out;  // 1 when the next six words are complete
    uint32_t op, phase, peer, expected, seen, epoch;
    uint32_t num_refused;  // operations that did nothing because a rank refused its call
    uint32_t refused_op, refused_by, refused_handle;
    uint32_t num_bad_ids;    // topk_idx entries outside [-1, num_experts)
    uint32_t num_overflows;  // dispatches whose duplicate ids filled an expert's zone beyond its rows
};

// Device memory of one handle.
struct HandleState {
    uint32_t refused;     // its last dispatch or combine was refused: what is enqueued behind it does nothing
    uint32_t refused_by;  // the rank that refused
    uint32_t unrouted;    // ht: its last routing was refused: nothing works before the next one
    uint32_t unused;
};

struct Operation {
    Control* control;
    Report* report;
    uint64_t timeout_ns;
    uint64_t epoch;  // of this operation; flags carry its low 32 bits
    Op op;
};

CUEP_DEVICE Operation begin_operation(Control* control, Report* report, int64_t timeout_ns, Op op) {
    return {control, report, static_cast<uint64_t>(timeout_ns), control->epoch[static_cast<int>(op)] + 1, op};
}

// A word {epoch, value}, written and read in one access: the value cannot be of another epoch.
CUEP_DEVICE uint64_t tagged(const Operation& op, uint32_t value) {
    return op.epoch << 32 | value;
}
CUEP_DEVICE uint32_t epoch_of(uint64_t word) {
    return static_cast<uint32_t>(word >> 32);
}

// Whether to stop waiting: the group is broken, or this wait has lasted longer than the timeout (and is then reported).
CUEP_DEVICE bool give_up(
    const Operation& op, Phase phase, int peer, uint32_t expected, uint32_t seen, uint64_t& since_ns) {
    if (ld_acquire_gpu(&op.control->broken) != 0) return true;
    const uint64_t now = now_ns();
    if (since_ns == 0) since_ns = now;
    if (now - since_ns < op.timeout_ns) return false;
    if (atom_cas_acq_rel_gpu(&op.control->broken, 0u, 1u) == 0u) {
        Report* report = op.report;
        report->op = static_cast<uint32_t>(op.op);
        report->phase = static_cast<uint32_t>(phase);
        report->peer = static_cast<uint32_t>(peer);
        report->expected = expected;
        report->seen = seen;
        report->epoch = static_cast<uint32_t>(op.epoch);
        st_release_sys(&report->timed_out, 1u);  // pairs with the host's read in Group.check
    }
    return true;
}

constexpr uint32_t kSpinsPerClock = 64;  // polls between two looks at the clock

// Waits until `word` carries this operation's epoch; its value goes to `value`. False: gave up.
template <bool kIsAcquire>
CUEP_DEVICE bool wait_tagged(const Operation& op, const uint64_t* word, Phase phase, int peer, uint32_t& value) {
    uint64_t since_ns = 0;
    for (uint32_t spin = 1;; spin++) {
        const uint64_t seen = kIsAcquire ? ld_acquire_sys(word) : ld_relaxed_sys(word);
        value = static_cast<uint32_t>(seen);
        if (epoch_of(seen) == static_cast<uint32_t>(op.epoch)) return true;
        if (spin % kSpinsPerClock == 0 &&
            give_up(op, phase, peer, static_cast<uint32_t>(op.epoch), epoch_of(seen), since_ns)) {
            return false;
        }
        relax();
    }
}

// A flag: what its writer stored before it may be read afterwards. Pairs with st_release_sys of the peer.
CUEP_DEVICE bool wait_flag(const Operation& op, const uint64_t* flag, Phase phase, int peer, uint32_t& value) {
    return wait_tagged<true>(op, flag, phase, peer, value);
}

// A word that says all there is to know, with no data behind it. Pairs with st_relaxed_sys of the peer.
CUEP_DEVICE bool wait_word(const Operation& op, const uint64_t* word, int peer, uint32_t& value) {
    return wait_tagged<false>(op, word, Phase::kCounts, peer, value);
}

// Waits until `peer` has read what this rank wrote `num_banks` epochs ago, so that the bank may be written again.
// A window, not "at least". It holds this very epoch too: a block that starts late may find peers that have everything
// from the other blocks of its rank and are through.
CUEP_DEVICE bool wait_bank_free(const Operation& op, const uint64_t* done, uint32_t num_banks, int peer) {
    uint64_t since_ns = 0;
    const uint32_t oldest = static_cast<uint32_t>(op.epoch) - num_banks;
    for (uint32_t spin = 1;; spin++) {
        const uint32_t seen = epoch_of(ld_acquire_sys(done));  // pairs with publish_done of the peer
        if (seen - oldest <= num_banks) return true;
        if (spin % kSpinsPerClock == 0 && give_up(op, Phase::kReuse, peer, oldest, seen, since_ns)) return false;
        relax();
    }
}

// Barrier of the block that tells every thread whether any passed true.
CUEP_DEVICE bool block_any(bool predicate) {
    return __syncthreads_or(predicate) != 0;
}

// True in every thread of the block that gets here last. What all blocks did before happens before what it does then.
CUEP_DEVICE bool is_last_block(const Operation& op) {
    __shared__ uint32_t arrived;
    __syncthreads();
    uint32_t* blocks = &op.control->blocks[static_cast<int>(op.op)];
    if (threadIdx.x == 0) arrived = atom_add_acq_rel_gpu(blocks, 1u);
    __syncthreads();
    return arrived == gridDim.x - 1;
}

// One thread of the last block: the operation is over on this rank.
CUEP_DEVICE void end_operation(const Operation& op) {
    op.control->blocks[static_cast<int>(op.op)] = 0;
    op.control->epoch[static_cast<int>(op.op)] = op.epoch;
}

// One thread: tell the host that an operation did nothing because `rank` refused its part.
CUEP_DEVICE void report_refusal(Report* report, Op op, uint32_t rank, uint32_t handle) {
    report->refused_op = static_cast<uint32_t>(op);
    report->refused_by = rank;
    report->refused_handle = handle;
    st_release_sys(&report->num_refused, report->num_refused + 1);  // pairs with the host's read in Group.check
}

}  // namespace cuep
