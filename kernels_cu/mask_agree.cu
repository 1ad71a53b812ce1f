// The ranks of a new mask agree: all are through with what they did before, nobody else may store any more, and epochs
// go on from a number that nobody has used. Each says what it proposes and answers what it has read of the others'
// proposals, by nonces, since an earlier call may have left some that look the same. One block, a thread for each rank.
#include <cuep/base.cuh>
#include <cuep/sync.cuh>
#include <cuep/operation.cuh>

#ifndef CUEP_JIT  // values for editors; cuep/jit.py gives the real ones
constexpr int kNumRanks = 4;
#endif
// compile: kNumRanks=4
constexpr bool kHasMask = true;
constexpr int kNumThreads = 32;  // one warp
#include <cuep/mask.cuh>

using namespace cuep;

struct Params {
    uint8_t* arena[kNumRanks];  // symmetric memory of every rank
    int64_t mask_offset;        // MaskWords [kNumRanks], then the number of exclusions
    Control* control;
    Report* report;
    int64_t timeout_ns;
    uint64_t start_epoch;  // the group's first
    int32_t rank;
    uint32_t active;  // bit r: rank r is to take part; this one is
    uint32_t nonce;   // of this call, not 0
    uint32_t ticket;
};

CUEP_LAUNCH(kNumThreads, 0)

// Further than any rank can be ahead of another: it sends num_buffers (at most 8) operations beyond what all have
// received.
constexpr uint64_t kGap = 64;
constexpr Op kOps[2] = {Op::kDispatch, Op::kCombine};

// Leaves dst out. It must see that before it sees a proposal of this rank that takes it in again: those come later. An
// earlier one that it has yet to hear is withdrawn first: it must not take this exclusion for one from before that.
CUEP_DEVICE void exclude(const Params& p, int dst) {
    st_relaxed_sys(&mask_words(p, dst, p.rank)->proposal, uint64_t{0});
    fence_acq_rel_sys();
    st_release_sys(&mask_words(p, dst, p.rank)->exclusion, uint64_t{p.nonce});
    red_add_release_sys(num_exclusions(p, dst), 1u);  // pairs with load_mask
}

CUEP_DEVICE void propose(const Params& p, int dst) {
    MaskWords* words = mask_words(p, dst, p.rank);
    st_relaxed_sys(&words->proposal, uint64_t{0});
    fence_acq_rel_sys();
    for (int i = 0; i < 2; i++) st_relaxed_sys(&words->epochs[i], p.control->ops[static_cast<int>(kOps[i])].epoch);
    st_release_sys(&words->proposal, uint64_t{p.active} << 32 | p.nonce);  // pairs with hear
}

// What this rank knows of another, src.
struct Heard {
    uint64_t epochs[2];
    uint32_t nonce;  // of its proposal, 0: nothing
    uint32_t exclusion;
};

// Whether src has answered this rank's proposal, while it stood by the one that was heard.
CUEP_DEVICE bool is_answered(const Params& p, int src, const Heard& heard) {
    const uint64_t answer = ld_acquire_sys(&mask_words(p, p.rank, src)->answer);  // pairs with hear
    return heard.nonce != 0 && answer == (uint64_t{p.nonce} << 32 | heard.nonce);
}

