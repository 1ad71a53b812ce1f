// serves: layout=expert_major
// High-throughput dispatch, expert_major. One row per (token, rank) crosses the link: send warps store it with the
// bulk-copy engine straight into the slot of its smallest k, with a header (slots and weights of the token's experts
// there) beside it, and a flag behind both; own rows go to all their slots at once. As flags arrive, receive warps
// bring each row into shared memory and store it to its other slots, so that copying overlaps with the links, and keep
// the header in the handle, for combine. A rank first tells its peers which of its receive buffers to fill: by then its
// stream is past all readers of that buffer and of the headers.
#include <cuep/base.cuh>
#include <cuep/sync.cuh>
#include <cuep/bulk.cuh>
#include <cuep/operation.cuh>
#include <cuep/row_pipe.cuh>
#include <cuep/ht_receive.cuh>
#include <cuep/ht_walk.cuh>

#ifndef CUEP_JIT  // values for editors; cuep/jit.py gives the real ones
constexpr int kTransport = 0;
constexpr int kNumRanks = 4, kNumExperts = 256, kNumTopk = 8, kRowBytes = 14336;
constexpr int kNumWarps = 6, kNumStages = 2;
constexpr int kSrcBytes = 14336, kTokenBytes = 14336, kQuant = 0, kNumScales = 0, kScaleBytes = 1;
using src_t = cuep::bf16_t;
#endif
// compile: kNumRanks=4 kNumExperts=256 kNumTopk=8 kRowBytes=14336 kSrcBytes=14336 kTokenBytes=14336 kQuant=0 kNumScales=0 kScaleBytes=1 src_t=cuep::bf16_t kTransport=0
// compile: kNumRanks=2 kNumExperts=8 kNumTopk=3 kRowBytes=528 kSrcBytes=528 kTokenBytes=528 kQuant=0 kNumScales=0 kScaleBytes=1 src_t=cuep::bf16_t kTransport=0
// compile: kNumRanks=4 kNumExperts=256 kNumTopk=8 kRowBytes=7392 kSrcBytes=14336 kTokenBytes=7168 kQuant=4 kNumScales=56 kScaleBytes=4 src_t=cuep::bf16_t kTransport=0
// compile: kNumRanks=2 kNumExperts=8 kNumTopk=3 kRowBytes=400 kSrcBytes=1536 kTokenBytes=384 kQuant=1 kNumScales=3 kScaleBytes=1 src_t=float kTransport=0
// compile: kNumRanks=2 kNumExperts=8 kNumTopk=3 kRowBytes=288 kSrcBytes=272 kTokenBytes=272 kQuant=0 kNumScales=5 kScaleBytes=2 src_t=cuep::bf16_t kTransport=0
static_assert(kTransport == cuep::kPushed, "variants named copy... have other memory: cuep/layout.py");
CUEP_TUNABLE(kNumWarps, 6, 2);
CUEP_TUNABLE(kNumStages, 2, 2);
#include <cuep/ht_source.cuh>

using namespace cuep;

struct Params {
    uint8_t* arena[kNumRanks];  // symmetric memory of every rank; offsets below are bytes into it
    int64_t tokens_offset;      // [num_buffers, max_rows] rows of kRowBytes
    int64_t headers_offset;     // int2 [messages, kNumTopk]: slot or -1, bits of the weight
    int64_t flags_offset;       // uint64 [messages]: epoch, token
    int64_t ready_offset;  // uint64 [kReadyBanks, kNumRanks]: epoch, buffer that this peer receives into, or kRefused
    const uint8_t* x;      // [num_tokens] rows, x_stride bytes apart
    int64_t x_stride;
    const uint8_t* x_scales;  // the caller's scales, [num_tokens, kNumScales] of kScaleBytes, where rows come with them
    int64_t x_scales_row_stride;  // bytes between the scales of two tokens
    int64_t x_scales_stride;      // bytes between two scales of a token
    uint8_t* out;                 // null, or [out_rows] rows, out_stride bytes apart: rows are wanted there
    int64_t out_stride;
    uint8_t* out_scales;            // null, or [max_rows, kNumScales] of kScaleBytes: those of the rows in out
    const int32_t* slots;           // [max_tokens, kNumTopk]: row of a pair at its expert's rank, or -1
    const int32_t* rows;            // [max_tokens, kNumRanks]: message at each rank, or -1
    const int32_t* ids;             // [max_tokens, kNumTopk]
    const float* weights;           // [max_tokens, kNumTopk]
    const int32_t* recv_base;       // [kNumRanks + 1]: first message here of each source rank
    const int32_t* expert_counts;   // [local experts]
    const int32_t* expert_offsets;  // [local experts + 1]; last: rows here
    int32_t* source;                // [max_rows, 3]: rank, token, k
    float* row_weights;             // [max_rows]
    int32_t* message_slots;         // [messages, kNumTopk]
    float* message_weights;         // [messages, kNumTopk]
    HandleState* state;
    Control* control;
    Report* report;
    int64_t timeout_ns;
    const uint8_t* num_tokens_at;  // null, or where the device has the number of tokens
    int32_t num_tokens;            // rows of x
    int32_t out_rows;              // fewer than are received: refused
    int32_t max_rows;
    int32_t rank;
    int32_t buffer;  // that this rank receives into
    uint32_t handle;
    uint32_t ticket;
    bool is_count_int64;
    bool is_padding_zeroed;  // rows between the end of an expert's rows and the next zone become 0
    bool is_refused;         // publish kRefused instead of a buffer
};

