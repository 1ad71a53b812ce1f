// The bulk-copy engine on the CPU: copies that are asynchronous on purpose. A copy is put into its block's list and
// done step by step at times that the rules of bulk.cuh allow: as late as they allow with seed 0, at random times
// otherwise. So a missing wait shows as stale or overwritten data, and misuse that the GPU would not report is an
// error.
#pragma once

#include <cuep/cpu/block.h>
#include <cuep/cpu/warp.h>

#pragma GCC visibility push(hidden)
namespace cuep {
namespace cpu {

struct Copy {
    enum State { kIssued, kRead, kDone };

    Copy* next;
    State state;
    void* dst;
    const void* src;
    uint32_t bytes;
    uint64_t* bar;  // of a load; nullptr for a store
    uint32_t warp;  // of a store, with its group
    uint32_t group;
    Site site;
    bool is_lazy;     // stays as it is until a wait asks for it
    bool is_awaited;  // some wait has asked for it
    uint8_t* staged;  // of a store: what it has read
};

// A barrier's 8 bytes: that it was initialised, and the parity of the current phase.
constexpr uint64_t kBarrierMagic = 0x6d62617272696572;
constexpr uint64_t kBarrierParity = 1;

inline bool is_initialised(const uint64_t* bar) {
    return (*bar & ~kBarrierParity) == kBarrierMagic;
}

// Takes a copy one step further: a load does all at once, a store reads and later writes.
inline void advance_copy(Block& block, Copy& copy) {
    copy.is_lazy = block.random.one_in(2);
    if (copy.bar != nullptr) {
        memcpy(copy.dst, copy.src, copy.bytes);
        *copy.bar ^= kBarrierParity;
        copy.state = Copy::kDone;
    } else if (copy.state == Copy::kIssued) {
        copy.staged = static_cast<uint8_t*>(malloc(copy.bytes));
        memcpy(copy.staged, copy.src, copy.bytes);
        copy.state = Copy::kRead;
    } else {
        memcpy(copy.dst, copy.staged, copy.bytes);
        copy.state = Copy::kDone;
    }
}

// Finished copies stay in the list until a wait has asked for them: misuse is then found whenever they finish.
inline void remove_finished_copies(Block& block) {
    for (Copy** link = &block.copies; *link != nullptr;) {
        Copy* copy = *link;
        if (copy->state != Copy::kDone || !copy->is_awaited) {
            link = &copy->next;
            continue;
        }
        *link = copy->next;
        --block.num_copies;
        free(copy->staged);
        delete copy;
    }
}

// Called at every switch of a seeded run.
inline void advance_random_copy(Block& block) {
    if (!block.random.one_in(8)) return;
    Copy* copy = block.copies;
    for (uint32_t skip = block.random.below(block.num_copies); skip > 0; --skip) copy = copy->next;
    if (copy->is_lazy || copy->state == Copy::kDone) return;
    advance_copy(block, *copy);
    remove_finished_copies(block);
}

inline void add_copy(Block& block, const Copy& copy) {
    Copy** link = &block.copies;
    while (*link != nullptr) link = &(*link)->next;
    *link = new Copy(copy);
    (*link)->is_lazy = block.random.one_in(2);
    ++block.num_copies;
}

// When all threads have returned: stores may still have to write, as the end of a GPU kernel waits for that. Anything
// else in flight could use shared memory that no longer belongs to the block.
inline void finish_copies(Block& block) {
    bool has_delayed = false;
    for (Copy* copy = block.copies; copy != nullptr; copy = copy->next) {
        if (copy->is_awaited) {
            // Others may act on a flag that was released too early: give them the time.
            if (!has_delayed) delay_block(block);
            has_delayed = true;
            while (copy->state != Copy::kDone) advance_copy(block, *copy);
        } else if (copy->bar != nullptr) {
            fail(block, "the block ends before mbarrier_wait for the bulk_load", copy->site);
        } else {
            fail(block, "the block ends before bulk_wait_read for the bulk_store", copy->site);
        }
    }
}

inline void drop_copies(Block& block) {
    for (Copy* copy = block.copies; copy != nullptr; copy = copy->next) {
        copy->state = Copy::kDone;
        copy->is_awaited = true;
    }
    remove_finished_copies(block);
}

inline Copy* find_load(Block& block, const uint64_t* bar) {
    Copy* copy = block.copies;
    while (copy != nullptr && copy->bar != bar) copy = copy->next;
    return copy;
}

inline bool is_aligned(const void* a, const void* b, uint32_t bytes) {
    return ((reinterpret_cast<uintptr_t>(a) | reinterpret_cast<uintptr_t>(b) | bytes) & 15) == 0;
}

// The call is one of the whole warp. Returns whether this lane is the one that issues.
inline bool gather_warp(Site site) {
    meet(Wait::kBulk, 0xffffffffu, 0, 0, site);
    return current->lane() == 0;
}

inline void mbarrier_init(uint64_t* bar, Site site) {
    if (gather_warp(site)) *bar = kBarrierMagic;
    gather_warp(site);
}

inline void bulk_load(void* smem, const void* gmem, uint32_t bytes, uint64_t* bar, Site site) {
    if (!gather_warp(site)) return;
    Block& block = *current->block;
    if (!is_aligned(smem, gmem, bytes)) fail(block, "bulk_load whose addresses or size are no multiple of 16", site);
    if (!is_initialised(bar)) fail(block, "bulk_load with a barrier that was not initialised", site);
    if (find_load(block, bar)) fail(block, "bulk_load with a barrier whose last load nobody has waited for", site);
    add_copy(block, {nullptr, Copy::kIssued, smem, gmem, bytes, bar, 0, 0, site, true, false, nullptr});
    for (uint32_t i = 0; i < block.num_fibers; ++i) {  // some may wait for this very load
        Fiber& fiber = block.fibers[i];
        if (fiber.wait != Wait::kMbarrier) continue;
        fiber.wait = Wait::kNone;
        block.make_runnable(&fiber);
    }
}

inline void mbarrier_wait(uint64_t* bar, uint32_t parity, Site site) {
    Fiber* self = current;
    Block& block = *self->block;
    if (!is_initialised(bar)) fail(block, "mbarrier_wait for a barrier that was not initialised", site);
    if (block.is_shuffled) yield(block, self);
    while ((*bar & kBarrierParity) == (parity & 1)) {
        if (Copy* load = find_load(block, bar)) {
            advance_copy(block, *load);
        } else {  // not issued yet: bulk_load wakes
            wait_in(block, self, Wait::kMbarrier, site);
            run_next(block, self);
        }
    }
    Copy* load = find_load(block, bar);
    if (load != nullptr && load->state == Copy::kDone) load->is_awaited = true;
    remove_finished_copies(block);
    gather_warp(site);
}

inline void bulk_store(void* gmem, const void* smem, uint32_t bytes, Site site) {
    if (!gather_warp(site)) return;
    Block& block = *current->block;
    if (!is_aligned(smem, gmem, bytes)) fail(block, "bulk_store whose addresses or size are no multiple of 16", site);
    const uint32_t warp = current->thread_idx.x / 32;
    const uint32_t group = block.warps[warp].num_groups;
    add_copy(block, {nullptr, Copy::kIssued, gmem, smem, bytes, nullptr, warp, group, site, true, false, nullptr});
}

inline void bulk_commit(Site site) {
    if (gather_warp(site)) ++current->block->warp_of(*current).num_groups;
}

// Takes all stores of this warp but those of its newest `num_pending` groups to `state`.
inline void bulk_wait(uint32_t num_pending, Copy::State state, Site site) {
    if (gather_warp(site)) {
        Block& block = *current->block;
        const uint32_t warp = current->thread_idx.x / 32;
        for (Copy* copy = block.copies; copy != nullptr; copy = copy->next) {
            if (copy->bar != nullptr || copy->warp != warp) continue;
            if (copy->group + num_pending >= block.warps[warp].num_groups) continue;
            while (copy->state < state) advance_copy(block, *copy);
            copy->is_awaited = true;
        }
        remove_finished_copies(block);
    }
    gather_warp(site);
}

}  // namespace cpu
}  // namespace cuep
#pragma GCC visibility pop
