// One block of a launch: its fibers, which of them can run, and what the others wait for.
//
// The OS thread of a block runs one fiber at a time. A fiber gives way only inside a primitive: it blocks in a barrier
// or a warp collective (and leaves the run queue until the others have arrived), polls in relax(), or is delayed. So an
// empty run queue with live fibers means that they wait for one another: an error, found at once and without a timeout.
#pragma once

#include <sched.h>

#include <cuep/cpu/context.h>
#include <cuep/cpu/language.h>
#include <cuep/cpu/random.h>
#include <cuep/cpu/report.h>

#pragma GCC visibility push(hidden)
namespace cuep {
namespace cpu {

constexpr uint32_t kMaxThreads = 1024;  // per block, as on the GPU

struct Block;
struct Copy;

void advance_random_copy(Block& block);
void finish_copies(Block& block);
void drop_copies(Block& block);

struct Site {
    const char* file;
    int line;

    bool operator==(const Site& other) const {  // one place may have several copies of its file's name
        return line == other.line && (file == other.file || __builtin_strcmp(file, other.file) == 0);
    }
};

enum class Wait : uint8_t {
    kNone,
    kExited,
    kRelax,
    kSyncThreads,
    kSyncWarp,
    kShuffle,
    kVote,
    kMatch,
    kReduceAdd,
    kReduceOr,
    kBulk,
    kMbarrier
};

inline const char* wait_name(Wait wait) {
    constexpr const char* kNames[] = {"running",
                                      "exited",
                                      "polling",
                                      "__syncthreads",
                                      "__syncwarp",
                                      "__shfl_sync",
                                      "vote",
                                      "__match_any_sync",
                                      "__reduce_add_sync",
                                      "__reduce_or_sync",
                                      "bulk copy",
                                      "mbarrier_wait"};
    static_assert(sizeof(kNames) / sizeof(kNames[0]) == size_t(Wait::kMbarrier) + 1, "a name for each");
    return kNames[int(wait)];
}

struct Fiber {
    Block* block;
    void* sp;  // while it does not run
    uint3 thread_idx;
    Wait wait = Wait::kNone;
    Site site = {};
    // What the fiber brings to a warp collective and, afterwards, its result.
    uint64_t value = 0;
    int source_lane = 0;
    bool is_polling = false;  // with its warp: see relax_warp

    uint32_t lane() const { return thread_idx.x % 32; }
};

// A warp collective for which some lanes of `mask` have arrived.
struct Meeting {
    Wait wait;
    Site site;
    uint32_t mask;
    uint32_t arrived;
};

struct Warp {
    uint32_t exited;          // lanes that returned from the kernel or never existed
    uint32_t in_barrier = 0;  // lanes in __syncthreads
    uint32_t pending = 0;     // which of `meetings` are going on: several, if their masks differ
    Meeting meetings[32];     // at the lane that came first
    uint32_t num_groups = 0;  // of bulk stores, committed
};

struct Launch {
    const char* name;
    void (*run)(const Launch& launch);  // one thread of the kernel
    void (*kernel)();                   // of a type that only `run` knows
    const void* params;
    uint32_t grid, threads;
    uint64_t smem_bytes;
    Settings settings;
    Error error;
};

struct Block {
    Launch* launch;
    uint3 block_idx;
    dim3 block_dim, grid_dim;
    uint8_t* dynamic_smem;

    Fiber* fibers;
    Warp* warps;
    uint32_t num_fibers;
    uint32_t num_live;
    uint32_t num_in_barrier = 0;
    uint32_t num_votes = 0;     // of the fibers in the barrier
    Site barrier_site = {};     // where its first fiber arrived
    void* thread_sp = nullptr;  // the context of the OS thread itself, where the block ends

    Fiber** queue;  // ring of the fibers that can run, num_fibers long
    uint32_t queue_head = 0;
    uint32_t queue_size = 0;

    Copy* copies = nullptr;  // bulk copies in flight
    uint32_t num_copies = 0;

    Random random;
    bool is_shuffled;
    int delay_level;
    uint32_t slow_warp;            // falls behind the others of a shuffled block; may be a warp that it does not have
    uint32_t num_relaxes = 0;      // in a row, with nothing else happening in this block
    uint32_t num_idle_rounds = 0;  // since something else happened

    Warp& warp_of(const Fiber& fiber) { return warps[fiber.thread_idx.x / 32]; }
    void note_progress() { num_relaxes = num_idle_rounds = 0; }

    void make_runnable(Fiber* fiber) {
        uint32_t slot = queue_head + queue_size++;
        if (slot >= num_fibers) slot -= num_fibers;
        queue[slot] = fiber;
    }

    uint32_t random_slot() {
        const uint32_t slot = queue_head + random.below(queue_size);
        return slot < num_fibers ? slot : slot - num_fibers;
    }

