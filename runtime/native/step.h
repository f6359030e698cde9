// The compiled step of an artifact: its library is loaded and called here, and nowhere else is TVM known.

#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "manifest.h"
#include "pages.h"
#include "weights.h"

namespace llmc {

// The index arrays of a step (docs/design.md, The step): N rows of S sequences with P pages, R rows that want logits.
struct StepArrays {
  std::vector<int32_t> tokens, positions, seqs, slots;  // (N,)
  std::vector<int32_t> page_indptr, page_ids;           // (S + 1,), (P,)
  std::vector<int32_t> logit_rows;                      // (R,)
};

// What a step gives for its R rows; K candidates each, V the vocabulary. Keeps the arrays alive.
struct StepOutput {
  std::shared_ptr<void> owner;
  const float* logits;       // (R, V)
  const int32_t* top_ids;    // (R, K)
  const float* top_values;   // (R, K)
  const float* normalizers;  // (R,)
  int64_t rows, candidates, vocab;
};

class Step {
 public:
  // Loads TVM's runtime, then the library of `variant`. `identities`: of both files when they were hashed, in this
  // order; they must be the same still. Throws ArtifactError. The pool and the weights must outlive the step.
  Step(const std::string& folder, const Manifest& manifest, const Variant& variant,
       const std::vector<std::string>& identities, const PagePool& pool, const std::vector<WeightView>& weights,
       int threads);
  ~Step();

  StepOutput run(const StepArrays& arrays);

 private:
  struct Loaded;
  std::unique_ptr<Loaded> loaded_;
};

}  // namespace llmc
