// The C interface: handles, and exceptions turned into statuses.

#include "llmc.h"

#include <algorithm>
#include <memory>
#include <new>
#include <string>
#include <vector>

#include "errors.h"
#include "model.h"

struct llmc_model {
  std::shared_ptr<llmc::Model> model;
};

struct llmc_sequence {
  llmc::Sequence sequence;
};

struct llmc_text {
  std::shared_ptr<llmc::Model> model;
  llmc::TextStream stream;
  std::string piece;
};

namespace {

thread_local std::string last_error;

llmc_status failed(llmc_status status, const char* message) noexcept {
  try {
    last_error = message;
  } catch (...) {
    last_error.clear();
  }
  return status;
}

// Runs `work`; what it throws becomes a status and a message.
template <typename Work>
llmc_status guarded(const Work& work) noexcept {
  try {
    work();
    return LLMC_OK;
  } catch (const llmc::Error& error) {
    return failed(error.status, error.what());
  } catch (const std::bad_alloc&) {
    return failed(LLMC_FAILED, "out of memory");
  } catch (const std::exception& error) {
    try {
      return failed(LLMC_FAILED, llmc::shown(error.what()).c_str());
    } catch (...) {
      return failed(LLMC_FAILED, "out of memory");
    }
  } catch (...) {
    return failed(LLMC_FAILED, "an unknown error");
  }
}

template <typename... Pointers>
void want(const Pointers*... pointers) {
  for (const void* pointer : {static_cast<const void*>(pointers)...}) {
    if (!pointer) throw llmc::RequestError("an argument is NULL that must not be");
  }
}

void give(llmc_text* text, std::string piece, const char** data, size_t* bytes) {
  text->piece = std::move(piece);
  *data = text->piece.data();
  *bytes = text->piece.size();
}

llmc_finish generate(const std::shared_ptr<llmc::Model>& model, const int32_t* ids, size_t count, int32_t max_tokens,
                     llmc_on_token on_token, void* user) {
  const llmc::Manifest& manifest = model->manifest();
  size_t limit = size_t(std::min(manifest.context, model->cache_tokens()));
  if (max_tokens < 1) throw llmc::RequestError("max_tokens: wanted a positive number");
  if (count >= limit) {
    throw llmc::RequestError("prompt: " + std::to_string(count) + " tokens leave no room for an answer in " +
                             std::to_string(limit));
  }
  llmc::TextStream text(model->tokenizer());
  llmc::Sequence sequence(model);
  model->feed(&sequence, ids, count);
  for (size_t made = 1;; ++made) {
    const llmc::StepOutput& output = sequence.output();
    int32_t id = output.top_ids[sequence.row() * output.candidates];
    int finish = -1;
    if (manifest.eos.count(id)) {
      finish = LLMC_FINISH_STOP;
    } else if (made >= size_t(max_tokens)) {
      finish = LLMC_FINISH_LENGTH;
    } else if (count + made >= limit) {
      finish = LLMC_FINISH_CONTEXT;
    }
    std::string piece = finish == LLMC_FINISH_STOP ? "" : text.push(id);
    if (finish >= 0) piece += text.finish();
    if (on_token(user, id, piece.data(), piece.size()) != 0 && finish < 0) finish = LLMC_FINISH_CALLER;
    if (finish >= 0) return llmc_finish(finish);
    model->step({{&sequence, &id, 1}});
  }
}

}  // namespace

