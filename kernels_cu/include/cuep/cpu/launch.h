// Running a grid: one OS thread per block, the last one being the caller's, until every block has ended.
#pragma once

#include <fenv.h>
#include <link.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>

#include <cuep/cpu/block.h>
#include <cuep/cpu/stacks.h>
#include <cuep/cpu/warp.h>

#pragma GCC visibility push(hidden)
namespace cuep {
namespace cpu {

constexpr int kPoison = 0xcd;
constexpr uint32_t kMarginBytes = 128;  // behind the dynamic shared memory, checked at the end

// Where this shared object's thread-local variables lie, relative to `current`, which is one of them.
struct ThreadLocals {
    ptrdiff_t begin = 0;
    size_t bytes = 0;

    ThreadLocals() { dl_iterate_phdr(&visit, this); }

    static int visit(dl_phdr_info* info, size_t, void* self) {
        const char* anchor = reinterpret_cast<const char*>(&current);
        const char* base = static_cast<const char*>(info->dlpi_tls_data);
        for (int i = 0; i < info->dlpi_phnum; ++i) {
            const auto& header = info->dlpi_phdr[i];
            if (header.p_type != PT_TLS || base == nullptr) continue;
            if (anchor < base || anchor >= base + header.p_memsz) continue;
            *static_cast<ThreadLocals*>(self) = {base - anchor, header.p_memsz};
            return 1;
        }
        return 0;
    }

private:
    ThreadLocals(ptrdiff_t begin_, size_t bytes_) : begin(begin_), bytes(bytes_) {}
};

// __shared__ variables are the shared object's thread-local variables: fill them all with poison, so that a kernel that
// relies on zeros, or on what an earlier block left, is found out. `current` is the only other one, and is null here.
inline void poison_shared_memory() {
    static const ThreadLocals locals;
    char* begin = reinterpret_cast<char*>(&current) + locals.begin;
    asm volatile("" : "+r"(begin));  // or compilers conclude that it points into `current` and nowhere else
    memset(begin, kPoison, locals.bytes);
    asm volatile("" ::"r"(begin) : "memory");
    current = nullptr;
}

// What a block needs besides its Block.
struct BlockMemory {
    Stacks* stacks;
    Fiber* fibers;
    Fiber** queue;
    Warp* warps;
    uint8_t* smem;
    uint64_t smem_bytes;

    BlockMemory(uint32_t num_threads, uint64_t smem_bytes_)
        : stacks(take_stacks(num_threads)),
          fibers(new Fiber[num_threads]),
          queue(new Fiber*[num_threads]),
          warps(new Warp[(num_threads + 31) / 32]),
          smem(static_cast<uint8_t*>(aligned_alloc(128, (smem_bytes_ + kMarginBytes + 127) / 128 * 128))),
          smem_bytes(smem_bytes_) {
        if (smem != nullptr) memset(smem, kPoison, smem_bytes + kMarginBytes);
    }
    BlockMemory(const BlockMemory&) = delete;
    ~BlockMemory() {
        free(smem);
        delete[] warps;
        delete[] queue;
        delete[] fibers;
        if (stacks != nullptr) give_back_stacks(stacks);
    }

    bool is_complete() const { return stacks != nullptr && smem != nullptr; }

    bool is_margin_intact() const {
        for (uint64_t i = smem_bytes; i < smem_bytes + kMarginBytes; ++i) {
            if (smem[i] != kPoison) return false;
        }
        return true;
    }
};

inline void run_thread() {
    current->block->launch->run(*current->block->launch);
    exit_thread();
}

inline void start_fibers(Block& block, const Stacks& stacks) {
    for (uint32_t first = 0; first < block.num_fibers; first += 32) {
        const uint32_t num_lanes = block.num_fibers - first;
        block.warps[first / 32].exited = num_lanes >= 32 ? 0 : ~0u << num_lanes;
    }
    for (uint32_t i = 0; i < block.num_fibers; ++i) {
        Fiber& fiber = block.fibers[i];
        fiber.block = &block;
        fiber.thread_idx = {i, 0, 0};
        fiber.sp = new_context(stacks.end(i), &run_thread);
        block.make_runnable(&fiber);
    }
}

inline void seed_block(Block& block, const Settings& settings) {
    block.random.state = settings.seed;
    block.random.mix(settings.num_launches);
    block.random.mix(block.block_idx.x);
    block.is_shuffled = settings.seed != 0;
    block.delay_level = block.is_shuffled ? settings.delay_level : 0;
    block.slow_warp = block.random.below(block.num_fibers / 16 + 1);
}

inline void run_block(Launch& launch, uint32_t block_idx) {
    BlockMemory memory(launch.threads, launch.smem_bytes);
    Text problem;
    problem.add("%s: block %u: ", launch.name, block_idx);
    if (!memory.is_complete()) {
        problem.add("no memory for its shared memory or the stacks of its %u threads", launch.threads);
        launch.error.set(problem);
        return;
    }
    // The GPU rounds to nearest and keeps subnormals, whatever the calling thread is set to.
    fenv_t caller_env;
    fegetenv(&caller_env);
    fesetenv(FE_DFL_ENV);
    poison_shared_memory();

    Block block = {};
    block.launch = &launch;
    block.block_idx = {block_idx, 0, 0};
    block.block_dim = launch.threads;
    block.grid_dim = launch.grid;
    block.dynamic_smem = memory.smem;
    block.fibers = memory.fibers;
    block.warps = memory.warps;
    block.queue = memory.queue;
    block.num_fibers = block.num_live = launch.threads;
    seed_block(block, launch.settings);
    start_fibers(block, *memory.stacks);
    delay_block(block);
    current = block.take_runnable();
    cuep_cpu_switch(&block.thread_sp, current->sp);  // returns when leave_block switches back

    drop_copies(block);
    fesetenv(&caller_env);
    if (!memory.is_margin_intact()) {
        problem.add("wrote beyond its %llu bytes of dynamic shared memory", (unsigned long long)launch.smem_bytes);
        launch.error.set(problem);
    }
}

struct BlockThread {
    Launch* launch;
    uint32_t block_idx;
    pthread_t thread;

