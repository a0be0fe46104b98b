// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "polykv/args.h"

namespace polykv {

// Null when every index the kernels follow stays inside its array; else the reason.
const char* check_slots(const StoreArgs& args);
const char* check_batch(const AttentionArgs& args);

}  // namespace polykv
