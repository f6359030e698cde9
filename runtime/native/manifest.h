// The manifest of an artifact: what is in the folder and how to run it. Reading it never runs anything.
//
// Its layout is docs/artifact.md; runtime/loading/package.py and manifest.py are the same in Python.

#pragma once

#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "json.h"

namespace llmc {

constexpr int64_t kFormat = 4;       // the layout this runtime reads
constexpr int64_t kPageTokens = 16;  // the kernels are compiled for this page size

struct FileEntry {
  std::string sha256;
  size_t bytes;
};

struct Variant {
  std::string file, name, arch;
  std::vector<std::string> required;
};

struct KvLayout {
  int64_t layers, kv_heads, head_dim;
  std::string dtype;
  std::vector<int64_t> page_shape;
  size_t groups;  // of layers that share a page table

  size_t element_bytes() const;
  size_t page_bytes() const;  // of one layer
};

struct Manifest {
  std::string name, tokenizer, runtime, weights, tvm, sha256;
  std::vector<Variant> variants;
  std::vector<std::string> device_runtimes;  // files that variants for GPUs need beside `runtime`
  std::map<std::string, FileEntry> files;
  size_t chunk_bytes;
  std::vector<std::string> chunks, order;
  int64_t vocab, context;
  KvLayout kv;
  int64_t bos;  // -1: none is put before a text
  std::set<int64_t> eos;
};

// The manifest in `folder`, checked in itself; the files it lists are not looked at. Throws ArtifactError.
Manifest read_manifest(const std::string& folder);

}  // namespace llmc
