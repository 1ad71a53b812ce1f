// What high-throughput combines share: rows come home to the owners of the tokens, one per (token, rank). Push warps
// store them into the owner's staging, each with its flag; sum warps add up this rank's own tokens as their rows
// arrive: fp32, in order of rank, then bias, rounded once. A kernel says how it makes a row that it pushes, and where
// its own term of a sum is. (Combines whose rows owners pull, or copy engines bring, have the words and the sums of it,
// nothing else.)
//
// A release waits for all that is under way to the peers, which takes several microseconds where much is. So flags may
// have a warp of their own (kNumTellWarps): then the warps that push go on, and rows that are there share a release.
#pragma once
#include <cuep/base.cuh>
#include <cuep/sync.cuh>
#include <cuep/bulk.cuh>
#include <cuep/convert.cuh>
#include <cuep/operation.cuh>
#include <cuep/ht_walk.cuh>

namespace cuep {

constexpr uint32_t kUnweighted = 1u << 29;  // in a word of totals: this rank applies no weights
constexpr uint32_t kHasGrads = 1u << 30;    // in a word of totals: gradients of weights come with the rows

// Of a push warp: the rows that it has brought home, for the warp that tells their owners, if there is one.
template <bool kHasTeller>
struct Brought {
    uint32_t* count;  // shared memory
    uint32_t num_rows = 0;

    // One more is there, with all that belongs to it. release(): tells its owner. The whole warp calls.
    template <class Release>
    CUEP_DEVICE void note(Release release) {
        __syncwarp();  // what all lanes stored is released by one
        num_rows++;
        if (lane_idx() != 0) return;
        if constexpr (kHasTeller) {
            st_release_block(count, num_rows);  // pairs with the wait in tell
        } else {
            release();  // pairs with the wait in sum_token
        }
    }
};

// E: element type. kIsOwnStaged: a rank's rows for its own tokens go through staging, too.
template <int kRanks, int kExpertsPerRank, int kTopk, int kBytes, class E, bool kIsOwnStaged>
struct Home {
    static constexpr int kNumDsts = kIsOwnStaged ? kRanks : kRanks - 1;  // that a rank pushes to, and is pushed to by
    using Walk = PeerWalk<kRanks, kNumDsts>;                             // of a push warp over what it answers
    static constexpr int kElemsPerVec = kPerVec<E>;
    static constexpr int kRowVecs = kBytes / 16;
    static constexpr int kRanksInFlight = kRanks < 8 ? kRanks : 8;  // rows that a lane of a sum warp reads at once
    static constexpr int kVecsInFlight = kRanksInFlight <= 2 ? 4 : kRanksInFlight <= 4 ? 3 : 2;  // pieces of each
    // Where all 32 warps of a block sum: as many as they have registers for, eight loads of a lane.
    static constexpr int kVecsOfManyWarps = kRanksInFlight >= 8 ? 1 : 8 / kRanksInFlight;

    // Which of rank dst's arrays of staging holds what rank src pushes.
    template <class Params>
    static CUEP_DEVICE int64_t staged_index(const Params& p, int dst, int src, int64_t slot) {
        return static_cast<int64_t>((src - dst - 1 + kRanks) % kRanks) * p.max_tokens + slot;
    }

    // Row of source rank src's answer to its slot-th token of rank dst, in dst's staging.
    template <class Params>
    static CUEP_DEVICE uint8_t* staged_row(const Params& p, int dst, int src, int64_t slot) {
        return p.arena[dst] + p.rows_offset + staged_index(p, dst, src, slot) * kBytes;
    }

    // The kTopk gradients that go with it.
    template <class Params>
    static CUEP_DEVICE float* staged_grads(const Params& p, int dst, int src, int64_t slot) {
        return reinterpret_cast<float*>(p.arena[dst] + p.grads_offset) + staged_index(p, dst, src, slot) * kTopk;
    }

    template <class Params>
    static CUEP_DEVICE uint64_t* flag_of(const Params& p, int dst, int src, int64_t slot) {
        return reinterpret_cast<uint64_t*>(p.arena[dst] + p.flags_offset) + int64_t{src} * p.max_tokens + slot;
    }

    template <class Params>
    static CUEP_DEVICE uint64_t* total_of(const Params& p, int dst, int src) {
        return reinterpret_cast<uint64_t*>(p.arena[dst] + p.totals_offset) + src;
    }

