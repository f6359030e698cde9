// The memory of which weights were found intact, which this runtime has in common with Python's
// (runtime/loading/integrity.py): as long as a file's identity is the same, its hashes are taken to be.

#pragma once

#include <string>

namespace llmc {

// Under which a file's hashes are remembered. Throws ArtifactError for a file that is missing.
std::string verified_key(const std::string& path, const std::string& manifest_sha256);

// Whether `remember_verified` was called before, here, in another process or by Python's runtime.
bool is_verified(const std::string& key);

// Keep `key` for later processes. A folder that cannot be written is no error: the next process hashes again.
void remember_verified(const std::string& key);

}  // namespace llmc
