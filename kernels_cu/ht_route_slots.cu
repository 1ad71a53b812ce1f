// serves: layout=expert_major
// High-throughput routing, expert_major. Every rank gets every rank's number of (token, k) pairs of every expert, so it
// knows all zones of all ranks, padded to the alignment, and gives each of its pairs the final row that it will have:
// start of the expert's zone + pairs of lower ranks + earlier pairs of this rank, in order of token, then k. Each warp
// of one block counts its share of the pairs and later numbers them, 32 at a time; no atomics decide an order. A second
// block gives each (token, rank), which crosses the link as one message, its place among those that the rank receives.
// Cost: two passes over topk_idx in one block, and one exchange of N * E small words.
#include <cuep/base.cuh>
#include <cuep/sync.cuh>
#include <cuep/operation.cuh>
#include <cuep/topk.cuh>
#include <cuep/ht_route.cuh>

#ifndef CUEP_JIT  // values for editors; cuep/jit.py gives the real ones
constexpr int kNumRanks = 4, kNumExperts = 256, kNumTopk = 8, kNumThreads = 1024;
#endif
// compile: kNumRanks=4 kNumExperts=256 kNumTopk=8
// compile: kNumRanks=2 kNumExperts=8 kNumTopk=3
CUEP_TUNABLE(kNumThreads, 1024, 64);

using namespace cuep;

struct Params {
    uint8_t* arena[kNumRanks];  // symmetric memory of every rank; offsets below are bytes into it
    int64_t matrix_offset;      // uint64 [kRouteBanks, kNumRanks (source), kNumRanks (destination)]: epoch, messages
    int64_t counts_offset;      // uint64 [kRouteBanks, kNumRanks (source), kNumExperts]: epoch, pairs or kRefused
    const uint8_t* topk_idx;    // [num_tokens, kNumTopk] int32 or int64
    const float* topk_weights;  // [num_tokens, kNumTopk] or null
    int32_t* ids;               // handle's copy [max_tokens, kNumTopk]
    float* weights;             // handle's copy [max_tokens, kNumTopk]
    int32_t* slots;             // [max_tokens, kNumTopk]: row of a pair at its expert's rank, or -1: none, or left out
    int32_t* rows;              // [max_tokens, kNumRanks]: message of a token at each rank, or -1
    int32_t* send_base;         // [kNumRanks]: first message of this rank's tokens at each rank
    int32_t* recv_base;         // [kNumRanks + 1]: first message here of each source rank; last: all messages
    int32_t* src_rank_counts;   // [local experts, kNumRanks]: rows that are received
    int32_t* expert_counts;     // [local experts]: rows that are received
    int32_t* expert_offsets;    // [local experts + 1]: first row of each zone; last: end of the last one
    int32_t* total;             // [1]: pairs for this rank, also those that are left out
    HandleState* state;
    Control* control;
    Report* report;
    int64_t timeout_ns;
    const uint8_t* num_tokens_at;  // null, or where the device has the number of tokens
    int32_t num_tokens;            // rows of topk_idx
    int32_t max_rows;              // that a rank can receive
    int32_t alignment;             // of the first row of a zone
    int32_t rank;
    uint32_t handle;
    uint32_t ticket;
    bool is_count_int64;
    bool is_int64;
    bool is_drop;     // rows beyond max_rows are left out; otherwise the routing is refused
    bool is_refused;  // publish kRefused instead of counts
};

constexpr int kNumLocalExperts = kNumExperts / kNumRanks;
constexpr int kCountBytes = kNumExperts * 4;
constexpr int kMaxCountBytes = 96 * 1024;  // that any GPU lets a block have
constexpr int kNumWarps = kNumThreads / 32;
// warps that number pairs, each with a counter for every expert: fewer where there are many experts
constexpr int kMostWarps = kMaxCountBytes / kCountBytes - 2;
constexpr int kNumCounters = kNumWarps < kMostWarps ? kNumWarps : kMostWarps;
static_assert(kNumCounters > 0, "too many experts");
constexpr int kStepsInFlight = 4;  // ids that a lane reads at once
using Places = Matrix<kNumRanks, kNumLocalExperts, kNumTopk, kNumThreads>;
CUEP_LAUNCH(kNumThreads, (kNumCounters + 2) * kCountBytes)

// The block's dynamic shared memory.
struct Counts {
    int32_t* warps;   // [kNumCounters, kNumExperts]: pairs of each warp, then the row of its next one
    int32_t* totals;  // [kNumExperts]: pairs of all ranks, then first row of the zone
    int32_t* lower;   // [kNumExperts]: pairs of lower ranks
};

CUEP_DEVICE uint64_t* counts_of(const Params& p, int dst, int bank, int src) {
    return reinterpret_cast<uint64_t*>(p.arena[dst] + p.counts_offset) +
           static_cast<int64_t>(bank * kNumRanks + src) * kNumExperts;
}

