// Barriers, shuffles and votes: meeting points of fibers. The last fiber to arrive works out everybody's result and
// makes the others runnable. Fibers that meet in different places are an error, as on the GPU, though there it may go
// unnoticed.
#pragma once

#include <cuep/cpu/block.h>

#pragma GCC visibility push(hidden)
namespace cuep {
namespace cpu {

inline void wait_in(Block& block, Fiber* self, Wait wait, Site site) {
    if (!self->is_polling || wait == Wait::kSyncThreads) block.note_progress();
    self->wait = wait;
    self->site = site;
}

// The meeting of the fiber's warp that needs the fiber, or nullptr.
inline const Meeting* expected_at(const Warp& warp, const Fiber* fiber) {
    for (uint32_t rest = warp.pending; rest != 0; rest &= rest - 1) {
        const Meeting& meeting = warp.meetings[__builtin_ctz(rest)];
        if (meeting.mask >> fiber->lane() & 1) return &meeting;
    }
    return nullptr;
}

inline void release_barrier(Block& block) {
    const uint32_t num_votes = block.num_votes;
    block.num_in_barrier = block.num_votes = 0;
    for (uint32_t i = 0; i < block.num_fibers; ++i) {
        Fiber& fiber = block.fibers[i];
        if (fiber.wait != Wait::kSyncThreads) continue;
        fiber.wait = Wait::kNone;
        fiber.value = num_votes;
        block.warp_of(fiber).in_barrier = 0;
        block.make_runnable(&fiber);
    }
}

// Returns how many threads of the block passed true.
inline uint32_t sync_threads(bool vote, Site site) {
    Fiber* self = current;
    Block& block = *self->block;
    Warp& warp = block.warp_of(*self);
    wait_in(block, self, Wait::kSyncThreads, site);
    if (expected_at(warp, self) != nullptr)
        fail(block, "__syncthreads in a thread that others of its warp expect in a collective", site);
    if (block.num_in_barrier++ == 0)
        block.barrier_site = site;
    else if (!(block.barrier_site == site))
        fail(block, "different __syncthreads in one block", site);
    block.num_votes += vote;
    warp.in_barrier |= 1u << self->lane();
    if (block.num_in_barrier == block.num_live) release_barrier(block);
    run_next(block, self);
    return uint32_t(self->value);
}

// Called when the kernel function returns. A thread that has returned no longer counts for __syncthreads.
[[noreturn]] inline void exit_thread() {
    Fiber* self = current;
    Block& block = *self->block;
    Warp& warp = block.warp_of(*self);
    wait_in(block, self, Wait::kExited, self->site);
    warp.exited |= 1u << self->lane();
    if (const Meeting* meeting = expected_at(warp, self))
        fail(block, "a thread returned that others of its warp expect in the collective", meeting->site);
    if (--block.num_live == 0) {
        finish_copies(block);
        leave_block(block);
    }
    if (block.num_in_barrier == block.num_live) release_barrier(block);
    run_next(block, self);
    __builtin_unreachable();
}

// Finds the meeting that this lane comes to, or begins it. A lane may pass through meetings of a few lanes while others
// wait for it elsewhere, but not one that has to wait for those others.
inline Meeting& join_meeting(Block& block, Fiber* self, const Meeting& wanted) {
    Warp& warp = block.warp_of(*self);
    if (!(wanted.mask >> self->lane() & 1))
        fail(block, "warp collective whose mask leaves out the caller", wanted.site);
    for (uint32_t rest = warp.pending; rest != 0; rest &= rest - 1) {
        Meeting& meeting = warp.meetings[__builtin_ctz(rest)];
        if (meeting.wait == wanted.wait && meeting.mask == wanted.mask && meeting.site == wanted.site) return meeting;
        if ((meeting.mask >> self->lane() & 1) && (meeting.arrived & wanted.mask))
            fail(block, "different warp collectives or masks", wanted.site);
    }
    if (wanted.mask & warp.exited)
        fail(block, "warp collective whose mask names threads that have returned", wanted.site);
    if (wanted.mask & warp.in_barrier)
        fail(block, "warp collective of threads of which some are in __syncthreads", wanted.site);
    warp.pending |= 1u << self->lane();
    return warp.meetings[self->lane()] = wanted;
}

// The lanes of `mask` that brought the same value as `lane`.
inline uint32_t matching_lanes(const Fiber* lanes, uint32_t mask, int lane) {
    uint32_t same = 0;
    for (uint32_t rest = mask; rest != 0; rest &= rest - 1) {
        const int other = __builtin_ctz(rest);
        if (lanes[other].value == lanes[lane].value) same |= 1u << other;
    }
    return same;
}

// All lanes have arrived: a shuffle gives each the value of its source lane, a vote the lanes that voted yes, a match
// the lanes with the same value, a reduction the sum or the union of all.
inline void finish_meeting(Block& block, Fiber* self, const Meeting& meeting) {
    Warp& warp = block.warp_of(*self);
    Fiber* lanes = self - self->lane();
    uint64_t results[32];
    uint32_t votes = 0, sum = 0, together = 0;
    for (uint32_t rest = meeting.mask; rest != 0; rest &= rest - 1) {
        const int lane = __builtin_ctz(rest);
        if (lanes[lane].value != 0) votes |= 1u << lane;
        sum += uint32_t(lanes[lane].value);
        together |= uint32_t(lanes[lane].value);
        const int source = lanes[lane].source_lane;
        const bool has_source = meeting.mask >> source & 1;
        results[lane] = has_source ? lanes[source].value : 0xcdcdcdcdcdcdcdcdu;  // undefined on the GPU: poison
        if (meeting.wait == Wait::kMatch) results[lane] = matching_lanes(lanes, meeting.mask, lane);
    }
    for (uint32_t rest = meeting.mask; rest != 0; rest &= rest - 1) {
        const int lane = __builtin_ctz(rest);
        lanes[lane].value = meeting.wait == Wait::kVote        ? votes
                            : meeting.wait == Wait::kReduceAdd ? sum
                            : meeting.wait == Wait::kReduceOr  ? together
                                                               : results[lane];
        lanes[lane].wait = Wait::kNone;
        if (&lanes[lane] != self) block.make_runnable(&lanes[lane]);
    }
    warp.pending &= ~(1u << (&meeting - warp.meetings));
}

// Meets the other lanes of `mask` in the same collective and returns this lane's result.
inline uint64_t meet(Wait wait, uint32_t mask, uint64_t value, uint32_t source_lane, Site site) {
    Fiber* self = current;
    Block& block = *self->block;
    wait_in(block, self, wait, site);
    self->value = value;
    self->source_lane = int(source_lane);
    Meeting& meeting = join_meeting(block, self, {wait, site, mask, 0});
    meeting.arrived |= 1u << self->lane();
    if (meeting.arrived != mask) {
        run_next(block, self);
    } else {
        finish_meeting(block, self, meeting);
        if (block.is_shuffled) yield(block, self);
    }
    return self->value;
}

template <class T>
T shuffle(uint32_t mask, T value, uint32_t source_lane, Site site) {
    static_assert(sizeof(T) == 4 || sizeof(T) == 8, "shuffles take 4 or 8 bytes");
    uint64_t bits = 0;
    __builtin_memcpy(&bits, &value, sizeof(T));
    bits = meet(Wait::kShuffle, mask, bits, source_lane, site);
    __builtin_memcpy(&value, &bits, sizeof(T));
    return value;
}

inline uint32_t vote(uint32_t mask, bool value, Site site) {
    return uint32_t(meet(Wait::kVote, mask, value, 0, site));
}

}  // namespace cpu
}  // namespace cuep
#pragma GCC visibility pop