constexpr int kNumThreads = kNumWarps * 32;
constexpr int kNumLocalExperts = kNumExperts / kNumRanks;
using Pipe = RowPipe<kSrcBytes, kNumStages, kStageRoom>;
using Messages = WalkOfPeers<kNumRanks>;
static_assert(kNumThreads >= kNumRanks, "one thread waits for each rank");
CUEP_LAUNCH(kNumThreads, kNumWarps* Pipe::kSmemBytes)

CUEP_DEVICE int2* header_of(const Params& p, int dst, int64_t message) {
    return reinterpret_cast<int2*>(p.arena[dst] + p.headers_offset) + message * kNumTopk;
}

CUEP_DEVICE uint64_t* flag_of(const Params& p, int dst, int64_t message) {
    return reinterpret_cast<uint64_t*>(p.arena[dst] + p.flags_offset) + message;
}

// What combine and the caller need of a message: where its rows are, their weights, and where they come from. Lane k
// has slot and weight of k. The whole warp calls.
CUEP_DEVICE void keep_header(const Params& p, int64_t message, int src, int32_t token, int32_t slot, float weight) {
    const int lane = lane_idx();
    if (lane >= kNumTopk) return;
    p.message_slots[message * kNumTopk + lane] = slot;
    p.message_weights[message * kNumTopk + lane] = weight;
    if (slot < 0) return;
    int32_t* source = p.source + static_cast<int64_t>(slot) * 3;
    source[0] = src;
    source[1] = token;
    source[2] = lane;
    p.row_weights[slot] = weight;
}

// Bulk stores of a row to the slot of each lane in `to`, here, or in the caller's array. The whole warp calls.
CUEP_DEVICE void store_here(const Params& p, const uint8_t* staged, int32_t slot, uint32_t to) {
    for (uint32_t rest = to; rest != 0; rest &= rest - 1) {
        const int64_t row = __shfl_sync(0xffffffffu, slot, __ffs(static_cast<int>(rest)) - 1);
        if (p.out != nullptr) {
            store_out(p, row, staged);
        } else {
            bulk_store(at_row<uint8_t>(p, p.tokens_offset, p.rank, p.buffer, row, kRowBytes), staged, kRowBytes);
        }
    }
}

// What is known of a token before its row is there: lane k has id, slot and weight of k, lane r the message to rank r.
struct Plan {
    int32_t owner, slot, message;
    float weight;
    GivenScales scales;

    CUEP_DEVICE Plan(const Params& p, int t) : message(row_of_lane<kNumRanks>(p, t)), scales(p, t) {
        const int64_t at = static_cast<int64_t>(t) * kNumTopk + lane_idx();
        const int32_t id = lane_idx() < kNumTopk ? p.ids[at] : -1;
        owner = id < 0 ? -1 : id / kNumLocalExperts;
        slot = id < 0 ? -1 : p.slots[at];
        weight = id < 0 ? 0.0f : p.weights[at];
    }
};