    Fiber* take_runnable() {
        if (is_shuffled) {
            uint32_t slot = random_slot();
            if (queue[slot]->thread_idx.x / 32 == slow_warp && !random.one_in(4)) slot = random_slot();
            Fiber* chosen = queue[slot];
            queue[slot] = queue[queue_head];
            queue[queue_head] = chosen;
        }
        Fiber* next = queue[queue_head];
        if (++queue_head == num_fibers) queue_head = 0;
        --queue_size;
        return next;
    }
};

// The fiber that this OS thread runs. A fiber never moves to another OS thread.
inline thread_local Fiber* current = nullptr;

// Ends the block from within a fiber: back to run_block, which frees the stacks of all fibers as they are.
[[noreturn]] inline void leave_block(Block& block) {
    void* abandoned;
    current = nullptr;
    cuep_cpu_switch(&abandoned, block.thread_sp);
    __builtin_unreachable();
}

// "12-15,17" for the fibers with the same wait as `first`; they are marked as listed.
inline void list_threads(Block& block, const Fiber& first, bool* is_listed, Text& text) {
    const char* separator = "";
    for (uint32_t i = first.thread_idx.x; i < block.num_fibers; ++i) {
        auto belongs = [&](uint32_t j) {
            const Fiber& fiber = block.fibers[j];
            return j < block.num_fibers && fiber.wait == first.wait &&
                   (first.wait <= Wait::kExited || fiber.site == first.site);
        };
        if (!belongs(i)) continue;
        const uint32_t begin = i;
        while (is_listed[i] = true, belongs(i + 1)) ++i;
        text.add(i > begin ? "%s%u-%u" : "%s%u", separator, begin, i);
        separator = ",";
    }
}

// Ends the launch with one line: the kernel, the block, the reason with its place, and where every thread of the block
// is.
[[noreturn]] inline void fail(Block& block, const char* reason, Site site) {
    bool is_listed[kMaxThreads] = {};
    Text text;
    text.add(
        "%s: block %u: %s at %s:%d", block.launch->name, block.block_idx.x, reason, base_name(site.file), site.line);
    const char* separator = "; threads: ";
    for (uint32_t i = 0; i < block.num_fibers; ++i) {
        if (is_listed[i]) continue;
        const Fiber& fiber = block.fibers[i];
        text.add("%s", separator);
        list_threads(block, fiber, is_listed, text);
        text.add(" %s", wait_name(fiber.wait));
        if (fiber.wait > Wait::kExited) text.add(" at %s:%d", base_name(fiber.site.file), fiber.site.line);
        separator = "; ";
    }
    block.launch->error.set(text);
    leave_block(block);
}

[[noreturn]] inline void fail_stuck(Block& block) {
    uint32_t i = 0;
    while (block.fibers[i].wait == Wait::kExited) ++i;
    fail(block, "all live threads wait for one another", block.fibers[i].site);
}

// Runs another fiber. The caller has put itself into the run queue, or somewhere else that will wake it.
inline void run_next(Block& block, Fiber* self) {
    if (block.queue_size == 0) fail_stuck(block);
    if (block.launch->error.is_set()) leave_block(block);  // another block failed
    if (block.is_shuffled && block.copies != nullptr) advance_random_copy(block);
    Fiber* next = block.take_runnable();
    if (next == self) return;
    current = next;
    cuep_cpu_switch(&self->sp, next->sp);
}

inline void yield(Block& block, Fiber* self) {
    block.make_runnable(self);
    run_next(block, self);
}

// Nothing in this block can proceed before another block or rank does: let them have the core. Many ranks share few
// cores, where sleeping early beat yielding longer: 8 ranks of 4 blocks on 2 cores exchanged flags in 1.6 instead
// of 3.9 ms.
inline void pause_thread(Block& block) {
    const uint32_t round = block.num_idle_rounds++;
    if (round < 2) {
        sched_yield();
    } else {
        sleep_ns(round < 20 ? 30000 : 100000);  // the kernel adds its timer slack, 50 us
    }
}

// Lets the whole block fall behind, at its start and where others are tempted to run ahead of it.
inline void delay_block(Block& block) {
    if (block.delay_level > 0) sleep_ns(1000 * uint64_t(block.random.below(150)) * uint32_t(block.delay_level));
}

inline void relax(Site site) {
    Fiber* self = current;
    Block& block = *self->block;
    self->wait = Wait::kRelax;
    self->site = site;
    if (++block.num_relaxes > block.queue_size) {  // every fiber that can run has polled in vain
        block.num_relaxes = 0;
        pause_thread(block);
        if (block.launch->error.is_set()) leave_block(block);
    }
    yield(block, self);
    self->wait = Wait::kNone;
}

}  // namespace cpu
}  // namespace cuep
#pragma GCC visibility pop

#define threadIdx (::cuep::cpu::current->thread_idx)
#define blockIdx (::cuep::cpu::current->block->block_idx)
#define blockDim (::cuep::cpu::current->block->block_dim)
#define gridDim (::cuep::cpu::current->block->grid_dim)
