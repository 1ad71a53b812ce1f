// serves: layout=flat
// High-throughput combine whose rows copy engines bring home: rows for one owner lie together, so the host enqueues a
// few copies straight from the experts' array into the owner's staging, and no multiprocessor moves a byte between
// GPUs. This kernel opens (one block: staging is free, the peers may hear) before the copies, and then, beside them,
// adds up this rank's own tokens as their rows arrive: fp32, in order of rank, rounded once. A flag is a copy, too, of
// the stamp that opening has left, behind the rows it is for. Cost: the host must know how many rows go where.
#include <cuep/base.cuh>
#include <cuep/sync.cuh>
#include <cuep/convert.cuh>
#include <cuep/operation.cuh>
#include <cuep/ht_home.cuh>
#include <cuep/ht_copy.cuh>

#ifndef CUEP_JIT  // values for editors; cuep/jit.py gives the real ones
constexpr int kTransport = 2;
constexpr int kNumRanks = 4, kNumExperts = 256, kNumTopk = 8, kRowBytes = 14336, kNumParts = 4, kNumWarps = 32;
using elem_t = cuep::bf16_t;
#endif
// compile: kNumRanks=4 kNumExperts=256 kNumTopk=8 kRowBytes=14336 elem_t=cuep::bf16_t kTransport=2 kNumParts=4
// compile: kNumRanks=2 kNumExperts=8 kNumTopk=3 kRowBytes=528 elem_t=float kTransport=2 kNumParts=4
CUEP_TUNABLE(kNumWarps, 32, 2);
static_assert(kTransport == cuep::kCopied, "only for variants named copy... the host copies rows: cuep/layout.py");

using namespace cuep;

struct Params {
    uint8_t* arena[kNumRanks];  // symmetric memory of every rank; offsets below are bytes into it
    int64_t rows_offset;        // [kNumRanks - 1, max_tokens] rows; source s is at (s - rank - 1) mod kNumRanks
    int64_t grads_offset;       // float [kNumRanks - 1, max_tokens, kNumTopk], likewise
    int64_t flags_offset;       // uint64 [kNumRanks, kNumParts]: epoch; a part of this peer's rows is here
    int64_t totals_offset;      // uint64 [kNumRanks]: epoch, rows that this peer sends | kHasGrads, or kRefused
    int64_t done_offset;        // uint64 [kNumRanks]: epoch that this peer has read
    int64_t left_offset;        // uint64 [kNumRanks]: value 1: this peer's copies wait for nobody any more
    int64_t stamp_offset;       // uint64 [1]: epoch, of this rank; copied to flags
    const uint8_t* expert_out;  // rows in the order of dispatch, expert_out_stride bytes apart
    int64_t expert_out_stride;
    const float* row_weight_grads;  // null, or [num_rows, kNumTopk]: they come home with the rows
    float* weight_grads;            // [num_tokens, kNumTopk]: where they go
    const uint8_t* bias[2];         // null, or [num_tokens] rows that are added to the sums, bias_stride bytes apart
    int64_t bias_stride[2];
    const int32_t* ids;        // [max_tokens, kNumTopk]
    const int32_t* rows;       // [max_tokens, kNumRanks]: row at each rank, or -1
    const int32_t* send_base;  // [kNumRanks]: first row of this rank's tokens at each rank
    const int32_t* recv_base;  // [kNumRanks + 1]: first row here of each source rank
    uint8_t* y;                // [num_tokens] rows, y_stride bytes apart
    int64_t y_stride;
    HandleState* state;
    Control* control;
    Report* report;
    int64_t timeout_ns;
    const uint8_t* num_tokens_at;   // null, or where the device has the number of tokens
    int32_t num_copied[kNumRanks];  // rows that the host copies to each rank; not those of the routing: refused
    int32_t num_tokens;
    int32_t num_rows;  // of expert_out; fewer than were received: refused
    int32_t max_tokens;
    int32_t rank;
    uint32_t handle;
    uint32_t ticket;
    bool is_count_int64;
    bool is_send;     // open
    bool is_receive;  // add up
    bool is_refused;  // publish kRefused; nothing is copied
};

constexpr int kNumThreads = kNumWarps * 32;
static_assert(kNumThreads >= kNumRanks, "one thread for each rank");
using Rows = Home<kNumRanks, kNumExperts / kNumRanks, kNumTopk, kRowBytes, elem_t, false>;
CUEP_LAUNCH(kNumThreads, 0)

CUEP_DEVICE bool is_peer(const Params& p) {
    return threadIdx.x < kNumRanks && static_cast<int>(threadIdx.x) != p.rank;
}

CUEP_DEVICE OwnCall<kNumRanks> own_call(const Params& p) {
    return {p, p.recv_base[kNumRanks] > p.num_rows};
}