// A token's row to each of its ranks: here to all its slots, elsewhere to one. The whole warp calls.
CUEP_DEVICE void send_row(const Params& p, const uint32_t* buffers, const Plan& plan, uint8_t* staged) {
    finish_row(p, plan.scales, staged);
#pragma unroll
    for (int i = 1; i <= kNumRanks; i++) {
        const int dst = (p.rank + i) % kNumRanks;
        const uint32_t filled = __ballot_sync(0xffffffffu, plan.owner == dst && plan.slot >= 0);
        if (filled == 0) continue;
        if (dst == p.rank) {
            store_here(p, staged, plan.slot, filled);
            continue;
        }
        const int32_t first = __shfl_sync(0xffffffffu, plan.slot, __ffs(static_cast<int>(filled)) - 1);
        bulk_store(at_row<uint8_t>(p, p.tokens_offset, dst, buffers[dst], first, kRowBytes), staged, kRowBytes);
    }
}

// What goes with it: a header to each of its ranks, here what it would say. The whole warp calls.
CUEP_DEVICE void send_headers(const Params& p, int t, const Plan& plan) {
    const int lane = lane_idx();
    for (int i = 1; i <= kNumRanks; i++) {
        const int dst = (p.rank + i) % kNumRanks;
        const int32_t message = __shfl_sync(0xffffffffu, plan.message, dst);
        if (message < 0) continue;
        const int32_t slot_there = plan.owner == dst ? plan.slot : -1;
        if (dst == p.rank) {
            keep_header(p, message, dst, t, slot_there, plan.weight);
        } else if (lane < kNumTopk) {
            header_of(p, dst, message)[lane] = make_int2(slot_there, __float_as_int(plan.weight));
        }
    }
}

CUEP_DEVICE void send_rows(const Params& p, const Operation& op, const uint32_t* buffers, int warp, Pipe& pipe) {
    pipe.move(
        TokenTurns(op, warp, kNumSendWarps, kept_tokens_of(p)),
        [&](const TokenTurns& at) { return p.x + at.t * p.x_stride; },
        [&](const TokenTurns& at) { return Plan(p, at.t); },
        [&](const TokenTurns&, const Plan& plan, uint8_t* staged) { send_row(p, buffers, plan, staged); },
        [&](const TokenTurns& at, const Plan& plan) { send_headers(p, at.t, plan); },
        [&](const TokenTurns& at) {  // a lane for each rank; pairs with the wait in receive_message
            fence_proxy_async();
            const int32_t message = row_of_lane<kNumRanks>(p, at.t);
            if (message >= 0 && lane_idx() != p.rank) {
                st_release_sys(flag_of(p, lane_idx(), message), tagged(op, static_cast<uint32_t>(at.t)));
            }
        });
}

// 0 into `bytes` bytes. The whole warp calls.
CUEP_DEVICE void zero_bytes(uint8_t* to, int bytes) {
    if (bytes % 16 == 0 && reinterpret_cast<uintptr_t>(to) % 16 == 0) {
        for (int i = lane_idx(); i < bytes / 16; i += 32) reinterpret_cast<uint4*>(to)[i] = make_uint4(0, 0, 0, 0);
    } else {
        for (int i = lane_idx(); i < bytes; i += 32) to[i] = 0;
    }
}

// The warp-th of num_warps shares of the padding of this rank's zones.
CUEP_DEVICE void zero_padding(const Params& p, int warp, int num_warps) {
    const int num_units = static_cast<int>(gridDim.x) * num_warps;
    int first = static_cast<int>(warp * gridDim.x + blockIdx.x);  // goes on from zone to zone, for even shares
    for (int e = 0; e < kNumLocalExperts; e++) {
        const int begin = p.expert_offsets[e] + p.expert_counts[e], end = p.expert_offsets[e + 1];
        int i = first;
        for (; i < end - begin; i += num_units) {
            const int64_t row = begin + i;
            if (p.out == nullptr) {
                zero_bytes(at_row<uint8_t>(p, p.tokens_offset, p.rank, p.buffer, row, kRowBytes), kRowBytes);
                continue;
            }
            zero_bytes(p.out + row * p.out_stride, kTokenBytes);
            if constexpr (kHasScales) {
                zero_bytes(p.out_scales + row * (kNumScales * kScaleBytes), kNumScales * kScaleBytes);
            }
        }
        first = i - max(end - begin, 0);
    }
}

