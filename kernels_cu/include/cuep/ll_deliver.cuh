// Where received rows go, in either layout, and what the receiver learns with them. Made of the kernel's constants:
// include it behind them.
//
// expert-major: the first row of (expert, source) is the sum of the counts of lower sources, so a row has its place
// without atomics. rank-major: a slot is a place, and only the block that writes the counts waits for them.
#pragma once
#include <cuep/ll_dispatch.cuh>

namespace cuep {

struct Shared {
    Outgoing out;
    Staging staging;
    Counted counted;
    Counts counts;
    int32_t dst_row[kNumTopk];  // of the row being delivered
    uint32_t token[2];          // of the row being received, and of the one before
    int32_t total;              // rows of all experts
};

// First row of an expert here that comes from src.
template <class Params>
CUEP_DEVICE int32_t first_row(const Params& p, int32_t local_expert, int src, const Counts& counts) {
    int32_t row = local_expert * kNumRanks * p.max_tokens;
    for (int lower = 0; lower < src; lower++) row += counts.experts[local_expert * kNumRanks + lower];
    return row;
}

// Where a received row goes.
struct Place {
    uint8_t* token;
    uint8_t* scales;       // the first
    int64_t scale_stride;  // bytes to the next
};

// Scales by columns: of each zone all rows' first scales, then all their second, ...; a column starts at a multiple of
// 16 bytes, as bulk loads of grouped GEMMs need.
template <class Params>
CUEP_DEVICE Place place_of(const Params& p, int64_t dst_row) {
    Place place{p.tokens + dst_row * p.tokens_stride, nullptr, kScaleBytes};
    if constexpr (kHasScales && !kHasScaleColumns) place.scales = p.scales + dst_row * p.scales_stride;
    if constexpr (kHasScaleColumns) {
        constexpr int kRowsPerPiece = 16 / kScaleBytes;
        const int zone_rows = p.max_tokens * (kIsRankMajor ? 1 : kNumRanks), row = static_cast<int>(dst_row);
        const int column_rows = (zone_rows + kRowsPerPiece - 1) / kRowsPerPiece * kRowsPerPiece;
        const int64_t first = static_cast<int64_t>(row / zone_rows) * kNumScales * column_rows + row % zone_rows;
        place.scales = p.scales + first * kScaleBytes;
        place.scale_stride = static_cast<int64_t>(column_rows) * kScaleBytes;
    }
    return place;
}

// A word of a row's scales as they travel.
CUEP_DEVICE void store_scales(const Place& place, int word, uint32_t bits) {
    constexpr int kPerWord = 4 / kScaleBytes;
    if constexpr (!kHasScaleColumns && kNumScales % kPerWord == 0) {
        if (word < kNumScales / kPerWord) reinterpret_cast<uint32_t*>(place.scales)[word] = bits;
        return;
    }
#pragma unroll
    for (int i = 0; i < kPerWord; i++) {
        const int scale = word * kPerWord + i;
        if (scale >= kNumScales) continue;
        uint8_t* at = place.scales + scale * place.scale_stride;
        if constexpr (kScaleBytes == 4) *reinterpret_cast<uint32_t*>(at) = bits;
        if constexpr (kScaleBytes == 2) *reinterpret_cast<uint16_t*>(at) = static_cast<uint16_t>(bits >> (16 * i));
        if constexpr (kScaleBytes == 1) *at = static_cast<uint8_t>(bits >> (8 * i));
    }
}

CUEP_DEVICE void store_received(const Place& place, int piece, uint4 v) {
    const int scale_vec = vec_of(piece) - kTokenBytes / 16;
    if (!kHasScales || scale_vec < 0) return store_piece(reinterpret_cast<uint4*>(place.token), piece, v);
    if constexpr (!kHasScaleColumns && kNumScales * kScaleBytes % 16 == 0) {
        uint4* scales = reinterpret_cast<uint4*>(place.scales) + scale_vec;
        if (kIsLine && scale_vec >= kNumScales * kScaleBytes / 16) return;
        if (!is_half(piece)) return store_16(scales, v);
        return store_8(reinterpret_cast<uint2*>(scales) + is_upper_half(piece), half_of(piece, v));
    }
    const uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const bool is_here = !is_half(piece) || (i >= 2) == is_upper_half(piece);
        if (is_here) store_scales(place, scale_vec * 4 + i, words[i]);
    }
}

// rank-major: what the receiver learns with a row. header, token: as in deliver.
template <class Params>
CUEP_DEVICE void note_row(const Params& p, int src, int64_t at, uint32_t token, const Header& header) {
    const int tid = threadIdx.x;
    if (tid < kNumTopk) {
        const int32_t first = p.is_global_ids ? p.rank * kNumLocalExperts : 0;
        p.recv_topk_idx[at * kNumTopk + tid] = header.expert < 0 ? -1 : first + header.expert;
        p.recv_topk_weights[at * kNumTopk + tid] = header.weight;
    }
    if (tid == 0) {
        p.token_idx[at] = static_cast<int32_t>(token);
        p.source[at * 2] = src;
        p.source[at * 2 + 1] = static_cast<int32_t>(token);
    }
}