    template <class Params>
    static CUEP_DEVICE uint64_t* done_of(const Params& p, int dst, int reader) {
        return reinterpret_cast<uint64_t*>(p.arena[dst] + p.done_offset) + reader;
    }

    // The rank that keeps this combine from being one, and why, or {-1}.
    struct Verdict {
        int refused_by;
        Cause own_cause;
    };

    static CUEP_DEVICE bool is_all_or_none(uint32_t ranks) {
        return ranks == 0 || ranks == 0xffffffffu >> (32 - kRanks);
    }

    // From what every rank published; lane r has rank r's word. The whole warp calls.
    template <class Params>
    static CUEP_DEVICE Verdict judge(const Params& p, bool is_refused, uint32_t total) {
        const int lane = lane_idx();
        const uint32_t refusing = __ballot_sync(0xffffffffu, lane < kRanks && total == kRefused);
        const uint32_t with_grads = __ballot_sync(0xffffffffu, lane < kRanks && (total & kHasGrads) != 0);
        const uint32_t unweighted = __ballot_sync(0xffffffffu, lane < kRanks && (total & kUnweighted) != 0);
        if (is_refused) return {p.rank, Cause::kTooFewRows};
        if (refusing != 0) return {__ffs(static_cast<int>(refusing)) - 1, Cause::kCall};
        if (!is_all_or_none(with_grads)) return {p.rank, Cause::kGradsDiffer};
        return {is_all_or_none(unweighted) ? -1 : p.rank, Cause::kWeightsDiffer};
    }

    // y = the sum of a token's terms, of rank 0 first, and its biases; null: there is none. The whole warp calls.
    // kVecs: pieces of each that a lane has under way.
    template <int kVecs>
    static CUEP_DEVICE void sum_terms(const uint4* const (&terms)[kRanks], const uint4* const (&biases)[2], uint4* y) {
        for (int first_vec = lane_idx(); first_vec < kRowVecs; first_vec += 32 * kVecs) {
            float sum[kVecs][kElemsPerVec] = {};
#pragma unroll
            for (int first = 0; first < kRanks; first += kRanksInFlight) {
                uint4 v[kRanksInFlight][kVecs];
#pragma unroll
                for (int i = 0; i < kRanksInFlight; i++) {
                    if (first + i >= kRanks || terms[first + i] == nullptr) continue;
#pragma unroll
                    for (int j = 0; j < kVecs; j++) {
                        if (first_vec + 32 * j < kRowVecs) v[i][j] = load_16(terms[first + i] + first_vec + 32 * j);
                    }
                }
#pragma unroll
                for (int j = 0; j < kVecs; j++) {  // one piece after the other, so few sums need registers
                    const int vec = first_vec + 32 * j;
                    if (vec >= kRowVecs) break;
#pragma unroll
                    for (int i = 0; i < kRanksInFlight; i++) {
                        if (first + i < kRanks && terms[first + i] != nullptr) add(sum[j], v[i][j]);
                    }
                    if (first + kRanksInFlight < kRanks) continue;
#pragma unroll
                    for (int b = 0; b < 2; b++) {
                        if (biases[b] != nullptr) add(sum[j], load_16(biases[b] + vec));
                    }
                    store_16(y + vec, pack<E>(sum[j]));
                }
            }
        }
    }

    // y[t] and weight_grads[t]. own_row(row): this rank's own term; own_grad(row, k). The whole warp calls; false: gave
    // up.
    template <class Params, class OwnRow, class OwnGrad>
    static CUEP_DEVICE bool sum_token(const Params& p, const Operation& op, int t, OwnRow own_row, OwnGrad own_grad) {
        const int lane = lane_idx();
        bool is_ok = true;
        const int32_t lane_row = row_of_lane<kRanks>(p, t);
        const int32_t slot = lane < kRanks ? lane_row - p.send_base[lane] : 0;
        if (lane_row >= 0 && (kIsOwnStaged || lane != p.rank)) {
            uint32_t unused = 0;
            is_ok = wait_flag(op, flag_of(p, p.rank, lane, slot), Phase::kRows, lane, unused);
        }
        if (!__all_sync(0xffffffffu, is_ok)) return false;
        __syncwarp();  // a vote orders no memory: now every lane may read what one lane has waited for
        add_up<kVecsInFlight>(p, t, lane_row, slot, own_row, own_grad);
        return true;
    }

