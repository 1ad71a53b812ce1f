// serves: layout=flat
// High-throughput combine that pulls: expert output lies in symmetric memory (Handle.combine_buffer), and the owner of
// a token reads its rows where they are and adds them up, fp32, in order of rank, rounded once. Each row is read once
// and stored nowhere but in y, so few multiprocessors do: half of what pushing takes. Rows from elsewhere are copied
// into such memory first, which is not hidden behind anything. Cost: combine buffers of as many rows as a rank may
// receive, in place of the staging of pushed rows.
#include <cuep/base.cuh>
#include <cuep/sync.cuh>
#include <cuep/convert.cuh>
#include <cuep/operation.cuh>
#include <cuep/ht_home.cuh>

#ifndef CUEP_JIT  // values for editors; cuep/jit.py gives the real ones
constexpr int kNumRanks = 4, kNumExperts = 256, kNumTopk = 8, kRowBytes = 14336, kNumWarps = 32;
constexpr int kTransport = 1;
using elem_t = cuep::bf16_t;
#endif
// compile: kNumRanks=4 kNumExperts=256 kNumTopk=8 kRowBytes=14336 elem_t=cuep::bf16_t kTransport=1
// compile: kNumRanks=2 kNumExperts=8 kNumTopk=3 kRowBytes=528 elem_t=float kTransport=1
CUEP_TUNABLE(kNumWarps, 32, 2);
static_assert(kTransport == cuep::kPulled, "only variants named pull... have combine buffers: cuep/layout.py");

using namespace cuep;

struct Params {
    uint8_t* arena[kNumRanks];  // symmetric memory of every rank; offsets below are bytes into it
    int64_t rows_offset;        // [num_buffers, max_rows] rows: combine buffers
    int64_t grads_offset;       // float [max_rows, kNumTopk]: gradients of weights beside rows
    int64_t totals_offset;      // uint64 [kNumRanks]: epoch, combine buffer of this peer | kHasGrads, or kRefused
    int64_t done_offset;        // uint64 [kNumRanks]: epoch whose rows this peer has pulled, 1 if it gave up then
    const uint8_t* expert_out;  // rows in the order of dispatch, expert_out_stride bytes apart
    int64_t expert_out_stride;
    const float* row_weight_grads;  // null, or [num_rows, kNumTopk]: they come home with the rows
    float* weight_grads;            // [num_tokens, kNumTopk]: where they go
    const uint8_t* bias[2];         // null, or [num_tokens] rows that are added to the sums, bias_stride bytes apart
    int64_t bias_stride[2];
    const int32_t* ids;        // [max_tokens, kNumTopk]
    const int32_t* rows;       // [max_tokens, kNumRanks]: row at each rank, or -1
    const int32_t* recv_base;  // [kNumRanks + 1]: first row here of each source rank
    uint8_t* y;                // [num_tokens] rows, y_stride bytes apart
    int64_t y_stride;
    HandleState* state;
    Control* control;
    Report* report;
    int64_t timeout_ns;
    const uint8_t* num_tokens_at;  // null, or where the device has the number of tokens
    int32_t num_tokens;
    int32_t num_rows;  // of expert_out; fewer than were received: refused
    int32_t max_rows;
    int32_t buffer;  // combine buffer that peers pull from
    int32_t rank;
    uint32_t handle;
    uint32_t ticket;
    bool is_count_int64;
    bool is_copied;   // expert_out lies elsewhere and is copied into that buffer; else it is that buffer
    bool is_refused;  // publish kRefused instead
};

constexpr int kNumThreads = kNumWarps * 32;
static_assert(kNumThreads >= kNumRanks, "one thread for each rank");
using Rows = Home<kNumRanks, kNumExperts / kNumRanks, kNumTopk, kRowBytes, elem_t, false>;
CUEP_LAUNCH(kNumThreads, 0)

CUEP_DEVICE uint8_t* pulled_row(const Params& p, int rank, int buffer, int64_t row) {
    return p.arena[rank] + p.rows_offset + (int64_t{buffer} * p.max_rows + row) * kRowBytes;
}

CUEP_DEVICE float* pulled_grads(const Params& p, int rank, int64_t row) {
    return reinterpret_cast<float*>(p.arena[rank] + p.grads_offset) + row * kNumTopk;
}

CUEP_DEVICE void copy_row(const uint8_t* from, uint8_t* to) {
    constexpr int kVecs = kRowBytes / 16, kAtOnce = 8;
    for (int first = lane_idx(); first < kVecs; first += 32 * kAtOnce) {
        uint4 v[kAtOnce];
#pragma unroll
        for (int j = 0; j < kAtOnce; j++) {
            if (first + 32 * j < kVecs) v[j] = load_16(reinterpret_cast<const uint4*>(from) + first + 32 * j);
        }
#pragma unroll
        for (int j = 0; j < kAtOnce; j++) {
            if (first + 32 * j < kVecs) store_16(reinterpret_cast<uint4*>(to) + first + 32 * j, v[j]);
        }
    }
}