CUEP_DEVICE void count_pairs(const Params& p, int num_tokens, Counts c) {
    for (int i = threadIdx.x; i < kNumCounters * kNumExperts; i += kNumThreads) c.warps[i] = 0;
    __syncthreads();
    if (warp_idx() >= kNumCounters) return;
    const int2 range = tokens_of_warp(num_tokens, warp_idx(), kNumCounters);
    int32_t* counters = c.warps + warp_idx() * kNumExperts;
    for (int t = range.x + lane_idx(); t < min(range.y, num_tokens); t += 32) {
        int32_t experts[kNumTopk];
        const uint32_t num_bad = load_experts<kNumExperts>(p.topk_idx, p.is_int64, t, experts);
        if (num_bad != 0) atom_add_relaxed_sys(&p.report->num_bad_ids, num_bad);
#pragma unroll
        for (int k = 0; k < kNumTopk; k++) {
            if (experts[k] >= 0) atomicAdd(&counters[experts[k]], 1);
        }
    }
}

// Pairs of each warp become those of earlier warps; all of them go to every rank.
CUEP_DEVICE void publish_counts(const Params& p, const Operation& op, bool is_refused, Counts c) {
    for (int e = threadIdx.x; e < kNumExperts; e += kNumThreads) {
        int32_t sum = 0;
        for (int w = 0; w < kNumCounters; w++) {
            const int32_t num_pairs = c.warps[w * kNumExperts + e];
            c.warps[w * kNumExperts + e] = sum;
            sum += num_pairs;
        }
        const uint32_t value = is_refused ? kRefused : static_cast<uint32_t>(sum);
        for (int i = 0; i < kNumRanks; i++) {  // pairs with wait_counts
            st_relaxed_sys(counts_of(p, (p.rank + i) % kNumRanks, bank_of(op), p.rank) + e, tagged(op, value));
        }
    }
}

// Sums over ranks. refused_by: a rank that refused, or -1. False: gave up.
CUEP_DEVICE bool wait_counts(const Params& p, const Operation& op, Counts c, int& refused_by) {
    __shared__ uint32_t refusing;  // bit r: rank r
    if (threadIdx.x == 0) refusing = 0;
    __syncthreads();
    bool is_ok = true;
    for (int e = threadIdx.x; e < kNumExperts; e += kNumThreads) {
        uint64_t words[kNumRanks];  // all asked for at once: most are there
#pragma unroll
        for (int src = 0; src < kNumRanks; src++) {
            words[src] = ld_relaxed_sys(counts_of(p, p.rank, bank_of(op), src) + e);
        }
        int32_t total = 0, lower = 0;
#pragma unroll
        for (int src = 0; src < kNumRanks; src++) {
            uint32_t count = static_cast<uint32_t>(words[src]);
            if (epoch_of(words[src]) != static_cast<uint32_t>(op.epoch)) {
                is_ok &= wait_word(op, counts_of(p, p.rank, bank_of(op), src) + e, src, count);
            }
            if (count == kRefused) atomicOr(&refusing, 1u << src);
            total += static_cast<int32_t>(count);
            if (src < p.rank) lower += static_cast<int32_t>(count);
        }
        c.totals[e] = total;
        c.lower[e] = lower;
    }
    if (block_any(!is_ok)) return false;
    refused_by = __ffs(static_cast<int>(refusing)) - 1;
    return true;
}

// Totals become first rows of zones; needed[r]: rows up to the end of the last zone of rank r. A warp for each rank.
CUEP_DEVICE void lay_out_zones(const Params& p, Counts c, int32_t* needed) {
    const int lane = lane_idx();
    for (int r = warp_idx(); r < kNumRanks; r += kNumWarps) {
        int32_t* zones = c.totals + r * kNumLocalExperts;
        int32_t first_row = 0;
        for (int first = 0; first < kNumLocalExperts; first += 32) {
            const bool is_expert = first + lane < kNumLocalExperts;
            const int32_t num_rows = is_expert ? zones[first + lane] : 0;
            const int32_t size = (num_rows + p.alignment - 1) / p.alignment * p.alignment;
            int32_t end = size;  // inclusive sum over lanes
            for (int distance = 1; distance < 32; distance *= 2) {
                const int32_t before = __shfl_up_sync(0xffffffffu, end, distance);
                if (lane >= distance) end += before;
            }
            if (is_expert) zones[first + lane] = first_row + end - size;
            first_row += __shfl_sync(0xffffffffu, end, 31);
        }
        if (lane == 0) needed[r] = first_row;
    }
}

CUEP_DEVICE Outcome judge(const Params& p, const Brought& own, int refused_by, const int32_t* needed) {
    int full_rank = -1;
    for (int r = 0; r < kNumRanks && full_rank < 0; r++) {
        if (needed[r] > p.max_rows) full_rank = r;
    }
    return judge_routing(p, own, refused_by, full_rank, full_rank < 0 ? 0 : needed[full_rank]);
}

