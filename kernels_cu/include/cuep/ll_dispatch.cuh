// What the low-latency dispatch kernels share: a token on its way out, its places among this rank's rows, the counts,
// and the slots that carry a row to a peer. Made of the kernel's constants: include it behind them.
#pragma once
#include <cuep/ll.cuh>
#include <cuep/sent_row.cuh>
#include <cuep/topk.cuh>

namespace cuep {

constexpr int kSrcPerThread = (kSrcVecs + kNumThreads - 1) / kNumThreads;

// A token on its way out.
struct Token {
    uint4 row[kPiecesPerThread];                 // this thread's pieces, as they travel
    uint4 source[kIsQuant ? kSrcPerThread : 1];  // 16-byte pieces of x
    RawIds<1> id;                                // of k = threadIdx.x
    float weight;
};

// A row while it is quantised, in shared memory.
struct Staging {
    uint4 row[kIsQuant ? kRowVecs : 1];
};

// What a thread loads early of this rank's first tokens: ids of token threadIdx.x, and of (token, k) pairs threadIdx.x
// + j * kNumThreads.
constexpr int kPairsAhead = 3;
struct Earlier {
    RawIds<kNumTopk> token;
    RawIds<1> pair[kPairsAhead];
};

// Of the token being sent, in shared memory.
struct Outgoing {
    int32_t expert[kNumTopk];
    float weight[kNumTopk];
    int32_t place[kNumTopk];  // among this rank's rows of each of its experts, where the layout needs that
    int32_t slot[kNumRanks];  // among this rank's rows to each rank
    uint32_t rank_mask;       // whose experts these are
};

// Rows of this rank's tokens up to num_tokens - 1, in shared memory.
struct Counted {
    int32_t experts[kIsRankMajor ? 1 : kNumExperts];
    int32_t ranks[kNumRanks];
    int32_t num_tokens;
};

// How many rows go where, in shared memory.
struct Counts {
    int32_t experts[kNumExperts];  // sender: rows of each expert; receiver: its own use
    int32_t ranks[kNumRanks];      // sender: rows to each rank
    Totals totals;                 // receiver: slots used by each source, or kRefused
};

// Rows of each local expert, from one source.
template <class Params>
CUEP_DEVICE uint64_t* counts_of(const Params& p, int dst, int bank, int src) {
    return reinterpret_cast<uint64_t*>(p.arena[dst] + p.counts_offset) + (bank * kNumRanks + src) * kNumLocalExperts;
}

// Whether peers put rows where the caller of this handle reads them, on all ranks alike.
template <class Params>
CUEP_DEVICE bool is_in_place(const Params& p) {
    return kHasInPlace && p.in_place_offset >= 0;
}

// Where a row goes in dst's memory: the row of `tokens` itself, or a slot from which dst takes it.
template <class Params>
CUEP_DEVICE uint4* row_at(const Params& p, int dst, int bank, int src, int64_t slot) {
    if (!is_in_place(p)) return staged_row(p, dst, bank, src, slot);
    const int64_t at = static_cast<int64_t>(src) * p.max_tokens + slot;
    return reinterpret_cast<uint4*>(p.arena[dst] + p.in_place_offset + at * kRowBytes);
}

// Tells the peers that nobody here reads any more what an earlier dispatch put in place: that was up to this call, and
// this kernel is behind it. Always, as a rank that refuses does not know what its peers work on. One block, behind
// wait_bank: by then nobody waits for the word that was there.
template <class Params>
CUEP_DEVICE void publish_ready(const Params& p, const Operation& op, int bank) {
    const int tid = threadIdx.x;
    if (!kHasInPlace || tid >= kNumRanks || tid == p.rank || !is_active(op, tid)) return;
    st_relaxed_sys(ready_of(p, tid, bank, p.rank), tagged(op, 0));  // pairs with wait_ready
}

// Before the first row is put in place, where no combine of the handle has told that the ones before were read. A
// barrier of the block. False: gave up.
template <class Params>
CUEP_DEVICE bool wait_ready(const Params& p, const Operation& op, int bank, bool is_unread) {
    if (!is_in_place(p) || !is_unread) return true;
    const int tid = threadIdx.x;
    bool is_ok = true;
    if (tid < kNumRanks && tid != p.rank && is_active(op, tid)) {
        uint32_t unused = 0;
        is_ok = wait_flag<kHasStats>(op, ready_of(p, p.rank, bank, tid), Phase::kReuse, tid, unused);
    }
    return !block_any(!is_ok);
}

// Whether the caller's routing is read, not the handle's copy of it.
template <class Params>
CUEP_DEVICE bool is_new_routing(const Params& p) {
    return p.topk_idx != reinterpret_cast<const uint8_t*>(p.ids);
}

// A piece of token t as it travels, where it is not quantised.
template <class Params>
CUEP_DEVICE uint4 load_sent(const Params& p, int t, int piece) {
    const uint4* row = reinterpret_cast<const uint4*>(p.x + t * p.x_stride);
    const int scale_vec = vec_of(piece) - kTokenBytes / 16;
    if (!kHasScales || scale_vec < 0) return load_piece(row, piece);
    uint32_t words[4];
#pragma unroll
    for (int i = 0; i < 4; i++) words[i] = load_scales(p, t, scale_vec * 4 + i);
    return {words[0], words[1], words[2], words[3]};
}

template <class Params>
CUEP_DEVICE void load_token(const Params& p, int t, Token& token) {
    const int tid = threadIdx.x;
    token.weight = 1.0f;
    if (tid < kNumTopk) {
        const int64_t at = static_cast<int64_t>(t) * kNumTopk + tid;
        load_raw(p.topk_idx, p.is_int64, at, token.id);
        if (p.topk_weights != nullptr) token.weight = p.topk_weights[at];
    }
    if constexpr (kIsQuant) {
        const uint4* row = reinterpret_cast<const uint4*>(p.x + t * p.x_stride);
#pragma unroll
        for (int j = 0; j < kSrcPerThread; j++) {
            const int vec = tid + j * kNumThreads;
            token.source[j] = make_uint4(0, 0, 0, 0);
            if (vec < kSrcVecs) token.source[j] = load_streaming(row + vec);
        }
    } else {
#pragma unroll
        for (int j = 0; j < kPiecesPerThread; j++) {
            if (piece_at(j) < kNumPieces) token.row[j] = load_sent(p, t, piece_at(j));
        }
    }
}

// Quantises a token into shared memory. Whole warps: the values of a block lie with 16 or 32 lanes next to one another.
CUEP_DEVICE void stage(const Token& token, Staging& staging) {
    if constexpr (kIsQuant) {
        static_assert(kNumThreads % kWarpSize == 0, "all lanes take part in a block's maximum");
        uint8_t* bytes = reinterpret_cast<uint8_t*>(staging.row);
#pragma unroll
        for (int j = 0; j < kSrcPerThread; j++) {
            const int vec = threadIdx.x + j * kNumThreads;
            const auto quantised = quantise(token.source[j]);
            if (vec < kSrcVecs) store_quantised(bytes, bytes + kHidden, vec, quantised);
        }
        constexpr int kUsed = kNumBlocks * kQuant, kUnused = kNumScales * kScaleBytes - kUsed;
        if (static_cast<int>(threadIdx.x) < kUnused) bytes[kHidden + kUsed + threadIdx.x] = 0;
    }
}

// Behind a barrier: this thread's pieces of what was staged.
CUEP_DEVICE void unstage(const Staging& staging, Token& token) {
    if constexpr (kIsQuant) {
#pragma unroll
        for (int j = 0; j < kPiecesPerThread; j++) {
            const int piece = piece_at(j);
            if (piece < kNumPieces) token.row[j] = staging.row[vec_to_load(piece)];
        }
    }
}

// Experts of ids, -1 also where their rank takes no part; those are counted. Returns how many ids are out of range.
template <int kCount>
CUEP_DEVICE uint32_t check_active(
    const Operation& op, const RawIds<kCount>& raw, bool is_int64, int32_t (&experts)[kCount], uint32_t& num_dropped) {
    const uint32_t num_bad = check_ids<kNumExperts>(raw, is_int64, experts);
    if constexpr (kHasMask) {
#pragma unroll
        for (int i = 0; i < kCount; i++) {
            if (experts[i] < 0 || is_active(op, experts[i] / kNumLocalExperts)) continue;
            experts[i] = -1;
            num_dropped++;
        }
    }
    return num_bad;
}

CUEP_DEVICE int32_t active_expert(const Operation& op, const RawIds<1>& raw, bool is_int64) {
    int32_t expert[1];
    uint32_t num_dropped = 0;
    check_active(op, raw, is_int64, expert, num_dropped);
    return expert[0];
}

// has_pairs: whether pairs are wanted, too.
template <class Params>
CUEP_DEVICE void load_earlier(const Params& p, int num_rows, bool has_pairs, Earlier& earlier) {
    const int tid = threadIdx.x;
    if (tid < num_rows) load_raw(p.topk_idx, p.is_int64, static_cast<int64_t>(tid) * kNumTopk, earlier.token);
#pragma unroll
    for (int j = 0; j < kPairsAhead; j++) {
        const int i = tid + j * kNumThreads;
        if (has_pairs && i < num_rows * kNumTopk) load_raw(p.topk_idx, p.is_int64, i, earlier.pair[j]);
    }
}

// visit(expert) of all pairs of tokens first to end - 1 that have an expert.
template <class Params, class Visit>
CUEP_DEVICE void for_pairs(
    const Params& p, const Operation& op, int first, int end, const Earlier& earlier, Visit visit) {
    const int tid = threadIdx.x;
#pragma unroll
    for (int j = 0; j < kPairsAhead; j++) {
        const int i = tid + j * kNumThreads;
        if (i < first * kNumTopk || i >= end * kNumTopk) continue;
        const int32_t expert = active_expert(op, earlier.pair[j], p.is_int64);
        if (expert >= 0) visit(expert);
    }
#pragma unroll 1
    for (int i = max(kPairsAhead * kNumThreads, first * kNumTopk) + tid; i < end * kNumTopk; i += kNumThreads) {
        RawIds<1> raw;
        load_raw(p.topk_idx, p.is_int64, i, raw);
        const int32_t expert = active_expert(op, raw, p.is_int64);
        if (expert >= 0) visit(expert);
    }
}

// Adds, for tokens first to end - 1, how many have an expert at each rank. note(num_bad, num_dropped): of a token's
// ids, where that is any. Whole warps.
template <class Params, class Note>
CUEP_DEVICE void count_slots(
    const Params& p, const Operation& op, int first, int end, const Earlier& earlier, int32_t* slots, Note note) {
    const int tid = threadIdx.x, warp_start = warp_idx() * kWarpSize;
#pragma unroll 1
    for (int from = first / kNumThreads * kNumThreads; from + warp_start < end; from += kNumThreads) {
        const int t = from + tid;
        if (from + warp_start + kWarpSize <= first) continue;
        uint32_t rank_mask = 0;
        if (t >= first && t < end) {
            RawIds<kNumTopk> raw = earlier.token;
            if (from > 0) load_raw(p.topk_idx, p.is_int64, static_cast<int64_t>(t) * kNumTopk, raw);
            int32_t experts[kNumTopk];
            uint32_t num_dropped = 0;
            const uint32_t num_bad = check_active(op, raw, p.is_int64, experts, num_dropped);
            if ((num_bad | num_dropped) != 0) note(num_bad, num_dropped);
            rank_mask = ranks_of<kNumLocalExperts>(experts);
        }
        count_ranks<kNumRanks>(rank_mask, slots);
    }
}

// What is known of a token alone; tokens before it count from here on. One warp: a thread for each k and each rank.
template <class Params>
CUEP_DEVICE void begin_outgoing(const Params& p, const Operation& op, const Token& token, Outgoing& out) {
    static_assert(kNumTopk <= kWarpSize && kNumRanks <= kWarpSize);
    if (warp_idx() != 0) return;
    const int lane = lane_idx();
    const int32_t e = lane < kNumTopk ? active_expert(op, token.id, p.is_int64) : -1;
    const uint32_t rank_mask = __reduce_or_sync(0xffffffffu, e >= 0 ? 1u << (e / kNumLocalExperts) : 0u);
    const uint32_t same = __match_any_sync(0xffffffffu, e);
    if (lane < kNumTopk) {
        out.expert[lane] = e;
        out.weight[lane] = token.weight;
        out.place[lane] = __popc(same & ((1u << lane) - 1u));
    }
    if (lane < kNumRanks) out.slot[lane] = 0;
    if (lane == 0) out.rank_mask = rank_mask;
}

// Counts the tokens before t, from those on that have been counted, and gives token t its slots and, expert-major, its
// places. Behind a barrier after begin_outgoing, and ends with one.
template <class Params>
CUEP_DEVICE void count_before(
    const Params& p, const Operation& op, int t, const Earlier& earlier, Counted& counted, Outgoing& out) {
    if (t == 0) return;
    const int tid = threadIdx.x, first = counted.num_tokens;
    count_slots(p, op, first, t, earlier, counted.ranks, [](uint32_t, uint32_t) {});
    if constexpr (!kIsRankMajor) {
        for_pairs(p, op, first, t, earlier, [&](int32_t expert) { atomicAdd(&counted.experts[expert], 1); });
    }
    __syncthreads();
    if (tid < kNumRanks) out.slot[tid] = counted.ranks[tid];
    if (!kIsRankMajor && tid < kNumTopk && out.expert[tid] >= 0) out.place[tid] += counted.experts[out.expert[tid]];
    if (tid == 0) counted.num_tokens = t;
    __syncthreads();
}

// By all threads, before a barrier.
CUEP_DEVICE void begin_counting(Counted& counted) {
    for (int e = threadIdx.x; !kIsRankMajor && e < kNumExperts; e += kNumThreads) counted.experts[e] = 0;
    if (threadIdx.x < kNumRanks) counted.ranks[threadIdx.x] = 0;
    if (threadIdx.x == 0) counted.num_tokens = 0;
}

// How many rows every expert gets from this rank, and every rank; zero tokens and refused calls publish too. One block,
// with counts of 0. most_per_expert: rows that a rank may send to one expert; only ids that name an expert twice can
// need more.
template <class Params>
CUEP_DEVICE void publish_counts(const Params& p,
                                const Operation& op,
                                int bank,
                                const Standing& standing,
                                int count,
                                int most_per_expert,
                                const Earlier& earlier,
                                Counts& counts) {
    const int tid = threadIdx.x;
    for_pairs(p, op, 0, count, earlier, [&](int32_t expert) { atomicAdd(&counts.experts[expert], 1); });
    count_slots(p, op, 0, count, earlier, counts.ranks, [&](uint32_t num_bad, uint32_t num_dropped) {
        if (num_bad != 0) atom_add_relaxed_sys(&p.report->num_bad_ids, num_bad);
        if (num_dropped != 0) atom_add_relaxed_sys(&p.report->num_dropped, num_dropped);
    });
    __syncthreads();
    bool is_too_full = false;
    for (int e = tid; e < kNumExperts; e += kNumThreads) {  // pairs with wait_count
        const int32_t num_rows = counts.experts[e];
        is_too_full |= num_rows > most_per_expert;
        if (!is_active(op, e / kNumLocalExperts)) continue;
        uint64_t* words = counts_of(p, e / kNumLocalExperts, bank, p.rank);
        st_relaxed_sys(words + e % kNumLocalExperts, tagged(op, static_cast<uint32_t>(num_rows)));
    }
    is_too_full = block_any(is_too_full);
    if (tid < kNumRanks && is_active(op, tid)) {  // pairs with wait_totals
        const bool is_refused = p.is_refused || is_too_full || count == kBadTokenCount;
        const uint32_t num_slots = static_cast<uint32_t>(counts.ranks[tid]);
        const uint32_t total = is_refused ? kRefused : num_slots | routing_bits(p) | settled_bit(standing);
        st_relaxed_sys(total_of(p, tid, bank, p.rank), tagged(op, total));
    }
    if (tid == 0 && is_new_routing(p)) p.state->num_tokens = count;
    __syncthreads();
}

// The expert of [token, k] as dst numbers its own, or -1 where it has it not.
CUEP_DEVICE int32_t local_expert_at(const Outgoing& out, int dst, int k) {
    const int32_t e = out.expert[k];
    return e >= 0 && e / kNumLocalExperts == dst ? e % kNumLocalExperts : -1;
}

// What travels beside a row for each k, and stays with this rank for its own.
struct Header {
    int32_t expert;  // as the receiver numbers its own, or -1
    int32_t place;   // among the source's rows of it
    float weight;    // 0 where there is no expert
};

CUEP_DEVICE Header header_for(const Outgoing& out, int dst, int k) {
    const int32_t expert = local_expert_at(out, dst, k);
    return {expert, out.place[k], expert < 0 ? 0.0f : out.weight[k]};
}

// What this rank keeps of token t, which it sends.
template <class Params>
CUEP_DEVICE void keep_token(const Params& p, int t, const Token& token, const Outgoing& out) {
    const int tid = threadIdx.x;
    if (tid == 0) p.own_slot[t] = out.rank_mask >> p.rank & 1u ? out.slot[p.rank] : -1;
    if (tid < kNumTopk && is_new_routing(p)) {
        const int64_t at = static_cast<int64_t>(t) * kNumTopk + tid;
        int32_t expert[1] = {out.expert[tid]};
        if constexpr (kHasMask) check_ids<kNumExperts>(token.id, p.is_int64, expert);  // also one that is left out now
        p.ids[at] = expert[0];
        p.weights[at] = out.weight[tid];
    }
}

// Of a source rank and one of this rank's experts. False: gave up.
template <class Params>
CUEP_DEVICE bool wait_count(const Params& p, const Operation& op, int bank, int src, int local_expert, int32_t& count) {
    uint32_t value = 0;
    const bool is_ok =
        !is_active(op, src) || wait_word<kHasStats>(op, counts_of(p, p.rank, bank, src) + local_expert, src, value);
    count = static_cast<int32_t>(value);
    return is_ok;
}

// The ranks' totals, without the number of the routing, and, expert-major, their counts: counts.experts[local expert *
// kNumRanks + source]. False: gave up.
template <class Params>
CUEP_DEVICE bool wait_slots(const Params& p, const Operation& op, int bank, Counts& counts) {
    bool is_ok = true;
    if constexpr (!kIsRankMajor) {
        for (int i = threadIdx.x; i < kNumExperts; i += kNumThreads) {
            const int src = i / kNumLocalExperts, e = i % kNumLocalExperts;
            is_ok &= wait_count(p, op, bank, src, e, counts.experts[e * kNumRanks + src]);
        }
    }
    return wait_totals(p, op, bank, is_ok, counts.totals);
}

// Who keeps this dispatch from being one, or -1, and why, where this rank itself finds it.
struct DispatchVerdict {
    int refused_by;
    Cause own_cause;
};

template <class Params>
CUEP_DEVICE DispatchVerdict verdict_of(const Params& p, int count, const Counts& counts) {
    const int refused_by = refusing_rank(p, counts.totals);
    if (refused_by >= 0) return {refused_by, count < 0 ? Cause::kTokenCount : Cause::kZoneFull};
    if (is_mispaired(counts.totals)) return {p.rank, Cause::kMispaired};
    return {-1, Cause::kCall};
}

// Slots filled by the peer that filled most.
template <class Params>
CUEP_DEVICE int most_rows(const Params& p, const Counts& counts) {
    uint32_t most = 0;
    for (int r = 0; r < kNumRanks; r++) {
        if (r != p.rank) most = max(most, counts.totals.of[r]);
    }
    return static_cast<int>(most);
}

// Rows of all peers, in about the order in which they come: take(src, slot) waits for the row and takes it. A team
// sends its token to the rank after its own first, then to the one after that, and so on; then its next token. False:
// gave up.
template <class Params, class Take>
CUEP_DEVICE bool receive_rows(const Params& p, const Counts& counts, Take take) {
    if constexpr (kNumPeers > 0) {
        const int most = most_rows(p, counts), wave = min(most, num_teams());
        int slot = first_to_receive(), distance = 1, first = 0;
        while (first < most && team() < num_teams()) {
            if (slot >= wave) {  // on to the next peer, or to the next wave of the first
                slot -= wave;
                if (++distance < kNumRanks) continue;
                distance = 1;
                first += wave;
                continue;
            }
            const int src = (p.rank + kNumRanks - distance) % kNumRanks;
            if (first + slot < static_cast<int>(counts.totals.of[src]) && !take(src, first + slot)) return false;
            slot += num_teams();
        }
    }
    return true;
}

// The kernel, but for how rows travel.
//   send(op, bank, t, is_last, token): token t, whose slots are known, to every rank that owns one of its experts;
//     is_last: of this block's
//   receive(op, bank, num_tokens, last, token): all that this block receives, when totals (and counts) are known.
//     last: the token that it sent last, still in `token` and `out`, or -1. False: gave up.
template <class Params, class Send, class Receive>
CUEP_DEVICE void dispatch(
    const Params& p, Outgoing& out, Staging& staging, Counted& counted, Counts& counts, Send send, Receive receive) {
    begin_launch(p);

    // the first token comes in while control words do; whether it is one is known later
    const Operation op = begin_phase(p, Op::kDispatch);
    const Standing standing = standing_of(p, op);
    const bool is_off = is_over(p, op);
    const bool is_unread = kHasInPlace && p.state->is_unread != 0;
    const int num_rows = p.is_refused || !p.is_send ? 0 : p.num_tokens;
    const bool is_sender = team() < num_rows;
    Token token;
    Earlier earlier;
    if (is_sender) load_token(p, team(), token);
    if (is_clerk() || (is_sender && team() > 0)) load_earlier(p, num_rows, is_clerk() || !kIsRankMajor, earlier);
    if (is_sender) {
        begin_counting(counted);
        begin_outgoing(p, op, token, out);
        stage(token, staging);
    }
    if (is_clerk()) {
        for (int e = threadIdx.x; e < kNumExperts; e += kNumThreads) counts.experts[e] = 0;
        if (threadIdx.x < kNumRanks) counts.ranks[threadIdx.x] = 0;
    }
    const int count = p.is_refused ? 0 : is_new_routing(p) ? tokens_of(p) : kept_tokens_of(p);
    const int num_tokens = max(count, 0);
    const int bank = bank_of(p, op);

    // the bank must have been read by every peer before it is written again
    if (wait_bank<false>(p, op, bank, standing, is_off) == Bank::kStop) return;
    if (is_sender) unstage(staging, token);
    const bool is_last_begun = p.is_send && is_last_to_begin(op);

    // send all that this block owes before it waits for rows
    int last = -1;
    if (p.is_send) {
        // a rank-major slot has room for every k, an expert's zone for each token once
        constexpr int kMostPerToken = kIsRankMajor ? kNumTopk : 1;
        if (is_clerk()) {
            publish_ready(p, op, bank);
            publish_counts(p, op, bank, standing, count, p.max_tokens * kMostPerToken, earlier, counts);
        }
        if (team() < num_tokens && !wait_ready(p, op, bank, is_unread)) return;
        for (int t = team(); t < num_tokens; t += num_teams()) {
            if (last >= 0) {
                if (last == 0) load_earlier(p, num_tokens, !kIsRankMajor, earlier);
                load_token(p, t, token);
                __syncthreads();  // the one before has been sent
                begin_outgoing(p, op, token, out);
                stage(token, staging);
                __syncthreads();
                unstage(staging, token);
            }
            count_before(p, op, t, earlier, counted, out);
            if (part() == 0) keep_token(p, t, token, out);
            send(op, bank, t, t + num_teams() >= num_tokens, token);
            last = t;
        }
    }

    DispatchVerdict verdict{-1, Cause::kCall};
    if (p.is_receive) {
        if (!wait_slots(p, op, bank, counts)) return;
        verdict = verdict_of(p, count, counts);
        if (verdict.refused_by < 0 && !receive(op, bank, num_tokens, last, token)) return;
    }
    end_launch(p, op, bank, is_last_begun, counts.totals, [&] {
        if (p.is_receive) {
            p.state->refused = 0;
            p.state->is_unread = verdict.refused_by < 0;
        }
        if (verdict.refused_by >= 0) mark_refused(p, Op::kDispatch, verdict.refused_by, verdict.own_cause);
    });
}

}  // namespace cuep