// Reads and answers src's proposal, if it is of this mask and was neither agreed to before nor heard. is_agreed: src
// and this rank have answered one another. What comes behind that is of src's next call, and is left to this rank's
// next; unless src gave up and calls again: then it answers this rank's proposal anew, which it does not do where it is
// through, and all that it says may have changed.
CUEP_DEVICE void hear(const Params& p, int src, Heard& heard, uint32_t& newest, bool& is_agreed) {
    const MaskWords* words = mask_words(p, p.rank, src);
    const uint64_t proposal = ld_acquire_sys(&words->proposal);
    const uint32_t nonce = static_cast<uint32_t>(proposal);
    if (proposal >> 32 != p.active || nonce == newest || nonce == p.control->agreed[src]) return;
    is_agreed |= is_answered(p, src, heard);  // src may have gone on since
    if (is_agreed && ld_acquire_sys(&words->answer) != (uint64_t{p.nonce} << 32 | nonce)) return;
    Heard now;
    for (int i = 0; i < 2; i++) now.epochs[i] = ld_acquire_sys(&words->epochs[i]);
    now.exclusion = static_cast<uint32_t>(ld_acquire_sys(&words->exclusion));  // all before this proposal are there
    now.nonce = nonce;
    if (ld_acquire_sys(&words->proposal) != proposal) return;  // it was changing, or was withdrawn
    heard = now;
    newest = nonce;
    st_release_sys(&mask_words(p, src, p.rank)->answer, uint64_t{nonce} << 32 | p.nonce);
}

// Until src and this rank have answered one another, for every src that a lane has. Lanes that are through go on
// hearing, so that a peer that has to call again is answered. False: gave up. The whole warp calls; is_peer: the lane
// has one.
CUEP_DEVICE bool agree(const Params& p, const Operation& op, int src, bool is_peer, Heard& heard) {
    uint64_t since_ns = 0;
    uint32_t newest = 0;
    bool is_agreed = !is_peer;
    for (uint32_t spin = 1;; spin++) {
        bool is_late = false;
        if (is_peer) {
            hear(p, src, heard, newest, is_agreed);
            is_agreed |= is_answered(p, src, heard);
            is_late = !is_agreed && spin % kSpinsPerClock == 0 &&
                      give_up(op, Phase::kMask, src, p.nonce, heard.nonce, since_ns);
        }
        if (__ballot_sync(0xffffffffu, is_late) != 0) return false;
        if (__ballot_sync(0xffffffffu, !is_agreed) == 0) return true;
        relax();
    }
}

extern "C" __global__ void __launch_bounds__(kNumThreads) mask_agree(const __grid_constant__ Params p) {
    __shared__ uint64_t epochs[2][kNumRanks];
    const int tid = threadIdx.x;
    const Operation op{p.control, p.report, static_cast<uint64_t>(p.timeout_ns), 0, p.ticket, Op::kMask, false};

    // kernels of this rank are over: the group is to work again
    if (tid == 0) p.control->broken = 0;
    __syncthreads();

    // tell those who are out, then those who are in
    const bool is_rank = tid < kNumRanks, is_in = is_rank && (p.active >> tid & 1u) != 0,
               is_peer = is_in && tid != p.rank;
    if (is_rank && !is_in) exclude(p, tid);
    if (is_peer) propose(p, tid);

    Heard heard{{0, 0}, 0, 0};
    const bool is_ok = agree(p, op, tid, is_peer, heard);
    if (is_rank) {
        for (int i = 0; i < 2; i++) {
            const uint64_t own = p.control->ops[static_cast<int>(kOps[i])].epoch;
            epochs[i][tid] = is_peer ? heard.epochs[i] : own;
        }
    }
    if (block_any(!is_ok)) return;

    // the same on all ranks
    if (is_rank) {
        const uint64_t newest = ld_relaxed_sys(&mask_words(p, p.rank, tid)->exclusion);
        p.control->excluded[tid] = is_peer ? heard.exclusion : static_cast<uint32_t>(newest);
        if (is_peer) p.control->agreed[tid] = heard.nonce;
    }
    if (tid < 2) {
        uint64_t epoch = 0;
        for (int r = 0; r < kNumRanks; r++) epoch = max(epoch, epochs[tid][r]);
        epoch += kGap;
        auto& control = p.control->ops[static_cast<int>(kOps[tid])];
        control.epoch = control.received = control.read_until = epoch;
        control.num_epochs = static_cast<uint32_t>(epoch - p.start_epoch);
        control.blocks = 0;
    }
    if (tid == 0) {
        p.control->active = p.active;
        st_relaxed_sys(&p.report->ticket, p.ticket);
    }
}
