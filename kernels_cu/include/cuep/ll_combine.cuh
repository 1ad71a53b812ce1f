// What the low-latency combine kernels share: what the ranks agree on, what is added to a sum, and gradients of
// weights, which come home beside the rows. Made of the kernel's constants: include it behind them.
#pragma once
#include <cuep/convert.cuh>
#include <cuep/ll.cuh>

namespace cuep {

constexpr int kElemsPerVec = kPerVec<elem_t>;
constexpr int kTermsInFlight = kNumTopk < 8 ? kNumTopk : 8;  // terms of a sum that a thread loads before it adds
constexpr uint32_t kUnweighted = 1u << 29;                   // in a total: this rank's call has no weights
constexpr uint32_t kHasGrads = 1u << 30;                     // in a total: this rank's call has row_weight_grads

template <class Params>
CUEP_DEVICE const uint4* expert_row(const Params& p, int64_t row) {
    return reinterpret_cast<const uint4*>(p.expert_out + row * p.expert_out_stride);
}

// A combine that is none, on any rank, because the one before it in its bank is still to be received.
template <class Params>
CUEP_DEVICE void refuse_combine(const Params& p) {
    uint32_t* blocks = &p.control->ops[static_cast<int>(Op::kCombine)].blocks;
    if (!is_last(blocks) || threadIdx.x != 0) return;
    red_add_relaxed_gpu(blocks, 0u - gridDim.x);
    p.state->refused = 1 + static_cast<uint32_t>(Op::kCombine);
    p.state->refused_by = static_cast<uint32_t>(p.rank);
    report_refusal(p, Op::kCombine, Cause::kBankTaken, p.state->refused_by);
}

// What this rank's call is, or that it refused; by one block (pairs with wait_totals).
template <class Params>
CUEP_DEVICE void publish_totals(
    const Params& p, const Operation& op, int bank, const Standing& standing, bool is_weighted) {
    const int tid = threadIdx.x;
    if (tid >= kNumRanks || !is_active(op, tid)) return;
    const uint32_t flags = (p.row_weight_grads == nullptr ? 0 : kHasGrads) | (is_weighted ? 0 : kUnweighted);
    const uint32_t total = p.is_refused ? kRefused : flags | routing_bits(p) | settled_bit(standing);
    st_relaxed_sys(total_of(p, tid, bank, p.rank), tagged(op, total));
}

// Who refused, or -1. If only some ranks have gradients, or weights, each refuses its own part.
struct Verdict {
    int refused_by;
    Cause cause;
};

template <class Params>
CUEP_DEVICE Verdict verdict_of(const Params& p, const Operation& op, const Totals& totals) {
    const int refused_by = refusing_rank(p, totals);
    if (refused_by >= 0) return {refused_by, Cause::kCall};
    if (is_mispaired(totals)) return {p.rank, Cause::kMispaired};
    uint32_t differs = 0;
    for (int r = 0; r < kNumRanks; r++) {
        if (is_active(op, r)) differs |= (totals.of[r] ^ totals.of[p.rank]) & (kHasGrads | kUnweighted);
    }
    return {differs == 0 ? -1 : p.rank, differs & kHasGrads ? Cause::kGradsDiffer : Cause::kWeightsDiffer};
}

// Rows that this rank received from the peer that sent most.
template <class Params>
CUEP_DEVICE int most_received(const Params& p) {
    int most = 0;
    for (int r = 0; r < kNumRanks; r++) {
        if (r != p.rank) most = max(most, p.num_rows[r]);
    }
    return min(most, p.max_tokens);
}

// One of the received rows that a block answers: low slots first, peers interleaved.
struct Answer {
    int unit;    // of kNumPeers * slots
    int src;     // whose token it is
    int64_t at;  // src * max_tokens + slot
    int32_t token;
    int32_t row;   // of k = threadIdx.x: of expert_out, or -1
    float weight;  // of that, where partial sums are weighted
};

// Where a unit is. False: beyond all slots.
template <class Params>
CUEP_DEVICE bool place_unit(const Params& p, int most, Answer& answer) {
    if constexpr (kNumPeers == 0) return false;
    constexpr int kPeers = kNumPeers > 0 ? kNumPeers : 1;
    if (answer.unit >= most * kPeers) return false;
    answer.src = (p.rank + 1 + answer.unit % kPeers) % kNumRanks;
    answer.at = static_cast<int64_t>(answer.src) * p.max_tokens + answer.unit / kPeers;
    return true;
}

template <class Params>
CUEP_DEVICE bool is_row(const Params& p, const Answer& answer) {
    return answer.at - static_cast<int64_t>(answer.src) * p.max_tokens < p.num_rows[answer.src];
}

// To the first row from answer.unit on. False: there is none.
template <class Params>
CUEP_DEVICE bool find_answer(const Params& p, int most, Answer& answer) {
    for (; place_unit(p, most, answer); answer.unit += num_teams()) {
        if (is_row(p, answer)) return true;
    }
    return false;
}

// What a block knows early of a token that it will sum, of k = threadIdx.x.
struct Term {
    int32_t expert = -1;
    float weight = 1.0f;
    int32_t own_slot = -1;   // of the token's row here, if it has one
    int32_t own_row = -1;    // of expert_out or, of a token's one row here, of the received rows
    uint32_t rank_mask = 0;  // whose experts the token has; known to the first warp
};

// Bits of the gradient of weight [token, k] in dst's arena, [num_banks, max_tokens, kNumTopk].
template <class Params>
CUEP_DEVICE uint32_t* grad_of(const Params& p, int dst, int bank, int64_t token, int k) {
    const int64_t at = (static_cast<int64_t>(bank) * p.max_tokens + token) * kNumTopk + k;
    return reinterpret_cast<uint32_t*>(p.arena[dst] + p.grads_offset) + at;
}

// Before the token's flag is released. row: of this thread's k among row_weight_grads, -1 if k is not served here.
template <class Params>
CUEP_DEVICE void send_grad(const Params& p, int src, int bank, int64_t token, int64_t row) {
    if (row >= 0) *grad_of(p, src, bank, token, threadIdx.x) = p.row_weight_grads[row];
}

// weight_grads[t, k] of this thread's k, when the token's flags have been acquired. own_row: as in send_grad.
template <class Params>
CUEP_DEVICE void take_grad(const Params& p, int bank, int64_t t, const Term& term, int64_t own_row) {
    const int64_t at = t * kNumTopk + threadIdx.x;
    uint32_t bits = 0;
    if (own_row >= 0) {
        bits = p.row_weight_grads[own_row];
    } else if (term.expert >= 0) {
        bits = ld_relaxed_sys(grad_of(p, p.rank, bank, t, threadIdx.x));
    }
    p.weight_grads[at] = bits;
}

// A rank that takes no part answers nothing, whatever the routing says.
CUEP_DEVICE void drop_inactive(const Operation& op, Term& term) {
    if (term.expert >= 0 && !is_active(op, term.expert / kNumLocalExperts)) term.expert = -1;
}

// The received row of this rank's own token, src * max_tokens + slot, or -1 where it has no expert here.
template <class Params>
CUEP_DEVICE int64_t own_row_of(const Params& p, const Term& term) {
    const bool is_slot = term.own_slot >= 0 && term.own_slot < p.max_tokens;  // beyond the tokens there may be anything
    return is_slot ? static_cast<int64_t>(p.rank) * p.max_tokens + term.own_slot : -1;
}

// By all lanes of the first warp.
CUEP_DEVICE void find_ranks(Term& term) {
    term.rank_mask = __reduce_or_sync(0xffffffffu, term.expert >= 0 ? 1u << (term.expert / kNumLocalExperts) : 0u);
}

// Waits for the flags of the ranks that answer token t. A barrier of the block. False: gave up.
template <class Params>
CUEP_DEVICE bool wait_ranks(const Params& p, const Operation& op, int bank, int t, const Term& term) {
    const int tid = threadIdx.x;
    bool is_ok = true;
    if (tid < kNumRanks && tid != p.rank && (term.rank_mask >> tid & 1u)) {
        uint32_t unused = 0;
        is_ok = wait_flag<kHasStats>(op, flag_of(p, p.rank, bank, tid, t), Phase::kRows, tid, unused);
    }
    return !block_any(!is_ok);
}

// Adds weight * the terms.
CUEP_DEVICE void add_weighted(float (&sum)[kElemsPerVec], float weight, const float (&term)[kElemsPerVec]) {
#pragma unroll
    for (int c = 0; c < kElemsPerVec; c++) sum[c] = __fadd_rn(sum[c], __fmul_rn(weight, term[c]));
}

// Of a vector's elements.
CUEP_DEVICE void add_weighted(float (&sum)[kElemsPerVec], float weight, uint4 vec) {
    float term[kElemsPerVec];
    unpack<elem_t>(vec, term);
    add_weighted(sum, weight, term);
}

CUEP_DEVICE void add(float (&sum)[kElemsPerVec], const float (&term)[kElemsPerVec]) {
#pragma unroll
    for (int c = 0; c < kElemsPerVec; c++) sum[c] = __fadd_rn(sum[c], term[c]);
}

CUEP_DEVICE void add(float (&sum)[kElemsPerVec], uint4 vec) {
    float term[kElemsPerVec];
    unpack<elem_t>(vec, term);
    add(sum, term);
}

// Adds what is to be added to a finished sum, rounds once and writes.
template <class Params>
CUEP_DEVICE void write_sum(const Params& p, int64_t t, int piece, float (&sum)[kElemsPerVec]) {
#pragma unroll
    for (int b = 0; b < 2; b++) {
        if (p.bias[b] == nullptr) continue;
        add(sum, load_piece(reinterpret_cast<const uint4*>(p.bias[b] + t * p.bias_stride[b]), piece));
    }
    store_piece(reinterpret_cast<uint4*>(p.y + t * p.y_stride), piece, pack<elem_t>(sum));
}

// The kernel, but for what the forms do differently.
//   look_up(answer): loads that tell where the row, or rows, of an answer lie
//   show(answer): what they tell, by the first warp, for all behind a barrier
//   send(op, bank, most, answer): all that this block sends, from that answer on
//   look_up_term(t, term), follow(term): loads, and loads that need those, of what can be known of a token that is
//     summed before its rows are there
//   prepare(bank, t, term): what comes of them, for all behind a barrier
//   sum(op, bank, t, term): y[t], waiting for its rows. False: gave up.
template <class Params, class LookUp, class Show, class Send, class LookUpTerm, class Follow, class Prepare, class Sum>
CUEP_DEVICE void combine(const Params& p,
                         bool is_weighted,
                         LookUp look_up,
                         Show show,
                         Send send,
                         LookUpTerm look_up_term,
                         Follow follow,
                         Prepare prepare,
                         Sum sum) {
    __shared__ Totals totals;
    begin_launch(p);

    // loads first, side by side; then what is made of them. What a dispatch that timed out has left is read, not
    // followed.
    const uint32_t refused = p.state->refused;
    const Operation op = begin_phase(p, Op::kCombine);
    const Standing standing = standing_of(p, op);
    const bool is_off = is_over(p, op);
    const bool is_sender = p.is_send && !p.is_refused;
    const int num_rows = p.is_refused || !p.is_receive ? 0 : p.num_tokens;
    const int first_token = first_to_receive();
    Answer answer;
    answer.unit = team();
    bool is_any = is_sender && place_unit(p, p.max_tokens, answer);
    if (is_any) look_up(answer);
    Term term;
    if (first_token < num_rows) look_up_term(first_token, term);
    const int count = p.is_refused ? 0 : kept_tokens_of(p);
    const int most = is_sender ? most_received(p) : 0;
    if (first_token < num_rows) follow(term);
    drop_inactive(op, term);
    const int bank = bank_of(p, op);
    if (is_any && !is_row(p, answer)) {
        is_any = find_answer(p, most, answer);
        if (is_any) look_up(answer);
    }
    if (is_any) show(answer);

    if (is_skipped(p, Op::kCombine, refused != 0)) return;

    // the bank must have been read by every peer before it is written again
    const Bank found = wait_bank<true>(p, op, bank, standing, is_off);
    if (found == Bank::kStop) return;
    if (found == Bank::kTaken) return refuse_combine(p);
    const bool is_last_begun = p.is_send && is_last_to_begin(op);

    // send all that this block owes before it waits for rows
    if (p.is_send) {
        if (is_clerk()) publish_totals(p, op, bank, standing, is_weighted);
        if (is_any) send(op, bank, most, answer);
    }

    // every rank says how much it sends, or that it refused; then the sums, token by token as they arrive
    Verdict verdict{-1, Cause::kCall};
    if (p.is_receive) {
        if (first_token < count) prepare(bank, first_token, term);
        if (!wait_totals(p, op, bank, true, totals)) return;
        verdict = verdict_of(p, op, totals);
        const int num_tokens = verdict.refused_by < 0 ? count : 0;
        for (int t = first_token; t < num_tokens; t += num_teams()) {
            if (t != first_token) {
                term = Term();
                look_up_term(t, term);
                follow(term);
                drop_inactive(op, term);
                __syncthreads();  // the one before is summed
                prepare(bank, t, term);
                __syncthreads();
            }
            if (!sum(op, bank, t, term)) return;
        }
    }
    end_launch(p, op, bank, is_last_begun, totals, [&] {
        if (p.is_receive && verdict.refused_by < 0) p.state->is_unread = 0;  // all ranks have sent what they made of it
        if (verdict.refused_by >= 0) mark_refused(p, Op::kCombine, verdict.refused_by, verdict.cause);
    });
}

}  // namespace cuep
