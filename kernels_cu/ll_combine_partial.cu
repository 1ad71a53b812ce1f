// Low-latency combine, per_rank. Each rank sends one row per token home, into its slot at the token's owner, with a
// flag: in rank-major the caller's row as it is; in expert-major the sum of weight * row over this rank's experts, in
// order of k in fp32, rounded once. The owner waits for the ranks of one token at a time and adds their rows, its own
// among them, in order of rank in fp32. Cost: one row over the link per (token, rank), as it is or encoded
// (ll_home.cuh); a sum is encoded as it is in fp32, without being rounded first.
// serves: reduce=per_rank
#include <cuep/base.cuh>
#include <cuep/sync.cuh>
#include <cuep/convert.cuh>
#include <cuep/operation.cuh>

#ifndef CUEP_JIT  // values for editors; cuep/jit.py gives the real ones
constexpr int kNumRanks = 4, kNumExperts = 256, kNumTopk = 8, kRowBytes = 14336, kNumThreads = 448, kMinBlocks = 1;
constexpr bool kIsRankMajor = false;
constexpr int kCombineCodec = 0, kSentBytes = 14336;  // how rows go home, and what of a slot is theirs
using elem_t = cuep::bf16_t;
constexpr bool kHasLineSlots = false, kHasMask = false, kHasStats = false;
#endif
// compile: kNumRanks=4 kNumExperts=256 kNumTopk=8 kRowBytes=14336 kCombineCodec=0 kSentBytes=14336 kIsRankMajor=false elem_t=cuep::bf16_t kHasLineSlots=false kHasMask=false kHasStats=false
// compile: kNumRanks=4 kNumExperts=256 kNumTopk=8 kRowBytes=14336 kCombineCodec=0 kSentBytes=14336 kIsRankMajor=true elem_t=cuep::bf16_t kHasLineSlots=false kHasMask=true kHasStats=false
// compile: kNumRanks=2 kNumExperts=8 kNumTopk=3 kRowBytes=528 kCombineCodec=0 kSentBytes=528 kIsRankMajor=false elem_t=float kHasLineSlots=false kHasMask=false kHasStats=true
// compile: kNumRanks=4 kNumExperts=256 kNumTopk=8 kRowBytes=14336 kCombineCodec=1 kSentBytes=9408 kIsRankMajor=false elem_t=cuep::bf16_t kHasLineSlots=false kHasMask=true kHasStats=true
// compile: kNumRanks=4 kNumExperts=256 kNumTopk=8 kRowBytes=14336 kCombineCodec=1 kSentBytes=9408 kIsRankMajor=true elem_t=cuep::bf16_t kHasLineSlots=false kHasMask=false kHasStats=false
// compile: kNumRanks=4 kNumExperts=256 kNumTopk=8 kRowBytes=14336 kCombineCodec=2 kSentBytes=7392 kIsRankMajor=true elem_t=cuep::bf16_t kHasLineSlots=false kHasMask=true kHasStats=false
// compile: kNumRanks=2 kNumExperts=8 kNumTopk=3 kRowBytes=1536 kCombineCodec=2 kSentBytes=400 kIsRankMajor=false elem_t=float kHasLineSlots=false kHasMask=false kHasStats=true
CUEP_TUNABLE(kNumThreads, 448, 64);
CUEP_TUNABLE(kMinBlocks, 1, 1);  // resident on one multiprocessor
constexpr bool kIsLine = false;
static_assert(kIsLine == kHasLineSlots, "cuep/layout.py lays out slots of lines for variants named line...");
constexpr int kParts = 1;
#include <cuep/ll_partial.cuh>
#include <cuep/ll_home.cuh>

using namespace cuep;