CUEP_DEVICE void __syncthreads(CUEP_CPU_CALLER) {
    cuep::cpu::sync_threads(false, {file, line});
}
CUEP_DEVICE int __syncthreads_count(int predicate, CUEP_CPU_CALLER) {
    return int(cuep::cpu::sync_threads(predicate != 0, {file, line}));
}
CUEP_DEVICE int __syncthreads_or(int predicate, CUEP_CPU_CALLER) {
    return cuep::cpu::sync_threads(predicate != 0, {file, line}) != 0;
}
CUEP_DEVICE int __syncthreads_and(int predicate, CUEP_CPU_CALLER) {
    return cuep::cpu::sync_threads(predicate == 0, {file, line}) == 0;
}

CUEP_DEVICE void __syncwarp(unsigned mask = 0xffffffffu, CUEP_CPU_CALLER) {
    cuep::cpu::meet(cuep::cpu::Wait::kSyncWarp, mask, 0, 0, {file, line});
}

// `width` (a power of two) splits the warp into segments; a source outside the own segment means the own value.
template <class T>
CUEP_DEVICE T __shfl_sync(unsigned mask, T value, int source, int width = 32, CUEP_CPU_CALLER) {
    const unsigned lane = cuep::cpu::current->lane(), segment = lane & ~unsigned(width - 1);
    return cuep::cpu::shuffle(mask, value, segment | (unsigned(source) & unsigned(width - 1)), {file, line});
}
template <class T>
CUEP_DEVICE T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32, CUEP_CPU_CALLER) {
    const unsigned lane = cuep::cpu::current->lane(), place = lane & unsigned(width - 1);
    return cuep::cpu::shuffle(mask, value, place >= delta ? lane - delta : lane, {file, line});
}
template <class T>
CUEP_DEVICE T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32, CUEP_CPU_CALLER) {
    const unsigned lane = cuep::cpu::current->lane(), place = lane & unsigned(width - 1);
    return cuep::cpu::shuffle(mask, value, place + delta < unsigned(width) ? lane + delta : lane, {file, line});
}
template <class T>
CUEP_DEVICE T __shfl_xor_sync(unsigned mask, T value, int lane_mask, int width = 32, CUEP_CPU_CALLER) {
    const unsigned lane = cuep::cpu::current->lane(), source = lane ^ unsigned(lane_mask);
    const bool is_beyond = (source & ~unsigned(width - 1)) > (lane & ~unsigned(width - 1));
    return cuep::cpu::shuffle(mask, value, is_beyond ? lane : source, {file, line});
}

