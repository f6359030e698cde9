#include "model.h"

#if defined(__GLIBC__)
#include <malloc.h>
#endif

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <set>

#include "errors.h"
#include "machine.h"
#include "memory.h"
#include "sha256.h"
#include "verified.h"

namespace llmc {
namespace {

constexpr size_t kPrefillChunk = 256;  // rows of one step at most, which bounds its working memory
constexpr size_t kManyRows = 256;      // a prompt from which on what its steps have let go is worth giving back
constexpr size_t kMostTokenizerBytes = 256 << 20;

// The first variant that this CPU can run, or the one that LLMC_VARIANT names.
const Variant& choose_variant(const Manifest& manifest, const std::string& folder) {
  const char* set = std::getenv("LLMC_VARIANT");
  std::string forced = set ? set : "", lacking, names;
  for (const Variant& variant : manifest.variants) {
    names += (names.empty() ? "" : ", ") + shown(variant.name);
    if (!forced.empty() && variant.name != forced) continue;
    std::vector<std::string> missing = missing_flags(variant.arch, variant.required);
    if (missing.empty()) return variant;
    lacking += (lacking.empty() ? "" : "; ") + shown(variant.name) + " needs";
    for (const std::string& flag : missing) lacking += " " + shown(flag);
  }
  std::string where = shown(folder) + ": ";
  if (!forced.empty() && lacking.empty()) {
    throw ArtifactError(where + "LLMC_VARIANT=" + shown(forced) + ": no such variant; it has " + names);
  }
  if (!forced.empty()) {
    throw ArtifactError(where + "LLMC_VARIANT: this CPU (" + cpu_arch() + ") cannot run it: " + lacking);
  }
  throw ArtifactError(where + "this CPU (" + cpu_arch() + ") lacks what the artifact was compiled for: " + lacking +
                      "; compile it with --target cpu:portable or on this machine");
}

[[noreturn]] void damaged(const std::string& path, const std::string& where = "") {
  throw ArtifactError(shown(path) + ": damaged: its SHA-256 is not the manifest's" + where +
                      "; copy or compile the artifact again");
}

// Hash everything but the weights; the identities of the files when they were.
std::map<std::string, std::string> check_files(const std::string& folder, const Manifest& manifest) {
  for (const auto& [name, entry] : manifest.files) check_present(folder, name, entry.bytes);
  choose_variant(manifest, folder);  // before the time that hashing takes
  std::map<std::string, std::string> identities;
  for (const auto& [name, entry] : manifest.files) {
    if (name == manifest.weights) continue;
    std::string path = folder + "/" + name;
    identities[name] = identity(path);
    if (file_sha256(path) != entry.sha256) damaged(path);
  }
  return identities;
}

// What the allocator keeps of freed memory, which no size of step after it may fit.
void give_back_freed_memory() {
#if defined(__GLIBC__)
  malloc_trim(0);
#endif
}

// Reading one takes several times the memory that it keeps, so it comes before the weights, and gives the rest back.
std::unique_ptr<Tokenizer> read_tokenizer(const std::string& folder, const Manifest& manifest) {
  std::string path = folder + "/" + manifest.tokenizer, text = read_file(path, kMostTokenizerBytes);
  if (sha256_hex(text.data(), text.size()) != manifest.files.at(manifest.tokenizer).sha256) damaged(path);
  auto tokenizer = std::make_unique<Tokenizer>(text);
  give_back_freed_memory();
  return tokenizer;
}

int64_t default_cache_tokens(const Manifest& manifest) {
  size_t token_bytes = size_t(manifest.kv.layers) * manifest.kv.page_bytes() / size_t(kPageTokens);
  size_t most = memory_bytes() / 2 / std::max(token_bytes, size_t(1));
  return std::max(int64_t(1), std::min(manifest.context, int64_t(most)));
}

}  // namespace

Model::Model(const std::string& folder, const llmc_options& options) {
  if (options.threads < 0 || options.cache_tokens < 0 || options.prefill_chunk < 0) {
    throw RequestError("options: none may be negative");
  }
  for (int32_t flag : {options.keep_mapped, options.always_hash}) {
    if (flag != 0 && flag != 1) throw RequestError("options: keep_mapped and always_hash are 0 or 1");
  }
  manifest_ = read_manifest(folder);
  std::map<std::string, std::string> identities = check_files(folder, manifest_);
  const Variant& variant = choose_variant(manifest_, folder);
  int threads = options.threads ? options.threads : default_threads();

  tokenizer_ = read_tokenizer(folder, manifest_);
  std::string path = folder + "/" + manifest_.weights, key = verified_key(path, manifest_.sha256);
  weights_file_ = std::make_unique<MappedFile>(path, manifest_.files.at(manifest_.weights).bytes);
  if (verified_key(path, manifest_.sha256) != key) fail_changed(path);  // `key` may be that of another one
  if (options.always_hash || !is_verified(key)) {
    bool settled = is_settled(path);
    ptrdiff_t wrong = wrong_chunk(weights_file_->view(), manifest_.chunk_bytes, manifest_.chunks, threads);
    if (wrong >= 0) damaged(path, " (in chunk " + std::to_string(wrong) + ")");
    if (settled && verified_key(path, manifest_.sha256) == key) remember_verified(key);
  }
  std::vector<WeightView> weights = read_weights(path, *weights_file_, manifest_.order);

  if (!options.keep_mapped) large_pages_.reset(new LargePages(weights_file_->data(), weights_file_->size()));

  prefill_chunk_ = options.prefill_chunk ? size_t(options.prefill_chunk) : kPrefillChunk;
  pool_ = std::make_unique<PagePool>(manifest_.kv,
                                     options.cache_tokens ? options.cache_tokens : default_cache_tokens(manifest_));
  step_ =
      std::make_unique<Step>(folder, manifest_, variant,
                             std::vector<std::string>{identities.at(manifest_.runtime), identities.at(variant.file)},
                             *pool_, weights, threads);
}

int64_t Model::free_pages() {
  std::lock_guard<std::mutex> guard(lock_);
  return pool_->free_pages();
}

std::vector<int32_t> Model::encode(std::string_view text) const {
  std::vector<int32_t> ids = tokenizer_->encode(text);
  if (manifest_.bos >= 0) ids.insert(ids.begin(), int32_t(manifest_.bos));
  return ids;
}

void Model::check(const std::vector<Feed>& feeds) const {
  std::set<const Sequence*> seen;
  if (feeds.empty()) throw RequestError("a step needs at least one sequence");
  for (const Feed& feed : feeds) {
    if (feed.sequence->model_.get() != this) throw RequestError("a step takes sequences of one model");
    if (!seen.insert(feed.sequence).second) throw RequestError("a step takes each sequence once");
    if (feed.count == 0) throw RequestError("a step needs at least one token of each sequence");
    if (feed.count > size_t(manifest_.context - feed.sequence->length_)) {
      throw RequestError(std::to_string(size_t(feed.sequence->length_) + feed.count) +
                         " tokens, and the model's context is " + std::to_string(manifest_.context));
    }
    for (size_t i = 0; i < feed.count; ++i) {
      if (feed.ids[i] >= 0 && feed.ids[i] < manifest_.vocab) continue;
      throw RequestError("token ids: got " + std::to_string(feed.ids[i]) + " at place " + std::to_string(i) +
                         ", wanted 0.." + std::to_string(manifest_.vocab - 1));
    }
  }
}

void Model::step(const std::vector<Feed>& feeds, bool quiet) {
  check(feeds);
  std::lock_guard<std::mutex> guard(lock_);
  std::vector<size_t> held;
  for (const Feed& feed : feeds) held.push_back(feed.sequence->pages_.size());
  StepOutput output;
  try {
    StepArrays arrays;
    arrays.page_indptr.push_back(0);
    for (size_t index = 0; index < feeds.size(); ++index) {
      const Feed& feed = feeds[index];
      int32_t length = feed.sequence->length_;
      pool_->grow(&feed.sequence->pages_, pages_for(length + int64_t(feed.count)));
      for (size_t i = 0; i < feed.count; ++i) {
        arrays.tokens.push_back(feed.ids[i]);
        arrays.positions.push_back(length + int32_t(i));
        arrays.slots.push_back(length + int32_t(i));
        arrays.seqs.push_back(int32_t(index));
      }
      const std::vector<int32_t>& pages = feed.sequence->pages_;
      arrays.page_ids.insert(arrays.page_ids.end(), pages.begin(), pages.end());
      arrays.page_indptr.push_back(int32_t(arrays.page_ids.size()));
      if (!quiet) arrays.logit_rows.push_back(int32_t(arrays.tokens.size()) - 1);
    }
    if (quiet) arrays.logit_rows.push_back(0);  // the compiled step wants at least one
    auto start = std::chrono::steady_clock::now();
    output = step_->run(arrays);
    std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
    if (large_pages_) large_pages_->worked(took.count());
  } catch (...) {
    for (size_t index = 0; index < feeds.size(); ++index) pool_->shrink(&feeds[index].sequence->pages_, held[index]);
    throw;
  }
  for (size_t index = 0; index < feeds.size(); ++index) {
    Sequence* sequence = feeds[index].sequence;
    sequence->length_ += int32_t(feeds[index].count);
    sequence->output_ = quiet ? StepOutput() : output;
    sequence->row_ = int64_t(index);
  }
}

void Model::feed(Sequence* sequence, const int32_t* ids, size_t count) {
  check({{sequence, ids, count}});
  for (size_t at = 0; at < count; at += prefill_chunk_) {
    size_t rows = std::min(prefill_chunk_, count - at);
    step({{sequence, ids + at, rows}}, at + rows < count);
  }
  if (count >= kManyRows) give_back_freed_memory();
}

void Model::release(Sequence* sequence) {
  std::lock_guard<std::mutex> guard(lock_);
  pool_->shrink(&sequence->pages_, 0);
}

Sequence::~Sequence() { model_->release(this); }

const StepOutput& Sequence::output() const {
  if (!output_.owner) throw RequestError("the sequence was not fed yet, so nothing comes after it");
  if (!std::isfinite(output_.top_values[row_ * output_.candidates])) {
    throw Error(LLMC_FAILED,
                "the model computed logits that are not finite; its weights may be damaged or not fit its spec");
  }
  return output_;
}

}  // namespace llmc
