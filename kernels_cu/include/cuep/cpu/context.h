// Switching between fibers: save the registers that a callee must preserve on the old stack, take the new stack, load
// them from there. Floating-point control registers are the same in all fibers and are left alone. The aarch64 half has
// run under qemu only.
#pragma once

#include <cstdint>

extern "C" __attribute__((visibility("hidden"))) void cuep_cpu_switch(void** save_sp, void* load_sp);

#ifdef __x86_64__
asm(R"(
.text
.type cuep_cpu_switch, @function
cuep_cpu_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
.size cuep_cpu_switch, . - cuep_cpu_switch
)");
#else
asm(R"(
.text
.type cuep_cpu_switch, %function
cuep_cpu_switch:
    sub sp, sp, #160
    stp x19, x20, [sp, #0]
    stp x21, x22, [sp, #16]
    stp x23, x24, [sp, #32]
    stp x25, x26, [sp, #48]
    stp x27, x28, [sp, #64]
    stp x29, x30, [sp, #80]
    stp d8, d9, [sp, #96]
    stp d10, d11, [sp, #112]
    stp d12, d13, [sp, #128]
    stp d14, d15, [sp, #144]
    mov x9, sp
    str x9, [x0]
    mov sp, x1
    ldp x19, x20, [sp, #0]
    ldp x21, x22, [sp, #16]
    ldp x23, x24, [sp, #32]
    ldp x25, x26, [sp, #48]
    ldp x27, x28, [sp, #64]
    ldp x29, x30, [sp, #80]
    ldp d8, d9, [sp, #96]
    ldp d10, d11, [sp, #112]
    ldp d12, d13, [sp, #128]
    ldp d14, d15, [sp, #144]
    add sp, sp, #160
    ret
.size cuep_cpu_switch, . - cuep_cpu_switch
)");
#endif

namespace cuep {
namespace cpu {

// Lays out a stack (its end, 16-byte aligned) so that the first switch to the returned pointer calls `entry`.
inline void* new_context(uint8_t* stack_end, void (*entry)()) {
    void** sp = reinterpret_cast<void**>(stack_end);
#ifdef __x86_64__
    *--sp = nullptr;  // where a caller's return address would be: keeps the ABI's alignment and ends backtraces
    *--sp = reinterpret_cast<void*>(entry);
    for (int i = 0; i < 6; ++i) *--sp = nullptr;
#else
    sp -= 20;
    for (int i = 0; i < 20; ++i) sp[i] = nullptr;
    sp[11] = reinterpret_cast<void*>(entry);  // x30, the return address
#endif
    return sp;
}

}  // namespace cpu
}  // namespace cuep
