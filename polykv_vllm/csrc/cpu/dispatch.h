// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "polykv/kernel_table.h"

namespace polykv {

// Number of instruction sets compiled in, fastest first, and the i-th of them.
int num_kernel_tables();
const KernelTable& kernel_table(int index);

}  // namespace polykv