struct Params {
    uint8_t* arena[kNumRanks];  // symmetric memory of every rank; offsets below are bytes into it
    int64_t rows_offset;    // [num_banks, kNumRanks - 1, max_tokens] slots; rank s is at (s - rank - 1) mod kNumRanks
    int64_t flags_offset;   // uint64 [num_banks, kNumRanks, max_tokens]: epoch
    int64_t totals_offset;  // uint64 [num_banks, kNumRanks]: epoch, kind of call or kRefused
    int64_t done_offset;    // uint64 [num_banks, kNumRanks]: epoch that this peer has read
    int64_t mask_offset;    // MaskWords [kNumRanks] and the number of exclusions, with a mask
    int64_t grads_offset;   // float [num_banks, max_tokens, kNumTopk]
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

// A piece as it is sent: 16 bytes, or a sum that is to be encoded.
template <bool kIsSum>
struct PartOf {
    using type = uint4;
};
template <>
struct PartOf<true> {
    using type = Sums;
};
using Part = PartOf<!kIsRankMajor && kCombineCodec != kNoCodec>::type;

CUEP_DEVICE void store_part(uint4* slot, int piece, const uint4& part) {
    store_home(slot, piece, part);
}

template <int kCodec = kCombineCodec>
CUEP_DEVICE void store_part(uint4* slot, int piece, const Sums& part) {
    float values[kElemsPerVec];
#pragma unroll
    for (int i = 0; i < kElemsPerVec; i++) values[i] = piece < kNumPieces ? part.v[i] : 0.0f;
    store_values<kCodec>(slot, piece, values);
}

CUEP_DEVICE void send(const Params& p, const Operation& op, int bank, int most, Answer& answer, Shared& s) {
    const int tid = threadIdx.x;
    send_answers<Part>(
        p,
        most,
        answer,
        s,
        [&](const Answer& to, const Part(&part)[kPiecesPerThread]) {
            if (is_fenced(p, op)) return;
            uint4* home = staged_row<kSentBytes>(p, to.src, bank, p.rank, to.token);
#pragma unroll
            for (int j = 0; j < kPiecesPerThread; j++) store_part(home, piece_at(j), part[j]);
            if (p.row_weight_grads != nullptr && tid < kNumTopk) {
                send_grad(p, to.src, bank, to.token, grad_row(p, to.at));
            }
        },
        [&](const Answer& sent) {          // behind a barrier; pairs with wait_ranks
            if (is_fenced(p, op)) return;  // then rows may have been left out
            if (tid == 0) st_release_sys(flag_of(p, sent.src, bank, p.rank, sent.token), tagged(op, 0));
        });
}

// y[t]: waits for the ranks that answer token t, then adds in order of rank. False: gave up.
CUEP_DEVICE bool sum_token(const Params& p, const Operation& op, int bank, int t, const Term& term, Shared& s) {
    const int tid = threadIdx.x;
    if (!wait_ranks(p, op, bank, t, term)) return false;
    if (p.weight_grads != nullptr && tid < kNumTopk) {
        take_grad(p, bank, t, term, s.has_own ? grad_row(p, own_row_of(p, term)) : -1);
    }
#pragma unroll 1
    for (int vec = tid; vec < kRowVecs; vec += kNumThreads) {
        float sum[kElemsPerVec];
        auto load = [&](int first, int piece, HomePiece(&v)[kRanksInFlight]) {
#pragma unroll
            for (int i = 0; i < kRanksInFlight; i++) {
                const int r = first + i;
                if (r < kNumRanks && s.rows[r] != nullptr) load_home(s.rows[r], piece, false, v[i]);
            }
            return true;
        };
        add_ranks<HomePiece>(p, s, vec, sum, load, [](float (&to)[kElemsPerVec], const HomePiece& v) {
            float term[kElemsPerVec];
            values_of(v, false, term);
            add(to, term);
        });
        write_sum(p, t, vec, sum);
    }
    return true;
}

extern "C" __global__ void __launch_bounds__(kNumThreads, kMinBlocks)
    ll_combine_partial(const __grid_constant__ Params p) {
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
            find_rows(p, term, s, [&](int rank) { return staged_row<kSentBytes>(p, p.rank, bank, rank, t); });
        },
        [&](const Operation& op, int bank, int t, const Term& term) { return sum_token(p, op, bank, t, term, s); });
}