// What this rank's experts receive.
CUEP_DEVICE void write_counts(const Params& p, const Operation& op, Counts c, int32_t num_rows, int32_t* total) {
    for (int e = threadIdx.x; e < kNumLocalExperts; e += kNumThreads) {
        const int32_t first = c.totals[p.rank * kNumLocalExperts + e];
        int32_t row = first;
        for (int src = 0; src < kNumRanks; src++) {  // the words are there: wait_counts has seen them
            const uint64_t* counts = counts_of(p, p.rank, bank_of(op), src) + p.rank * kNumLocalExperts;
            const int32_t num_pairs = static_cast<int32_t>(ld_relaxed_sys(counts + e));
            p.src_rank_counts[e * kNumRanks + src] = min(row + num_pairs, p.max_rows) - min(row, p.max_rows);
            row += num_pairs;
        }
        p.expert_counts[e] = min(row, p.max_rows) - min(first, p.max_rows);
        p.expert_offsets[e] = min(first, p.max_rows);
        atomicAdd(total, row - first);
    }
    if (threadIdx.x == 0) p.expert_offsets[kNumLocalExperts] = min(num_rows, p.max_rows);
}

// This warp's share of the pairs, in order of token, then k.
CUEP_DEVICE void place_pairs(const Params& p, int num_tokens, Counts c) {
    if (warp_idx() >= kNumCounters) return;
    const int2 range = tokens_of_warp(num_tokens, warp_idx(), kNumCounters);
    int32_t* next_row = c.warps + warp_idx() * kNumExperts;
    for (int e = lane_idx(); e < kNumExperts; e += 32) next_row[e] += c.totals[e] + c.lower[e];
    __syncwarp();
    const int64_t last = int64_t{min(range.y, num_tokens)} * kNumTopk;
    const int lane = lane_idx();
    for (int64_t first = int64_t{range.x} * kNumTopk; first < last; first += 32 * kStepsInFlight) {
        int32_t experts[kStepsInFlight];
#pragma unroll
        for (int j = 0; j < kStepsInFlight; j++) {
            const int64_t i = first + 32 * j + lane;
            experts[j] = -1;
            if (i < last) {
                experts[j] = load_expert<kNumExperts>(p.topk_idx, p.is_int64, i);
            }
        }
#pragma unroll
        for (int j = 0; j < kStepsInFlight; j++) {
            const int64_t i = first + 32 * j + lane;
            const int e = experts[j];
            const uint32_t same = __match_any_sync(0xffffffffu, e);
            const uint32_t earlier = same & ((1u << lane) - 1u);
            const int32_t row = e < 0 ? -1 : next_row[e] + __popc(earlier);
            __syncwarp();
            if (e >= 0 && earlier == 0) next_row[e] += __popc(same);
            __syncwarp();
            if (i < last) p.slots[i] = row < p.max_rows ? row : -1;
        }
    }
}

// The first block: the row of every pair. False: gave up.
CUEP_DEVICE bool route_pairs(const Params& p, const Operation& op, const Brought& own, Counts c) {
    __shared__ int32_t needed[kNumRanks];
    __shared__ int32_t total;
    if (threadIdx.x == 0) total = 0;
    count_pairs(p, own.num_tokens, c);
    __syncthreads();
    publish_counts(p, op, own.is_refused, c);
    int refused_by = -1;
    if (!wait_counts(p, op, c, refused_by)) return false;
    lay_out_zones(p, c, needed);
    __syncthreads();
    const Outcome outcome = judge(p, own, refused_by, needed);
    if (outcome.refused_by < 0) {
        write_counts(p, op, c, needed[p.rank], &total);
        place_pairs(p, own.num_tokens, c);
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        *p.total = total;
        write_state(p, own, outcome);
    }
    return true;
}

// The second block: the place of every (token, rank). False: gave up.
CUEP_DEVICE bool route_messages(const Params& p, const Operation& op, const Brought& own, Places& places) {
    constexpr int32_t kAll =
        kNumRanks << 24;  // tokens of all ranks: a message is sent even if all its pairs are left out
    if (!places.exchange(p, op, own)) return false;
    if (places.refusing_rank() >= 0) return true;
    places.write_bases(p, kAll);
    places.place(p, own.num_tokens, kAll);
    return true;
}

extern "C" __global__ void __launch_bounds__(kNumThreads, 1) ht_route_slots(const __grid_constant__ Params p) {
    CUEP_DYNAMIC_SMEM(smem);
    __shared__ Places places;
    const int block = blockIdx.x, num_blocks = gridDim.x;
    const Operation op = begin_operation(p, Op::kRoute);
    if (block_any(is_broken(op))) return;
    const Brought own = brought_tokens(p);

    // each block its part; with few blocks the last one has several
    if (block == 0) {
        int32_t* counts = reinterpret_cast<int32_t*>(smem);
        const int at = kNumCounters * kNumExperts;
        if (!route_pairs(p, op, own, {counts, counts + at, counts + at + kNumExperts})) return;
    }
    if (block == min(1, num_blocks - 1) && !route_messages(p, op, own, places)) return;
    const int first_copier = min(2, num_blocks - 1);
    if (block >= first_copier) {
        copy_routing<kNumExperts, kNumTopk, kNumThreads>(
            p, own.num_tokens, block - first_copier, num_blocks - first_copier);
    }

    if (is_last_block(op) && threadIdx.x == 0) end_kernel(op);
}
