/* Philox4x32-10 (Salmon et al. 2011), many counters at a time so that the loops vectorise. */
#ifndef GLM_CPU_PHILOX_H
#define GLM_CPU_PHILOX_H

#include <cstdint>

#include "isa.h"

GLM_CPU_BEGIN

/* words[4 * i + j] = word j of the generator at counter {first + i, position, 0, 0}, key {seed low, seed high}. */
template <int kCounters>
inline void philox_words(uint64_t seed, uint32_t first, uint32_t position, uint32_t* words) {
  uint32_t x0[kCounters], x1[kCounters], x2[kCounters], x3[kCounters];
  for (int i = 0; i < kCounters; ++i) {
    x0[i] = first + static_cast<uint32_t>(i);
    x1[i] = position;
    x2[i] = 0;
    x3[i] = 0;
  }
  auto key0 = static_cast<uint32_t>(seed);
  auto key1 = static_cast<uint32_t>(seed >> 32);
  for (int round = 0; round < 10; ++round) {
    for (int i = 0; i < kCounters; ++i) {
      const uint64_t product0 = uint64_t{0xD2511F53u} * x0[i];
      const uint64_t product1 = uint64_t{0xCD9E8D57u} * x2[i];
      x0[i] = static_cast<uint32_t>(product1 >> 32) ^ x1[i] ^ key0;
      x2[i] = static_cast<uint32_t>(product0 >> 32) ^ x3[i] ^ key1;
      x1[i] = static_cast<uint32_t>(product1);
      x3[i] = static_cast<uint32_t>(product0);
    }
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
  for (int i = 0; i < kCounters; ++i) {
    words[4 * i] = x0[i];
    words[4 * i + 1] = x1[i];
    words[4 * i + 2] = x2[i];
    words[4 * i + 3] = x3[i];
  }
}

GLM_CPU_END

#endif
