// Files of an artifact: plain ones only, mapped, hashed, and known again later.

#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

namespace llmc {

// A plain file mapped into memory, privately: a write would stay in this process. Empty files have no data.
class MappedFile {
 public:
  // Throws ArtifactError unless `path` is a plain file, no link, of `bytes` bytes.
  MappedFile(const std::string& path, size_t bytes);
  ~MappedFile();
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  char* data() const { return data_; }
  size_t size() const { return size_; }
  std::string_view view() const { return {data_, size_}; }

 private:
  char* data_ = nullptr;
  size_t size_ = 0;
};

// Zeros of one layer of the KV cache, from the start of a page of 2 MB on. Their memory is taken when touched, in pages
// of 4 KB; see runtime/cache/memory.py for how these become large ones. Throws RequestError when the system refuses.
class ZeroedMemory {
 public:
  // `place`: that of the layer among all, from 0 to 1; pages become large when (1 + place) / 2 of them are in use.
  ZeroedMemory(size_t bytes, double place);
  ~ZeroedMemory();
  ZeroedMemory(ZeroedMemory&& other) noexcept;
  ZeroedMemory(const ZeroedMemory&) = delete;
  ZeroedMemory& operator=(const ZeroedMemory&) = delete;

  void* data() const { return data_; }

  // The first `bytes` bytes will be used: see to large pages. What is over at the end stays in small ones.
  void use(size_t bytes);

 private:
  void* map_;
  char* data_;
  size_t size_, least_, large_ = 0;  // bytes, bytes of a page that are in use before it is large, pages that are
};

// Content of a plain file of at most `most` bytes. Throws ArtifactError.
std::string read_file(const std::string& path, size_t most);

// Raise ArtifactError unless `name`, relative to `folder`, is a plain file of `bytes` bytes, reached without links.
void check_present(const std::string& folder, const std::string& name, size_t bytes);

// Device, inode, size and times: while they are the same, the file is taken to be the same.
std::string identity(const std::string& path);

// Whether the file's last change is long enough ago for its time to tell it from the next change.
bool is_settled(const std::string& path);

// Throws ArtifactError: `path`, a file or the folder, is not what it was when loading began.
[[noreturn]] void fail_changed(const std::string& path);

// SHA-256 of a file, read once from start to end, in hexadecimal.
std::string file_sha256(const std::string& path);

// Index of the first chunk of `data` whose SHA-256 is not in `chunks`, or -1; on `threads` threads.
ptrdiff_t wrong_chunk(std::string_view data, size_t chunk_bytes, const std::vector<std::string>& chunks, int threads);

}  // namespace llmc
