// What makes a run different from the plain one: a seed that shuffles the order of fibers, and injected delays.
#pragma once

#include <sched.h>
#include <time.h>

#include <cstdint>

#pragma GCC visibility push(hidden)
namespace cuep {
namespace cpu {

// splitmix64 (Steele, Lea, Flood 2014): any state is a good one, so seeds can simply be mixed in.
struct Random {
    uint64_t state;

    uint64_t next() {
        state += 0x9e3779b97f4a7c15u;
        uint64_t z = state;
        z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
        z = (z ^ z >> 27) * 0x94d049bb133111ebu;
        return z ^ z >> 31;
    }
    uint32_t below(uint32_t bound) { return uint32_t((next() >> 32) * bound >> 32); }
    bool one_in(uint32_t n) { return below(n) == 0; }
    void mix(uint64_t value) {
        state ^= value;
        state = next();
    }
};

// Set by cuep_cpu_configure, read once by each launch. The launch count makes launches differ from one another.
struct Settings {
    uint64_t seed = 0;  // 0: fibers run in order
    int delay_level = 0;
    uint64_t num_launches = 0;
};
inline Settings settings;

inline void sleep_ns(uint64_t ns) {
    const timespec duration = {time_t(ns / 1000000000), long(ns % 1000000000)};
    nanosleep(&duration, nullptr);
}

inline uint64_t now_ns() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return uint64_t(now.tv_sec) * 1000000000 + uint64_t(now.tv_nsec);
}

}  // namespace cpu
}  // namespace cuep
#pragma GCC visibility pop
