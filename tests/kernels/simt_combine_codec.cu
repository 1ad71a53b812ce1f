// Rows through a codec of combine_codec.cuh: what is sent of them, and what they are where they arrive.
// compile: kCodec=1 kNumValues=384 elem_t=cuep::bf16_t
// compile: kCodec=2 kNumValues=384 elem_t=float
#include <cuep/base.cuh>
#include <cuep/combine_codec.cuh>

CUEP_TUNABLE(kNumThreads, 64, 64);

using namespace cuep;

struct Params {
    const uint4* rows;  // [num_rows, kNumValues] of elem_t
    uint8_t* sent;      // [num_rows, Codec::kBytes]
    float* values;      // [num_rows, kNumValues]
    int32_t num_rows;
};

CUEP_LAUNCH(kNumThreads, 0)

template <int kNumber>
struct CodecOf : LogFmt10<kPerVec<elem_t>, kNumValues> {};
template <>
struct CodecOf<2> : Fp8Block128<kPerVec<elem_t>, kNumValues> {};

extern "C" __global__ void __launch_bounds__(kNumThreads, 1) simt_combine_codec(const __grid_constant__ Params p) {
    using Codec = CodecOf<kCodec>;
    constexpr int kPer = kPerVec<elem_t>, kNumPieces = kNumValues / kPer;
    for (int64_t r = blockIdx.x; r < p.num_rows; r += gridDim.x) {
        uint8_t* sent = p.sent + r * Codec::kBytes;
        for (int first = 0; first < kNumPieces; first += kNumThreads) {
            const int piece = first + threadIdx.x;
            float x[kPer];
            unpack<elem_t>(piece < kNumPieces ? p.rows[r * kNumPieces + piece] : make_uint4(0, 0, 0, 0), x);
            const Coded coded = Codec::encode(x);
            if (piece < kNumPieces) Codec::store(sent, piece, coded);
        }
        __syncthreads();
        for (int piece = threadIdx.x; piece < kNumPieces; piece += kNumThreads) {
            float x[kPer];
            Codec::decode(Codec::load(sent, piece), x);
            for (int i = 0; i < kPer; i++) p.values[(r * kNumPieces + piece) * kPer + i] = x[i];
        }
    }
}
