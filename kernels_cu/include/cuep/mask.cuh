// Which ranks of a group take part (GroupConfig.mask), and how the others learn that they do not. How ranks agree on
// it: mask_agree.cu. Made of the kernel's constants: include it behind them.
//
// A rank that was only stopped goes on where it was, and may have been replaced by then: it must not store into memory
// that others use. So whoever excludes a rank writes that into its memory first, and every kernel looks.
#pragma once
#include <cuep/operation.cuh>

namespace cuep {

// What rank src tells a rank about the mask, in that rank's memory.
struct MaskWords {
    uint64_t proposal;   // mask << 32 | nonce; 0 while the epochs change
    uint64_t answer;     // nonce of the reader's proposal that src has read << 32 | nonce of src
    uint64_t epochs[2];  // of src: dispatch, combine
    uint64_t exclusion;  // nonce of the newest proposal of src that left the reader out
};

// Behind those of all ranks there is the number of exclusions.
template <class Params>
CUEP_DEVICE MaskWords* mask_words(const Params& p, int dst, int src) {
    return reinterpret_cast<MaskWords*>(p.arena[dst] + p.mask_offset) + src;
}
template <class Params>
CUEP_DEVICE uint32_t* num_exclusions(const Params& p, int dst) {
    return reinterpret_cast<uint32_t*>(mask_words(p, dst, kNumRanks));
}

CUEP_DEVICE bool is_active(const Operation& op, int rank) {
    return !kHasMask || (op.active >> rank & 1u) != 0;
}

// At a kernel's start.
template <class Params>
CUEP_DEVICE void load_mask(const Params& p, Operation& op) {
    if constexpr (kHasMask) {
        op.active = p.control->active;
        op.num_exclusions = ld_acquire_sys(num_exclusions(p, p.rank));  // pairs with exclude
    }
}

// Whether a rank that this one counts in has left it out and not taken it in again. To others this rank stores nothing.
template <class Params>
CUEP_DEVICE bool is_excluded_by(const Params& p, const Operation& op, int src) {
    if (src >= kNumRanks || !is_active(op, src)) return false;
    const uint64_t nonce = ld_relaxed_sys(&mask_words(p, p.rank, src)->exclusion);
    return static_cast<uint32_t>(nonce) != p.control->excluded[src];
}

// Whether this rank has been excluded and not taken in again, for block_any. Behind load_mask.
template <class Params>
CUEP_DEVICE bool is_excluded(const Params& p, const Operation& op) {
    if (!kHasMask || !is_excluded_by(p, op, threadIdx.x)) return false;
    break_group(op, Phase::kExcluded, threadIdx.x, 0, 0);
    return true;
}

// Whether it has been since this kernel began: then it may store no more where others may store now. By whole warps,
// all lanes of which are told the same. (A thread that is stopped between this look and the stores behind it, as only a
// CPU's can be, is not found out.)
template <class Params>
CUEP_DEVICE bool is_fenced(const Params& p, const Operation& op) {
    if constexpr (!kHasMask) return false;
    const bool is_new = ld_acquire_sys(num_exclusions(p, p.rank)) != op.num_exclusions;  // pairs with exclude
    if (__ballot_sync(0xffffffffu, is_new) == 0) return false;
    return __ballot_sync(0xffffffffu, is_excluded_by(p, op, lane_idx())) != 0;
}

}  // namespace cuep
