// A loaded artifact and the sequences in its cache: turns "these tokens of these sequences" into steps.

#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "files.h"
#include "large_pages.h"
#include "llmc.h"
#include "manifest.h"
#include "pages.h"
#include "step.h"
#include "tokenizer.h"

namespace llmc {

class Model;

// Tokens in the cache, and what the step said after the last one. Gives its pages back when it goes.
class Sequence {
 public:
  explicit Sequence(std::shared_ptr<Model> model) : model_(std::move(model)) {}
  ~Sequence();
  Sequence(const Sequence&) = delete;
  Sequence& operator=(const Sequence&) = delete;

  Model& model() const { return *model_; }
  int32_t length() const { return length_; }

  // What came after the last token: a row of `output`. Throws RequestError when nothing was fed yet.
  const StepOutput& output() const;
  int64_t row() const { return row_; }

 private:
  friend class Model;
  std::shared_ptr<Model> model_;
  std::vector<int32_t> pages_;
  int32_t length_ = 0;
  StepOutput output_ = {};
  int64_t row_ = 0;
};

struct Feed {
  Sequence* sequence;
  const int32_t* ids;
  size_t count;
};

class Model {
 public:
  // Opens, checks, maps and loads. Throws ArtifactError or RequestError.
  Model(const std::string& folder, const llmc_options& options);

  const Manifest& manifest() const { return manifest_; }
  const Tokenizer& tokenizer() const { return *tokenizer_; }
  int64_t free_pages();
  int64_t cache_tokens() const { return pool_->num_pages() * kPageTokens; }

  std::vector<int32_t> encode(std::string_view text) const;

  // Append tokens in one step; all sequences get what comes after their last one, unless `quiet`. After an exception no
  // sequence has grown.
  void step(const std::vector<Feed>& feeds, bool quiet = false);

  // The same for one sequence, in steps of at most prefill_chunk. After an exception it has the chunks that were done.
  void feed(Sequence* sequence, const int32_t* ids, size_t count);

  void release(Sequence* sequence);

 private:
  void check(const std::vector<Feed>& feeds) const;

  Manifest manifest_;
  size_t prefill_chunk_;
  std::unique_ptr<Tokenizer> tokenizer_;
  std::unique_ptr<MappedFile> weights_file_;
  std::unique_ptr<LargePages> large_pages_;  // none where the weights stay the file's
  std::unique_ptr<PagePool> pool_;
  std::unique_ptr<Step> step_;
  std::mutex lock_;  // one step at a time; the pool is its
};

}  // namespace llmc
