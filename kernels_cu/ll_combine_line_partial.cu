// Low-latency combine, per_rank, for some hundred tokens at most: as ll_combine_partial, but rows go home as lines that
// carry their own flags (line.cuh): the sender releases nothing, the owner polls the rows themselves. The same bits.
// Cost: 128 bytes over the link for 120 of a row per (token, rank).
// serves: reduce=per_rank combine_quant=None
#include <cuep/base.cuh>
#include <cuep/sync.cuh>
#include <cuep/convert.cuh>
#include <cuep/operation.cuh>

#ifndef CUEP_JIT  // values for editors; cuep/jit.py gives the real ones
constexpr int kNumRanks = 4, kNumExperts = 256, kNumTopk = 8, kRowBytes = 14336, kNumThreads = 320, kMinBlocks = 1;
constexpr int kParts = 4;
constexpr bool kIsRankMajor = false;
using elem_t = cuep::bf16_t;
constexpr bool kHasLineSlots = true, kHasMask = false, kHasStats = false;
#endif
// compile: kNumRanks=4 kNumExperts=256 kNumTopk=8 kRowBytes=14336 kIsRankMajor=false elem_t=cuep::bf16_t kHasLineSlots=true kHasMask=false kHasStats=false
// compile: kNumRanks=4 kNumExperts=256 kNumTopk=8 kRowBytes=14336 kIsRankMajor=true elem_t=cuep::bf16_t kHasLineSlots=true kHasMask=true kHasStats=false
// compile: kNumRanks=2 kNumExperts=8 kNumTopk=3 kRowBytes=528 kIsRankMajor=false elem_t=float kHasLineSlots=true kHasMask=false kHasStats=true
CUEP_TUNABLE(kNumThreads, 320, 64);
CUEP_TUNABLE(kParts, 4, 2);      // blocks that share a row
CUEP_TUNABLE(kMinBlocks, 1, 1);  // resident on one multiprocessor
constexpr bool kIsLine = true;
static_assert(kIsLine == kHasLineSlots, "cuep/layout.py lays out slots of lines for variants named line...");
#include <cuep/ll_partial.cuh>
#include <cuep/line.cuh>

using namespace cuep;

struct Params {
    uint8_t* arena[kNumRanks];  // symmetric memory of every rank; offsets below are bytes into it
    int64_t rows_offset;    // [num_banks, kNumRanks - 1, max_tokens] slots; rank s is at (s - rank - 1) mod kNumRanks
    int64_t totals_offset;  // uint64 [num_banks, kNumRanks]: epoch, kind of call or kRefused
    int64_t done_offset;    // uint64 [num_banks, kNumRanks]: epoch that this peer has read
    int64_t mask_offset;    // MaskWords [kNumRanks] and the number of exclusions, with a mask
    const uint8_t* expert_out;  // [local experts, kNumRanks * max_tokens] or, rank-major, [kNumRanks, max_tokens] rows
    int64_t expert_out_stride;  // bytes between rows
    const int32_t* ids;         // [max_tokens, kNumTopk] routing of this rank's tokens
    const int32_t* own_slot;    // [max_tokens]
    const int32_t* num_rows;    // [kNumRanks]
    const int32_t* token_idx;   // [kNumRanks, max_tokens]
    const int32_t* row_idx;     // expert-major [kNumRanks, max_tokens, kNumTopk]: row of expert_out, or -1
    const float* recv_weights;  // expert-major [kNumRanks, max_tokens, kNumTopk]: from dispatch
    const int32_t* recv_topk_idx;  // rank-major [kNumRanks, max_tokens, kNumTopk]: -1 where the expert is not here
    const uint32_t*
        row_weight_grads;    // float bits; one per row of expert_out or, rank-major, one per row and k; or null
    uint32_t* weight_grads;  // [num_tokens, kNumTopk], or null
    uint8_t* y;              // [num_tokens] rows, y_stride bytes apart
    int64_t y_stride;
    const uint8_t* bias[2];  // each [num_tokens] rows that are added to y, or null
    int64_t bias_stride[2];
    HandleState* state;
    Control* control;
    Arrivals* arrivals;  // or null
    Report* report;
    int64_t timeout_ns;
    const uint8_t* num_tokens_at;  // int32 or int64, null: num_tokens counts
    int32_t num_tokens;
    int32_t max_tokens;
    int32_t rank;
    int32_t num_banks;  // a power of two
    uint32_t handle;
    uint32_t ticket;
    uint32_t routing;  // number of the routing that is combined, modulo 32
    bool is_count_int64;
    bool is_weighted;  // false: weights count as 1
    bool is_send;      // phases of this launch: both are a whole operation
    bool is_receive;
    bool is_refused;  // publish kRefused instead of sending
    bool is_alone;    // no other group shares the device: the next kernel may be set up early
};