// What peers pull, to where they can. A rank's own rows are read where they are.
CUEP_DEVICE void copy_in(const Params& p) {
    const int32_t own_begin = p.recv_base[p.rank], num_own = p.recv_base[p.rank + 1] - own_begin;
    const int32_t end = p.recv_base[kNumRanks] - num_own;
    for (int32_t i = warp_idx() * gridDim.x + blockIdx.x; i < end; i += gridDim.x * kNumWarps) {
        const int64_t row = i < own_begin ? i : i + num_own;
        if (p.is_copied) copy_row(p.expert_out + row * p.expert_out_stride, pulled_row(p, p.rank, p.buffer, row));
        if (p.row_weight_grads != nullptr && lane_idx() < kNumTopk) {
            pulled_grads(p, p.rank, row)[lane_idx()] = p.row_weight_grads[row * kNumTopk + lane_idx()];
        }
    }
}

// Tells all ranks which buffer holds this rank's rows, when they are there. Nobody waits in here.
CUEP_DEVICE void publish(const Params& p, const Operation& op, bool is_refused) {
    bool is_teller = blockIdx.x == 0;
    if (p.is_copied || p.row_weight_grads != nullptr) {
        if (!is_refused) copy_in(p);
        is_teller = is_last_block(op);
        if (is_teller && threadIdx.x == 0) {  // blocks are counted once more, at the end
            red_add_relaxed_gpu(&op.control->ops[static_cast<int>(op.op)].blocks, 0u - gridDim.x);
        }
    }
    if (is_teller && threadIdx.x < kNumRanks) {  // pairs with the wait in hear
        const uint32_t value = static_cast<uint32_t>(p.buffer) | (p.row_weight_grads != nullptr ? kHasGrads : 0);
        st_release_sys(Rows::total_of(p, threadIdx.x, p.rank), tagged(op, is_refused ? kRefused : value));
    }
}

// totals[r]: what rank r published, whose rows may be read from then on. False: gave up. All threads call.
CUEP_DEVICE bool hear(const Params& p, const Operation& op, uint32_t* totals) {
    const int tid = threadIdx.x;
    bool is_ok = true;
    if (tid < kNumRanks) is_ok = wait_flag(op, Rows::total_of(p, p.rank, tid), Phase::kCounts, tid, totals[tid]);
    return !block_any(!is_ok);
}

// y[t] and weight_grads[t]. lane_total: of lane r, what rank r published. The whole warp calls.
CUEP_DEVICE void pull_token(const Params& p, int t, uint32_t lane_total) {
    const int32_t lane_row = row_of_lane<kNumRanks>(p, t);
    const uint4* terms[kNumRanks];  // null: this rank has none of the token's experts
#pragma unroll
    for (int r = 0; r < kNumRanks; r++) {
        const int64_t row = __shfl_sync(0xffffffffu, lane_row, r);
        const int buffer = static_cast<int>(__shfl_sync(0xffffffffu, lane_total, r) & ~kHasGrads);
        const uint8_t* term = r == p.rank ? p.expert_out + row * p.expert_out_stride : pulled_row(p, r, buffer, row);
        terms[r] = row < 0 ? nullptr : reinterpret_cast<const uint4*>(term);
    }
    Rows::store_sums<Rows::kVecsOfManyWarps>(p, t, terms);
    Rows::store_grads(p, t, lane_row, [&](int owner, int64_t row) {
        if (row < 0) return 0.0f;
        const float* grads = owner == p.rank ? p.row_weight_grads + row * kNumTopk : pulled_grads(p, owner, row);
        return grads[lane_idx()];
    });
}

extern "C" __global__ void __launch_bounds__(kNumThreads, 1) ht_combine_pull(const __grid_constant__ Params p) {
    if (is_skipped(p, Op::kCombine, (p.state->refused | p.state->unrouted) != 0)) return;
    __shared__ uint32_t totals[kNumRanks];
    const int tid = threadIdx.x;
    const int32_t num_needed = p.recv_base[kNumRanks];
    const bool is_refused = p.is_refused || num_needed > p.num_rows;  // by this rank
    const Operation op = begin_operation(p, Op::kCombine);
    if (block_any(is_broken(op))) return;
    publish(p, op, is_refused);
    if (!hear(p, op, totals)) return;
    const uint32_t lane_total = lane_idx() < kNumRanks ? totals[lane_idx()] : 0;
    const Rows::Verdict verdict = Rows::judge(p, is_refused, lane_total);
    const int num_tokens = verdict.refused_by < 0 ? kept_tokens_of(p) : 0;
    for (TokenWalk share(warp_idx(), kNumWarps, num_tokens); !share.is_over(); share.advance()) {
        pull_token(p, share.t, lane_total);
    }

    // This rank has pulled. When all have, what comes behind this kernel may write the buffer.
    if (!is_last_block(op)) return;
    const bool has_peer = tid < kNumRanks && tid != p.rank;
    bool is_ok = true;
    if (has_peer) {
        uint32_t has_left = 0;
        st_release_sys(Rows::done_of(p, tid, p.rank), tagged(op, 0));  // pairs with the wait of the peer
        is_ok = wait_flag(op, Rows::done_of(p, p.rank, tid), Phase::kReuse, tid, has_left);
        if (is_ok && has_left != 0) {
            break_group(op, Phase::kLeft, tid, 0, 0);
            is_ok = false;
        }
    }
    if (block_any(!is_ok)) {  // who still pulls from here must know that it may have pulled anything
        if (has_peer) st_release_sys(Rows::done_of(p, tid, p.rank), tagged(op, 1));
        return;
    }
    if (tid == 0) {
        if (verdict.refused_by >= 0) {
            mark_refused(p, Op::kCombine, verdict.refused_by, verdict.own_cause, num_needed);
        }
        end_kernel(op);
    }
}
