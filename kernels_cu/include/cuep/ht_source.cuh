// Rows of x on their way out of a high-throughput dispatch: a warp has one in shared memory, as it was, and makes of it
// what travels. Made of the kernel's constants: include it behind them.
#pragma once
#include <cuep/bulk.cuh>
#include <cuep/sent_row.cuh>

namespace cuep {

// Warps that send, where others receive beside them. A single one receives when all is sent.
constexpr int kNumSendWarps = (kNumWarps + 1) / 2;
constexpr int kFirstReceiver = kNumWarps > 1 ? kNumSendWarps : 0, kNumReceivers = kNumWarps - kFirstReceiver;

// Shared memory for a row: what is loaded, and behind it the scales until all of it has been read.
constexpr int kStageRoom = kIsQuant ? kSrcBytes + kNumBlocks * kQuant : kRowBytes;

// Values in place of the row, scales behind them. Each lane has four pieces at a time, of different blocks. A piece of
// 16 bytes leaves at most 8, so what is written over has been read, by this turn at the latest.
CUEP_DEVICE void quantise_row(uint8_t* row) {
    const int lane = lane_idx();
    uint8_t* scales = row + kSrcBytes;
#pragma unroll 1
    for (int first = lane; first - lane < kSrcVecs; first += kWarpSize * kBlocksAtOnce) {
        float x[kBlocksAtOnce][kPerSource];
#pragma unroll
        for (int j = 0; j < kBlocksAtOnce; j++) {
            const int vec = first + kWarpSize * j;
            const uint4 nothing = make_uint4(0, 0, 0, 0);
            unpack<src_t>(vec < kSrcVecs ? reinterpret_cast<const uint4*>(row)[vec] : nothing, x[j]);
        }
        const BlockScales<kPerSource> found = scales_of<kQuant == 1>(x);
        const int block = (first + kWarpSize * found.which) / (kQuantBlock / kPerSource);
        if (found.is_first && block < kNumBlocks) store_scale(scales, block, found.scale);
        __syncwarp();
#pragma unroll
        for (int j = 0; j < kBlocksAtOnce; j++) {
            const int vec = first + kWarpSize * j;
            uint32_t codes[kPerSource / 4];
            multiply_out(x[j], found.inverse(j), codes);
            if (vec < kSrcVecs) store_codes(row, vec, codes);
        }
    }
    __syncwarp();
    for (int i = lane; i < kRowBytes - kHidden; i += kWarpSize) {
        row[kHidden + i] = i < kNumBlocks * kQuant ? scales[i] : 0;
    }
}

// What a lane has of the caller's scales of a token, as they travel.
struct GivenScales {
    static constexpr int kWords = kHasScales && !kIsQuant ? (kRowBytes - kTokenBytes) / 4 : 0;
    static constexpr int kMine = kWords <= 8 * kWarpSize ? (kWords + kWarpSize - 1) / kWarpSize : 8;  // others: later
    uint32_t mine[kMine > 0 ? kMine : 1];
    int t;

    // Of a token. To be asked for before its row is waited for.
    template <class Params>
    CUEP_DEVICE GivenScales(const Params& p, int token) : t(token) {
#pragma unroll
        for (int i = 0; i < kMine; i++) {
            const int word = lane_idx() + kWarpSize * i;
            mine[i] = word < kWords ? load_scales(p, t, word) : 0;
        }
    }

    template <class Params>
    CUEP_DEVICE void store(const Params& p, uint8_t* row) const {
        uint32_t* scales = reinterpret_cast<uint32_t*>(row + kTokenBytes);
#pragma unroll
        for (int i = 0; i < kMine; i++) {
            if (lane_idx() + kWarpSize * i < kWords) scales[lane_idx() + kWarpSize * i] = mine[i];
        }
        for (int word = lane_idx() + kWarpSize * kMine; word < kWords; word += kWarpSize) {
            scales[word] = load_scales(p, t, word);
        }
    }
};

// A token, of which the first kSrcBytes have been loaded, becomes a row as it travels. The whole warp calls, before the
// bulk stores.
template <class Params>
CUEP_DEVICE void finish_row(const Params& p, const GivenScales& given, uint8_t* row) {
    if constexpr (!kHasScales) return;
    if constexpr (kIsQuant) {
        quantise_row(row);
    } else {
        given.store(p, row);
    }
    fence_proxy_async_shared();
}

// A received row's scales, which lie behind its values, to a place of their own. The whole warp calls.
template <class Params>
CUEP_DEVICE void copy_scales(const Params& p, const uint8_t* row, int64_t to_row) {
    constexpr int kBytes = kNumScales * kScaleBytes;
    uint8_t* to = p.out_scales + to_row * kBytes;
    for (int i = lane_idx(); i < kNumScales; i += kWarpSize) {
        const uint8_t* from = row + kTokenBytes + i * kScaleBytes;
        if constexpr (kScaleBytes == 4) reinterpret_cast<uint32_t*>(to)[i] = *reinterpret_cast<const uint32_t*>(from);
        if constexpr (kScaleBytes == 2) reinterpret_cast<uint16_t*>(to)[i] = *reinterpret_cast<const uint16_t*>(from);
        if constexpr (kScaleBytes == 1) to[i] = *from;
    }
}

// A row into the caller's array: values here, scales to theirs. The whole warp calls.
template <class Params>
CUEP_DEVICE void store_out(const Params& p, int64_t row, const uint8_t* staged) {
    bulk_store(p.out + row * p.out_stride, staged, kTokenBytes);
    if constexpr (kHasScales) {
        copy_scales(p, staged, row);
        fence_proxy_async_shared();  // lanes have read what is refilled
    }
}

}  // namespace cuep
