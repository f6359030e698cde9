// The weights of an artifact as tensors over the mapped file: nothing is read before a kernel touches it.

#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "files.h"

namespace llmc {

struct WeightView {
  uint8_t type_code, bits;  // of DLDataType
  std::vector<int64_t> shape;
  void* data;
};

// The tensors named in `order` of a safetensors file whose tensors start at multiples of 64 bytes, filled up with ones
// named "pad.N" (runtime/loading/weights.py). Throws ArtifactError when its header is not sound or it holds others.
std::vector<WeightView> read_weights(const std::string& path, const MappedFile& file,
                                     const std::vector<std::string>& order);

}  // namespace llmc
