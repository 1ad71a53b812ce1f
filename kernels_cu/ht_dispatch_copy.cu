// serves: layout=flat
// High-throughput dispatch, flat, whose rows copy engines fetch: multiprocessors pack the rows for each peer in memory
// of their own rank, part by part. A launch packs a part, and is over when all ranks have packed theirs; behind it each
// host has copies, which take the peers' rows straight to their final place while the next launch packs. Ids, weights
// and origins are few bytes, and stored at the receivers at once. The last launch, behind all copies, ends the
// dispatch. Cost: memory for N - 1 rows a token, and the host must know how many rows come from where.
#include <cuep/base.cuh>
#include <cuep/sync.cuh>
#include <cuep/bulk.cuh>
#include <cuep/operation.cuh>
#include <cuep/row_pipe.cuh>
#include <cuep/ht_receive.cuh>
#include <cuep/ht_copy.cuh>
#include <cuep/ht_walk.cuh>

#ifndef CUEP_JIT  // values for editors; cuep/jit.py gives the real ones
constexpr int kTransport = 2;
constexpr int kNumRanks = 4, kNumExperts = 256, kNumTopk = 8, kRowBytes = 14336, kNumWarps = 6, kNumStages = 2;
constexpr int kNumParts = 4;
constexpr int kSrcBytes = 14336, kTokenBytes = 14336, kQuant = 0, kNumScales = 0, kScaleBytes = 1;
using src_t = cuep::bf16_t;
#endif
// compile: kNumRanks=4 kNumExperts=256 kNumTopk=8 kRowBytes=14336 kSrcBytes=14336 kTokenBytes=14336 kQuant=0 kNumScales=0 kScaleBytes=1 src_t=cuep::bf16_t kNumParts=4 kTransport=2
// compile: kNumRanks=2 kNumExperts=8 kNumTopk=3 kRowBytes=400 kSrcBytes=1536 kTokenBytes=384 kQuant=1 kNumScales=3 kScaleBytes=1 src_t=float kNumParts=4 kTransport=2
// compile: kNumRanks=2 kNumExperts=8 kNumTopk=3 kRowBytes=288 kSrcBytes=272 kTokenBytes=272 kQuant=0 kNumScales=5 kScaleBytes=2 src_t=cuep::bf16_t kNumParts=4 kTransport=2
static_assert(kTransport == cuep::kCopied, "only for variants named copy... the host copies rows: cuep/layout.py");
CUEP_TUNABLE(kNumWarps, 6, 2);
CUEP_TUNABLE(kNumStages, 2, 2);
#include <cuep/ht_flat.cuh>

using namespace cuep;

struct Params {
    uint8_t* arena[kNumRanks];    // symmetric memory of every rank; offsets below are bytes into it
    int64_t tokens_offset;        // [num_buffers, max_rows] rows of kRowBytes
    int64_t topk_idx_offset;      // int32 [num_buffers, max_rows, kNumTopk]: expert of the receiver or -1
    int64_t topk_weights_offset;  // float [num_buffers, max_rows, kNumTopk]
    int64_t source_offset;        // int32 [num_buffers, max_rows, 2]: rank, token
    int64_t packed_offset;   // [kNumRanks - 1, max_tokens] rows for others; those for d at (d - rank - 1) mod kNumRanks
    int64_t ready_offset;    // uint64 [kReadyBanks, kNumRanks]: epoch, buffer that this peer receives into, or kRefused
    int64_t arrived_offset;  // uint64 [kNumParts, kNumRanks]: epoch; a part of this peer's rows is packed
    const uint8_t* x;        // [num_tokens] rows, x_stride bytes apart
    int64_t x_stride;
    const uint8_t* x_scales;  // the caller's scales, [num_tokens, kNumScales] of kScaleBytes, where rows come with them
    int64_t x_scales_row_stride;  // bytes between the scales of two tokens
    int64_t x_scales_stride;      // bytes between two scales of a token
    uint8_t* out;                 // null, or [out_rows] rows, out_stride bytes apart: rows go there instead, and what
    int64_t out_stride;           // belongs to them to the next four
    uint8_t* out_scales;          // null, or [max_rows, kNumScales] of kScaleBytes: those of the rows in out
    int32_t* out_topk_idx;        // [max_rows, kNumTopk]
    float* out_topk_weights;      // [max_rows, kNumTopk]
    int32_t* out_source;          // [max_rows, 2]
    const int32_t* rows;          // [max_tokens, kNumRanks]: row at each rank, or -1
    const int32_t* send_base;     // [kNumRanks]: first row of this rank's tokens at each rank
    const int32_t* recv_base;     // [kNumRanks + 1]: first row here of each source rank; last: rows that are received
    const int32_t* ids;           // [max_tokens, kNumTopk]
    const float* weights;         // [max_tokens, kNumTopk]
    int32_t* high_water;          // [num_buffers]: rows of this rank's buffers that may hold ids
    HandleState* state;
    Control* control;
    Report* report;
    int64_t timeout_ns;
    const uint8_t* num_tokens_at;   // null, or where the device has the number of tokens
    int32_t num_copied[kNumRanks];  // rows that the host copies from each rank; not those of the routing: refused
    int32_t num_tokens;             // rows of x
    int32_t out_rows;               // fewer than are received: refused
    int32_t max_rows;
    int32_t max_tokens;
    int32_t rank;
    int32_t buffer;      // that this rank receives into
    int32_t first_part;  // that this launch packs,
    int32_t end_part;    // and the first that it does not; beyond kNumParts: it is the last launch
    uint32_t handle;
    uint32_t ticket;
    bool is_count_int64;
    bool is_global_ids;  // experts are numbered as in topk_idx, not from the receiver's first
    bool is_refused;     // publish kRefused instead of a buffer; nothing is copied
};