// Copies a received row to where it belongs. header: of k = threadIdx.x, where that is below kNumTopk; token: thread 0
// and those that have a header know it.
template <class Params>
CUEP_DEVICE void deliver(const Params& p,
                         int src,
                         int slot,
                         uint32_t token,
                         const Header& header,
                         const uint4 (&row)[kPiecesPerThread],
                         Shared& s) {
    const int tid = threadIdx.x;
    const int64_t at = static_cast<int64_t>(src) * p.max_tokens + slot;
    const bool is_first = part() == 0;  // of the blocks that share the row: it writes what goes with it
    auto copy_to = [&](int64_t dst_row) {
        const Place place = place_of(p, dst_row);
#pragma unroll
        for (int j = 0; j < kPiecesPerThread; j++) {
            if (piece_at(j) < kNumPieces) store_received(place, piece_at(j), row[j]);
        }
    };
    if constexpr (kIsRankMajor) {
        if (is_first) note_row(p, src, at, token, header);
        copy_to(at);
    } else {
        if (tid == 0 && is_first) p.token_idx[at] = static_cast<int32_t>(token);
        if (tid < kNumTopk) {
            int32_t dst_row = -1;
            if (header.expert >= 0) {
                dst_row = first_row(p, header.expert, src, s.counts) + header.place;
            }
            if (dst_row >= 0 && is_first) {
                int32_t* source = p.source + static_cast<int64_t>(dst_row) * 3;
                source[0] = src;
                source[1] = static_cast<int32_t>(token);
                source[2] = tid;
            }
            s.dst_row[tid] = dst_row;
            if (is_first) p.row_idx[at * kNumTopk + tid] = dst_row;
            if (is_first && p.recv_weights != nullptr) p.recv_weights[at * kNumTopk + tid] = header.weight;
        }
        __syncthreads();
#pragma unroll 1
        for (int k = 0; k < kNumTopk; k++) {
            if (s.dst_row[k] >= 0) copy_to(s.dst_row[k]);
        }
    }
}

// Token t of this rank, which is in registers and s.out.
template <class Params>
CUEP_DEVICE void deliver_own(const Params& p, int t, const Token& token, Shared& s) {
    Header header{-1, 0, 0.0f};
    if (threadIdx.x < kNumTopk) header = header_for(s.out, p.rank, threadIdx.x);
    deliver(p, p.rank, s.out.slot[p.rank], static_cast<uint32_t>(t), header, token.row, s);
}

// rank-major: rows beyond the counts name no expert, whatever an earlier dispatch left there.
template <class Params>
CUEP_DEVICE void clear_unused(const Params& p, const Counts& counts) {
    const int64_t end = static_cast<int64_t>(p.max_tokens) * kNumTopk;
#pragma unroll 1
    for (int src = 0; src < kNumRanks; src++) {
        int64_t i = static_cast<int64_t>(counts.totals.of[src]) * kNumTopk + blockIdx.x * kNumThreads + threadIdx.x;
#pragma unroll 1
        for (; i < end; i += gridDim.x * kNumThreads) {
            p.recv_topk_idx[src * end + i] = -1;
            p.recv_topk_weights[src * end + i] = 0.0f;
        }
    }
}

// What this rank received in all; one block. False: gave up.
template <class Params>
CUEP_DEVICE bool write_counts(const Params& p, const Operation& op, int bank, Shared& s) {
    const int tid = threadIdx.x;
    bool is_ok = true;
    if (tid == 0) s.total = 0;
    if constexpr (kIsRankMajor) {  // totals are of rows, counts of pairs
        for (int e = tid; e < kNumLocalExperts; e += kNumThreads) s.counts.experts[e] = 0;
        __syncthreads();
        for (int i = tid; i < kNumExperts; i += kNumThreads) {
            const int src = i / kNumLocalExperts, e = i % kNumLocalExperts;
            int32_t count = 0;
            is_ok &= wait_count(p, op, bank, src, e, count);
            atomicAdd(&s.counts.experts[e], count);
        }
    }
    if (block_any(!is_ok)) return false;
    for (int e = tid; e < kNumLocalExperts; e += kNumThreads) {
        int32_t num_rows = 0;
        if constexpr (kIsRankMajor) {
            num_rows = s.counts.experts[e];
        } else {
            for (int src = 0; src < kNumRanks; src++) {
                const int32_t count = s.counts.experts[e * kNumRanks + src];
                p.src_rank_counts[e * kNumRanks + src] = count;
                num_rows += count;
            }
            atomicAdd(&s.total, num_rows);
        }
        p.expert_counts[e] = num_rows;
    }
    if (tid < kNumRanks) {
        const int32_t num_slots = static_cast<int32_t>(s.counts.totals.of[tid]);
        p.num_rows[tid] = num_slots;
        if constexpr (kIsRankMajor) {
            p.src_rank_counts[tid] = num_slots;
            atomicAdd(&s.total, num_slots);
        }
    }
    __syncthreads();
    if (tid == 0) *p.total = s.total;
    return true;
}

// Peers' rows as take(src, slot) waits for them and delivers them, and the counts. False: gave up.
template <class Params, class Take>
CUEP_DEVICE bool receive(const Params& p, const Operation& op, int bank, Shared& s, Take take) {
    if (!receive_rows(p, s.counts, take)) return false;
    if constexpr (kIsRankMajor) clear_unused(p, s.counts);
    return !is_clerk() || write_counts(p, op, bank, s);
}

}  // namespace cuep