CUEP_LAUNCH_EARLY(kNumThreads, 0)

constexpr int kSlotBytes = slot_pieces(kNumTopk) * 16;  // the row, then {gradient's bits} of each k

CUEP_DEVICE uint4* slot_of(const Params& p, int dst, int bank, int src, int64_t token) {
    return staged_row<kSlotBytes>(p, dst, bank, src, token);
}

CUEP_DEVICE void send(const Params& p, const Operation& op, int bank, int most, Answer& answer, Shared& s) {
    const int tid = threadIdx.x;
    const uint32_t epoch = static_cast<uint32_t>(op.epoch);
    send_answers(
        p,
        most,
        answer,
        s,
        [&](const Answer& to, const uint4(&part)[kPiecesPerThread]) {
            uint4* slot = slot_of(p, to.src, bank, p.rank, to.token);
            store_lines(slot, part, epoch);
            if (p.row_weight_grads == nullptr || tid >= kNumTopk || cuep::part() != 0) return;
            const int64_t row = grad_row(p, to.at);
            if (row >= 0) st_packet(slot + kNumPieces + tid, {p.row_weight_grads[row], 0, 0, epoch});
        },
        [](const Answer&) {});
}

// weight_grads[t, k] of this thread's k. By whole warps. False: gave up.
CUEP_DEVICE bool take_gradient(const Params& p, const Operation& op, int t, const Term& term, const Shared& s) {
    const int k = threadIdx.x;
    const int owner = k >= kNumTopk || term.expert < 0 ? -1 : term.expert / kNumLocalExperts;
    uint4 packet = make_uint4(0, 0, 0, 0);
    if (owner == p.rank) packet.x = p.row_weight_grads[grad_row(p, own_row_of(p, term))];
    const bool is_ok = wait_lines(op, [&](Missing& missing) {
        if (owner < 0 || owner == p.rank) return;
        packet = ld_packet(s.rows[owner] + kNumPieces + k);
        note_packet(op, packet, owner, missing);
    });
    if (k < kNumTopk) p.weight_grads[static_cast<int64_t>(t) * kNumTopk + k] = packet.x;
    return is_ok;
}

// y[t]: adds in order of rank, waiting for the rows of peers. False: gave up.
CUEP_DEVICE bool sum_token(const Params& p, const Operation& op, int bank, int t, const Term& term, Shared& s) {
    bool is_ok = true;
#pragma unroll 1
    for (int j = 0; j < kPiecesPerThread; j++) {
        const int asked = piece_to_ask(piece_at(j));
        float sum[kElemsPerVec];
        auto load = [&](int first, int, uint4(&v)[kRanksInFlight]) {
            return wait_lines(op, [&](Missing& missing) {
#pragma unroll
                for (int i = 0; i < kRanksInFlight; i++) {
                    if (first + i < kNumRanks && s.rows[first + i] != nullptr) {
                        v[i] = load_line(s.rows[first + i], asked);
                    }
                }
#pragma unroll
                for (int i = 0; i < kRanksInFlight; i++) {
                    if (first + i < kNumRanks && s.rows[first + i] != nullptr) {
                        note_line(op, v[i], asked, first + i, missing);
                    }
                }
            });
        };
        is_ok &= add_ranks<uint4>(p, s, piece_at(j), sum, load, [](float (&to)[kElemsPerVec], uint4 v) { add(to, v); });
        if (piece_at(j) < kNumPieces) write_sum(p, t, piece_at(j), sum);
    }
    if (p.weight_grads != nullptr && warp_idx() == 0 && part() == 0) is_ok &= take_gradient(p, op, t, term, s);
    return !block_any(!is_ok);
}

extern "C" __global__ void __launch_bounds__(kNumThreads, kMinBlocks)
    ll_combine_line_partial(const __grid_constant__ Params p) {
    __shared__ Shared s;
    combine(
        p,
        kIsRankMajor || p.is_weighted,
        [&](Answer& answer) { look_up(p, answer); },
        [&](const Answer& answer) { show(p, answer, s); },
        [&](const Operation& op, int bank, int most, Answer& answer) { send(p, op, bank, most, answer, s); },
        [&](int t, Term& term) { look_up_term(p, t, term); },
        [&](Term& term) { follow(p, term); },
        [&](int bank, int t, Term& term) {
            find_rows(p, term, s, [&](int rank) { return slot_of(p, p.rank, bank, rank, t); });
        },
        [&](const Operation& op, int bank, int t, const Term& term) { return sum_token(p, op, bank, t, term, s); });
}