    static void* main(void* self) {
        const auto* block = static_cast<BlockThread*>(self);
        run_block(*block->launch, block->block_idx);
        return nullptr;
    }
};

// Starts threads for the first `count` blocks and returns how many there are. Blocks wait for one another, so if one
// cannot be started, the launch fails and the others end at their next switch.
inline uint32_t start_blocks(Launch& launch, BlockThread* blocks, uint32_t count) {
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    pthread_attr_setstacksize(&attributes, 256 << 10);  // the block's fibers have stacks of their own
    sigset_t all_signals, caller_signals;               // signals are for the program's own threads
    sigfillset(&all_signals);
    pthread_sigmask(SIG_SETMASK, &all_signals, &caller_signals);
    uint32_t num_started = 0;
    for (; num_started < count; ++num_started) {
        BlockThread& block = blocks[num_started];
        block.launch = &launch;
        block.block_idx = num_started;
        const int status = pthread_create(&block.thread, &attributes, &BlockThread::main, &block);
        if (status == 0) continue;
        Text text;
        text.add("%s: cannot start a thread for block %u of %u: %s",
                 launch.name,
                 num_started,
                 launch.grid,
                 strerror(status));
        launch.error.set(text);
        break;
    }
    pthread_sigmask(SIG_SETMASK, &caller_signals, nullptr);
    pthread_attr_destroy(&attributes);
    return num_started;
}

// All blocks run at once, the last one in the calling thread.
inline void run_grid(Launch& launch) {
    BlockThread* blocks = new BlockThread[launch.grid];
    const uint32_t num_started = start_blocks(launch, blocks, launch.grid - 1);
    if (num_started == launch.grid - 1) run_block(launch, launch.grid - 1);
    for (uint32_t i = 0; i < num_started; ++i) pthread_join(blocks[i].thread, nullptr);
    delete[] blocks;
}

inline Settings settings_of_next_launch() {
    Settings now;
    now.seed = __atomic_load_n(&settings.seed, __ATOMIC_RELAXED);
    now.delay_level = __atomic_load_n(&settings.delay_level, __ATOMIC_RELAXED);
    now.num_launches = __atomic_fetch_add(&settings.num_launches, 1, __ATOMIC_RELAXED);
    return now;
}

// Runs a kernel to its end. Returns 0, or 1 with one line of text in `error`.
template <class Params>
int launch(const char* name,
           void (*kernel)(Params),
           uint32_t grid,
           uint32_t threads,
           uint64_t smem_bytes,
           const void* params,
           char* error,
           uint64_t error_bytes) {
    auto run = [](const Launch& launch) {
        reinterpret_cast<void (*)(Params)>(launch.kernel)(*static_cast<const Params*>(launch.params));
    };
    Launch launch = {name,
                     run,
                     reinterpret_cast<void (*)()>(kernel),
                     params,
                     grid,
                     threads,
                     smem_bytes,
                     settings_of_next_launch(),
                     Error(error, error_bytes)};
    if (grid == 0 || threads == 0 || threads > kMaxThreads) {
        Text text;
        text.add("%s: cannot launch %u blocks of %u threads: need 1 or more blocks of 1 to %u threads",
                 name,
                 grid,
                 threads,
                 kMaxThreads);
        launch.error.set(text);
        return 1;
    }
    run_grid(launch);
    return launch.error.is_set();
}

}  // namespace cpu
}  // namespace cuep
#pragma GCC visibility pop

#define CUEP_CPU_PUBLIC extern "C" __attribute__((visibility("default")))

// Seeds the scheduler of this shared object's later launches. Seed 0: threads run in order, without delays. Otherwise
// in random order, with delays from 0 (none) to 3 (many) before accesses that other blocks or ranks can see.
CUEP_CPU_PUBLIC void cuep_cpu_configure(uint64_t seed, int delay_level) {
    using cuep::cpu::settings;
    __atomic_store_n(&settings.seed, seed, __ATOMIC_RELAXED);
    __atomic_store_n(&settings.delay_level, delay_level < 0 ? 0 : delay_level > 3 ? 3 : delay_level, __ATOMIC_RELAXED);
    __atomic_store_n(&settings.num_launches, uint64_t(0), __ATOMIC_RELAXED);
}

#define CUEP_CPU_EXPORT(name)                                                                                          \
    CUEP_CPU_PUBLIC int cuep_launch_##name(                                                                            \
        uint32_t grid, uint32_t threads, uint64_t smem_bytes, const void* params, char* error, uint64_t error_bytes) { \
        return cuep::cpu::launch(#name, &name, grid, threads, smem_bytes, params, error, error_bytes);                 \
    }
