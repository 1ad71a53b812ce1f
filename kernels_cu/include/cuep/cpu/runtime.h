// Runs CUDA C++ kernels on the CPU, compiled by a plain C++ compiler: a thread is a fiber, a block is an OS thread, and
// all blocks of a launch are resident at once. See cpu/block.h for the scheduler. Only C headers are used, because
// every kernel shape is compiled by itself and the standard library's containers would double the time that takes.
#pragma once

#if !defined(__linux__) || !(defined(__x86_64__) || defined(__aarch64__))
#error "the CPU backend of cuep needs Linux on x86-64 or aarch64"
#endif

#include <cuep/cpu/language.h>
#include <cuep/cpu/context.h>
#include <cuep/cpu/stacks.h>
#include <cuep/cpu/random.h>
#include <cuep/cpu/block.h>
#include <cuep/cpu/warp.h>
#include <cuep/cpu/bulk.h>
#include <cuep/cpu/memory.h>
#include <cuep/cpu/launch.h>
