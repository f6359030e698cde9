// A strict reader of JSON: one value, no duplicate keys, no NaN, no text that is not Unicode, bounded depth.

#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

namespace llmc {

struct Json {
  enum Kind { kNull, kBool, kWhole, kReal, kText, kList, kObject };
  Kind kind = kNull;
  bool flag = false;
  std::string text;  // of a text: its UTF-8; of a number: how Python's json writes it
  std::vector<Json> list;
  std::map<std::string, Json> object;  // sorted by bytes, which for UTF-8 is by code points

  bool is_text() const { return kind == kText; }
  bool is_list() const { return kind == kList; }
  bool is_object() const { return kind == kObject; }

  // Whether it is an integer in low..high; then `value` is it.
  bool whole(int64_t low, int64_t high, int64_t* value) const;

  // The member of an object, or nullptr; `get`: or null.
  const Json* find(const std::string& key) const;
  const Json& get(const std::string& key) const;

  // Of a tokenizer.json: the steps of a decoder or a pre-tokenizer: itself, or, of a Sequence, its list `key`.
  std::vector<Json> steps(const std::string& key) const;
};

// The document in `data`. Throws std::invalid_argument that says what is wrong and at which byte.
Json parse_json(std::string_view data);

// The one spelling that hashes are taken of (runtime/loading/schema.py, canonical_json), without the key `skip`.
std::string canonical_json(const Json& value, const std::string& skip);

}  // namespace llmc
