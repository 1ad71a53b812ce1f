// What the per_rank combine kernels share: each rank sends one row per token home, the sum over its own experts or,
// rank-major, the caller's row; the owner adds the ranks' rows in order of rank in fp32. Made of the kernel's
// constants: include it behind them.
#pragma once
#include <cuep/ll_combine.cuh>

namespace cuep {

constexpr int kRanksInFlight = kNumRanks < 8 ? kNumRanks : 8;  // rows of ranks that a thread loads before it adds

// This rank's part of a token's sum: where its terms are. rank-major: rows[0] alone.
struct Partial {
    const uint4* rows[kNumTopk];  // null where there is none
    float weights[kNumTopk];
};

struct Shared {
    Partial answer;                // of the received token that is being answered
    Partial own;                   // of the token that is being summed
    const uint4* rows[kNumRanks];  // its rows of the peers, null where there is none
    bool has_own;
};

// By the first warp; the others know it behind a barrier. row, weight: of k = threadIdx.x, expert-major; at: of the
// received row, src * max_tokens + slot.
template <class Params>
CUEP_DEVICE void show_partial(const Params& p, int64_t at, int32_t row, float weight, Partial& partial) {
    const int tid = threadIdx.x;
    if constexpr (kIsRankMajor) {
        if (tid == 0) partial.rows[0] = expert_row(p, at);
    } else if (tid < kNumTopk) {
        partial.rows[tid] = row < 0 ? nullptr : expert_row(p, row);
        partial.weights[tid] = weight;
    }
}

// A piece of this rank's part in fp32, expert-major.
struct Sums {
    float v[kElemsPerVec];
};

CUEP_DEVICE void make_part(const Partial& partial, int piece, Sums& part) {
    float (&sum)[kElemsPerVec] = part.v;
#pragma unroll
    for (int i = 0; i < kElemsPerVec; i++) sum[i] = 0.0f;
#pragma unroll
    for (int first = 0; first < kNumTopk; first += kTermsInFlight) {
        uint4 v[kTermsInFlight];
#pragma unroll
        for (int i = 0; i < kTermsInFlight; i++) {
            if (first + i < kNumTopk && partial.rows[first + i] != nullptr) {
                v[i] = load_piece(partial.rows[first + i], piece);
            }
        }
#pragma unroll
        for (int i = 0; i < kTermsInFlight; i++) {
            if (first + i < kNumTopk && partial.rows[first + i] != nullptr) {
                add_weighted(sum, partial.weights[first + i], v[i]);
            }
        }
    }
}

// The same, rounded to elem_t, or, rank-major, of the caller's row.
CUEP_DEVICE void make_part(const Partial& partial, int piece, uint4& part) {
    if constexpr (kIsRankMajor) {
        part = load_piece(partial.rows[0], piece);
    } else {
        Sums sums;
        make_part(partial, piece, sums);
        part = pack<elem_t>(sums.v);
    }
}

// Where this thread's k of a received row has its gradient, -1 if it is not served here.
template <class Params>
CUEP_DEVICE int64_t grad_row(const Params& p, int64_t at) {
    const int64_t i = at * kNumTopk + threadIdx.x;
    if constexpr (kIsRankMajor) return p.recv_topk_idx[i] < 0 ? -1 : i;
    return p.row_idx[i];
}

template <class Params>
CUEP_DEVICE void look_up(const Params& p, Answer& answer) {
    answer.token = p.token_idx[answer.at];
    if (kIsRankMajor || threadIdx.x >= kNumTopk) return;
    const int64_t at = answer.at * kNumTopk + threadIdx.x;
    answer.row = p.row_idx[at];
    answer.weight = p.is_weighted ? p.recv_weights[at] : 1.0f;
}

template <class Params>
CUEP_DEVICE void show(const Params& p, const Answer& answer, Shared& s) {
    show_partial(p, answer.at, answer.row, answer.weight, s.answer);
}

// This thread's pieces of an answer: uint4 or Sums.
template <class Part>
CUEP_DEVICE void load_part(const Shared& s, Part (&part)[kPiecesPerThread]) {
#pragma unroll kIsRankMajor ? kPiecesPerThread : 1
    for (int j = 0; j < kPiecesPerThread; j++) {
        if (piece_at(j) < kNumPieces) make_part(s.answer, piece_at(j), part[j]);
    }
}

// All answers of a block, from `answer` on, whose rows are known. The next part is made before end(answer) says that
// one is sent. store(answer, part): a row home.
template <class Part = uint4, class Params, class Store, class End>
CUEP_DEVICE void send_answers(const Params& p, int most, Answer& answer, Shared& s, Store store, End end) {
    Part part[kPiecesPerThread];
    load_part(s, part);
    for (bool is_any = true; is_any;) {
        store(answer, part);
        const Answer sent = answer;
        answer.unit += num_teams();
        is_any = find_answer(p, most, answer);
        __syncthreads();
        if (is_any) {
            look_up(p, answer);
            show(p, answer, s);
            __syncthreads();
            load_part(s, part);
        }
        end(sent);
    }
}

template <class Params>
CUEP_DEVICE void look_up_term(const Params& p, int t, Term& term) {
    if (threadIdx.x < kNumTopk) term.expert = p.ids[t * kNumTopk + threadIdx.x];
    term.own_slot = p.own_slot[t];
}

template <class Params>
CUEP_DEVICE void follow(const Params& p, Term& term) {
    const int64_t own = own_row_of(p, term);
    if (kIsRankMajor || threadIdx.x >= kNumTopk || own < 0) return;
    term.own_row = p.row_idx[own * kNumTopk + threadIdx.x];
    term.weight = p.is_weighted ? p.recv_weights[own * kNumTopk + threadIdx.x] : 1.0f;
}

// Where the rows of a token are, for all behind a barrier; home(rank): of a peer's.
template <class Params, class Home>
CUEP_DEVICE void find_rows(const Params& p, Term& term, Shared& s, Home home) {
    if (warp_idx() != 0) return;
    find_ranks(term);
    const int tid = threadIdx.x;
    const bool is_own = (term.rank_mask >> p.rank & 1u) != 0;
    if (tid < kNumRanks) s.rows[tid] = tid != p.rank && (term.rank_mask >> tid & 1u) ? home(tid) : nullptr;
    if (tid == 0) s.has_own = is_own;
    if (is_own) show_partial(p, own_row_of(p, term), term.own_row, term.weight, s.own);
}

// A piece of a token's sum. load(first, piece, v): of the rows of kRanksInFlight ranks from `first` on. False: load
// gave up. add_peer(sum, v): adds what was loaded.
template <class Piece, class Params, class Load, class AddPeer>
CUEP_DEVICE bool add_ranks(
    const Params& p, const Shared& s, int piece, float (&sum)[kElemsPerVec], Load load, AddPeer add_peer) {
    bool is_ok = true;
    uint4 own = make_uint4(0, 0, 0, 0);
#pragma unroll
    for (int i = 0; i < kElemsPerVec; i++) sum[i] = 0.0f;
#pragma unroll 1
    for (int first = 0; first < kNumRanks; first += kRanksInFlight) {
        Piece v[kRanksInFlight];
        if (first == 0 && s.has_own) make_part(s.own, piece, own);
        is_ok &= load(first, piece, v);
#pragma unroll
        for (int i = 0; i < kRanksInFlight; i++) {
            const int r = first + i;
            if (r >= kNumRanks) continue;
            if (s.rows[r] != nullptr) {
                add_peer(sum, v[i]);
            } else if (r == p.rank && s.has_own) {
                add(sum, own);
            }
        }
    }
    return is_ok;
}

}  // namespace cuep
