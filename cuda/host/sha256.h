// SHA-256 (FIPS 180-4), for names and checks of files in the kernel cache.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>

namespace jaxflash {

class Sha256 {
 public:
  Sha256& add(const void* data, size_t size);
  // Length first, so that two texts never run into one another.
  Sha256& add(const std::string& text);
  std::array<uint8_t, 32> digest();  // once, at the end
  std::string hex();                 // likewise

 private:
  void compress(const uint8_t* block);

  uint32_t state_[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                        0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  uint8_t block_[64];
  size_t filled_ = 0;
  uint64_t bytes_ = 0;
};

}  // namespace jaxflash
