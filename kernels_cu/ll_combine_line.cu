// Low-latency combine, exact, for some hundred tokens at most: as ll_combine_direct, but rows go home as lines that
// carry their own flags (line.cuh): the sender releases nothing, the owner polls the rows themselves. The same bits.
// Cost: 128 bytes over the link for 120 of a row per (token, expert).
// serves: layout=expert_major reduce=exact combine_quant=None
#include <cuep/base.cuh>
#include <cuep/sync.cuh>
#include <cuep/convert.cuh>
#include <cuep/operation.cuh>

#ifndef CUEP_JIT  // values for editors; cuep/jit.py gives the real ones
constexpr int kNumRanks = 4, kNumExperts = 256, kNumTopk = 8, kRowBytes = 14336, kNumThreads = 320, kMinBlocks = 1;
constexpr int kParts = 4;
using elem_t = cuep::bf16_t;
constexpr bool kHasLineSlots = true, kHasMask = false, kHasStats = false;
#endif
// compile: kNumRanks=4 kNumExperts=256 kNumTopk=8 kRowBytes=14336 elem_t=cuep::bf16_t kHasLineSlots=true kHasMask=false kHasStats=false
// compile: kNumRanks=2 kNumExperts=8 kNumTopk=3 kRowBytes=528 elem_t=float kHasLineSlots=true kHasMask=true kHasStats=false
CUEP_TUNABLE(kNumThreads, 320, 64);
CUEP_TUNABLE(kParts, 4, 2);      // blocks that share a row
CUEP_TUNABLE(kMinBlocks, 1, 1);  // resident on one multiprocessor
constexpr bool kIsLine = true;
static_assert(kIsLine == kHasLineSlots, "cuep/layout.py lays out slots of lines for variants named line...");
#include <cuep/ll_exact.cuh>
#include <cuep/line.cuh>

using namespace cuep;

struct Params {
    uint8_t* arena[kNumRanks];         // symmetric memory of every rank; offsets below are bytes into it
    int64_t rows_offset;               // [num_banks, max_tokens, kNumTopk] slots
    int64_t totals_offset;             // uint64 [num_banks, kNumRanks]: epoch, kind of call or kRefused
    int64_t done_offset;               // uint64 [num_banks, kNumRanks]: epoch that this peer has read
    int64_t mask_offset;               // MaskWords [kNumRanks] and the number of exclusions, with a mask
    const uint8_t* expert_out;         // [local experts, kNumRanks * max_tokens] rows, as dispatch gave them
    int64_t expert_out_stride;         // bytes between rows
    const int32_t* ids;                // [max_tokens, kNumTopk] routing of this rank's tokens
    const float* weights;              // [num_tokens, kNumTopk], null for ones
    const int32_t* own_slot;           // [max_tokens]
    const int32_t* num_rows;           // [kNumRanks]
    const int32_t* token_idx;          // [kNumRanks, max_tokens]
    const int32_t* row_idx;            // [kNumRanks, max_tokens, kNumTopk]
    const uint32_t* row_weight_grads;  // float bits [local experts, kNumRanks * max_tokens], or null
    uint32_t* weight_grads;            // [num_tokens, kNumTopk], or null
    uint8_t* y;                        // [num_tokens] rows, y_stride bytes apart
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
    bool is_send;  // phases of this launch: both are a whole operation
    bool is_receive;
    bool is_refused;  // publish kRefused instead of sending
    bool is_alone;    // no other group shares the device: the next kernel may be set up early
};

CUEP_LAUNCH_EARLY(kNumThreads, 0)

constexpr int kSlotPieces = slot_pieces(1);  // the row, then {gradient's bits}

CUEP_DEVICE uint4* slot_of(const Params& p, int dst, int bank, int64_t token, int k) {
    const int64_t at = (static_cast<int64_t>(bank) * p.max_tokens + token) * kNumTopk + k;
    return reinterpret_cast<uint4*>(p.arena[dst] + p.rows_offset) + at * kSlotPieces;
}

