// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "polykv/kernel_table.h"

namespace polykv {

// Runs the whole operation on `args.num_threads` OpenMP threads (<= 0: the default).
void run_store(const KernelTable& table, const StoreArgs& args);
void run_attention(const KernelTable& table, const AttentionArgs& args);

}  // namespace polykv