// A message that has come: lane k has the slot of k; `missing`: the lanes whose slots are still to be filled.
struct Message {
    const uint8_t* row;
    int32_t slot;
    uint32_t missing;
};

// Waits for a message and keeps its header. The whole warp calls; false: gave up.
CUEP_DEVICE bool receive_message(const Params& p, const Operation& op, const Messages& walk, Message& message) {
    const int lane = lane_idx(), src = walk.peer();
    const int64_t at = walk.row();
    uint32_t token = 0;
    bool is_ok = true;
    if (lane == 0) is_ok = wait_flag(op, flag_of(p, p.rank, at), Phase::kRows, src, token);
    if (!__all_sync(0xffffffffu, is_ok)) return false;
    __syncwarp();  // a vote orders no memory: now every lane may read what one lane has waited for
    token = __shfl_sync(0xffffffffu, token, 0);
    const int2 header = lane < kNumTopk ? header_of(p, p.rank, at)[lane] : make_int2(-1, 0);
    message.slot = header.x;
    const uint32_t filled = __ballot_sync(0xffffffffu, message.slot >= 0);
    message.missing = p.out != nullptr ? filled : filled & (filled - 1);
    if (message.missing != 0) {
        const int32_t first = __shfl_sync(0xffffffffu, message.slot, __ffs(static_cast<int>(filled)) - 1);
        message.row = at_row<uint8_t>(p, p.tokens_offset, p.rank, p.buffer, first, kRowBytes);
    }
    keep_header(p, at, src, static_cast<int32_t>(token), message.slot, __int_as_float(header.y));
    return true;
}

// One receive warp's share of the messages of peers. False: gave up.
CUEP_DEVICE bool receive_rows(const Params& p, const Operation& op, const Messages& walk, Pipe& pipe) {
    return pipe.move_as_they_come<kRowBytes, Message>(
        walk,
        [&](const Messages& next, Message& message) { return receive_message(p, op, next, message); },
        [&](const Message& message, const uint8_t* staged) { store_here(p, staged, message.slot, message.missing); });
}

extern "C" __global__ void __launch_bounds__(kNumThreads, 1) ht_dispatch_expand(const __grid_constant__ Params p) {
    CUEP_DYNAMIC_SMEM(smem);
    __shared__ uint32_t buffers[kNumRanks];
    __shared__ int32_t recv_base[kNumRanks + 1];
    const int tid = threadIdx.x, warp = warp_idx();
    if (is_skipped(p, Op::kDispatch, p.state->unrouted != 0)) return;
    const Operation op = begin_operation(p, Op::kDispatch);
    for (int r = tid; r <= kNumRanks; r += kNumThreads) recv_base[r] = p.recv_base[r];
    if (block_any(is_broken(op))) return;

    const int num_rows = p.expert_offsets[kNumLocalExperts];
    const bool has_room = p.out == nullptr || p.out_rows >= num_rows;
    const bool is_refused = p.is_refused || !has_room;  // of this rank
    if (!exchange_buffers<kNumRanks>(p, op, is_refused, 0, buffers)) return;
    fence_proxy_async();  // what peers read from their buffers comes before the bulk copies that write them
    const int refused_by = refusing_rank<kNumRanks>(p, is_refused, buffers);

    // send warps send all they owe and wait for nobody; receive warps wait for each message
    bool is_ok = true;
    if (refused_by < 0) {
        Pipe pipe(smem, warp, kNumWarps);
        if (warp < kNumSendWarps) send_rows(p, op, buffers, warp, pipe);
        if (warp >= kFirstReceiver && p.is_padding_zeroed) zero_padding(p, warp - kFirstReceiver, kNumReceivers);
        if (kNumRanks > 1 && warp >= kFirstReceiver) {
            is_ok = receive_rows(p, op, Messages(p.rank, recv_base, warp - kFirstReceiver, kNumReceivers), pipe);
        }
    }
    if (block_any(!is_ok)) return;

    if (!is_last_block(op)) return;
    if (tid == 0) {
        p.state->refused = 0;
        if (refused_by >= 0) mark_refused(p, Op::kDispatch, refused_by, Cause::kTooFewRows, num_rows);
        end_kernel(op);
    }
}
