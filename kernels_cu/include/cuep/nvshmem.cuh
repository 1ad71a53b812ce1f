// NVSHMEM's device library, for kernels whose peers may be outside the NVLink domain. Include it after base.cuh instead
// of <nvshmem.h>: cuep/compilers.py builds a kernel that reaches <nvshmem.h> in one of two ways, by NVSHMEM's version:
//   3.6.5 and newer   everything inlined from headers; this file defines the version constant that cumodule_init reads
//   older             relocatable code linked with libnvshmem_device.a; this file mends what NVRTC does differently
// GPU only. These headers take seconds to parse, so kernels that need only peer pointers do not include them.
#pragma once
#include <cuep/base.cuh>

#ifdef CUEP_CPU
#error "kernels that use NVSHMEM's device library exist for GPUs only"
#endif

#include <non_abi/nvshmem_version.h>
#if defined(__CUDACC_RTC__) && NVSHMEM_VENDOR_MAJOR_VERSION == 3 && NVSHMEM_VENDOR_MINOR_VERSION < 5
// 3.4 uses std:: traits, which NVRTC has only as cuda::std::
#include <cuda/std/type_traits>
#include <cuda/std/utility>
#include <cuda/std/tuple>
namespace std {
using namespace cuda::std;
}
#endif
#include <nvshmem.h>
#include <nvshmemx.h>

#ifdef NVSHMEM_ENABLE_ALL_DEVICE_INLINING
__constant__ nvshmemi_version_t nvshmemi_device_lib_version_d = {
    NVSHMEM_VENDOR_MAJOR_VERSION, NVSHMEM_VENDOR_MINOR_VERSION, NVSHMEM_VENDOR_PATCH_VERSION};
#elif defined(__CUDACC_RTC__) && defined(__CUDA_ARCH__)
// uint64_t is `unsigned long long` under NVRTC and `unsigned long` in the archive, which shows in the mangled name of
// the one exported function that takes it outside a template argument: put-with-signal. Forward the one to the other.
#define CUEP_NVSHMEM_VERSION (NVSHMEM_VENDOR_MAJOR_VERSION * 100 + NVSHMEM_VENDOR_MINOR_VERSION)
#if CUEP_NVSHMEM_VERSION >= 308
#define CUEP_PUT_SIGNAL nvshmemi_transfer_put_signal_dispatch
#else
#define CUEP_PUT_SIGNAL nvshmemi_transfer_put_signal
#endif
#if CUEP_NVSHMEM_VERSION >= 305
#define CUEP_QUEUE_PAIR_PARAMETER , nvshmemx_qp_handle_t queue_pair
#define CUEP_QUEUE_PAIR , queue_pair
#else
#define CUEP_QUEUE_PAIR_PARAMETER
#define CUEP_QUEUE_PAIR
#endif
template <threadgroup_t kScope>
__device__ void CUEP_PUT_SIGNAL(void* remote,
                                void* local,
                                size_t bytes,
                                void* signal_address,
                                unsigned long signal,
                                nvshmemi_amo_t signal_op,
                                int pe,
                                bool is_nbi CUEP_QUEUE_PAIR_PARAMETER);
template <threadgroup_t kScope>
__device__ void CUEP_PUT_SIGNAL(void* remote,
                                void* local,
                                size_t bytes,
                                void* signal_address,
                                uint64_t signal,
                                nvshmemi_amo_t signal_op,
                                int pe,
                                bool is_nbi CUEP_QUEUE_PAIR_PARAMETER) {
    CUEP_PUT_SIGNAL<kScope>(remote,
                            local,
                            bytes,
                            signal_address,
                            static_cast<unsigned long>(signal),
                            signal_op,
                            pe,
                            is_nbi CUEP_QUEUE_PAIR);
}
#undef CUEP_PUT_SIGNAL
#undef CUEP_QUEUE_PAIR_PARAMETER
#undef CUEP_QUEUE_PAIR
#undef CUEP_NVSHMEM_VERSION
#endif
