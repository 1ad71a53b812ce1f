// Fiber stacks: one mapping per block with a guard page below each stack, kept between launches.
#pragma once

#include <pthread.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>

#pragma GCC visibility push(hidden)
namespace cuep {
namespace cpu {

constexpr size_t kStackBytes = 128 << 10;  // address space; only touched pages cost memory
constexpr uint32_t kMaxPooledStacks = 4096;

struct Stacks {
    uint8_t* base;
    uint32_t count;
    Stacks* next;

    static size_t guard_bytes() { return size_t(sysconf(_SC_PAGESIZE)); }
    static size_t stride() { return kStackBytes + guard_bytes(); }

    // The end of a stack. Stacks start at different places within a page: at equal ones the hot ends of all fibers
    // would compete for the same few cache sets.
    uint8_t* end(uint32_t i) const { return base + stride() * (i + 1) - (i % 16) * 192; }
};

struct StackPool {
    pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
    Stacks* free_list = nullptr;
    uint32_t num_pooled = 0;
};
inline StackPool stack_pool;

inline bool guard(uint8_t* page, size_t bytes) {
    constexpr int kGuardInstall = 102;  // MADV_GUARD_INSTALL of Linux 6.13: does not split the mapping in two
    return madvise(page, bytes, kGuardInstall) == 0 || mprotect(page, bytes, PROT_NONE) == 0;
}

inline Stacks* map_stacks(uint32_t count) {
    const size_t stride = Stacks::stride();
    void* base = mmap(nullptr,
                      stride * count,
                      PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_STACK,
                      -1,
                      0);
    if (base == MAP_FAILED) return nullptr;
    Stacks* stacks = new Stacks{static_cast<uint8_t*>(base), count, nullptr};
    // A huge grid can run out of mappings. Its stacks then work without guards.
    for (uint32_t i = 0; i < count && guard(stacks->base + stride * i, Stacks::guard_bytes()); ++i) {
    }
    return stacks;
}

// At least `count` stacks, or nullptr without memory.
inline Stacks* take_stacks(uint32_t count) {
    pthread_mutex_lock(&stack_pool.mutex);
    Stacks** link = &stack_pool.free_list;
    while (*link != nullptr && (*link)->count < count) link = &(*link)->next;
    Stacks* found = *link;
    if (found != nullptr) {
        *link = found->next;
        stack_pool.num_pooled -= found->count;
    }
    pthread_mutex_unlock(&stack_pool.mutex);
    return found != nullptr ? found : map_stacks(count);
}

inline void give_back_stacks(Stacks* stacks) {
    pthread_mutex_lock(&stack_pool.mutex);
    const bool keep = stack_pool.num_pooled + stacks->count <= kMaxPooledStacks;
    if (keep) {
        stacks->next = stack_pool.free_list;
        stack_pool.free_list = stacks;
        stack_pool.num_pooled += stacks->count;
    }
    pthread_mutex_unlock(&stack_pool.mutex);
    if (!keep) {
        munmap(stacks->base, Stacks::stride() * stacks->count);
        delete stacks;
    }
}

}  // namespace cpu
}  // namespace cuep
#pragma GCC visibility pop
