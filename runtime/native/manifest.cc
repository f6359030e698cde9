#include "manifest.h"

#include <sys/stat.h>

#include <stdexcept>

#include "errors.h"
#include "files.h"
#include "schema.h"
#include "sha256.h"

namespace llmc {
namespace {

constexpr size_t kMostBytes = 64 << 20;  // 16 MiB chunks: the hashes of a 10 TB weights file still fit
constexpr int64_t kInt32 = INT32_MAX;
constexpr const char* kAdvice = "compile the model again";

bool is_sha256(const std::string& text) {
  return text.size() == 64 && text.find_first_not_of("0123456789abcdef") == std::string::npos;
}

// Whether `name` stays inside the folder by its spelling alone.
bool is_plain(const std::string& name) {
  for (char c : name) {
    if (static_cast<unsigned char>(c) < 0x20 || c == 0x7F || c == '\\') return false;
  }
  for (size_t start = 0; start != std::string::npos;) {
    size_t end = name.find('/', start);
    std::string part = name.substr(start, end == std::string::npos ? end : end - start);
    if (part.empty() || part == "." || part == "..") return false;
    start = end == std::string::npos ? end : end + 1;
  }
  return name != "manifest.json";
}

Json read_document(const std::string& folder, const std::string& path) {
  struct stat info;
  if (stat(folder.c_str(), &info) != 0 || !S_ISDIR(info.st_mode)) {
    throw ArtifactError(shown(folder) + ": no such artifact folder; `llmc compile` makes one");
  }
  if (lstat(path.c_str(), &info) != 0 || !S_ISREG(info.st_mode)) {
    throw ArtifactError(shown(path) + ": no such file, so this folder is not an llmc artifact");
  }
  Json raw;
  try {
    raw = parse_json(read_file(path, kMostBytes));
  } catch (const std::invalid_argument& error) {
    throw ArtifactError(shown(path) + ": damaged: not readable as JSON: " + error.what());
  }
  if (!raw.is_object()) throw ArtifactError(shown(path) + ": damaged: wanted an object");
  int64_t version;
  const Json* format = raw.find("format");
  if (format && format->whole(kFormat + 1, INT64_MAX, &version)) {
    throw ArtifactError(shown(path) + ": format " + format->text + " was made by a newer llmc; this one reads format " +
                        std::to_string(kFormat));
  }
  std::string canonical = canonical_json(raw, "manifest_sha256");
  const Json* stated = raw.find("manifest_sha256");
  if (!stated || stated->text != sha256_hex(canonical.data(), canonical.size())) {
    throw ArtifactError(shown(path) + ": damaged: its SHA-256 is not the one it states; copy or compile it again");
  }
  return raw;
}

void read_files(Fields* top, Manifest* manifest, std::vector<std::string>* problems) {
  top->each_member("files", [&](const std::string& name, Fields entry) {
    FileEntry file{entry.text("sha256"), size_t(entry.whole("bytes", 0, int64_t(1) << 60))};
    if (!is_sha256(file.sha256)) entry.wrong("sha256", "64 hexadecimal digits");
    if (!is_plain(name)) problems->push_back("files: '" + shown(name) + "' is not a plain relative path");
    entry.done();
    manifest->files[name] = file;
  });
  top->each_item("variants", 1, [&](Fields entry) {
    manifest->variants.push_back({entry.text("file"), entry.text("name"), entry.text("arch"), entry.texts("requires")});
    if (entry.has("device")) {  // `requires` then names what no CPU has, so the variant is passed over
      Fields device = entry.fields("device");
      if (device.text("kind") != "cuda") device.wrong("kind", "cuda");
      device.text("arch");
      manifest->device_runtimes.push_back(device.text("runtime"));
      device.done();
    }
    entry.done();
  });
  manifest->runtime = top->text("runtime");
  manifest->tokenizer = top->text("tokenizer");
  Fields weights = top->fields("weights");
  manifest->weights = weights.text("file");
  manifest->chunk_bytes = size_t(weights.whole("chunk_bytes", 4096, int64_t(1) << 31));
  manifest->chunks = weights.texts("chunks", 1);
  manifest->order = weights.texts("order", 1);
  weights.done();
}

void read_kv(Fields kv, KvLayout* layout) {
  layout->layers = kv.whole("layers", 1, 1 << 16);
  layout->kv_heads = kv.whole("kv_heads", 1, 1 << 16);
  layout->head_dim = kv.whole("head_dim", 1, 1 << 16);
  layout->dtype = kv.text("dtype");
  layout->page_shape = kv.wholes("page_shape", 1, kInt32, 3);
  kv.whole("page_tokens", kPageTokens, kPageTokens);
  layout->groups = 0;
  std::set<int64_t> layers;
  size_t listed = 0;
  kv.each_item("groups", 1, [&](Fields group) {
    for (int64_t layer : group.wholes("layers", 0, layout->layers - 1)) layers.insert(layer), ++listed;
    group.whole("window", 0, kInt32);
    group.done();
    ++layout->groups;
  });
  if (listed != layers.size() || listed != size_t(layout->layers)) kv.wrong("groups", "each layer in one of them");
  kv.done();
}

void read_tokens(Fields tokens, Manifest* manifest) {
  bool add_bos = tokens.flag("add_bos");
  bool has_bos = tokens.any("bos").kind != Json::kNull;
  if (add_bos && !has_bos) tokens.wrong("bos", "an id, because add_bos is true");
  int64_t bos = has_bos ? tokens.whole("bos", 0, manifest->vocab - 1) : -1;
  manifest->bos = add_bos ? bos : -1;
  for (int64_t id : tokens.wholes("eos", 0, manifest->vocab - 1)) manifest->eos.insert(id);
  for (const char* unused : {"end", "start", "forced", "suppressed", "special"}) tokens.any(unused);
  tokens.done();
}

// docs/artifact.md, A page of the KV cache.
std::vector<int64_t> wanted_page_shape(const KvLayout& kv) {
  int64_t padded = (kv.head_dim + 15) / 16 * 16, groups = (kv.head_dim + 31) / 32;
  if (kv.dtype == "q8") return {1, kv.kv_heads, 64 + 32 * padded};
  if (kv.dtype == "q4") return {1, kv.kv_heads, 32 + 64 * groups + 20 * padded};
  int64_t size = kv.dtype == "bf16" ? (kv.head_dim + 1) / 2 * 2 : kv.head_dim;  // elements lie in pairs
  return {2, kv.kv_heads, kPageTokens * size};
}

// Problems that only show when parts of the manifest are held against each other.
void contradictions(const Manifest& manifest, std::vector<std::string>* problems) {
  std::vector<std::string> named = {manifest.runtime, manifest.weights, manifest.tokenizer};
  for (const Variant& variant : manifest.variants) named.push_back(variant.file);
  named.insert(named.end(), manifest.device_runtimes.begin(), manifest.device_runtimes.end());
  for (const std::string& name : named) {
    if (!manifest.files.count(name)) problems->push_back("'" + shown(name) + "' is used but not listed in files");
  }
  std::set<std::string> names(manifest.order.begin(), manifest.order.end());
  if (names.size() != manifest.order.size()) problems->push_back("weights.order names a tensor twice");
  auto weights = manifest.files.find(manifest.weights);
  if (weights != manifest.files.end()) {
    size_t wanted = (weights->second.bytes + manifest.chunk_bytes - 1) / manifest.chunk_bytes;
    if (manifest.chunks.size() != wanted) {
      problems->push_back("weights.chunks: got " + std::to_string(manifest.chunks.size()) + " hashes, wanted " +
                          std::to_string(wanted));
    }
  }
  static const std::set<std::string> kDtypes = {"f32", "bf16", "q8", "q4"};
  if (!kDtypes.count(manifest.kv.dtype)) problems->push_back("kv.dtype: wanted f32, bf16, q8 or q4");
  if (manifest.kv.page_shape != wanted_page_shape(manifest.kv)) problems->push_back("kv.page_shape is not its dtype's");
  if (manifest.kv.groups > 2) problems->push_back("kv.groups: wanted one or two");
}

}  // namespace

size_t KvLayout::element_bytes() const { return dtype == "f32" ? 4 : dtype == "bf16" ? 2 : 1; }

size_t KvLayout::page_bytes() const {
  size_t bytes = element_bytes();  // at most 2^42 in all: every size is bounded
  for (int64_t size : page_shape) bytes *= size_t(size);
  return bytes;
}

Manifest read_manifest(const std::string& folder) {
  std::string path = folder + "/manifest.json";
  Json raw = read_document(folder, path);
  const Json* task = raw.find("task");
  if (task && task->is_text() && task->text != "generate") {
    throw ArtifactError(shown(folder) + ": made to " + shown(task->text) +
                        "; this runtime only generates: use llmc's own");
  }
  if (raw.find("devices")) {
    throw ArtifactError(shown(folder) + ": compiled for several devices; this runtime is one process: use llmc's own");
  }
  std::vector<std::string> problems;
  Manifest manifest;
  Fields top(raw, "manifest", &problems);
  top.whole("format", kFormat, kFormat);
  manifest.name = top.text("name");
  top.text("task");
  manifest.vocab = top.whole("vocab", 1, 1 << 24);
  manifest.context = top.whole("context", 1, 1 << 30);
  read_files(&top, &manifest, &problems);
  read_kv(top.fields("kv"), &manifest.kv);
  read_tokens(top.fields("tokens"), &manifest);
  const Json* tvm = top.object("compiler").find("tvm");
  manifest.tvm = tvm ? tvm->text : "";
  manifest.sha256 = raw.get("manifest_sha256").text;
  bool steps = false;
  for (const std::string& function : top.texts("functions", 1)) steps = steps || function == "step";
  if (!steps) problems.push_back("manifest.functions: wanted step among them");
  for (const char* unused : {"pooling", "spec", "quantization", "languages", "prefixes", "chat_template", "generation",
                             "invariance", "endless", "parts", "manifest_sha256"}) {
    top.any(unused);
  }
  top.done();
  for (const std::string& chunk : manifest.chunks) {
    if (!is_sha256(chunk)) problems.push_back("weights.chunks: wanted hashes of 64 hexadecimal digits");
  }
  if (problems.empty()) contradictions(manifest, &problems);
  refuse(path, problems, kAdvice);
  return manifest;
}

}  // namespace llmc
