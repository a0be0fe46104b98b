// SPDX-License-Identifier: Apache-2.0
// The random numbers of the test programs: the same ones on every machine.
#pragma once
#include <cstdint>

class Random {
 public:
  uint64_t bits() {  // splitmix64
    uint64_t z = state_ += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
  }
  float normal() {
    float sum = -6;
    for (int i = 0; i < 12; ++i) sum += static_cast<float>(bits() >> 40) / (1 << 24);
    return sum;
  }

 private:
  uint64_t state_ = 1;
};
