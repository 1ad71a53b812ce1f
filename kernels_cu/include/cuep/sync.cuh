// Every access that orders memory between threads, blocks or ranks, named after its PTX instruction. Nothing else in
// the kernels writes PTX for this, so a protocol can be checked by reading these names.
//
// relaxed: the access itself is atomic and not torn, nothing around it is ordered.
// acquire / release: a release store publishes everything this thread did or observed before it (also what other
//   threads did, if a barrier or an acquire lies between) to whoever reads the value with an acquire load.
// gpu / sys: the observers are on the same device / anywhere, including other GPUs and the host.
//
// All pointers are to global memory (own, peer or pinned host memory); the two accesses with `block` in their names are
// to shared memory, between the warps of a block. Every asm is volatile with a "memory" clobber: the compiler may
// neither drop nor merge it, nor move other accesses across it.
#pragma once

#include <cuep/base.cuh>

#ifdef CUEP_CPU
// The CPU has one scope. x86 orders stores by itself, yet the C++ order matters: it also binds the compiler.
#define CUEP_LOAD(name, ptx, order)                     \
    CUEP_DEVICE uint32_t name(const uint32_t* ptr) {    \
        return cpu::scoped_load<__ATOMIC_##order>(ptr); \
    }                                                   \
    CUEP_DEVICE uint64_t name(const uint64_t* ptr) {    \
        return cpu::scoped_load<__ATOMIC_##order>(ptr); \
    }
#define CUEP_STORE(name, ptx, order)                       \
    CUEP_DEVICE void name(uint32_t* ptr, uint32_t value) { \
        cpu::scoped_store<__ATOMIC_##order>(ptr, value);   \
    }                                                      \
    CUEP_DEVICE void name(uint64_t* ptr, uint64_t value) { \
        cpu::scoped_store<__ATOMIC_##order>(ptr, value);   \
    }
#define CUEP_ATOM_ADD(name, ptx, order)                        \
    CUEP_DEVICE uint32_t name(uint32_t* ptr, uint32_t value) { \
        return cpu::scoped_add<__ATOMIC_##order>(ptr, value);  \
    }
#define CUEP_RED_ADD(name, ptx, order)                     \
    CUEP_DEVICE void name(uint32_t* ptr, uint32_t value) { \
        cpu::scoped_add<__ATOMIC_##order>(ptr, value);     \
    }
#define CUEP_RED_MAX(name, ptx, order)                     \
    CUEP_DEVICE void name(uint64_t* ptr, uint64_t value) { \
        cpu::scoped_max<__ATOMIC_##order>(ptr, value);     \
    }
#define CUEP_ATOM_CAS(name, ptx, order)                                                \
    CUEP_DEVICE uint32_t name(uint32_t* ptr, uint32_t expected, uint32_t desired) {    \
        return cpu::scoped_compare_exchange<__ATOMIC_##order>(ptr, expected, desired); \
    }
#define CUEP_FENCE(name, ptx, order)           \
    CUEP_DEVICE void name() {                  \
        cpu::scoped_fence<__ATOMIC_##order>(); \
    }
#else
#define CUEP_LOAD(name, ptx, order)                                                          \
    CUEP_DEVICE uint32_t name(const uint32_t* ptr) {                                         \
        uint32_t value;                                                                      \
        asm volatile("ld." ptx ".global.u32 %0, [%1];" : "=r"(value) : "l"(ptr) : "memory"); \
        return value;                                                                        \
    }                                                                                        \
    CUEP_DEVICE uint64_t name(const uint64_t* ptr) {                                         \
        uint64_t value;                                                                      \
        asm volatile("ld." ptx ".global.u64 %0, [%1];" : "=l"(value) : "l"(ptr) : "memory"); \
        return value;                                                                        \
    }
#define CUEP_STORE(name, ptx, order)                                                       \
    CUEP_DEVICE void name(uint32_t* ptr, uint32_t value) {                                 \
        asm volatile("st." ptx ".global.u32 [%0], %1;" ::"l"(ptr), "r"(value) : "memory"); \
    }                                                                                      \
    CUEP_DEVICE void name(uint64_t* ptr, uint64_t value) {                                 \
        asm volatile("st." ptx ".global.u64 [%0], %1;" ::"l"(ptr), "l"(value) : "memory"); \
    }
#define CUEP_ATOM_ADD(name, ptx, order)                                                                          \
    CUEP_DEVICE uint32_t name(uint32_t* ptr, uint32_t value) {                                                   \
        uint32_t old;                                                                                            \
        asm volatile("atom." ptx ".global.add.u32 %0, [%1], %2;" : "=r"(old) : "l"(ptr), "r"(value) : "memory"); \
        return old;                                                                                              \
    }
