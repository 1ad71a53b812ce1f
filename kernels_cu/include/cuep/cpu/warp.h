// Barriers, shuffles and votes: meeting points of fibers. The last fiber to arrive works out everybody's result and
// makes the others runnable. Fibers that meet in different places are an error, as on the GPU, though there it may go
// unnoticed.
#pragma once

#include <cuep/cpu/block.h>

#pragma GCC visibility push(hidden)
namespace cuep {
namespace cpu {

inline void block_in(Block& block, Fiber* self, Wait wait, Site site) {
    block.note_progress();
    self->wait = wait;
    self->site = site;
    block.warp_of(*self).blocked |= 1u << self->lane();
}

inline void release_barrier(Block& block) {
    const uint32_t num_votes = block.num_votes;
    block.num_in_barrier = block.num_votes = 0;
    for (uint32_t i = 0; i < block.num_fibers; ++i) {
        Fiber& fiber = block.fibers[i];
        if (fiber.wait != Wait::kSyncThreads)
            continue;
        fiber.wait = Wait::kNone;
        fiber.value = num_votes;
        block.warp_of(fiber).blocked &= ~(1u << fiber.lane());
        block.make_runnable(&fiber);
    }
}

// Returns how many threads of the block passed true.
inline uint32_t sync_threads(bool vote, Site site) {
    Fiber* self = current;
    Block& block = *self->block;
    block_in(block, self, Wait::kSyncThreads, site);
    if (block.warp_of(*self).claimed >> self->lane() & 1) {
        fail(block, "__syncthreads in a thread that others of its warp expect in a warp collective", site);
    }
    // Any fiber of the barrier will do to compare with: those before it were compared too.
    if (block.num_in_barrier++ == 0) {
        block.barrier_site = site;
    } else if (!(block.barrier_site == site)) {
        fail(block, "different __syncthreads in one block", site);
    }
    block.num_votes += vote;
    if (block.num_in_barrier == block.num_live)
        release_barrier(block);
    run_next(block, self);
    return uint32_t(self->value);
}

// Called when the kernel function returns. A thread that has returned no longer counts for __syncthreads.
[[noreturn]] inline void exit_thread() {
    Fiber* self = current;
    Block& block = *self->block;
    Warp& warp = block.warp_of(*self);
    block.note_progress();
    self->wait = Wait::kExited;
    warp.exited |= 1u << self->lane();
    if (warp.claimed >> self->lane() & 1) {
        Fiber* waiting = self - self->lane();
        while (waiting->wait <= Wait::kExited || !(waiting->mask >> self->lane() & 1))
            ++waiting;
        fail(block, "a thread returned that others of its warp expect in the collective", waiting->site);
    }
    if (--block.num_live == 0) {
        finish_copies(block);
        leave_block(block);
    }
    if (block.num_in_barrier == block.num_live)
        release_barrier(block);
    run_next(block, self);
    __builtin_unreachable();
}

inline bool is_same_collective(const Fiber& a, const Fiber& b) {
    return a.wait == b.wait && a.mask == b.mask && a.site == b.site;
}

// All lanes of `mask` have arrived: a shuffle gives each the value of its source lane, a vote the lanes that voted yes.
inline void finish_collective(Block& block, Fiber* self) {
    Warp& warp = block.warp_of(*self);
    Fiber* lanes = self - self->lane();
    uint64_t results[32];
    uint32_t votes = 0;
    for (uint32_t rest = self->mask; rest != 0; rest &= rest - 1) {
        const int lane = __builtin_ctz(rest);
        if (!is_same_collective(lanes[lane], *self))
            fail(block, "different warp collectives or masks", self->site);
        if (lanes[lane].value != 0)
            votes |= 1u << lane;
        const int source = lanes[lane].source_lane;
        const bool has_source = self->mask >> source & 1;
        results[lane] = has_source ? lanes[source].value : 0xcdcdcdcdcdcdcdcdu;  // undefined on the GPU: poison
    }
    warp.blocked &= ~self->mask;
    warp.claimed &= ~self->mask;
    for (uint32_t rest = self->mask; rest != 0; rest &= rest - 1) {
        const int lane = __builtin_ctz(rest);
        lanes[lane].value = self->wait == Wait::kVote ? votes : results[lane];
        if (&lanes[lane] != self)
            block.make_runnable(&lanes[lane]);
    }
}

// Meets the other lanes of `mask` in the same collective and returns this lane's result.
inline uint64_t meet(Wait wait, uint32_t mask, uint64_t value, uint32_t source_lane, Site site) {
    Fiber* self = current;
    Block& block = *self->block;
    Warp& warp = block.warp_of(*self);
    const uint32_t others = warp.blocked & mask;
    const bool is_expected = warp.claimed >> self->lane() & 1;
    block_in(block, self, wait, site);
    self->mask = mask;
    self->value = value;
    self->source_lane = int(source_lane);
    if (!(mask >> self->lane() & 1))
        fail(block, "warp collective whose mask leaves out the caller", site);
    if (mask & warp.exited)
        fail(block, "warp collective whose mask names threads that have returned", site);
    if (others == 0 ? is_expected : !is_same_collective((self - self->lane())[__builtin_ctz(others)], *self)) {
        fail(block, "different warp collectives or masks", site);
    }
    warp.claimed |= mask;
    if ((warp.blocked & mask) != mask) {
        run_next(block, self);
    } else {
        finish_collective(block, self);
        if (block.is_shuffled)
            yield(block, self);
    }
    self->wait = Wait::kNone;
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

CUEP_DEVICE unsigned __ballot_sync(unsigned mask, int predicate, CUEP_CPU_CALLER) {
    return cuep::cpu::vote(mask, predicate != 0, {file, line});
}
CUEP_DEVICE int __any_sync(unsigned mask, int predicate, CUEP_CPU_CALLER) {
    return cuep::cpu::vote(mask, predicate != 0, {file, line}) != 0;
}
CUEP_DEVICE int __all_sync(unsigned mask, int predicate, CUEP_CPU_CALLER) {
    return cuep::cpu::vote(mask, predicate != 0, {file, line}) == mask;
}
