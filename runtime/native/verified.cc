#include "verified.h"

#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <stdexcept>
#include <vector>

#include "errors.h"
#include "files.h"
#include "json.h"

namespace llmc {
namespace {

constexpr size_t kRemembered = 256;     // keys that are kept; the oldest go first
constexpr size_t kMostBytes = 1 << 20;  // of the file with them

std::string set_to(const char* name) {
  const char* value = std::getenv(name);
  return value ? value : "";
}

// Where the runtimes keep what they may lose; nothing where there is no such place.
std::string cache_folder() {
  std::string own = set_to("LLMC_CACHE_DIR"), base = set_to("XDG_CACHE_HOME"), home = set_to("HOME");
  if (!own.empty()) return own;
  if (!base.empty()) return base + "/llmc";
  return home.empty() ? "" : home + "/.cache/llmc";
}

std::vector<std::string> known() {
  std::vector<std::string> keys;
  try {
    for (const Json& key : parse_json(read_file(cache_folder() + "/verified.json", kMostBytes)).list) {
      if (key.is_text()) keys.push_back(key.text);
    }
  } catch (const std::exception&) {
    return {};  // none was written yet, or something else stands there
  }
  return keys;
}

// A list of texts of which none has anything to escape.
std::string written(const std::vector<std::string>& keys) {
  std::string text;
  for (const std::string& key : keys) text += (text.empty() ? "[\"" : ", \"") + key + "\"";
  return text + "]";
}

}  // namespace

std::string verified_key(const std::string& path, const std::string& manifest_sha256) {
  return identity(path) + ":" + manifest_sha256;
}

bool is_verified(const std::string& key) {
  std::vector<std::string> keys = known();
  return std::find(keys.begin(), keys.end(), key) != keys.end();
}

void remember_verified(const std::string& key) {
  std::string folder = cache_folder(), name = folder + "/.verified.XXXXXX";
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  int fd = folder.empty() || error ? -1 : mkstemp(name.data());
  if (fd < 0) return;
  std::vector<std::string> keys = known();
  keys.erase(std::remove(keys.begin(), keys.end(), key), keys.end());
  if (keys.size() >= kRemembered) keys.erase(keys.begin(), keys.end() - (kRemembered - 1));
  keys.push_back(key);
  std::string text = written(keys);
  bool whole = write(fd, text.data(), text.size()) == ssize_t(text.size());
  close(fd);
  if (!whole || rename(name.c_str(), (folder + "/verified.json").c_str()) != 0) unlink(name.c_str());
}

}  // namespace llmc