using Pipe = RowPipe<kSrcBytes, kNumStages, kStageRoom>;
static_assert(kNumThreads >= kNumRanks, "one thread waits for each rank");
CUEP_LAUNCH(kNumThreads, kNumWarps* Pipe::kSmemBytes)

CUEP_DEVICE uint8_t* packed_row(const Params& p, int dst, int64_t slot) {
    const int64_t first = int64_t{(dst - p.rank - 1 + kNumRanks) % kNumRanks} * p.max_tokens;
    return p.arena[p.rank] + p.packed_offset + (first + slot) * kRowBytes;
}

// Rows of one part: those for each rank are numbered from 0 (slots), and a part has as many numbers as any other.
struct Part {
    int32_t first_slot, end_slot;
    int32_t send_base;  // of lane r: first row at rank r

    Part() = default;
    CUEP_DEVICE Part(const Params& p, int part) {
        const int32_t num_slots = (p.max_tokens + kNumParts - 1) / kNumParts;
        first_slot = part * num_slots;
        end_slot = first_slot + num_slots;
        send_base = lane_idx() < kNumRanks ? p.send_base[lane_idx()] : 0;
    }

    CUEP_DEVICE bool has(int32_t slot) const { return slot >= first_slot && slot < end_slot; }
};

// One warp's share of the tokens that have rows in a part.
struct PartWalk : TokenWalk {
    const Params* p;
    Part part;
    bool is_beyond;  // of lane r: all further rows for rank r are of later parts

    PartWalk() = default;
    CUEP_DEVICE PartWalk(const Params& params, const Part& of, int warp, int num_tokens)
        : TokenWalk(warp, kNumWarps, num_tokens), p(&params), part(of), is_beyond(lane_idx() >= kNumRanks) {
        if (t < part.first_slot)
            t += (part.first_slot - t + step - 1) / step * step;  // a slot is never above its token
        skip();
    }

    CUEP_DEVICE void skip() {
        for (; !is_over(); TokenWalk::advance()) {
            const int32_t row = row_of_lane<kNumRanks>(*p, t), slot = row - part.send_base;
            is_beyond |= row >= 0 && slot >= part.end_slot;
            if (__any_sync(0xffffffffu, row >= 0 && part.has(slot))) return;
            if (__all_sync(0xffffffffu, is_beyond)) end = t;
        }
    }
    CUEP_DEVICE void advance() {
        TokenWalk::advance();
        skip();
    }
};

// Rows of a part.
struct Packer {
    const Params& p;
    const Part& part;

    // what(dst, row there, slot): of each rank that the token goes to in this part. rows: row_of_lane.
    template <class What>
    CUEP_DEVICE void for_each(int32_t rows, What what) const {
#pragma unroll
        for (int i = 1; i <= kNumRanks; i++) {
            const int dst = (p.rank + i) % kNumRanks;
            const int32_t row = __shfl_sync(0xffffffffu, rows, dst);
            const int32_t slot = row - __shfl_sync(0xffffffffu, part.send_base, dst);
            if (row >= 0 && part.has(slot)) what(dst, row, slot);
        }
    }

    // Those for peers to where they are fetched, its own to its place.
    CUEP_DEVICE void store(const Plan& plan, uint8_t* staged) const {
        finish_row(p, plan.scales, staged);
        for_each(plan.rows, [&](int dst, int32_t row, int32_t slot) {
            const uint32_t buffer = static_cast<uint32_t>(p.buffer);
            uint8_t* own = at_row<uint8_t>(p, p.tokens_offset, p.rank, buffer, row, kRowBytes);
            if (dst == p.rank && p.out != nullptr) {
                store_out(p, row, staged);
            } else {
                bulk_store(dst == p.rank ? own : packed_row(p, dst, slot), staged, kRowBytes);
            }
        });
    }
};