CUEP_DEVICE void send(const Params& p, const Operation& op, int bank, int most, Answer& answer, Shared& s) {
    const uint32_t epoch = static_cast<uint32_t>(op.epoch);
    send_answers(
        p,
        most,
        answer,
        s,
        [&](const Answer& to, int k, const uint4(&row)[kPiecesPerThread]) {
            if (is_fenced(p, op)) return;
            uint4* slot = slot_of(p, to.src, bank, to.token, k);
            store_lines(slot, row, epoch);
            if (p.row_weight_grads != nullptr && threadIdx.x == 0 && part() == 0) {
                st_packet(slot + kNumPieces, {p.row_weight_grads[p.row_idx[to.at * kNumTopk + k]], 0, 0, epoch});
            }
        },
        [](const Answer&) {});
}

// weight_grads[t, k] of this thread's k. By whole warps. False: gave up.
CUEP_DEVICE bool take_gradient(const Params& p, const Operation& op, int t, const Term& term, const Shared& s) {
    const int k = threadIdx.x;
    const bool is_own = k < kNumTopk && (s.own_terms >> k & 1u), is_asked = k < kNumTopk && (s.peer_terms >> k & 1u);
    uint4 packet = make_uint4(0, 0, 0, 0);
    if (is_own) packet.x = p.row_weight_grads[term.own_row];
    const bool is_ok = wait_lines(op, [&](Missing& missing) {
        if (!is_asked) return;
        packet = ld_packet(s.terms[k] + kNumPieces);
        note_packet(op, packet, s.owner[k], missing);
    });
    if (k < kNumTopk) p.weight_grads[static_cast<int64_t>(t) * kNumTopk + k] = packet.x;
    return is_ok;
}

// y[t]: adds in order of k, waiting for the rows of peers. False: gave up.
CUEP_DEVICE bool sum_token(const Params& p, const Operation& op, int t, const Term& term, Shared& s) {
    const uint32_t own_terms = s.own_terms, peer_terms = s.peer_terms;
    bool is_ok = true;
#pragma unroll 1
    for (int j = 0; j < kPiecesPerThread; j++) {
        const int piece = piece_at(j), asked = piece_to_ask(piece);
        float sum[kElemsPerVec];
#pragma unroll
        for (int i = 0; i < kElemsPerVec; i++) sum[i] = 0.0f;
#pragma unroll 1
        for (int first = 0; first < kNumTopk; first += kTermsInFlight) {
            uint4 v[kTermsInFlight];
#pragma unroll
            for (int i = 0; i < kTermsInFlight; i++) {
                if (own_terms >> (first + i) & 1u) v[i] = load_piece(s.terms[first + i], piece);
            }
            is_ok &= wait_lines(op, [&](Missing& missing) {
#pragma unroll
                for (int i = 0; i < kTermsInFlight; i++) {
                    if (peer_terms >> (first + i) & 1u) v[i] = load_line(s.terms[first + i], asked);
                }
#pragma unroll
                for (int i = 0; i < kTermsInFlight; i++) {
                    if (peer_terms >> (first + i) & 1u) note_line(op, v[i], asked, s.owner[first + i], missing);
                }
            });
#pragma unroll
            for (int i = 0; i < kTermsInFlight; i++) {
                if ((own_terms | peer_terms) >> (first + i) & 1u) add_weighted(sum, s.weights[first + i], v[i]);
            }
        }
        if (piece < kNumPieces) write_sum(p, t, piece, sum);
    }
    if (p.weight_grads != nullptr && warp_idx() == 0 && part() == 0) is_ok &= take_gradient(p, op, t, term, s);
    return !block_any(!is_ok);
}

extern "C" __global__ void __launch_bounds__(kNumThreads, kMinBlocks)
    ll_combine_line(const __grid_constant__ Params p) {
    __shared__ Shared s;
    combine(
        p,
        true,
        [&](Answer& answer) { look_up(p, answer); },
        [&](const Answer& answer) { show(p, answer, s); },
        [&](const Operation& op, int bank, int most, Answer& answer) { send(p, op, bank, most, answer, s); },
        [&](int t, Term& term) { look_up_term(p, t, term); },
        [&](Term& term) { follow(p, term); },
        [&](int bank, int t, Term& term) {
            find_terms(p, term, s, [&](int k) { return slot_of(p, p.rank, bank, t, k); });
        },
        [&](const Operation& op, int, int t, const Term& term) { return sum_token(p, op, t, term, s); });
}
