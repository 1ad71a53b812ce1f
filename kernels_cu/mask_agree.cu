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
constexpr int kNumThreads = 32;
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

// Leaves dst out. It must see that before it sees a proposal of this rank that takes it in again: those come later.
CUEP_DEVICE void exclude(const Params& p, int dst) {
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

// What this rank knows of another.
struct Heard {
    uint64_t epochs[2];
    uint32_t nonce;  // 0: nothing
    uint32_t exclusion;
};

// Reads src's proposal, if it is of this mask and another than the last; answers it.
CUEP_DEVICE void hear(const Params& p, int src, Heard& heard) {
    const MaskWords* words = mask_words(p, p.rank, src);
    const uint64_t proposal = ld_acquire_sys(&words->proposal);
    const uint32_t nonce = static_cast<uint32_t>(proposal);
    if (proposal >> 32 != p.active || nonce == heard.nonce) return;
    Heard now;
    for (int i = 0; i < 2; i++) now.epochs[i] = ld_acquire_sys(&words->epochs[i]);
    // exclusions by src before this proposal are over; there is none behind it before src has this rank's answer
    now.exclusion = static_cast<uint32_t>(ld_acquire_sys(&words->exclusion));
    now.nonce = nonce;
    if (ld_acquire_sys(&words->proposal) != proposal) return;  // it was changing
    heard = now;
    st_release_sys(&mask_words(p, src, p.rank)->answer, uint64_t{nonce} << 32 | p.nonce);
}

// Until src has answered this rank's proposal, and this rank that of src. False: gave up.
CUEP_DEVICE bool agree(const Params& p, const Operation& op, int src, Heard& heard) {
    uint64_t since_ns = 0;
    for (uint32_t spin = 1;; spin++) {
        hear(p, src, heard);
        const uint64_t answer = ld_acquire_sys(&mask_words(p, p.rank, src)->answer);
        if (heard.nonce != 0 && answer == (uint64_t{p.nonce} << 32 | heard.nonce)) return true;
        const bool is_late =
            spin % kSpinsPerClock == 0 && give_up(op, Phase::kMask, src, p.nonce, heard.nonce, since_ns);
        if (is_late) return false;
        relax();
    }
}

extern "C" __global__ void __launch_bounds__(kNumThreads) mask_agree(const __grid_constant__ Params p) {
    __shared__ uint64_t epochs[2][kNumRanks];
    const int tid = threadIdx.x;
    const Operation op{p.control, p.report, static_cast<uint64_t>(p.timeout_ns), 0, p.ticket, Op::kMask, false};

    // kernels of this rank are over: the group is to work again
    if (tid == 0) {
        p.control->broken = 0;
        p.control->sent = 0;
    }
    __syncthreads();

    // tell those who are out, then those who are in
    const bool is_rank = tid < kNumRanks, is_in = is_rank && (p.active >> tid & 1u) != 0,
               is_peer = is_in && tid != p.rank;
    if (is_rank && !is_in) exclude(p, tid);
    if (is_peer) propose(p, tid);

    Heard heard{{0, 0}, 0, 0};
    const bool is_ok = !is_peer || agree(p, op, tid, heard);
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