// Before the copies, which follow whatever becomes of this. One block.
CUEP_DEVICE void open(const Params& p, bool is_skipped) {
    const int tid = threadIdx.x;
    const Operation op = begin_operation(p, Op::kCombine);
    const bool is_off = is_broken(op);
    bool is_ok = true;
    if (is_peer(p)) is_ok = wait_bank_free(op, Rows::done_of(p, p.rank, tid), 1, tid);
    if (block_any(!is_ok || is_off)) {  // rows that a late peer still reads are about to be overwritten: it must know
        if (is_peer(p) && !p.is_refused) st_release_sys(word_of(p, p.left_offset, tid, p.rank), tagged(op, 1));
        return;
    }
    if (is_skipped) return;
    const bool is_refused = own_call(p).is_refused;
    if (tid < kNumRanks) {  // pairs with the wait for totals in receive
        const uint32_t num_rows = static_cast<uint32_t>(p.recv_base[tid + 1] - p.recv_base[tid]);
        const uint32_t value = num_rows | (p.row_weight_grads != nullptr ? kHasGrads : 0);
        st_relaxed_sys(Rows::total_of(p, tid, p.rank), tagged(op, is_refused ? kRefused : value));
    }
    if (tid == 0) *word_of(p, p.stamp_offset, p.rank, 0) = tagged(op, 0);  // for copies behind this kernel
}

// Of a warp: how many parts of each rank's rows have been waited for; lane r has rank r's.
struct Arrived {
    int32_t rows_per_part;
    int32_t num_parts = 0;

    // lane_total: of lane r, what rank r published.
    CUEP_DEVICE explicit Arrived(uint32_t lane_total)
        : rows_per_part(max(1, (static_cast<int32_t>(lane_total & ~kHasGrads) + kNumParts - 1) / kNumParts)) {}

    // Waits for the row in this slot of lane r's rank r, if slot >= 0. The whole warp calls; false: gave up.
    CUEP_DEVICE bool wait(const Params& p, const Operation& op, int32_t slot) {
        const int lane = lane_idx();
        const int32_t part = slot / rows_per_part;
        bool is_ok = true;
        if (slot >= 0 && part >= num_parts) {  // parts come in order
            uint32_t unused = 0;
            const uint64_t* flag = word_of(p, p.flags_offset, p.rank, lane * kNumParts + part);
            is_ok = wait_flag(op, flag, Phase::kRows, lane, unused);
            num_parts = part + 1;
        }
        if (!__all_sync(0xffffffffu, is_ok)) return false;
        __syncwarp();  // a vote orders no memory: now every lane may read what one lane has waited for
        return true;
    }
};

// This block's share of y and weight_grads. False: gave up.
CUEP_DEVICE bool sum_tokens(const Params& p, const Operation& op, uint32_t lane_total, int num_tokens) {
    const int lane = lane_idx();
    const int32_t send_base = lane < kNumRanks ? p.send_base[lane] : 0;
    Arrived arrived(lane_total);
    for (TokenWalk share(warp_idx(), kNumWarps, num_tokens); !share.is_over(); share.advance()) {
        const int32_t lane_row = row_of_lane<kNumRanks>(p, share.t);
        const int32_t slot = lane_row - send_base;
        if (!arrived.wait(p, op, lane_row < 0 || lane == p.rank ? -1 : slot)) return false;
        Rows::add_up<Rows::kVecsOfManyWarps>(
            p,
            share.t,
            lane_row,
            slot,
            [&](int64_t row) { return p.expert_out + row * p.expert_out_stride; },
            [&](int64_t row, int k) { return p.row_weight_grads[row * kNumTopk + k]; });
    }
    return true;
}

// All blocks, beside the copies.
CUEP_DEVICE void receive(const Params& p) {
    const int tid = threadIdx.x, lane = lane_idx();
    const OwnCall<kNumRanks> own = own_call(p);
    const Operation op = begin_operation(p, Op::kCombine);
    if (block_any(is_broken(op))) return;

    uint32_t lane_total = 0;
    bool is_ok = true;
    if (lane < kNumRanks) is_ok = wait_word(op, Rows::total_of(p, p.rank, lane), lane, lane_total);
    is_ok = __all_sync(0xffffffffu, is_ok);
    const Rows::Verdict verdict = Rows::judge(p, own.is_refused, lane_total);
    const int num_tokens = verdict.refused_by < 0 ? kept_tokens_of(p) : 0;
    if (block_any(!(is_ok && sum_tokens(p, op, lane_total, num_tokens)))) return;

    // all blocks have read: were the rows what they should be?
    if (!is_last_block(op)) return;
    const bool has_left =
        is_peer(p) && static_cast<uint32_t>(ld_acquire_sys(word_of(p, p.left_offset, p.rank, tid))) != 0;
    if (has_left) break_group(op, Phase::kLeft, tid, 0, 0);
    if (block_any(has_left)) return;
    if (is_peer(p)) st_release_sys(Rows::done_of(p, tid, p.rank), tagged(op, 0));  // pairs with open
    if (tid == 0) {
        if (verdict.refused_by >= 0) {
            const Cause cause = own.is_refused ? own.cause : verdict.own_cause;
            mark_refused(p, Op::kCombine, verdict.refused_by, cause, p.recv_base[kNumRanks]);
        }
        end_kernel(op);
    }
}

extern "C" __global__ void __launch_bounds__(kNumThreads, 1) ht_combine_copy(const __grid_constant__ Params p) {
    const bool has_nothing = (p.state->refused | p.state->unrouted) != 0;
    if (p.is_send && blockIdx.x == 0) open(p, has_nothing);
    if (p.is_receive && !is_skipped(p, Op::kCombine, has_nothing)) receive(p);
}