    // The same when its rows are here. lane_row: row_of_lane; slot: of lane r, where rank r's row is in staging.
    template <int kVecs, class Params, class OwnRow, class OwnGrad>
    static CUEP_DEVICE void add_up(
        const Params& p, int t, int32_t lane_row, int32_t slot, OwnRow own_row, OwnGrad own_grad) {
        const uint4* terms[kRanks];  // null: this rank has none of the token's experts
#pragma unroll
        for (int r = 0; r < kRanks; r++) {
            const int32_t row = __shfl_sync(0xffffffffu, lane_row, r), at = __shfl_sync(0xffffffffu, slot, r);
            const uint8_t* term = !kIsOwnStaged && r == p.rank ? own_row(row) : staged_row(p, p.rank, r, at);
            terms[r] = row < 0 ? nullptr : reinterpret_cast<const uint4*>(term);
        }
        store_sums<kVecs>(p, t, terms);
        store_grads(p, t, lane_row, [&](int owner, int32_t row) {
            const int32_t at = __shfl_sync(0xffffffffu, slot, owner);
            if (row < 0) return 0.0f;
            return owner == p.rank ? own_grad(row, lane_idx()) : staged_grads(p, p.rank, owner, at)[lane_idx()];
        });
    }

    // y[t] from a token's terms, see sum_terms. The whole warp calls.
    template <int kVecs, class Params>
    static CUEP_DEVICE void store_sums(const Params& p, int t, const uint4* const (&terms)[kRanks]) {
        uint4* y = reinterpret_cast<uint4*>(p.y + t * p.y_stride);
        if (p.bias[0] == nullptr) {  // without biases there are registers for more of a row
            sum_terms<kVecs>(terms, {nullptr, nullptr}, y);
            return;
        }
        const uint4* biases[2];
#pragma unroll
        for (int b = 0; b < 2; b++) {
            biases[b] =
                p.bias[b] == nullptr ? nullptr : reinterpret_cast<const uint4*>(p.bias[b] + t * p.bias_stride[b]);
        }
        sum_terms<kVecs>(terms, biases, y);
    }

    // weight_grads[t], if asked for. grad_of(owner, row): of this lane's k, whose expert is at rank `owner`, where the
    // token has this row, or -1. lane_row: row_of_lane. The whole warp calls.
    template <class Params, class GradOf>
    static CUEP_DEVICE void store_grads(const Params& p, int t, int32_t lane_row, GradOf grad_of) {
        if (p.row_weight_grads == nullptr) return;
        const int lane = lane_idx();
        const int32_t id = lane < kTopk ? p.ids[static_cast<int64_t>(t) * kTopk + lane] : -1;
        const int owner = id < 0 ? 0 : id / kExpertsPerRank;
        const int32_t row = __shfl_sync(0xffffffffu, lane_row, owner);
        const float grad = grad_of(owner, id < 0 ? -1 : row);
        if (lane < kTopk) p.weight_grads[static_cast<int64_t>(t) * kTopk + lane] = grad;
    }

    // Releases the flags of rows that push warps have brought; lane w follows the walk of warp w. The whole warp calls.
    template <int kNumPushWarps, class Params>
    static CUEP_DEVICE void tell(const Params& p,
                                 const Operation& op,
                                 const int32_t* recv_base,
                                 const uint32_t* brought) {
        const bool has_warp = lane_idx() < kNumPushWarps;
        Walk walk(p.rank, recv_base, has_warp ? lane_idx() : 0, kNumPushWarps);
        uint32_t num_told = 0;
        while (__any_sync(0xffffffffu, has_warp && !walk.is_over())) {
            const uint32_t num_brought = has_warp ? ld_acquire_block(brought + lane_idx()) : 0;
            if (!__any_sync(0xffffffffu, num_brought != num_told)) {
                relax_warp();
                continue;
            }
            fence_acq_rel_sys();  // with the stores behind it a release; pairs with the wait in sum_token
            for (; num_told != num_brought; num_told++, walk.advance()) {
                st_relaxed_sys(flag_of(p, walk.peer(), p.rank, walk.slot()), tagged(op, 0));
            }
        }
        end_polling();
    }