#define CUEP_RED_ADD(name, ptx, order)                                                          \
    CUEP_DEVICE void name(uint32_t* ptr, uint32_t value) {                                      \
        asm volatile("red." ptx ".global.add.u32 [%0], %1;" ::"l"(ptr), "r"(value) : "memory"); \
    }
#define CUEP_RED_MAX(name, ptx, order)                                                          \
    CUEP_DEVICE void name(uint64_t* ptr, uint64_t value) {                                      \
        asm volatile("red." ptx ".global.max.u64 [%0], %1;" ::"l"(ptr), "l"(value) : "memory"); \
    }
#define CUEP_ATOM_CAS(name, ptx, order)                                             \
    CUEP_DEVICE uint32_t name(uint32_t* ptr, uint32_t expected, uint32_t desired) { \
        uint32_t old;                                                               \
        asm volatile("atom." ptx ".global.cas.b32 %0, [%1], %2, %3;"                \
                     : "=r"(old)                                                    \
                     : "l"(ptr), "r"(expected), "r"(desired)                        \
                     : "memory");                                                   \
        return old;                                                                 \
    }
#define CUEP_FENCE(name, ptx, order)                 \
    CUEP_DEVICE void name() {                        \
        asm volatile("fence." ptx ";" ::: "memory"); \
    }
#endif

namespace cuep {

CUEP_LOAD(ld_relaxed_sys, "relaxed.sys", RELAXED)
CUEP_LOAD(ld_acquire_sys, "acquire.sys", ACQUIRE)
CUEP_LOAD(ld_acquire_gpu, "acquire.gpu", ACQUIRE)
CUEP_STORE(st_relaxed_sys, "relaxed.sys", RELAXED)
CUEP_STORE(st_release_sys, "release.sys", RELEASE)
CUEP_STORE(st_release_gpu, "release.gpu", RELEASE)
CUEP_ATOM_ADD(atom_add_relaxed_sys, "relaxed.sys", RELAXED)
CUEP_ATOM_ADD(atom_add_relaxed_gpu, "relaxed.gpu", RELAXED)
CUEP_ATOM_ADD(atom_add_acq_rel_gpu, "acq_rel.gpu", ACQ_REL)
CUEP_RED_ADD(red_add_relaxed_gpu, "relaxed.gpu", RELAXED)
CUEP_RED_ADD(red_add_release_sys, "release.sys", RELEASE)
CUEP_RED_MAX(red_max_relaxed_gpu, "relaxed.gpu", RELAXED)
CUEP_ATOM_CAS(atom_cas_relaxed_sys, "relaxed.sys", RELAXED)
CUEP_ATOM_CAS(atom_cas_acq_rel_gpu, "acq_rel.gpu", ACQ_REL)
CUEP_FENCE(fence_acq_rel_sys, "acq_rel.sys", ACQ_REL)
CUEP_FENCE(fence_acq_rel_gpu, "acq_rel.gpu", ACQ_REL)

#ifdef CUEP_CPU

// Called in every loop that waits for memory to change. Without it a CPU block would spin in one thread for ever.
CUEP_DEVICE void relax(CUEP_CPU_CALLER) {
    cpu::relax({file, line});
}

// The same where a whole warp polls: what its lanes tell each other in such a loop is not that something happens.
CUEP_DEVICE void relax_warp(CUEP_CPU_CALLER) {
    cpu::current->is_polling = true;
    cpu::relax({file, line});
}

// Behind that loop.
CUEP_DEVICE void end_polling() {
    cpu::current->is_polling = false;
}

CUEP_DEVICE void st_release_block(uint32_t* ptr, uint32_t value) {
    cpu::scoped_store<__ATOMIC_RELEASE>(ptr, value);
}
CUEP_DEVICE uint32_t ld_acquire_block(const uint32_t* ptr) {
    return cpu::scoped_load<__ATOMIC_ACQUIRE>(ptr);
}

CUEP_DEVICE uint64_t now_ns() {
    return cpu::now_ns();
}

CUEP_DEVICE void wait_for_earlier_kernels() {}
CUEP_DEVICE void let_next_kernel_begin() {}

CUEP_DEVICE uint4 load_streaming(const uint4* ptr) {
    return *ptr;
}
CUEP_DEVICE uint32_t load_streaming(const uint32_t* ptr) {
    return *ptr;
}

CUEP_DEVICE uint4 load_16(const uint4* ptr) {
    cpu::delay_point();
    return *ptr;
}

CUEP_DEVICE void store_16(uint4* ptr, uint4 value) {
    cpu::delay_point();
    *ptr = value;
}

#define CUEP_NARROW(bytes, ptx, type)                           \
    CUEP_DEVICE uint32_t load_##bytes(const type* ptr) {        \
        cpu::delay_point();                                     \
        return *ptr;                                            \
    }                                                           \
    CUEP_DEVICE void store_##bytes(type* ptr, uint32_t value) { \
        cpu::delay_point();                                     \
        *ptr = static_cast<type>(value);                        \
    }

