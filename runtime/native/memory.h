// Memory of the machine, and what this process may still take of it.

#pragma once

#include <cstddef>
#include <string>

namespace llmc {

constexpr size_t kLargePage = 2 << 20;  // bytes, where the system has larger pages than of 4 KB for who asks

// Bytes of memory that the machine has.
size_t memory_bytes();

// What programs may still take, as the system guesses, and no more than a control group allows, as of a container
// (runtime/memory.py). `root`: where the system's own files are.
size_t available_bytes(const std::string& root = "/");

}  // namespace llmc
