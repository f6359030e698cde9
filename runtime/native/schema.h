// Checks of JSON documents that collect every problem instead of stopping at the first (runtime/loading/schema.py).

#pragma once

#include <functional>
#include <set>
#include <string>
#include <vector>

#include "json.h"

namespace llmc {

// An object of a document, read key by key. Everything wrong with it goes to `problems`.
class Fields {
 public:
  Fields(const Json& value, std::string where, std::vector<std::string>* problems);

  const Json& any(const std::string& key);  // null if it is missing
  bool has(const std::string& key) const;   // of keys that need not be there
  const Json& object(const std::string& key);
  std::string text(const std::string& key);
  bool flag(const std::string& key);
  int64_t whole(const std::string& key, int64_t low, int64_t high);
  std::vector<int64_t> wholes(const std::string& key, int64_t low, int64_t high, size_t least = 0);
  std::vector<std::string> texts(const std::string& key, size_t least = 0);
  Fields fields(const std::string& key);
  // An object of any keys, or a list, with `each` called for all its values.
  void each_member(const std::string& key, const std::function<void(const std::string& key, Fields)>& each);
  void each_item(const std::string& key, size_t least, const std::function<void(Fields)>& each);

  // Complain about keys that were not asked for.
  void done();
  void wrong(const std::string& key, const std::string& wanted);

 private:
  const std::vector<Json>& list(const std::string& key, size_t least);

  const Json& value_;
  std::string where_;
  std::vector<std::string>* problems_;
  std::set<std::string> asked_;
};

// Raise ArtifactError naming the first problems and how many more there are, if there are any.
void refuse(const std::string& path, const std::vector<std::string>& problems, const std::string& advice);

}  // namespace llmc
