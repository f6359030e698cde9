// Continues a text with an artifact, and writes it as it is made.
//
//   embed_cpp MODEL.llmc [--max-tokens N] [--threads N] [--cache-tokens N] [--ids] TEXT
//
// TEXT is what the model reads, without a chat template. With --ids it is token ids, and ids are written, one a line,
// for models whose tokenizer this runtime does not know.

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "llmc.h"

namespace {

struct Arguments {
  const char* folder = nullptr;
  const char* text = nullptr;
  int32_t max_tokens = 256;
  bool ids = false;
  llmc_options options = {};
};

constexpr int kRefused = 1, kWrongUsage = 2;

[[noreturn]] void refuse(const char* why, int code) {
  std::fprintf(stderr, "embed_cpp: %s\n", why);
  std::exit(code);
}

void check(llmc_status status) {
  if (status != LLMC_OK) refuse(llmc_last_error(), kRefused);
}

long whole(const char* text) {
  char* end = nullptr;
  long value = text ? std::strtol(text, &end, 10) : 0;
  if (!text || end == text || *end || value < 1 || value > INT32_MAX) refuse("wanted a positive number", kWrongUsage);
  return value;
}

Arguments read(int count, char** values) {
  Arguments arguments;
  for (int i = 1; i < count; ++i) {
    std::string name = values[i];
    const char* next = i + 1 < count ? values[i + 1] : nullptr;
    if (name == "--ids") {
      arguments.ids = true;
    } else if (name == "--max-tokens") {
      arguments.max_tokens = int32_t(whole(next)), ++i;
    } else if (name == "--threads") {
      arguments.options.threads = int32_t(whole(next)), ++i;
    } else if (name == "--cache-tokens") {
      arguments.options.cache_tokens = whole(next), ++i;
    } else if (!arguments.folder) {
      arguments.folder = values[i];
    } else if (!arguments.text) {
      arguments.text = values[i];
    } else {
      refuse("usage: embed_cpp MODEL.llmc [--max-tokens N] [--threads N] [--cache-tokens N] [--ids] TEXT", kWrongUsage);
    }
  }
  if (!arguments.text) refuse("wanted an artifact and a text", kWrongUsage);
  return arguments;
}

std::vector<int32_t> ids_of(const llmc_model* model, const char* text, bool ids) {
  std::vector<int32_t> out;
  if (ids) {
    for (char* end; *text; text = end) {
      out.push_back(int32_t(std::strtol(text, &end, 10)));
      if (end == text) refuse("wanted token ids with spaces between them", kWrongUsage);
    }
    return out;
  }
  size_t count = 0;
  check(llmc_encode(model, text, std::strlen(text), nullptr, 0, &count));
  out.resize(count);
  check(llmc_encode(model, text, std::strlen(text), out.data(), count, &count));
  return out;
}

int write_text(void*, int32_t, const char* piece, size_t bytes) {
  std::fwrite(piece, 1, bytes, stdout);
  return std::fflush(stdout);  // nobody reads any more: stop
}

// The same loop with the single steps, for an app that has its own way to choose tokens.
void write_ids(llmc_model* model, const std::vector<int32_t>& prompt, int32_t max_tokens) {
  llmc_sequence* opened = nullptr;
  check(llmc_sequence_open(model, &opened));
  std::unique_ptr<llmc_sequence, decltype(&llmc_sequence_close)> sequence(opened, llmc_sequence_close);
  check(llmc_feed(opened, prompt.data(), prompt.size()));
  for (int32_t made = 1;; ++made) {
    int32_t id = 0;
    check(llmc_best(opened, &id));
    std::printf("%d\n", int(id));
    if (llmc_is_end(model, id) || made == max_tokens || llmc_length(opened) + 1 >= llmc_context(model)) return;
    check(llmc_feed(opened, &id, 1));
  }
}

}  // namespace

int main(int count, char** values) {
  Arguments arguments = read(count, values);
  llmc_model* opened = nullptr;
  check(llmc_open(arguments.folder, &arguments.options, &opened));
  std::unique_ptr<llmc_model, decltype(&llmc_close)> model(opened, llmc_close);
  std::vector<int32_t> prompt = ids_of(opened, arguments.text, arguments.ids);
  if (arguments.ids) {
    write_ids(opened, prompt, arguments.max_tokens);
  } else {
    check(llmc_generate(opened, prompt.data(), prompt.size(), arguments.max_tokens, write_text, nullptr, nullptr));
    std::printf("\n");
  }
}
