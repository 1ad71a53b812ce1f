// How rows travel home in the combine kernels with a flag per slot: as they are, or encoded (kCombineCodec). Made of
// the kernel's constants: include it behind them. A rank's own rows are read where they are and never encoded.
#pragma once
#include <cuep/combine_codec.cuh>
#include <cuep/ll_combine.cuh>

namespace cuep {

constexpr int kNoCodec = 0, kLogFmt10 = 1, kFp8Block128 = 2;  // of kCombineCodec; cuep/config.py has the same order
constexpr int kElemsPerRow = kRowBytes / static_cast<int>(sizeof(elem_t));

// The codec, and what a thread holds of a row that came home or, of this rank's rows, of the row itself.
template <int kCodec, int kNumValues = kElemsPerRow>
struct Home {
    using Piece = uint4;
    static constexpr int kBytes = kRowBytes;
};
template <int kNumValues>
struct Home<kLogFmt10, kNumValues> : LogFmt10<kElemsPerVec, kNumValues> {
    using Piece = Coded;
};
template <int kNumValues>
struct Home<kFp8Block128, kNumValues> : Fp8Block128<kElemsPerVec, kNumValues> {
    using Piece = Coded;
};

using HomePiece = Home<kCombineCodec>::Piece;
static_assert(kSentBytes == Home<kCombineCodec>::kBytes, "cuep/config.py has another idea of an encoded row");
static_assert(kCombineCodec == kNoCodec || kNumThreads % kWarpSize == 0, "a block of values needs all its lanes");

// This thread's piece of a row to its slot in a peer's memory: values that are encoded. By all threads, as they share
// blocks of values; those that have no piece store nothing.
template <int kCodec = kCombineCodec>
CUEP_DEVICE void store_values(uint4* slot, int piece, const float (&values)[kElemsPerVec]) {
    const Coded coded = Home<kCodec>::encode(values);
    if (piece < kNumPieces) Home<kCodec>::store(reinterpret_cast<uint8_t*>(slot), piece, coded);
}

// The same of 16 bytes of a row.
template <int kCodec = kCombineCodec>
CUEP_DEVICE void store_home(uint4* slot, int piece, const uint4& v) {
    if constexpr (kCodec == kNoCodec) {
        if (piece < kNumPieces) store_16(slot + piece, v);
    } else {
        float values[kElemsPerVec];
        unpack<elem_t>(piece < kNumPieces ? v : make_uint4(0, 0, 0, 0), values);
        store_values<kCodec>(slot, piece, values);
    }
}

// A piece of a row that came home, behind its flag, or of one of this rank's.
template <int kCodec = kCombineCodec>
CUEP_DEVICE void load_home(const uint4* row, int piece, bool is_own, typename Home<kCodec>::Piece& v) {
    if constexpr (kCodec == kNoCodec) {
        v = load_16(row + piece);
    } else if (is_own) {
        v.v = load_16(row + piece);
    } else {
        v = Home<kCodec>::load(reinterpret_cast<const uint8_t*>(row), piece);
    }
}

template <int kCodec = kCombineCodec>
CUEP_DEVICE void values_of(const typename Home<kCodec>::Piece& v, bool is_own, float (&values)[kElemsPerVec]) {
    if constexpr (kCodec == kNoCodec) {
        unpack<elem_t>(v, values);
    } else if (is_own) {
        unpack<elem_t>(v.v, values);
    } else {
        Home<kCodec>::decode(v, values);
    }
}

}  // namespace cuep
