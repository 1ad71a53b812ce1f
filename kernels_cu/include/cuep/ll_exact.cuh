// What the exact combine kernels share: every (token, k) row goes home by itself, and the token's owner adds weight *
// row in order of k in fp32. Made of the kernel's constants: include it behind them.
#pragma once
#include <cuep/ll_combine.cuh>

namespace cuep {

constexpr int kMostRowsInFlight = kIsLine && kPiecesPerThread == 1 ? 8 : 4;
constexpr int kRowsInFlight = kNumTopk < kMostRowsInFlight ? kNumTopk : kMostRowsInFlight;  // loaded before stored

struct Shared {
    const uint4* answer_rows[kNumTopk];  // of the received token that is being answered, null where it has none here
    const uint4* terms[kNumTopk];        // of the token that is being summed, null where it has none
    float weights[kNumTopk];
    int32_t owner[kNumTopk];  // rank whose expert it is
    uint32_t own_terms;       // bit k: that term is a row of this rank's experts
    uint32_t peer_terms;      // of a peer's
};

// Pieces of an answer's rows that this thread has loaded: of kRowsInFlight rows.
using Loaded = uint4[kRowsInFlight][kPiecesPerThread];

template <class Params>
CUEP_DEVICE void look_up(const Params& p, Answer& answer) {
    answer.token = p.token_idx[answer.at];
    if (threadIdx.x < kNumTopk) answer.row = p.row_idx[answer.at * kNumTopk + threadIdx.x];
}

template <class Params>
CUEP_DEVICE void show(const Params& p, const Answer& answer, Shared& s) {
    const int k = threadIdx.x;
    if (k < kNumTopk) s.answer_rows[k] = answer.row < 0 ? nullptr : expert_row(p, answer.row);
}

// Rows of k = first, first + 1, ...
CUEP_DEVICE void load_rows(int first, const Shared& s, Loaded& loaded) {
#pragma unroll
    for (int i = 0; i < kRowsInFlight; i++) {
        if (first + i >= kNumTopk) continue;
        const uint4* row = s.answer_rows[first + i];
        if (row == nullptr) continue;
#pragma unroll
        for (int j = 0; j < kPiecesPerThread; j++) {
            if (piece_at(j) < kNumPieces) loaded[i][j] = load_piece(row, piece_at(j));
        }
    }
}

// All answers of a block, from `answer` on, whose rows are known. The first rows of the next one are loaded before
// end(answer) says that one is sent. store(answer, k, pieces): a row home.
template <class Params, class Store, class End>
CUEP_DEVICE void send_answers(const Params& p, int most, Answer& answer, Shared& s, Store store, End end) {
    Loaded loaded;
    load_rows(0, s, loaded);
    for (bool is_any = true; is_any;) {
#pragma unroll 1
        for (int first = 0; first < kNumTopk; first += kRowsInFlight) {
            if (first > 0) load_rows(first, s, loaded);
#pragma unroll
            for (int i = 0; i < kRowsInFlight; i++) {
                if (first + i < kNumTopk && s.answer_rows[first + i] != nullptr) store(answer, first + i, loaded[i]);
            }
        }
        const Answer sent = answer;
        answer.unit += num_teams();
        is_any = find_answer(p, most, answer);
        __syncthreads();
        if (is_any) {
            look_up(p, answer);
            show(p, answer, s);
            __syncthreads();
            load_rows(0, s, loaded);
        }
        end(sent);
    }
}

template <class Params>
CUEP_DEVICE void look_up_term(const Params& p, int t, Term& term) {
    const int k = threadIdx.x;
    if (k >= kNumTopk) return;
    term.expert = p.ids[t * kNumTopk + k];
    term.own_slot = p.own_slot[t];
    if (p.weights != nullptr) term.weight = p.weights[t * kNumTopk + k];
}

template <class Params>
CUEP_DEVICE void follow(const Params& p, Term& term) {
    const int64_t own = own_row_of(p, term);
    if (threadIdx.x < kNumTopk && own >= 0) term.own_row = p.row_idx[own * kNumTopk + threadIdx.x];
}

// Where the terms of a token are, for all behind a barrier; home(k): of a peer's.
template <class Params, class Home>
CUEP_DEVICE void find_terms(const Params& p, Term& term, Shared& s, Home home) {
    if (warp_idx() != 0) return;
    find_ranks(term);
    const int k = threadIdx.x;
    const bool is_own = term.expert >= 0 && term.expert / kNumLocalExperts == p.rank;
    const uint32_t own_terms = __ballot_sync(0xffffffffu, is_own);
    const uint32_t peer_terms = __ballot_sync(0xffffffffu, term.expert >= 0 && !is_own);
    if (k < kNumTopk) {
        s.terms[k] = term.expert < 0 ? nullptr : is_own ? expert_row(p, term.own_row) : home(k);
        s.weights[k] = term.weight;
        s.owner[k] = term.expert / kNumLocalExperts;
    }
    if (k == 0) s.own_terms = own_terms;
    if (k == 0) s.peer_terms = peer_terms;
}

}  // namespace cuep