CUEP_DEVICE uint2 load_8(const uint2* ptr) {
    cpu::delay_point();
    return *ptr;
}

CUEP_DEVICE void store_8(uint2* ptr, uint2 value) {
    cpu::delay_point();
    *ptr = value;
}

// The CPU has no access of 16 bytes that every compiler knows to be one: the last word says that the others are there.
CUEP_DEVICE void st_packet(uint4* ptr, uint4 value) {
    cpu::scoped_store<__ATOMIC_RELAXED>(&ptr->x, value.x);
    cpu::scoped_store<__ATOMIC_RELAXED>(&ptr->y, value.y);
    cpu::scoped_store<__ATOMIC_RELAXED>(&ptr->z, value.z);
    cpu::scoped_store<__ATOMIC_RELEASE>(&ptr->w, value.w);
}

CUEP_DEVICE uint4 ld_packet(const uint4* ptr) {
    uint4 v;
    v.w = cpu::scoped_load<__ATOMIC_ACQUIRE>(&ptr->w);
    v.x = cpu::scoped_load<__ATOMIC_RELAXED>(&ptr->x);
    v.y = cpu::scoped_load<__ATOMIC_RELAXED>(&ptr->y);
    v.z = cpu::scoped_load<__ATOMIC_RELAXED>(&ptr->z);
    return v;
}

// Lanes take turns: the last of a line, which has the flag, stores when the others have, and loads before they do; and
// so with its words, of which the flag is the second or the last.
CUEP_DEVICE void st_line(uint4* ptr, uint4 value, bool has_piece, bool is_flag_second) {
    const bool is_last = lane_idx() % 8 == 7;
    const uint32_t values[4] = {value.x, value.y, value.z, value.w};
    const int flag = is_flag_second ? 1 : 3;
    const auto store = [&] {
        for (int i = 0; i < 4; i++) {
            if (i != flag) cpu::scoped_store<__ATOMIC_RELAXED>(&ptr->x + i, values[i]);
        }
        cpu::scoped_store<__ATOMIC_RELEASE>(&ptr->x + flag, values[flag]);
    };
    if (has_piece && !is_last) store();
    __syncwarp();
    if (has_piece && is_last) store();
}

CUEP_DEVICE uint4 ld_line(const uint4* ptr, bool is_flag_second) {
    const bool is_last = lane_idx() % 8 == 7;
    uint32_t values[4];
    const int flag = is_flag_second ? 1 : 3;
    const auto load = [&] {
        values[flag] = cpu::scoped_load<__ATOMIC_ACQUIRE>(&ptr->x + flag);
        for (int i = 0; i < 4; i++) {
            if (i != flag) values[i] = cpu::scoped_load<__ATOMIC_RELAXED>(&ptr->x + i);
        }
    };
    if (is_last) load();
    __syncwarp();
    if (!is_last) load();
    return {values[0], values[1], values[2], values[3]};
}

#else

// Called in every loop that waits for memory to change. The polling load itself paces the loop on the GPU.
CUEP_DEVICE void relax() {}
CUEP_DEVICE void relax_warp() {}
CUEP_DEVICE void end_polling() {}

CUEP_DEVICE void st_release_block(uint32_t* ptr, uint32_t value) {
    const uint32_t address = uint32_t(__cvta_generic_to_shared(ptr));
    asm volatile("st.release.cta.shared.u32 [%0], %1;" ::"r"(address), "r"(value) : "memory");
}

CUEP_DEVICE uint32_t ld_acquire_block(const uint32_t* ptr) {
    const uint32_t address = uint32_t(__cvta_generic_to_shared(ptr));
    uint32_t value;
    asm volatile("ld.acquire.cta.shared.u32 %0, [%1];" : "=r"(value) : "r"(address) : "memory");
    return value;
}

// Nanoseconds of a clock that all blocks of a device share. For time-outs: it may tick as coarsely as 1 us.
CUEP_DEVICE uint64_t now_ns() {
    uint64_t ns;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(ns)::"memory");
    return ns;
}

