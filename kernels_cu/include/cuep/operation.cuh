// What all operations of a group share: epochs, tagged words, bounded waits, reports to the host, and the end of a
// kernel.
#pragma once
#include <cuep/base.cuh>
#include <cuep/sync.cuh>

namespace cuep {

enum class Op : uint32_t { kRoute = 0, kDispatch = 1, kCombine = 2, kMask = 3 };  // kMask: in reports alone
enum class Phase : uint32_t {
    kReuse = 0,
    kCounts = 1,
    kRows = 2,
    kExcluded = 3,
    kMask = 4,
    kLeft = 5
};  // as in cuep/status.py

constexpr uint32_t kRefused = 0xffffffffu;  // published instead of a count by a rank whose call was refused

// Why a rank refused, for its own host: the host itself did, or the kernel found something that the host cannot see.
enum class Cause : uint32_t {
    kCall = 0,
    kZoneFull = 1,
    kTooFewRows = 2,
    kTokenCount = 3,
    kOverflow = 4,
    kGradsDiffer = 5,
    kBankTaken = 6,
    kWeightsDiffer = 7,
    kMispaired = 8,
    kStaleCounts = 9,
};

// Device memory of one rank, one per group. One block of a kernel writes it, when all have read it.
struct Control {
    struct {
        uint64_t epoch;       // newest that was taken
        uint64_t received;    // ll: epoch, less the sends that are still to be received
        uint64_t read_until;  // ll: what is known of the others: all ranks have read what was sent up to this epoch
        uint32_t num_epochs;  // how many were taken, since the group's first
        uint32_t blocks;      // of the running kernel: through or (ll) past their look at these words
        uint32_t turns;       // ht: of the running kernel: how often warps took what is next (TokenTurns)
        uint32_t unused;
    } ops[3];               // of each Op
    uint32_t broken;        // a wait has timed out: the group is over
    uint32_t active;        // ll with a mask: bit r: rank r takes part
    uint32_t excluded[32];  // likewise, of each rank: its last exclusion of this one that has been made good
    uint32_t agreed[32];    // and its last proposal that this one has agreed to
};

constexpr uint32_t kRefusalsKept = 8;

// Host memory of one rank that the host reads without waiting (cuep/status.py).
struct Report {
    uint32_t timed_out;  // 1 when the next six words are complete
    uint32_t op, phase, peer, expected, seen, epoch;
    uint32_t num_bad_ids;  // topk_idx entries outside [-1, num_experts)
    uint32_t ticket;       // of a launch that is over, and all before it: the host may let go of what they read
    uint32_t num_dropped;  // (token, k) pairs whose expert's rank does not take part
    uint32_t num_refused;  // operations that did nothing because a rank refused; the newest are in `refusals`
    struct {
        uint32_t what;  // Op, Cause << 8, rank << 16
        uint32_t handle;
        uint32_t ticket;  // of the launch that did nothing
        uint32_t detail;  // kOverflow: rows that `rank` would receive; kTooFewRows: that this one has received
    } refusals[kRefusalsKept];
};

// Device memory of one handle.
struct HandleState {
    uint64_t epoch[3];    // of its newest operation of each Op, for the kernel that completes it
    uint32_t refused;     // 1 + the Op that was refused: what is enqueued behind it does nothing
    uint32_t refused_by;  // the rank that refused
    uint32_t unrouted;    // ht: its last routing was refused: nothing works before the next one
    int32_t num_tokens;   // that its routing has
    uint32_t is_unread;   // ll: rows that peers put where the caller reads them may still be read
    uint32_t unused;
};

struct Operation {
    Control* control;
    Report* report;
    uint64_t timeout_ns;
    uint64_t epoch;  // of this operation; flags carry its low 32 bits
    uint32_t ticket;
    Op op;
    bool is_new;                    // this kernel takes the epoch
    uint32_t active = 0xffffffffu;  // bit r: rank r takes part
    uint32_t num_exclusions = 0;    // of this rank by others, when the kernel began
    uint64_t* waits = nullptr;      // of each rank: ns from begin_ns until this kernel's last wait for it was over
    uint64_t begin_ns = 0;
};

// Params is that of any kernel: all have these fields.
template <class Params>
CUEP_DEVICE Operation begin_operation(const Params& p, Op op) {
    const uint64_t epoch = p.control->ops[static_cast<int>(op)].epoch + 1;
    return {p.control, p.report, static_cast<uint64_t>(p.timeout_ns), epoch, p.ticket, op, true};
}

// A kernel that only receives: the operation that the handle's last send began.
template <class Params>
CUEP_DEVICE Operation resume_operation(const Params& p, Op op) {
    const uint64_t epoch = p.state->epoch[static_cast<int>(op)];
    return {p.control, p.report, static_cast<uint64_t>(p.timeout_ns), epoch, p.ticket, op, false};
}

constexpr int kBadTokenCount = -1;

// Tokens of this call: the host's number, or one on the device, which a CUDA graph may change from replay to replay.
template <class Params>
CUEP_DEVICE int tokens_of(const Params& p) {
    if (p.num_tokens_at == nullptr) return p.num_tokens;
    const int64_t count = p.is_count_int64 ? *reinterpret_cast<const int64_t*>(p.num_tokens_at)
                                           : int64_t{*reinterpret_cast<const int32_t*>(p.num_tokens_at)};
    return count < 0 || count > p.num_tokens ? kBadTokenCount : static_cast<int>(count);
}

// The same for a kernel that works on a routing which the handle keeps: of a replayed graph the host's number may be
// that of a larger routing.
template <class Params>
CUEP_DEVICE int kept_tokens_of(const Params& p) {
    return min(tokens_of(p), p.state->num_tokens);
}

// Whether the group is over, for block_any: a wait of an earlier kernel timed out. Its epoch never ended, so a kernel
// that ran now would write over what a late peer has yet to read. One thread looks, since another block may break the
// group at any time. Ask early and use the answer late: the load is relaxed, so it runs beside others.
CUEP_DEVICE bool is_broken(const Operation& op) {
    return threadIdx.x == 0 && ld_relaxed_sys(&op.control->broken) != 0;
}

// The same, asked by every thread for itself: for who reads what only an operation that ended well has left.
CUEP_DEVICE bool is_broken_for_all(const Operation& op) {
    return ld_relaxed_sys(&op.control->broken) != 0;
}

// A word {epoch, value}, written and read in one access: the value cannot be of another epoch.
CUEP_DEVICE uint64_t tagged(const Operation& op, uint32_t value) {
    return op.epoch << 32 | value;
}
CUEP_DEVICE uint32_t epoch_of(uint64_t word) {
    return static_cast<uint32_t>(word >> 32);
}

// The group is over, for this reason unless there was one before.
CUEP_DEVICE_COLD void break_group(const Operation& op, Phase phase, int peer, uint32_t expected, uint32_t seen) {
    if (atom_cas_acq_rel_gpu(&op.control->broken, 0u, 1u) != 0u) return;
    Report* report = op.report;
    report->op = static_cast<uint32_t>(op.op);
    report->phase = static_cast<uint32_t>(phase);
    report->peer = static_cast<uint32_t>(peer);
    report->expected = expected;
    report->seen = seen;
    report->epoch = static_cast<uint32_t>(op.epoch);
    st_release_sys(&report->timed_out, 1u);  // pairs with the host's read in Group.check
}

// Whether to stop waiting: the group is broken, or this wait has lasted longer than the timeout (and is then reported).
CUEP_DEVICE_COLD bool give_up(
    const Operation& op, Phase phase, int peer, uint32_t expected, uint32_t seen, uint64_t& since_ns) {
    if (ld_acquire_gpu(&op.control->broken) != 0) return true;
    const uint64_t now = now_ns();
    if (since_ns == 0) since_ns = now;
    if (now - since_ns < op.timeout_ns) return false;
    break_group(op, phase, peer, expected, seen);
    return true;
}

constexpr uint32_t kSpinsPerClock = 64;  // polls between two looks at the clock

// A wait for a peer is over (GroupConfig.arrival_stats).
CUEP_DEVICE void note_wait(const Operation& op, int peer) {
    red_max_relaxed_gpu(op.waits + peer, now_ns() - op.begin_ns);
}

// Waits until `word` carries this operation's epoch; its value goes to `value`. kIsNoted: by note_wait, if it took any
// time. False: gave up.
template <bool kIsAcquire, bool kIsNoted>
CUEP_DEVICE bool wait_tagged(const Operation& op, const uint64_t* word, Phase phase, int peer, uint32_t& value) {
    uint64_t since_ns = 0;
    for (uint32_t spin = 1;; spin++) {
        const uint64_t seen = kIsAcquire ? ld_acquire_sys(word) : ld_relaxed_sys(word);
        value = static_cast<uint32_t>(seen);
        if (epoch_of(seen) == static_cast<uint32_t>(op.epoch)) {
            if (kIsNoted && spin > 1) note_wait(op, peer);
            return true;
        }
        if (spin % kSpinsPerClock == 0 &&
            give_up(op, phase, peer, static_cast<uint32_t>(op.epoch), epoch_of(seen), since_ns)) {
            return false;
        }
        relax();
    }
}

// A flag: what its writer stored before it may be read afterwards. Pairs with st_release_sys of the peer.
template <bool kIsNoted = false>
CUEP_DEVICE bool wait_flag(const Operation& op, const uint64_t* flag, Phase phase, int peer, uint32_t& value) {
    return wait_tagged<true, kIsNoted>(op, flag, phase, peer, value);
}

// A word that says all there is to know, with no data behind it. Pairs with st_relaxed_sys of the peer.
template <bool kIsNoted = false>
CUEP_DEVICE bool wait_word(const Operation& op, const uint64_t* word, int peer, uint32_t& value) {
    return wait_tagged<false, kIsNoted>(op, word, Phase::kCounts, peer, value);
}

// Whether a done word says that a bank of this epoch may be written.
CUEP_DEVICE bool is_in_window(const Operation& op, uint64_t done, uint32_t num_banks) {
    return epoch_of(done) - (static_cast<uint32_t>(op.epoch) - num_banks) <= num_banks;
}

// Waits until `peer` has read what this rank wrote `num_banks` epochs ago, so that the bank may be written again.
// A window, not "at least". It holds this very epoch too: a block that starts late may find peers that have everything
// from the other blocks of its rank and are through.
CUEP_DEVICE bool wait_bank_free(const Operation& op, const uint64_t* done, uint32_t num_banks, int peer) {
    uint64_t since_ns = 0;
    const uint32_t oldest = static_cast<uint32_t>(op.epoch) - num_banks;
    for (uint32_t spin = 1;; spin++) {
        const uint64_t seen = ld_acquire_sys(done);  // pairs with the store of done words by the peer
        if (is_in_window(op, seen, num_banks)) return true;
        if (spin % kSpinsPerClock == 0 && give_up(op, Phase::kReuse, peer, oldest, epoch_of(seen), since_ns))
            return false;
        relax();
    }
}

// Barrier of the block that tells every thread whether any passed true.
CUEP_DEVICE bool block_any(bool predicate) {
    return __syncthreads_or(predicate) != 0;
}

// True in every thread of the block that counts last. What all blocks did before happens before what it does then.
// Counters are taken back by gridDim, not set to 0: should two kernels count at once, each time that gridDim blocks are
// through one is the last.
CUEP_DEVICE bool is_last(uint32_t* blocks) {
    __shared__ uint32_t arrived;
    __syncthreads();
    if (threadIdx.x == 0) arrived = atom_add_acq_rel_gpu(blocks, 1u);
    __syncthreads();
    return arrived % gridDim.x == gridDim.x - 1;
}

CUEP_DEVICE bool is_last_block(const Operation& op) {
    return is_last(&op.control->ops[static_cast<int>(op.op)].blocks);
}

// One thread, when all blocks have read the epoch; it is taken by the kernel that sends. Should two kernels have worked
// in one epoch, as replays of two graphs in two streams may, both count it, and Group.check sees too many.
CUEP_DEVICE void take_epoch(const Operation& op) {
    auto& control = op.control->ops[static_cast<int>(op.op)];
    red_add_relaxed_gpu(&control.blocks, 0u - gridDim.x);
    if (!op.is_new) return;
    control.epoch = op.epoch;
    red_add_relaxed_gpu(&control.num_epochs, 1u);
}

// One thread of the last block of a kernel.
CUEP_DEVICE void end_kernel(const Operation& op) {
    op.control->ops[static_cast<int>(op.op)].turns = 0;  // (two kernels at once, which Group.check finds, share turns)
    take_epoch(op);
    st_relaxed_sys(&op.report->ticket, op.ticket);
}

// One thread: tell the host that this launch did nothing because `rank` refused its part of an operation.
template <class Params>
CUEP_DEVICE void report_refusal(const Params& p, Op op, Cause cause, uint32_t rank, uint32_t detail = 0) {
    const uint32_t number = p.report->num_refused;
    auto& refusal = p.report->refusals[number % kRefusalsKept];
    refusal.what = static_cast<uint32_t>(op) | static_cast<uint32_t>(cause) << 8 | rank << 16;
    refusal.handle = p.handle;
    refusal.ticket = p.ticket;
    refusal.detail = detail;
    st_release_sys(&p.report->num_refused, number + 1);  // pairs with the host's read in Group.raise_pending
}

// One thread, at the end of an operation that some rank refused: nothing works on this handle before its next one.
template <class Params>
CUEP_DEVICE void mark_refused(const Params& p, Op op, int rank, Cause own_cause, uint32_t detail = 0) {
    const bool is_own = rank == p.rank && !p.is_refused;
    p.state->refused = 1 + static_cast<uint32_t>(op);
    p.state->refused_by = static_cast<uint32_t>(rank);
    report_refusal(p, op, is_own ? own_cause : Cause::kCall, p.state->refused_by, detail);
}

// Whether an earlier operation on this handle was refused. Then this one is none: no epoch, on any rank. Says so again,
// when all blocks have looked: with the ticket the host lets go of what they look at.
template <class Params>
CUEP_DEVICE bool is_skipped(const Params& p, Op kind, bool is_refused) {
    if (!is_refused) return false;
    uint32_t* blocks = &p.control->ops[static_cast<int>(kind)].blocks;
    if (is_last(blocks) && threadIdx.x == 0) {
        red_add_relaxed_gpu(blocks, 0u - gridDim.x);
        const Op op = p.state->refused == 0 ? Op::kRoute : static_cast<Op>(p.state->refused - 1);
        report_refusal(p, op, Cause::kCall, p.state->refused_by);
        st_relaxed_sys(&p.report->ticket, p.ticket);
    }
    return true;
}

}  // namespace cuep
