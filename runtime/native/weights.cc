#include "weights.h"

#include <algorithm>
#include <map>
#include <set>
#include <stdexcept>

#include "errors.h"
#include "schema.h"

namespace llmc {
namespace {

constexpr size_t kAlign = 64;  // kernels use aligned vector loads
constexpr size_t kMostAxes = 32;
constexpr size_t kMostHeaderBytes = size_t(100) << 20;  // what safetensors itself allows

struct Dtype {
  uint8_t type_code, bits;
};

// DLPack: 0 int, 1 uint, 2 float, 6 bool.
const std::map<std::string, Dtype> kDtypes = {{"F64", {2, 64}}, {"F32", {2, 32}}, {"F16", {2, 16}}, {"I64", {0, 64}},
                                              {"I32", {0, 32}}, {"I16", {0, 16}}, {"I8", {0, 8}},   {"U64", {1, 64}},
                                              {"U32", {1, 32}}, {"U16", {1, 16}}, {"U8", {1, 8}},   {"BOOL", {6, 8}}};

struct Entry {
  std::string name;
  Dtype dtype;
  std::vector<int64_t> shape;
  size_t begin, end;
};

bool is_padding(const std::string& name) { return name.rfind("pad.", 0) == 0; }

// Bytes of a tensor, or SIZE_MAX where they are more than a file can have.
size_t tensor_bytes(const Entry& entry) {
  size_t bytes = entry.dtype.bits / 8;
  for (int64_t size : entry.shape) {
    if (size == 0) return 0;
  }
  for (int64_t size : entry.shape) {
    if (__builtin_mul_overflow(bytes, size_t(size), &bytes)) return SIZE_MAX;
  }
  return bytes;
}

std::vector<Entry> read_header(std::string_view header, std::vector<std::string>* problems) {
  Json raw = parse_json(header);
  std::vector<Entry> entries;
  if (!raw.is_object()) problems->push_back("its header is no object");
  for (const auto& [name, value] : raw.object) {
    Fields fields(value, "header." + shown(name), problems);
    auto dtype = kDtypes.find(fields.text("dtype"));
    if (dtype == kDtypes.end()) fields.wrong("dtype", "a known type");
    Entry entry{name, dtype == kDtypes.end() ? Dtype{1, 8} : dtype->second, fields.wholes("shape", 0, int64_t(1) << 48),
                0, 0};
    if (entry.shape.size() > kMostAxes) fields.wrong("shape", "fewer axes");
    std::vector<int64_t> offsets = fields.wholes("data_offsets", 0, int64_t(1) << 60, 2);
    if (offsets.size() != 2) {
      fields.wrong("data_offsets", "two offsets");
    } else {
      entry.begin = size_t(offsets[0]), entry.end = size_t(offsets[1]);
    }
    fields.done();
    entries.push_back(std::move(entry));
  }
  return entries;
}

// Tensors must follow each other without gaps and fill the file.
void check_places(std::vector<Entry> entries, size_t start, size_t size, std::vector<std::string>* problems) {
  std::sort(entries.begin(), entries.end(), [](const Entry& a, const Entry& b) {
    return std::make_pair(a.begin, a.end) < std::make_pair(b.begin, b.end);
  });
  size_t at = 0;
  for (const Entry& entry : entries) {
    if (entry.begin != at || entry.end < entry.begin || entry.end - entry.begin != tensor_bytes(entry)) {
      problems->push_back("tensor '" + shown(entry.name) + "' does not lie where the one before it ends");
      return;
    }
    if (!is_padding(entry.name) && (start + entry.begin) % kAlign) {
      problems->push_back("tensor '" + shown(entry.name) + "' does not start at a multiple of 64 bytes");
    }
    at = entry.end;
  }
  if (start + at != size) problems->push_back("its tensors do not end where the file ends");
}

}  // namespace

std::vector<WeightView> read_weights(const std::string& path, const MappedFile& file,
                                     const std::vector<std::string>& order) {
  std::string_view data = file.view();
  if (data.size() < 8) throw ArtifactError(shown(path) + ": cut short: " + std::to_string(data.size()) + " bytes");
  uint64_t length = 0;
  for (int i = 7; i >= 0; --i) length = length << 8 | static_cast<unsigned char>(data[size_t(i)]);
  if (length > std::min(data.size() - 8, kMostHeaderBytes)) {
    throw ArtifactError(shown(path) + ": its header of " + std::to_string(length) + " bytes does not fit in the file");
  }
  std::vector<std::string> problems;
  std::vector<Entry> entries;
  try {
    entries = read_header(data.substr(8, length), &problems);
  } catch (const std::invalid_argument& error) {
    throw ArtifactError(shown(path) + ": its header is not readable: " + error.what());
  }
  if (problems.empty()) check_places(entries, 8 + length, data.size(), &problems);
  std::map<std::string, const Entry*> named;
  std::set<std::string> wanted(order.begin(), order.end());
  for (const Entry& entry : entries) {
    named[entry.name] = &entry;
    if (is_padding(entry.name) || wanted.count(entry.name)) continue;
    problems.push_back("the manifest does not name tensor '" + shown(entry.name) + "'");
  }
  for (const std::string& name : order) {
    if (!named.count(name)) problems.push_back("tensor '" + shown(name) + "' is missing");
  }
  refuse(path, problems, "compile the model again");
  std::vector<WeightView> views;
  for (const std::string& name : order) {
    const Entry& entry = *named[name];
    views.push_back({entry.dtype.type_code, entry.dtype.bits, entry.shape, file.data() + 8 + length + entry.begin});
  }
  return views;
}

}  // namespace llmc