// First in a kernel with CUEP_LAUNCH_EARLY: what comes before it in its stream is complete and visible afterwards.
CUEP_DEVICE void wait_for_earlier_kernels() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// The kernel behind this one may be set up from now on, and holds its share of the device while this one waits.
CUEP_DEVICE void let_next_kernel_begin() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Memory that nobody writes while this kernel runs: through the non-coherent path, kept out of L1. Volatile
// so that it stays behind whatever this kernel waited for at its start; no clobber, so loads of a row can be batched.
CUEP_DEVICE uint4 load_streaming(const uint4* ptr) {
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(ptr));
    return v;
}

CUEP_DEVICE uint32_t load_streaming(const uint32_t* ptr) {
    uint32_t word;
    asm volatile("ld.global.nc.L1::no_allocate.u32 %0, [%1];" : "=r"(word) : "l"(ptr));
    return word;
}

// 16 bytes of memory that a peer or another block wrote before the flag that this thread (or, before a barrier, a
// thread of its block) acquired. A weak load: it needs that acquire. Not one access: two 8-byte halves may tear.
CUEP_DEVICE uint4 load_16(const uint4* ptr) {
    uint4 v;
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(ptr)
                 : "memory");
    return v;
}

// 16 bytes to own or peer memory; visible to others only after a release that follows it.
CUEP_DEVICE void store_16(uint4* ptr, uint4 value) {
    asm volatile(
        "st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(ptr), "r"(value.x), "r"(value.y), "r"(value.z), "r"(value.w)
        : "memory");
}

// Fewer bytes, otherwise as load_16 and store_16.
#define CUEP_NARROW(bytes, ptx, type)                                                                    \
    CUEP_DEVICE uint32_t load_##bytes(const type* ptr) {                                                 \
        uint32_t value;                                                                                  \
        asm volatile("ld.global.L1::no_allocate." ptx " %0, [%1];" : "=r"(value) : "l"(ptr) : "memory"); \
        return value;                                                                                    \
    }                                                                                                    \
    CUEP_DEVICE void store_##bytes(type* ptr, uint32_t value) {                                          \
        asm volatile("st.global." ptx " [%0], %1;" ::"l"(ptr), "r"(value) : "memory");                   \
    }

CUEP_DEVICE uint2 load_8(const uint2* ptr) {
    uint2 v;
    asm volatile("ld.global.L1::no_allocate.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(ptr) : "memory");
    return v;
}

CUEP_DEVICE void store_8(uint2* ptr, uint2 value) {
    asm volatile("st.global.v2.u32 [%0], {%1, %2};" ::"l"(ptr), "r"(value.x), "r"(value.y) : "memory");
}

// 16 bytes that peers see whole or not at all: a scalar of 128 bits is one access (PTX 8.3, sm_70), a vector is not.
// Nothing around it is ordered: what it says, it says by itself.
CUEP_DEVICE void st_packet(uint4* ptr, uint4 value) {
    const uint64_t low = uint64_t(value.y) << 32 | value.x, high = uint64_t(value.w) << 32 | value.z;
    asm volatile(
        "{\n.reg .b128 packet;\nmov.b128 packet, {%1, %2};\nst.relaxed.sys.global.b128 [%0], packet;\n}" ::"l"(ptr),
        "l"(low),
        "l"(high)
        : "memory");
}

CUEP_DEVICE uint4 ld_packet(const uint4* ptr) {
    uint64_t low, high;
    asm volatile("{\n.reg .b128 packet;\nld.relaxed.sys.global.b128 packet, [%2];\nmov.b128 {%0, %1}, packet;\n}"
                 : "=l"(low), "=l"(high)
                 : "l"(ptr)
                 : "memory");
    return {uint32_t(low), uint32_t(low >> 32), uint32_t(high), uint32_t(high >> 32)};
}

// 16 bytes of each lane of a warp: of a line, 128 aligned bytes, all eight lanes have a piece or none. A line is seen
// whole or not at all (line.cuh says why). By whole warps, behind a barrier of theirs.
CUEP_DEVICE void st_line(uint4* ptr, uint4 value, bool has_piece, bool) {
    if (has_piece) st_packet(ptr, value);
}

CUEP_DEVICE uint4 ld_line(const uint4* ptr, bool) {
    return ld_packet(ptr);
}

#endif  // CUEP_CPU

CUEP_NARROW(4, "u32", uint32_t)
CUEP_NARROW(2, "u16", uint16_t)
CUEP_NARROW(1, "u8", uint8_t)

}  // namespace cuep

#undef CUEP_NARROW
#undef CUEP_LOAD
#undef CUEP_STORE
#undef CUEP_ATOM_ADD
#undef CUEP_RED_ADD
#undef CUEP_RED_MAX
#undef CUEP_ATOM_CAS
#undef CUEP_FENCE
