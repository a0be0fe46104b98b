// SPDX-License-Identifier: Apache-2.0
#include "dispatch.h"

namespace polykv {
namespace {

using TableFn = const KernelTable& (*)();

constexpr TableFn kTables[] = {
#if defined(__x86_64__)
    amx_kernels,
    avx512_kernels,
    avx512bw_kernels,
    avxvnni_kernels,
    avx2_kernels,
#elif defined(__aarch64__)
    neon_i8mm_kernels,
    neon_kernels,
#endif
    scalar_kernels,
};

}  // namespace

int num_kernel_tables() { return sizeof(kTables) / sizeof(kTables[0]); }
const KernelTable& kernel_table(int index) { return kTables[index](); }

}  // namespace polykv
