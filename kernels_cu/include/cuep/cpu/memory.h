// Every access that is shared with other blocks or ranks, in one place: here delays are injected, and here a race
// checker would hook in.
#pragma once

#include <cuep/cpu/block.h>

#pragma GCC visibility push(hidden)
namespace cuep {
namespace cpu {

__attribute__((noinline)) inline void delay(Block& block, Fiber* self) {
    constexpr uint32_t kOneIn[] = {0, 512, 64, 12};
    if (!block.random.one_in(kOneIn[block.delay_level])) return;
    switch (block.random.below(8)) {
        case 0:
            sleep_ns(1000 * block.random.below(100));
            break;
        case 1:
        case 2:
            sched_yield();
            break;
        default:
            yield(block, self);
            break;
    }
}

// Now and then lets other fibers, other threads or time pass before the access that follows.
inline void delay_point() {
    if (__atomic_load_n(&settings.delay_level, __ATOMIC_RELAXED) == 0) return;  // cheap: this stands in inner loops
    Fiber* self = current;
    if (self->block->delay_level != 0) delay(*self->block, self);
}

template <int kOrder, class T>
T scoped_load(const T* ptr) {
    delay_point();
    return __atomic_load_n(ptr, kOrder);
}

template <int kOrder, class T>
void scoped_store(T* ptr, T value) {
    delay_point();
    __atomic_store_n(ptr, value, kOrder);
    current->block->note_progress();
}

template <int kOrder, class T>
T scoped_add(T* ptr, T value) {
    delay_point();
    current->block->note_progress();
    return __atomic_fetch_add(ptr, value, kOrder);
}

template <int kOrder, class T>
T scoped_compare_exchange(T* ptr, T expected, T desired) {
    constexpr int kOrderOnFailure = kOrder == __ATOMIC_ACQ_REL ? __ATOMIC_ACQUIRE : kOrder;
    delay_point();
    __atomic_compare_exchange_n(ptr, &expected, desired, false, kOrder, kOrderOnFailure);
    return expected;
}

template <int kOrder, class T>
void scoped_max(T* ptr, T value) {
    delay_point();
    T seen = __atomic_load_n(ptr, kOrder);
    while (seen < value && !__atomic_compare_exchange_n(ptr, &seen, value, false, kOrder, kOrder)) {
    }
}

template <int kOrder>
void scoped_fence() {
    delay_point();
    __atomic_thread_fence(kOrder);
}

}  // namespace cpu
}  // namespace cuep
#pragma GCC visibility pop

// CUDA's own atomics: relaxed, on shared or global memory. The value takes the type that the pointer has.
namespace cuep {
namespace cpu {
template <class T>
struct Same {
    using type = T;
};
template <class T>
using same_t = typename Same<T>::type;
}  // namespace cpu
}  // namespace cuep

template <class T>
CUEP_DEVICE T atomicExch(T* ptr, cuep::cpu::same_t<T> value) {
    return __atomic_exchange_n(ptr, value, __ATOMIC_RELAXED);
}
template <class T>
CUEP_DEVICE T atomicCAS(T* ptr, cuep::cpu::same_t<T> expected, cuep::cpu::same_t<T> desired) {
    __atomic_compare_exchange_n(ptr, &expected, desired, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
    return expected;
}
template <class T>
CUEP_DEVICE T atomicAdd(T* ptr, cuep::cpu::same_t<T> value) {
    return __atomic_fetch_add(ptr, value, __ATOMIC_RELAXED);
}
CUEP_DEVICE float atomicAdd(float* ptr, float value) {
    float old, sum;
    __atomic_load(ptr, &old, __ATOMIC_RELAXED);
    do {
        sum = old + value;
    } while (!__atomic_compare_exchange(ptr, &old, &sum, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
    return old;
}
template <class T>
CUEP_DEVICE T atomicMax(T* ptr, cuep::cpu::same_t<T> value) {
    T old = __atomic_load_n(ptr, __ATOMIC_RELAXED);
    while (old < value && !__atomic_compare_exchange_n(ptr, &old, value, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
    }
    return old;
}
template <class T>
CUEP_DEVICE T atomicOr(T* ptr, cuep::cpu::same_t<T> value) {
    return __atomic_fetch_or(ptr, value, __ATOMIC_RELAXED);
}