extern "C" {

const char* llmc_last_error(void) { return last_error.c_str(); }

llmc_status llmc_open(const char* folder, const llmc_options* options, llmc_model** model) {
  return guarded([&] {
    want(folder, model);
    *model = nullptr;
    *model = new llmc_model{std::make_shared<llmc::Model>(folder, options ? *options : llmc_options{})};
  });
}

void llmc_close(llmc_model* model) { delete model; }

const char* llmc_name(const llmc_model* model) { return model->model->manifest().name.c_str(); }

int32_t llmc_vocab(const llmc_model* model) { return int32_t(model->model->manifest().vocab); }

int32_t llmc_context(const llmc_model* model) { return int32_t(model->model->manifest().context); }

int llmc_is_end(const llmc_model* model, int32_t id) { return model->model->manifest().eos.count(id) > 0; }

int64_t llmc_free_pages(const llmc_model* model) { return model->model->free_pages(); }

llmc_status llmc_encode(const llmc_model* model, const char* text, size_t bytes, int32_t* ids, size_t capacity,
                        size_t* count) {
  return guarded([&] {
    want(model, text, count);
    std::vector<int32_t> all = model->model->encode({text, bytes});
    *count = all.size();
    if (capacity) want(ids);
    std::copy_n(all.begin(), std::min(all.size(), capacity), ids);
  });
}

llmc_status llmc_text_open(const llmc_model* model, llmc_text** text) {
  return guarded([&] {
    want(model, text);
    *text = nullptr;
    *text = new llmc_text{model->model, llmc::TextStream(model->model->tokenizer()), ""};
  });
}

void llmc_text_close(llmc_text* text) { delete text; }

llmc_status llmc_text_push(llmc_text* text, int32_t id, const char** piece, size_t* bytes) {
  return guarded([&] {
    want(text, piece, bytes);
    give(text, text->stream.push(id), piece, bytes);
  });
}

llmc_status llmc_text_finish(llmc_text* text, const char** piece, size_t* bytes) {
  return guarded([&] {
    want(text, piece, bytes);
    give(text, text->stream.finish(), piece, bytes);
  });
}

llmc_status llmc_sequence_open(llmc_model* model, llmc_sequence** sequence) {
  return guarded([&] {
    want(model, sequence);
    *sequence = nullptr;
    *sequence = new llmc_sequence{llmc::Sequence(model->model)};
  });
}

void llmc_sequence_close(llmc_sequence* sequence) { delete sequence; }

int32_t llmc_length(const llmc_sequence* sequence) { return sequence->sequence.length(); }

llmc_status llmc_feed(llmc_sequence* sequence, const int32_t* ids, size_t count) {
  return guarded([&] {
    want(sequence, ids);
    sequence->sequence.model().feed(&sequence->sequence, ids, count);
  });
}

llmc_status llmc_step(llmc_sequence* const* sequences, const int32_t* ids, size_t count) {
  return guarded([&] {
    want(sequences, ids);
    std::vector<llmc::Feed> feeds;
    for (size_t i = 0; i < count; ++i) {
      want(sequences[i]);
      feeds.push_back({&sequences[i]->sequence, ids + i, 1});
    }
    if (feeds.empty()) throw llmc::RequestError("a step needs at least one sequence");
    feeds[0].sequence->model().step(feeds);
  });
}

llmc_status llmc_best(const llmc_sequence* sequence, int32_t* id) {
  return guarded([&] {
    want(sequence, id);
    const llmc::StepOutput& output = sequence->sequence.output();
    *id = output.top_ids[sequence->sequence.row() * output.candidates];
  });
}

llmc_status llmc_candidates(const llmc_sequence* sequence, int32_t* ids, float* logits, size_t capacity, size_t* count,
                            float* normalizer) {
  return guarded([&] {
    want(sequence, ids, logits, count, normalizer);
    const llmc::StepOutput& output = sequence->sequence.output();
    int64_t row = sequence->sequence.row();
    *count = std::min(capacity, size_t(output.candidates));
    std::copy_n(output.top_ids + row * output.candidates, *count, ids);
    std::copy_n(output.top_values + row * output.candidates, *count, logits);
    *normalizer = output.normalizers[row];
  });
}

llmc_status llmc_logits(const llmc_sequence* sequence, const float** logits) {
  return guarded([&] {
    want(sequence, logits);
    const llmc::StepOutput& output = sequence->sequence.output();
    *logits = output.logits + sequence->sequence.row() * output.vocab;
  });
}

llmc_status llmc_generate(llmc_model* model, const int32_t* ids, size_t count, int32_t max_tokens,
                          llmc_on_token on_token, void* user, llmc_finish* finish) {
  return guarded([&] {
    want(model, ids);
    if (!on_token) throw llmc::RequestError("on_token is NULL");
    llmc_finish why = generate(model->model, ids, count, max_tokens, on_token, user);
    if (finish) *finish = why;
  });
}

}  // extern "C"
