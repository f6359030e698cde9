// What is inside runtime/native, for tests/test_embedding.py: every command answers with a line for each thing asked.

#include <cstdio>
#include <fstream>
#include <iostream>
#include <iterator>
#include <sstream>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "errors.h"
#include "files.h"
#include "json.h"
#include "large_pages.h"
#include "llmc.h"
#include "memory.h"
#include "sha256.h"
#include "text.h"
#include "tokenizer.h"

namespace {

using Words = std::vector<std::string>;

std::string standard_input() { return {std::istreambuf_iterator<char>(std::cin), std::istreambuf_iterator<char>()}; }

std::string contents(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

std::vector<int32_t> numbers(const std::string& text) {
  std::istringstream in(text);
  return {std::istream_iterator<int32_t>(in), std::istream_iterator<int32_t>()};
}

void print(const std::vector<int32_t>& ids) {
  for (size_t i = 0; i < ids.size(); ++i) std::printf(i ? " %d" : "%d", int(ids[i]));
  std::printf("\n");
}

void must(llmc_status status) {
  if (status != LLMC_OK) throw std::runtime_error(llmc_last_error());
}

// The status of opening each of the folders, and why.
void open_all(const Words& folders, bool always_hash) {
  for (const std::string& folder : folders) {
    llmc_model* model = nullptr;
    llmc_options options = {1, 64, 0, 0, always_hash};
    llmc_status status = llmc_open(folder.c_str(), &options, &model);
    std::printf("%d %s\n", int(status), status == LLMC_OK ? "" : llmc_last_error());
    llmc_close(model);
  }
}

// open FOLDER...
void open(const Words& folders) { open_all(folders, false); }

// hash FOLDER...: the same, with weights hashed whatever is remembered of them.
void hash(const Words& folders) { open_all(folders, true); }

// encode TOKENIZER.json: ids of each text of the input, which end with zeros.
void encode(const Words& words) {
  llmc::Tokenizer tokenizer(contents(words.at(0)));
  std::string input = standard_input();
  for (size_t at = 0; at < input.size();) {
    size_t end = input.find('\0', at);
    print(tokenizer.encode(std::string_view(input).substr(at, end - at)));
    at = end + 1;
  }
}

// decode TOKENIZER.json: the text of the ids on each line, then a zero.
void decode(const Words& words) {
  llmc::Tokenizer tokenizer(contents(words.at(0)));
  for (std::string line; std::getline(std::cin, line);) {
    llmc::TextStream stream(tokenizer);
    std::string text;
    for (int32_t id : numbers(line)) text += stream.push(id);
    text += stream.finish() + '\0';
    std::fwrite(text.data(), 1, text.size(), stdout);
  }
}

// json: the canonical form of each line.
void json(const Words&) {
  for (std::string line; std::getline(std::cin, line);) {
    try {
      std::printf("%s\n", llmc::canonical_json(llmc::parse_json(line), "").c_str());
    } catch (const std::invalid_argument& error) {
      std::printf("refused: %s\n", error.what());
    }
  }
}

// sha256 N...: of the first N bytes of the input, given in two parts, by the CPU's instructions and without.
void sha256(const Words& words) {
  std::string input = standard_input();
  for (const std::string& word : words) {
    size_t bytes = std::stoul(word);
    for (llmc::Sha256Blocks blocks : {llmc::sha256_fastest(), llmc::sha256_plain}) {
      llmc::Sha256 hash(blocks);
      hash.update(input.data(), bytes / 3);
      hash.update(input.data() + bytes / 3, bytes - bytes / 3);
      std::printf("%s\n", hash.hex().c_str());
    }
  }
}

// utf8 N: the input as text, given N bytes at a time.
void utf8(const Words& words) {
  std::string input = standard_input(), out;
  size_t count = std::stoul(words.at(0));
  llmc::Utf8Stream stream;
  for (size_t at = 0; at < input.size(); at += count) out += stream.push(std::string_view(input).substr(at, count));
  out += stream.finish();
  std::fwrite(out.data(), 1, out.size(), stdout);
}

// together FOLDER COUNT: COUNT greedy ids after the prompt on each line, all prompts in common steps.
void together(const Words& words) {
  llmc_model* model = nullptr;
  llmc_options options = {1, 0, 0, 0, 0};
  must(llmc_open(words.at(0).c_str(), &options, &model));
  int64_t free = llmc_free_pages(model);
  std::vector<llmc_sequence*> sequences;
  for (std::string line; std::getline(std::cin, line);) {
    std::vector<int32_t> prompt = numbers(line);
    sequences.push_back(nullptr);
    must(llmc_sequence_open(model, &sequences.back()));
    must(llmc_feed(sequences.back(), prompt.data(), prompt.size()));
  }
  std::vector<std::vector<int32_t>> made(sequences.size());
  for (long step = std::stol(words.at(1)); step > 0; --step) {
    std::vector<int32_t> next;
    for (size_t i = 0; i < sequences.size(); ++i) {
      next.push_back(0);
      must(llmc_best(sequences[i], &next.back()));
      made[i].push_back(next.back());
    }
    must(llmc_step(sequences.data(), next.data(), next.size()));
  }
  for (size_t i = 0; i < sequences.size(); ++i) print(made[i]);
  llmc_close(model);  // sequences keep what they need of it
  for (llmc_sequence* sequence : sequences) llmc_sequence_close(sequence);
  must(llmc_open(words.at(0).c_str(), &options, &model));
  if (llmc_free_pages(model) != free) throw std::runtime_error("pages were lost");
  llmc_close(model);
}

// available ROOT...: bytes that may still be taken, by the system's files in each.
void available(const Words& roots) {
  for (const std::string& root : roots) std::printf("%zu\n", llmc::available_bytes(root));
}

// Bytes of a file that this process has maps of.
size_t mapped_bytes(const std::string& path) {
  std::ifstream maps("/proc/self/maps");
  size_t sum = 0;
  for (std::string line; std::getline(maps, line);) {
    unsigned long first = 0, end = 0;
    if (line.find(path) == std::string::npos || std::sscanf(line.c_str(), "%lx-%lx", &first, &end) != 2) continue;
    sum += end - first;
  }
  return sum;
}

// move FILE BYTES FASTER SECONDS...: after steps of so many seconds, pages that were copied, bytes that are the file's,
// and whether that is all; in the end the hash of what is there.
void move(const Words& words) {
  llmc::MappedFile file(words.at(0), std::stoul(words.at(1)));
  llmc::LargePages pages(file.data(), file.size(), std::stod(words.at(2)));
  for (size_t i = 3; i < words.size(); ++i) {
    pages.worked(std::stod(words[i]));
    std::printf("%zu %zu %d\n", pages.copied(), mapped_bytes(words[0]), int(pages.done()));
  }
  std::printf("%s\n", llmc::sha256_hex(file.data(), file.size()).c_str());
}

int keep(void* kept, int32_t id, const char*, size_t) {
  static_cast<std::vector<int32_t>*>(kept)->push_back(id);
  return 0;
}

// threads FOLDER COUNT: the same, each prompt in a thread of its own, with weights that stay mapped.
void threads(const Words& words) {
  llmc_model* model = nullptr;
  llmc_options options = {1, 16 * 200, 0, 1, 0};
  must(llmc_open(words.at(0).c_str(), &options, &model));
  int64_t free = llmc_free_pages(model);
  std::vector<std::vector<int32_t>> prompts;
  for (std::string line; std::getline(std::cin, line);) prompts.push_back(numbers(line));
  std::vector<std::vector<int32_t>> made(prompts.size());
  std::vector<std::thread> workers;
  for (size_t i = 0; i < prompts.size(); ++i) {
    workers.emplace_back([&, i] {
      int32_t count = int32_t(std::stol(words.at(1)));
      must(llmc_generate(model, prompts[i].data(), prompts[i].size(), count, keep, &made[i], nullptr));
    });
  }
  for (std::thread& worker : workers) worker.join();
  for (const std::vector<int32_t>& ids : made) print(ids);
  if (llmc_free_pages(model) != free) throw std::runtime_error("pages were lost");
  llmc_close(model);
}

// wishes FOLDER: what calls that ask too much are told.
void wishes(const Words& words) {
  llmc_model* model = nullptr;
  llmc_options options = {1, 48, 0, 0, 0};
  must(llmc_open(words.at(0).c_str(), &options, &model));
  llmc_sequence* sequence = nullptr;
  must(llmc_sequence_open(model, &sequence));
  std::vector<int32_t> ids(60, 3);
  int32_t outside = llmc_vocab(model), id = 0;
  llmc_sequence* other = nullptr;
  must(llmc_sequence_open(model, &other));
  llmc_sequence *twice[] = {sequence, sequence}, *both[] = {sequence, other};
  const llmc_status statuses[] = {
      llmc_best(sequence, &id),
      llmc_feed(sequence, &outside, 1),
      llmc_feed(sequence, ids.data(), 0),
      llmc_feed(sequence, nullptr, 1),
      llmc_feed(sequence, ids.data(), ids.size()),
      llmc_step(twice, ids.data(), 2),
      llmc_generate(model, ids.data(), ids.size(), 1, keep, &ids, nullptr),
  };
  for (llmc_status status : statuses) std::printf("%d\n", int(status));
  std::printf("%d %d %s\n", int(llmc_free_pages(model)), int(llmc_length(sequence)), llmc_last_error());
  must(llmc_feed(sequence, ids.data(), 16));
  must(llmc_feed(other, ids.data(), 16));
  llmc_status status = llmc_step(both, ids.data(), 2);  // one page is left for two that need one
  std::printf("%d %d %d %d\n", int(status), int(llmc_free_pages(model)), int(llmc_length(sequence)),
              int(llmc_length(other)));
  must(llmc_step(both, ids.data(), 1));
  options.keep_mapped = 2;
  llmc_model* none = nullptr;
  status = llmc_open(words.at(0).c_str(), &options, &none);
  std::printf("%d %s\n", int(status), llmc_last_error());
  llmc_sequence_close(sequence);
  llmc_sequence_close(other);
  std::printf("%d\n", int(llmc_free_pages(model)));
  llmc_close(model);
}

}  // namespace

int main(int count, char** values) {
  const std::pair<const char*, void (*)(const Words&)> commands[] = {
      {"open", open}, {"encode", encode},   {"decode", decode},     {"json", json},     {"sha256", sha256},
      {"utf8", utf8}, {"threads", threads}, {"together", together}, {"wishes", wishes}, {"available", available},
      {"move", move}, {"hash", hash},
  };
  std::string command = count > 1 ? values[1] : "";
  try {
    for (const auto& [name, run] : commands) {
      if (command == name) run(Words(values + 2, values + count));
    }
  } catch (const std::exception& error) {
    std::printf("refused: %s\n", error.what());
    return 1;
  }
}