    static CUEP_DEVICE void add(float (&sum)[kElemsPerVec], uint4 vec) {
        float term[kElemsPerVec];
        unpack<E>(vec, term);
#pragma unroll
        for (int c = 0; c < kElemsPerVec; c++) sum[c] = __fadd_rn(sum[c], term[c]);
    }

    // The whole operation. num_needed: rows that expert_out must have. push(op, recv_base, warp, brought) pushes a
    // warp's share.
    template <int kNumPushWarps,
              int kNumTellWarps,
              int kNumSumWarps,
              class Params,
              class Push,
              class OwnRow,
              class OwnGrad>
    static CUEP_DEVICE void combine(
        const Params& p, int32_t num_needed, bool is_weighted, Push push, OwnRow own_row, OwnGrad own_grad) {
        static_assert((kNumPushWarps + kNumSumWarps) * 32 > kRanks, "one thread for each rank, and one for the sum");
        static_assert(kNumPushWarps <= 32 && kNumTellWarps <= 1, "a lane for each push warp");
        static_assert(kNumPushWarps > 0 && kNumSumWarps > 0, "somebody pushes, and somebody adds up");
        __shared__ uint32_t brought[kNumPushWarps];
        __shared__ int32_t recv_base[kRanks + 1];
        __shared__ Verdict verdict;
        const int tid = threadIdx.x, warp = warp_idx();
        const bool is_refused = p.is_refused || num_needed > p.num_rows;  // of this rank
        const Operation op = begin_operation(p, Op::kCombine);
        if (tid <= kRanks) recv_base[tid] = p.recv_base[tid];
        if (tid < kNumPushWarps) brought[tid] = 0;

        // staging must have been read by its owners before it is written again
        const bool is_off = is_broken(op);
        bool is_ok = true;
        if (tid < kRanks && tid != p.rank) is_ok = wait_bank_free(op, done_of(p, p.rank, tid), 1, tid);
        if (block_any(!is_ok || is_off)) return;
        fence_proxy_async();  // what peers read from staging comes before the bulk copies that write it
        if (blockIdx.x == 0 && tid < kRanks) {  // pairs with the wait for totals below
            const uint32_t flags = (p.row_weight_grads ? kHasGrads : 0) | (is_weighted ? 0 : kUnweighted);
            const uint32_t num_rows = static_cast<uint32_t>(recv_base[tid + 1] - recv_base[tid]);
            st_relaxed_sys(total_of(p, tid, p.rank), tagged(op, is_refused ? kRefused : num_rows | flags));
        }

        // push warps send all they owe and wait for nobody; sum warps first hear from every rank
        constexpr bool kHasTeller = kNumTellWarps > 0;
        if (warp < kNumPushWarps + kNumTellWarps) {
            if constexpr (kNumDsts > 0) {
                if (warp < kNumPushWarps && !is_refused) push(op, recv_base, warp, Brought<kHasTeller>{brought + warp});
                if (warp >= kNumPushWarps && !is_refused) tell<kNumPushWarps>(p, op, recv_base, brought);
            }
        } else {
            const int lane = lane_idx(), sum_warp = warp - kNumPushWarps - kNumTellWarps;
            uint32_t total = 0;
            if (lane < kRanks) is_ok = wait_word(op, total_of(p, p.rank, lane), lane, total);
            is_ok = __all_sync(0xffffffffu, is_ok);
            const Verdict found = judge(p, is_refused, total);
            if (sum_warp == 0 && lane == 0) verdict = found;
            const int num_tokens = found.refused_by < 0 ? kept_tokens_of(p) : 0;
            const int step = gridDim.x * kNumSumWarps;
            for (int t = sum_warp * gridDim.x + blockIdx.x; is_ok && t < num_tokens; t += step) {
                is_ok = sum_token(p, op, t, own_row, own_grad);
            }
        }
        if (block_any(!is_ok)) return;

        // done: peers may write this staging again (pairs with wait_bank_free)
        if (!is_last_block(op)) return;
        if (tid < kRanks && tid != p.rank) st_release_sys(done_of(p, tid, p.rank), tagged(op, 0));
        if (tid == 0) {
            if (verdict.refused_by >= 0)
                mark_refused(p, Op::kCombine, verdict.refused_by, verdict.own_cause, num_needed);
            end_kernel(op);
        }
    }
};

}  // namespace cuep