template <class T>
CUEP_DEVICE unsigned __match_any_sync(unsigned mask, T value, CUEP_CPU_CALLER) {
    static_assert(sizeof(T) == 4 || sizeof(T) == 8, "matches take 4 or 8 bytes");
    uint64_t bits = 0;
    __builtin_memcpy(&bits, &value, sizeof(T));
    return unsigned(cuep::cpu::meet(cuep::cpu::Wait::kMatch, mask, bits, 0, {file, line}));
}

CUEP_DEVICE unsigned __reduce_add_sync(unsigned mask, unsigned value, CUEP_CPU_CALLER) {
    return unsigned(cuep::cpu::meet(cuep::cpu::Wait::kReduceAdd, mask, value, 0, {file, line}));
}
CUEP_DEVICE unsigned __reduce_or_sync(unsigned mask, unsigned value, CUEP_CPU_CALLER) {
    return unsigned(cuep::cpu::meet(cuep::cpu::Wait::kReduceOr, mask, value, 0, {file, line}));
}

CUEP_DEVICE unsigned __ballot_sync(unsigned mask, int predicate, CUEP_CPU_CALLER) {
    return cuep::cpu::vote(mask, predicate != 0, {file, line});
}
CUEP_DEVICE int __any_sync(unsigned mask, int predicate, CUEP_CPU_CALLER) {
    return cuep::cpu::vote(mask, predicate != 0, {file, line}) != 0;
}
CUEP_DEVICE int __all_sync(unsigned mask, int predicate, CUEP_CPU_CALLER) {
    return cuep::cpu::vote(mask, predicate != 0, {file, line}) == mask;
}