// One warp's share of a part. Peers have fetched what lay there before: they are ready for this dispatch, which they
// are behind the copies of the last one.
CUEP_DEVICE void pack_rows(const Params& p, const uint32_t* buffers, int number, Pipe& pipe) {
    const Part part(p, number);
    const Packer packer{p, part};
    pipe.move(
        PartWalk(p, part, warp_idx(), kept_tokens_of(p)),
        [&](const PartWalk& at) { return p.x + at.t * p.x_stride; },
        [&](const PartWalk& at) { return Plan(p, at.t); },
        [&](const PartWalk&, const Plan& plan, uint8_t* staged) { packer.store(plan, staged); },
        [&](const PartWalk& at, const Plan& plan) {
            packer.for_each(plan.rows, [&](int dst, int64_t row, int32_t) {
                if (dst == p.rank && p.out != nullptr) {
                    store_routing_out(p, at.t, row);
                } else {
                    store_routing(p, at.t, dst, buffer_of(buffers[dst]), row);
                }
            });
        });
    fence_proxy_async();
}

// Parts are packed by all blocks: tell all ranks, and wait for theirs. The last block calls; false: gave up.
CUEP_DEVICE bool exchange_arrived(const Params& p, const Operation& op) {
    const int tid = threadIdx.x;
    bool is_ok = true;
    if (tid < kNumRanks) {
        const int end_part = min(p.end_part, kNumParts);
        fence_acq_rel_sys();
        for (int part = p.first_part; part < end_part; part++) {
            st_release_sys(word_of(p, p.arrived_offset, tid, part * kNumRanks + p.rank), tagged(op, 0));
        }
        for (int part = p.first_part; part < end_part; part++) {
            uint32_t unused = 0;
            const uint64_t* theirs = word_of(p, p.arrived_offset, p.rank, part * kNumRanks + tid);
            is_ok &= wait_flag(op, theirs, Phase::kRows, tid, unused);
        }
    }
    return !block_any(!is_ok);
}

// One thread, behind all copies.
CUEP_DEVICE void end(const Params& p, const Operation& op, int refused_by, Cause own_cause) {
    p.state->refused = 0;
    if (refused_by >= 0) {
        mark_refused(p, Op::kDispatch, refused_by, own_cause, p.recv_base[kNumRanks]);
    } else {
        p.high_water[p.buffer] = p.recv_base[kNumRanks];
    }
    end_kernel(op);
}

extern "C" __global__ void __launch_bounds__(kNumThreads, 1) ht_dispatch_copy(const __grid_constant__ Params p) {
    CUEP_DYNAMIC_SMEM(smem);
    __shared__ uint32_t buffers[kNumRanks];
    const bool is_end = p.end_part > kNumParts;
    if (p.state->unrouted != 0) {  // copies come all the same, and bring anything
        if (is_end) is_skipped(p, Op::kDispatch, true);
        return;
    }
    const Operation op = begin_operation(p, Op::kDispatch);
    Pipe pipe(smem, warp_idx(), kNumWarps);
    if (block_any(is_broken(op))) return;
    const OwnCall<kNumRanks> own(p, p.out != nullptr && p.out_rows < p.recv_base[kNumRanks]);
    if (!exchange_buffers<kNumRanks>(p, op, own.is_refused, 0, buffers)) return;
    fence_proxy_async();  // what was fetched from this memory comes before the bulk copies that write it
    const int refused_by = refusing_rank<kNumRanks>(p, own.is_refused, buffers);
    const int32_t num_rows = p.recv_base[kNumRanks];

    for (int part = p.first_part; refused_by < 0 && part < min(p.end_part, kNumParts); part++) {
        if (part == 0) {
            if (p.out != nullptr) clear_tail(p.out_topk_idx, p.out_topk_weights, num_rows, p.max_rows);
            clear_tail(at_row<int32_t>(p, p.topk_idx_offset, p.rank, p.buffer, 0, kNumTopk),
                       at_row<float>(p, p.topk_weights_offset, p.rank, p.buffer, 0, kNumTopk),
                       num_rows,
                       p.high_water[p.buffer]);
        }
        pack_rows(p, buffers, part, pipe);
    }
    if constexpr (kNumRanks > 1) {
        if (is_end && refused_by < 0 && p.out != nullptr) {
            WalkOfPeers<kNumRanks> walk(p.rank, p.recv_base, warp_idx(), kNumWarps);
            for (; !walk.is_over(); walk.advance()) bring_routing_out(p, walk.row());
        }
    }
    if (!is_last_block(op) || !exchange_arrived(p, op) || threadIdx.x != 0) return;
    if (is_end) {
        end(p, op, refused_by, own.cause);
    } else {  // blocks of the next launch are counted anew
        red_add_relaxed_gpu(&op.control->ops[static_cast<int>(op.op)].blocks, 0u - gridDim.x);
    }
}
